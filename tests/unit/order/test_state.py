"""A loader's state as a dict: small, plain, and refused when it means another order."""

from __future__ import annotations

import json

import msgspec
import pytest

from shardkeep.errors import IncompatibleFormat, StateMismatch
from shardkeep.order.cursor import SEQUENTIAL, Cursor
from shardkeep.order.state import decode_state, encode_state


def live(**fields: object) -> Cursor:
    return Cursor(**{"seed": 7, "epoch": 0, "consumed": 0, "size": 100, **fields})  # type: ignore[arg-type]


def saved(**fields: object) -> dict[str, object]:
    state: dict[str, object] = dict(encode_state(live(epoch=2, consumed=40), batch_size=8, drop_last=False))
    return {**state, **fields}


@pytest.mark.parametrize("seed", [0, 7, 2**53 - 1, 2**53, 2**64, 2**20_000 + 1], ids=int.bit_length)
def test_round_trip_through_json_under_a_kibibyte(seed: int) -> None:
    cursor = Cursor(seed=seed, epoch=2**40, consumed=10**12, size=2**62)
    state = encode_state(cursor, batch_size=2**40, drop_last=True)
    for text, parse in ((json.dumps(state).encode(), json.loads), (msgspec.json.encode(state), msgspec.json.decode)):
        assert len(text) < 1024
        assert decode_state(parse(text), Cursor(seed=seed, epoch=0, consumed=0, size=2**62)) == cursor


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"size": 101}, ["size: stored 100, this loader 101", "dataset"]),
        ({"seed": 8}, ["seed: stored 7, this loader 8", "stored seed"]),
        ({"algorithm": SEQUENTIAL}, ["algorithm: stored 'keyed-1', this loader 'sequential-1'", "shuffle"]),
        ({"seed": 8, "size": 5}, ["size: stored 100, this loader 5", "seed: stored 7, this loader 8"]),
        ({"seed": 2**80}, ["seed: stored 7, this loader 'blake2b:"]),
    ],
)
def test_another_order_is_refused_naming_both_sides(other: dict[str, object], says: list[str]) -> None:
    with pytest.raises(StateMismatch) as caught:
        decode_state(saved(), live(**other))
    for words in says:
        assert words in str(caught.value)


def test_large_seeds_that_differ_are_told_apart() -> None:
    state = encode_state(live(seed=2**80), batch_size=8, drop_last=False)
    with pytest.raises(StateMismatch, match="seed"):
        decode_state(state, live(seed=2**80 + 1))


def test_newer_version_is_refused_as_such() -> None:
    with pytest.raises(IncompatibleFormat, match="version 2"):
        decode_state(saved(version=2, something_new=1), live())


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "version: missing"),
        ({"_sampler_iter_yielded": 4}, "_sampler_iter_yielded: unknown"),
        (saved(epoch=-1), "epoch: expected an integer"),
        (saved(epoch=1.0), "epoch: expected an integer"),
        (saved(consumed=True), "consumed: expected an integer"),
        (saved(consumed="4"), "consumed: expected an integer"),
        (saved(consumed=101), "101 samples consumed of 100"),
        (saved(extra=1), "extra: unknown"),
        ([1], "found list"),
    ],
)
def test_what_is_no_loader_state_is_refused(state: dict[str, object], says: str) -> None:
    with pytest.raises(StateMismatch) as caught:
        decode_state(state, live())
    assert says in str(caught.value)


@pytest.mark.parametrize("name", sorted(saved()))
def test_every_key_is_needed(name: str) -> None:
    state = saved()
    del state[name]
    with pytest.raises(StateMismatch, match=f"{name}: missing"):
        decode_state(state, live())
