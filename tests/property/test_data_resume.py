"""Any run, killed anywhere and resumed on other worlds and workers, reads what the unbroken run reads."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from shardkeep.data.loader import ResumableLoader
from shardkeep.data.mixture import Mixture
from shardkeep.errors import UsageError
from shardkeep.order.cursor import Cursor, ids_between
from shardkeep.order.draws import iter_draw_seeds

many_workers = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
Sample = tuple[int, float, float, float]


class Drawing(Dataset[Sample]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return index, random.random(), float(np.random.random()), float(torch.rand(1, dtype=torch.float64))


def expect(seed: int, epoch: int, number: int) -> Sample:
    """Return what a sample is, from its own seeds alone."""
    python, for_numpy, for_torch = next(iter_draw_seeds(seed, epoch, [number], domain="sample"))
    drawn = torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(for_torch))
    return number, random.Random(python).random(), float(np.random.RandomState(for_numpy).random()), float(drawn)


def run(loaders: list[ResumableLoader], batches: int) -> list[Sample]:
    """Train so many global batches in lockstep."""
    found: list[Sample] = []
    while batches:
        for shares in zip(*loaders, strict=True):
            found += [sample for share in shares for sample in share]
            batches -= 1
            if not batches:
                break
    return found


@many_workers
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_kills_anywhere_change_nothing(data: st.DataObject) -> None:
    size = data.draw(st.one_of(st.integers(1, 200), st.integers(1, 100_000)), label="size")
    seed = data.draw(st.integers(0, 1 << 70), label="seed")
    drop_last = data.draw(st.booleans(), label="drop_last")
    batch = 12 * data.draw(st.integers(1, max(1, min(size // 120, 200))), label="batch") if size >= 60 else 1
    batch = min(batch, max(size // 3, 1)) if size < 60 else batch
    lives = data.draw(
        st.lists(
            st.tuples(st.integers(1, 4), st.sampled_from([0, 0, 0, 1, 2, 3]), st.integers(1, 4)),
            min_size=2,
            max_size=7,
        ),
        label="world, workers and batches of each life",
    )
    text: str | None = None
    found: list[Sample] = []
    consumed = 0
    for world, workers, batches in lives:
        try:
            loaders = [
                ResumableLoader(
                    Drawing(size),
                    global_batch_size=batch,
                    seed=seed,
                    drop_last=drop_last,
                    num_workers=workers if rank == 0 else 0,
                    collate_fn=list,
                    data_rank=rank,
                    data_size=world,
                )
                for rank in range(world)
            ]
            for loader in loaders:
                if text is not None:
                    loader.load_state_dict(json.loads(text))
        except UsageError:
            continue  # a batch that cannot go round is refused, not lost
        found += run(loaders, batches)
        texts = {json.dumps(loader.state_dict()) for loader in loaders}
        assert len(texts) == 1
        text = texts.pop()
        assert len(text) < 1024
        consumed += batches
    per_epoch = size // batch * batch if drop_last else size
    expected: list[tuple[int, int]] = []
    epoch = 0
    while len(expected) < len(found):
        ids = ids_between(Cursor(seed=seed, epoch=epoch, consumed=0, size=size), 0, per_epoch).tolist()
        expected += [(epoch, number) for number in ids]
        epoch += 1
    expected = expected[: len(found)]
    assert [sample[0] for sample in found] == [number for _, number in expected]
    for at in {0, len(found) - 1, *range(0, len(found), max(1, len(found) // 50))} if found else ():
        assert found[at] == expect(seed, *expected[at])


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_a_mixture_goes_on_in_any_world(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    weights = data.draw(st.lists(st.floats(0.01, 10), min_size=len(sizes), max_size=len(sizes)))
    mixture = [(Drawing(n), w) for n, w in zip(sizes, weights, strict=True)]
    lives = data.draw(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3)), min_size=1, max_size=5))
    if sum(sizes) < 12:
        return

    def world_of(count: int, text: str | None) -> list[ResumableLoader]:
        loaders = [
            ResumableLoader(
                Mixture(mixture), global_batch_size=12, seed=1, drop_last=True, collate_fn=list,
                data_rank=rank, data_size=count,
            )
            for rank in range(count)
        ]  # fmt: skip
        for loader in loaders:
            if text is not None:
                loader.load_state_dict(json.loads(text))
        return loaders

    whole = run(world_of(1, None), sum(batches for _, batches in lives))
    text, found = None, []
    for count, batches in lives:
        loaders = world_of(count, text)
        found += run(loaders, batches)
        text = json.dumps(loaders[-1].state_dict())
    assert len(text or "") < 1024
    assert found == whole


def test_a_mixture_that_changed_is_refused() -> None:
    from shardkeep.errors import StateMismatch

    def build(weights: tuple[Any, Any]) -> ResumableLoader:
        sources = [(Drawing(20), weights[0]), (Drawing(30), weights[1])]
        return ResumableLoader(Mixture(sources), global_batch_size=5, seed=1)

    state = build((1, 2)).state_dict()
    build((0.5, 1)).load_state_dict(state)
    with pytest.raises(StateMismatch, match="its sources and weights"):
        build((1, 3)).load_state_dict(state)


def test_a_sample_that_comes_twice_in_an_epoch_draws_anew() -> None:
    loader = ResumableLoader(
        Mixture([(Drawing(3), 1), (Drawing(97), 1)]), global_batch_size=10, seed=1, collate_fn=list
    )
    draws = [sample[1] for batch in loader for sample in batch]
    assert len(draws) == len(set(draws)) == 100


def test_an_order_of_a_million_million_samples_costs_nothing() -> None:
    loader = ResumableLoader(Huge(), global_batch_size=8192, seed=3, collate_fn=list)
    loader.load_state_dict({**loader.state_dict(), "epoch": 5, "consumed": 10**12 - 8192})
    batch = next(iter(loader))
    assert len(set(batch)) == 8192
    assert (loader.epoch, loader.consumed) == (6, 0)
    assert len(json.dumps(loader.state_dict())) < 1024


class Huge(Dataset[int]):
    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int) -> int:
        return index
