"""Whatever the size, batch, world, workers and the places of the kills: nothing lost, nothing twice."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from shardkeep.data.loader import ResumableLoader
from shardkeep.order.cursor import Cursor, count_batches, next_batch, share
from shardkeep.order.permutation import TABLE_MAX, Permutation, derive_key

SEEDS = st.one_of(st.integers(0, 5), st.integers(0, 2**300))


@settings(deadline=None, max_examples=60)
@given(
    n=st.one_of(st.integers(1, 300), st.integers(TABLE_MAX - 2, TABLE_MAX + 2), st.integers(TABLE_MAX, 200_000)),
    seed=SEEDS,
    epoch=st.integers(0, 2**70),
)
def test_the_order_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    permutation = Permutation(n, derive_key(seed, epoch))
    ids = permutation.ids_at(np.arange(n))
    assert (np.bincount(ids, minlength=n) == 1).all()
    assert (permutation.positions_of(ids) == np.arange(n)).all()


@settings(deadline=None, max_examples=200)
@given(n=st.integers(TABLE_MAX + 1, 2**62), seed=SEEDS, data=st.data())
def test_the_order_of_a_huge_set_has_an_inverse(n: int, seed: int, data: st.DataObject) -> None:
    permutation = Permutation(n, derive_key(seed, 0))
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    ids = permutation.ids_at(positions)
    assert ((ids >= 0) & (ids < n)).all()
    assert (permutation.positions_of(ids) == positions).all()
    assert (permutation.ids_at(permutation.positions_of(positions)) == positions).all()
    # A position means the same alone and in any company.
    assert [int(permutation.ids_at([p])[0]) for p in positions[:3]] == ids[:3].tolist()


@settings(deadline=None, max_examples=100)
@given(
    size=st.integers(1, 200),
    batches=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    seed=SEEDS,
    shuffle=st.booleans(),
)
def test_batches_of_changing_size_cover_every_epoch(size: int, batches: list[int], seed: int, shuffle: bool) -> None:
    begin = Cursor(seed=seed, epoch=0, consumed=0, size=size, algorithm="keyed-1" if shuffle else "sequential-1")
    cursor, epochs = begin, {}
    for batch_size in batches:
        epoch = cursor.epoch
        ids, cursor = next_batch(cursor, batch_size, drop_last=False)
        assert 0 < len(ids) <= batch_size
        epochs.setdefault(epoch, []).extend(ids.tolist())
    for epoch, seen in epochs.items():
        whole = Cursor(seed=seed, epoch=epoch, consumed=0, size=size, algorithm=begin.algorithm)
        assert seen == next_batch(whole, size, drop_last=False)[0].tolist()[: len(seen)]
        if epoch < cursor.epoch:
            assert sorted(seen) == list(range(size))


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def serves(size: int, batch: int, world: int, consumed: int, *, drop_last: bool) -> bool:
    if batch % world:
        return False
    if drop_last:
        return size >= batch
    return not any(0 < tail < world for tail in (size % batch, (size - consumed) % batch))


def unbroken(size: int, batch: int, seed: int, steps: int, *, drop_last: bool) -> list[list[int]]:
    """Say what the steps of a run without kills train on, one global batch each."""
    cursor, order = Cursor(seed=seed, epoch=0, consumed=0, size=size), []
    for _ in range(steps):
        ids, cursor = next_batch(cursor, batch, drop_last=drop_last)
        order.append(ids.tolist())
    return order


def train(loaders: list[ResumableLoader], steps: int) -> list[list[int]]:
    """Train so many steps on all ranks, over epochs; every rank's loader is what a process of its own would have."""
    log: list[list[int]] = []
    while len(log) < steps:
        for parts in zip(*loaders, strict=True):
            log.append([value for part in parts for value in part])
            assert tuple(log[-1]) == loaders[0].last_global_ids
            assert {json.dumps(loader.state_dict()) for loader in loaders} == {json.dumps(loaders[0].state_dict())}
            if len(log) == steps:
                break
    return log


def run_with_kills(data: Any, *, workers: int, kills: int) -> None:
    size = data.draw(st.integers(4, 60), label="size")
    drop_last = data.draw(st.booleans(), label="drop_last")
    choices = [b for b in range(1, 25) if serves(size, b, 1, 0, drop_last=drop_last)]
    batch = data.draw(st.sampled_from(choices), label="batch")
    seed = data.draw(SEEDS, label="seed")
    per_epoch = count_batches(size, batch, drop_last=drop_last)
    total = min(data.draw(st.integers(1, 3), label="epochs") * per_epoch, 60)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=kills, max_size=kills), label="cuts"))
    log: list[list[int]] = []
    state = None
    for begin, end in zip([0, *cuts], [*cuts, total], strict=True):
        consumed = 0 if state is None else state["consumed"]
        worlds = [w for w in range(1, 5) if serves(size, batch, w, consumed, drop_last=drop_last)]
        world = data.draw(st.sampled_from(worlds), label="world")
        loaders = [
            ResumableLoader(
                Numbers(size),
                global_batch_size=batch,
                seed=seed,
                drop_last=drop_last,
                data_rank=rank,
                data_size=world,
                num_workers=workers if rank == 0 else 0,
                collate_fn=list,
            )
            for rank in range(world)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        log += train(loaders, end - begin)
        state = json.loads(json.dumps(loaders[0].state_dict()))
        assert len(json.dumps(state)) < 1024
    assert log == unbroken(size, batch, seed, total, drop_last=drop_last)


@settings(deadline=None, max_examples=80)
@given(data=st.data(), kills=st.integers(1, 4))
def test_killed_runs_train_on_the_unbroken_order(data: Any, kills: int) -> None:
    run_with_kills(data, workers=0, kills=kills)


@settings(deadline=None, max_examples=6)
@given(data=st.data(), workers=st.integers(1, 2))
def test_killed_runs_with_workers_train_on_the_unbroken_order(data: Any, workers: int) -> None:
    run_with_kills(data, workers=workers, kills=2)


@settings(deadline=None, max_examples=100)
@given(size=st.integers(1, 500), batch=st.integers(1, 64), world=st.integers(1, 16), seed=SEEDS)
def test_the_global_batch_does_not_depend_on_the_world(size: int, batch: int, world: int, seed: int) -> None:
    ids, _ = next_batch(Cursor(seed=seed, epoch=0, consumed=0, size=size), batch, drop_last=False)
    parts = [share(ids, rank, world).tolist() for rank in range(world)]
    assert [value for part in parts for value in part] == ids.tolist()
