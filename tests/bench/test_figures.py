"""Figures follow from seconds: ratios within rounds, the peer that is hardest to beat, and the bars."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.bench.bars import BARS, GROUPS, list_keys
from shardkeep.bench.figures import describe_seconds, find_figures
from shardkeep.bench.rounds import Field, order_round
from shardkeep.bench.stats import find_best, find_ratio, find_slow, find_spread

KEYS = [
    "save.durable.limit_ratio",
    "save.durable.best_checkpointer_ratio",
    "save.durable.best_writer_ratio",
    "async.stall.memcpy_ratio",
    "async.first_stall.best_peer_ratio",
    "async.lost_steps.best_peer_ratio",
    "overlap.stall.memcpy_ratio",
    "load.cold.limit_ratio",
    "load.cold.best_peer_ratio",
    "load.warm.best_peer_ratio",
    "load.partial.amplification",
    "tiers.restart.memcpy_ratio",
    "ranks4.save.best_peer_ratio",
    "ranks4.reshard_load.best_peer_ratio",
    "memory.save_blocking_extra_mib",
    "memory.load_extra_mib",
    "memory.async_extra_ratio",
    "scale.commit_s",
    "scale.restart_plan_s",
    "scale.reshard_plan_s",
    "scale.proof_s",
    "cli.ls_ms",
]

SECONDS: dict[str, dict[str, list[float | None]]] = {
    "save": {
        "raw": [1.0, 4.0, 1.0],
        "shardkeep": [1.0, 5.0, 1.25],
        "dcp-2t": [2.0, 10.0, 2.5],
        "orbax": [9.0, None, None],
        "safetensors": [1.5, 7.5, None],
        "torch": [3.0, 15.0, 3.75],
    },
    "load.cold": {"raw": [1.0], "shardkeep": [1.25], "dcp-hf": [1.5], "torch-mmap": [1.375]},
    "load.warm": {"shardkeep": [0.5], "dcp-hf": [0.25]},
    "memcpy": {"raw": [0.2, 0.4]},
    "async.stall": {"shardkeep": [0.25, 0.5], "dcp-2t": [0.5, 1.0]},
    "async.first_stall": {"shardkeep": [0.25, 0.5], "dcp-2t": [1.0, 2.0], "dcp-1t": [1.25, None]},
    "async.lost": {"shardkeep": [0.5, 0.5], "dcp-2t": [1.5, 1.0]},
    "overlap.stall": {"shardkeep": [0.02, 0.04]},
    "tiers.restart": {"raw": [0.5, 0.25], "shardkeep": [1.0, 0.5]},
    "ranks4.save": {"raw": [1.0], "shardkeep": [1.5], "dcp-1t": [4.5]},
    "ranks4.reshard_load": {"shardkeep": [1.5], "dcp-1t": [3.0]},
}
FACTS: dict[str, Any] = {
    "state_bytes": 1 << 30,
    "memory": {
        "save": {"shardkeep": 32 << 20, "dcp-hf": 2 << 30},
        "load": {"shardkeep": 16 << 20},
        "async": {"shardkeep": 1 << 30},
    },
    "partial": {"shardkeep": {"tensor": 1.01, "rows": 1.04}, "safetensors": {"tensor": 3.0}},
    "scale": {"commit_s": 1.5, "restart_plan_s": 0.25, "reshard_plan_s": 2.0, "proof_s": 3.0},
    "ls_ms": 99.0,
}
EXPECTED = {
    "save.durable.limit_ratio": 0.8,  # of 1.0, 0.8, 0.8: not of the medians over the run
    "save.durable.best_checkpointer_ratio": 2.0,
    "save.durable.best_writer_ratio": 1.5,
    "async.stall.memcpy_ratio": 0.8,
    "async.first_stall.best_peer_ratio": 4.0,
    "async.lost_steps.best_peer_ratio": 2.5,
    "overlap.stall.memcpy_ratio": 10.0,
    "load.cold.limit_ratio": 0.8,
    "load.cold.best_peer_ratio": 1.1,
    "load.warm.best_peer_ratio": 0.5,
    "load.partial.amplification": 1.04,
    "tiers.restart.memcpy_ratio": 0.5,
    "ranks4.save.best_peer_ratio": 3.0,
    "ranks4.reshard_load.best_peer_ratio": 2.0,
    "memory.save_blocking_extra_mib": 32.0,
    "memory.load_extra_mib": 16.0,
    "memory.async_extra_ratio": 1.0,
    "scale.commit_s": 1.5,
    "scale.restart_plan_s": 0.25,
    "scale.reshard_plan_s": 2.0,
    "scale.proof_s": 3.0,
    "cli.ls_ms": 99.0,
}


def test_the_keys_are_these_and_stay() -> None:
    assert list(BARS) == list_keys(GROUPS)
    assert set(BARS) == set(KEYS)
    assert {bar.group for bar in BARS.values()} == set(GROUPS)


def test_figures_of_known_seconds() -> None:
    found = find_figures(SECONDS, FACTS, GROUPS)
    assert list(found) == list_keys(GROUPS)
    assert {key: figure.value for key, figure in found.items()} == pytest.approx(EXPECTED)
    against = {key: figure.against for key, figure in found.items()}
    assert against["save.durable.best_checkpointer_ratio"] == "dcp-2t"
    assert against["save.durable.best_writer_ratio"] == "safetensors"
    assert against["load.cold.best_peer_ratio"] == "torch-mmap"
    assert against["async.first_stall.best_peer_ratio"] == "dcp-2t"


def test_only_the_keys_of_the_groups_measured_are_there() -> None:
    assert list(find_figures(SECONDS, FACTS, ("cli", "partial"))) == ["load.partial.amplification", "cli.ls_ms"]


def test_what_was_not_measured_has_no_value() -> None:
    found = find_figures({}, {}, GROUPS)
    assert list(found) == list_keys(GROUPS)
    assert {figure.value for figure in found.values()} == {None}
    alone = find_figures({"save": {"raw": [1.0], "shardkeep": [2.0]}}, {}, ("save",))
    assert alone["save.durable.limit_ratio"].value == 0.5
    assert alone["save.durable.best_writer_ratio"].value is None


@pytest.mark.parametrize(
    ("key", "value", "met"),
    [
        ("save.durable.limit_ratio", 0.90, True),
        ("save.durable.limit_ratio", 0.899, False),
        ("cli.ls_ms", 200.0, True),
        ("cli.ls_ms", 200.1, False),
        ("cli.ls_ms", None, None),
        ("cli.ls_ms", math.nan, None),
    ],
)
def test_bars(key: str, value: float | None, met: bool | None) -> None:
    assert BARS[key].is_met(value) is met


def test_details_keep_every_round() -> None:
    found = describe_seconds(SECONDS)["save"]["safetensors"]
    assert found == {
        "median": 4.5,
        "least": 1.5,
        "greatest": 7.5,
        "count": 2,
        "by_round": [1.5, 7.5, None],
        "ratio_to_ours": 1.5,
    }


TIMES = st.lists(st.one_of(st.none(), st.floats(0.01, 100)), max_size=8)


@settings(max_examples=60)
@given(TIMES, TIMES)
def test_a_ratio_uses_only_rounds_that_have_both(above: list[float | None], below: list[float | None]) -> None:
    both = [(a, b) for a, b in zip(above, below, strict=False) if a is not None and b is not None]
    found = find_ratio(above, below)
    assert (found is None) == (not both)
    if found is not None:
        assert min(a / b for a, b in both) <= found <= max(a / b for a, b in both)
        # A drift of the machine that hits both alike changes nothing.
        assert find_ratio([a * 3 for a, _ in both], [b * 3 for _, b in both]) == pytest.approx(found)


def test_the_best_peer_is_that_of_the_least_ratio() -> None:
    assert find_best({"a": [2.0, 2.0], "b": [3.0, None]}, [1.0, 4.0]) == ("a", 1.25)
    assert find_best({"a": [None]}, [1.0]) is None
    assert find_best({}, [1.0]) is None
    assert find_slow({"a": 1.0, "b": 1.6, "c": 1.7}, factor=1.6) == {"c"}
    assert find_slow({}, factor=2) == set()
    assert find_spread([None]) is None


def test_everyone_is_at_every_place_of_a_round() -> None:
    names = ["raw", "shardkeep", "a", "b"]
    orders = [order_round(names, number) for number in range(8)]
    assert all(sorted(order) == sorted(names) for order in orders)
    for at in range(4):
        assert {order[at] for order in orders} == set(names)
    assert order_round([], 3) == []


def test_slow_peers_sit_out_but_never_all() -> None:
    field = Field(["torch", "safetensors", "dcp-2t", "orbax"], by_kind=True)
    assert field.settle(0, 1.0, {"torch": 2.0, "safetensors": 1.0, "dcp-2t": 3.0, "orbax": 7.6}) == ["orbax"]
    assert field.settle(1, 1.0, {"torch": 1.7, "safetensors": 1.0, "dcp-2t": 9.0}) == ["torch"]
    assert field.settle(2, 1.0, {"safetensors": 50.0, "dcp-2t": 90.0}) == []
    assert field.names == ["safetensors", "dcp-2t"]


def test_a_wave_is_held_against_those_before() -> None:
    field = Field(["orbax"])
    field.know({"shardkeep": [1.0, 1.0], "dcp-hf": [1.2, 1.2]})
    assert field.settle(0, 1.0, {"orbax": 2.9}) == []
    assert field.settle(1, 1.0, {"orbax": 2.9}) == ["orbax"]
    assert field.names == []
    other = Field(["orbax", "torch"])
    other.know({"shardkeep": [1.0], "dcp-hf": [1.2]})
    assert other.settle(0, 1.0, {"orbax": 3.1, "torch": 2.0}) == ["orbax"]
