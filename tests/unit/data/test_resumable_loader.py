"""The loader's own rules: options, iterators, position, and no global random generator touched."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from shardkeep.data.batches import Batching, IdBatches
from shardkeep.data.coordinates import Coordinates
from shardkeep.data.loader import ResumableLoader
from shardkeep.errors import StateMismatch, UsageError
from shardkeep.order.cursor import Cursor, ids_between


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return index


class WorkerFacts(Numbers):
    """Sample i says which process fetched it and a draw from there."""

    def __getitem__(self, index: int) -> tuple[int, int, int]:  # type: ignore[override]
        info = get_worker_info()
        return index, os.getpid(), info.seed if info is not None else -1


def make(size: int = 24, batch: int = 4, **options: Any) -> ResumableLoader:
    options.setdefault("seed", 0)
    return ResumableLoader(Numbers(size), global_batch_size=batch, **options)


def flat(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch]


def order(size: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    ids: list[int] = ids_between(Cursor(seed=seed, epoch=epoch, consumed=0, size=size), 0, size).tolist()
    return ids


def test_epochs_follow_the_order_and_batches_are_tensors() -> None:
    loader = make(10, 4, seed=3)
    assert len(loader) == 3
    for epoch in range(3):
        assert loader.epoch == epoch
        batches = list(loader)
        assert all(isinstance(batch, torch.Tensor) for batch in batches)
        assert flat(batches) == order(10, seed=3, epoch=epoch)


def test_position_counts_what_the_loop_received() -> None:
    loader = make(10, 4)
    seen = []
    for batch in loader:
        seen.append((loader.epoch, loader.consumed, loader.batches_left, len(batch)))
    # Behind the last batch the position is the next epoch's start.
    assert seen == [(0, 4, 2, 4), (0, 8, 1, 4), (1, 0, 3, 2)]


def test_prefetched_batches_do_not_count() -> None:
    loader = make(64, 4, num_workers=2, prefetch_factor=4)
    batches = iter(loader)
    next(batches)
    assert loader.consumed == 4
    assert loader.state_dict()["consumed"] == 4


def test_break_goes_on_at_the_next_unseen_batch() -> None:
    loader = make(24, 4)
    seen = []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 2:
            break
    assert flat(seen) + flat(loader) == order(24)
    assert flat(loader) == order(24, epoch=1)


def test_last_ids_are_those_of_the_batch_in_hand() -> None:
    loaders = [make(10, 4, data_rank=rank, data_size=2) for rank in range(2)]
    assert loaders[0].last_batch_ids is None
    assert loaders[0].last_global_ids is None
    for first, second in zip(*loaders, strict=True):
        assert loaders[0].last_batch_ids == tuple(first.tolist())
        assert loaders[1].last_batch_ids == tuple(second.tolist())
        both = (*first.tolist(), *second.tolist())
        assert loaders[0].last_global_ids == loaders[1].last_global_ids == both
    loaders[0].load_state_dict(loaders[0].state_dict())
    assert loaders[0].last_batch_ids is None


def test_shuffle_off_ascends() -> None:
    loader = make(10, 4, shuffle=False)
    assert flat(loader) == flat(loader) == list(range(10))


def test_state_is_small_plain_and_equal_on_all_ranks() -> None:
    loaders = [make(24, 4, data_rank=rank, data_size=4, seed=2**70) for rank in range(4)]
    for loader in loaders:
        next(iter(loader))
    texts = {json.dumps(loader.state_dict()) for loader in loaders}
    assert len(texts) == 1
    assert len(texts.pop()) < 1024


def test_global_generators_stay_untouched() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)

    def everything() -> tuple[object, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = everything()
    for options in ({}, {"num_workers": 1}, {"shuffle": False}, {"num_workers": 1, "persistent_workers": True}):
        loader = make(24, 4, **options)
        assert everything() == before
        for _ in range(2):
            for _ in loader:
                assert loader.last_global_ids
                assert everything() == before
        loader.load_state_dict(loader.state_dict())
        assert everything() == before


def test_worker_seeds_follow_seed_epoch_and_data_rank_only() -> None:
    def worker_seeds(seed: int, rank: int, skip: int) -> list[set[int]]:
        torch.manual_seed(skip)  # whatever the global generator holds
        loader = ResumableLoader(
            WorkerFacts(16), global_batch_size=4, seed=seed, num_workers=1, data_rank=rank, data_size=2
        )
        if skip:
            for _ in zip(range(skip), loader, strict=False):
                pass
        return [{int(value) for batch in loader for value in batch[2]} for _ in range(2)]

    base = worker_seeds(0, 0, 0)
    assert all(len(seeds) == 1 for seeds in base)
    assert base[0] != base[1]
    assert worker_seeds(0, 0, 2) == base
    assert worker_seeds(1, 0, 0)[0] != base[0]
    assert worker_seeds(0, 1, 0)[0] != base[0]


def test_persistent_workers_are_reused_also_after_a_break() -> None:
    loader = ResumableLoader(WorkerFacts(24), global_batch_size=4, seed=0, num_workers=1, persistent_workers=True)
    processes: set[int] = set()
    seen: list[int] = []
    for epoch in range(3):
        for number, batch in enumerate(loader):
            processes.update(batch[1].tolist())
            seen += batch[0].tolist()
            if epoch == 1 and number == 1:
                break
    assert len(processes) == 1
    # The break in epoch 1 left 16 samples to the third loop.
    assert seen == order(24) + order(24, epoch=1)
    assert loader.epoch == 2


def test_a_new_loop_ends_the_one_before() -> None:
    loader = make()
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(UsageError, match=r"another loop.*\n.*iterate over the loader again"):
        next(first)
    next(second)
    assert loader.consumed == 8


def test_load_ends_the_live_iterator_instead_of_going_on() -> None:
    loader = make()
    state = loader.state_dict()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(UsageError, match="load_state_dict moved the loader"):
            next(batches)
    assert loader.consumed == 0
    assert flat(loader) == order(24)


def test_an_exhausted_iterator_stays_exhausted() -> None:
    loader = make()
    batches = iter(loader)
    list(batches)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)
    next(iter(loader))
    with pytest.raises(StopIteration):
        next(batches)


class Failing(Numbers):
    """Raises while a file exists; may raise the exception that ends loops."""

    def __init__(self, size: int, flag: Path, error: type[Exception]) -> None:
        super().__init__(size)
        self.flag = flag
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == order(self.size)[9] and self.flag.exists():
            raise self.error("broken sample")
        return index


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=["main", "w1", "w1p"]
)
def test_a_batch_that_failed_is_not_consumed_and_comes_again(tmp_path: Path, options: dict[str, Any]) -> None:
    flag = tmp_path / "broken"
    flag.touch()
    loader = ResumableLoader(Failing(24, flag, OSError), global_batch_size=4, seed=0, **options)
    batches = iter(loader)
    seen = [next(batches), next(batches)]
    with pytest.raises(OSError, match="broken sample"):
        next(batches)
    assert loader.consumed == 8
    with pytest.raises(UsageError, match="OSError while fetching"):
        next(batches)
    flag.unlink()
    assert flat(seen) + flat(loader) == order(24)
    assert flat(loader) == order(24, epoch=1)


def test_stop_iteration_in_the_dataset_does_not_end_the_epoch_silently(tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    flag.touch()
    loader = ResumableLoader(Failing(24, flag, StopIteration), global_batch_size=4, seed=0)
    with pytest.raises(UsageError, match="StopIteration while fetching positions 8 to 11 of epoch 0"):
        list(loader)


def test_a_failure_stops_the_workers_though_its_traceback_is_kept(tmp_path: Path) -> None:
    """A dead worker that torch still watches raises its error again at every later SIGCHLD."""
    flag = tmp_path / "broken"
    flag.touch()
    loader = ResumableLoader(
        Failing(24, flag, OSError), global_batch_size=4, seed=0, num_workers=1, persistent_workers=True
    )
    before = set(multiprocessing.active_children())
    with pytest.raises(OSError, match="broken sample") as kept:
        list(loader)
    assert kept.tb is not None
    assert set(multiprocessing.active_children()) <= before


def test_ids_start_where_the_position_was_at_iter() -> None:
    start = Cursor(seed=0, epoch=0, consumed=0, size=24)
    ids = IdBatches(Batching(batch_size=4, drop_last=False, at=Coordinates(rank=0, size=1)), start, seeded=False)
    batches = iter(ids)
    ids.start = Cursor(seed=0, epoch=0, consumed=20, size=24)
    assert flat(batches) == order(24)
    assert len(ids) == 1


class Dying(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 9 and get_worker_info() is not None and os.environ.get("KILL_LOADER_WORKER"):
            os._exit(3)
        return index


def test_dead_persistent_workers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILL_LOADER_WORKER", "1")
    loader = ResumableLoader(
        Dying(24),
        global_batch_size=4,
        seed=0,
        shuffle=False,
        num_workers=1,
        persistent_workers=True,
        collate_fn=list,  # no tensors: a dead worker takes those in flight with it, which raises other errors
    )
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader)
    done = loader.consumed
    assert done in (0, 4, 8)  # how far depends on when the death is seen
    monkeypatch.delenv("KILL_LOADER_WORKER")
    assert flat(loader) == list(range(done, 24))


def test_other_dataset_size_seed_or_shuffle_is_refused_and_the_position_kept() -> None:
    state = make(24).state_dict()
    for other, says in ((make(25), "size"), (make(seed=1), "seed"), (make(shuffle=False), "algorithm")):
        batches = iter(other)
        next(batches)
        with pytest.raises(StateMismatch, match=says):
            other.load_state_dict(state)
        assert other.consumed == 4
        next(batches)  # a refused load leaves the live loop alone


def test_load_onto_ranks_that_the_rest_of_the_epoch_cannot_serve_is_refused() -> None:
    loader = make(128, 21)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    other = make(128, 64, data_rank=0, data_size=4)
    with pytest.raises(UsageError, match=r"65 left in epoch 0.*has 1 samples for 4"):
        other.load_state_dict(loader.state_dict())
    assert other.consumed == 0


def test_a_dataset_that_changed_its_length_is_refused() -> None:
    numbers = Numbers(24)
    loader = ResumableLoader(numbers, global_batch_size=4, seed=0)
    next(iter(loader))
    numbers.size = 25
    with pytest.raises(UsageError, match="had 24 samples when the loader was built and has 25 now"):
        iter(loader)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (Stream(), {}, "IterableDataset"),
        (iter([1]), {}, "no __len__ and no __getitem__"),
        (Numbers(0), {}, "is empty"),
        (Numbers(8), {"seed": -1}, "seed is -1"),
        (Numbers(8), {"seed": 0.5}, "seed is 0.5: expected an integer"),
        (Numbers(8), {"global_batch_size": 2.0}, "global_batch_size is 2.0"),
        (Numbers(8), {"global_batch_size": 0}, "global_batch_size is 0"),
        (Numbers(8), {"data_rank": 1}, "expected both or neither"),
        (Numbers(8), {"data_rank": 2, "data_size": 2}, "data_rank 2 of data_size 2"),
        (Numbers(8), {"data_rank": 0, "data_size": 3}, "does not divide by the 3"),
        (Numbers(9), {"data_rank": 0, "data_size": 2}, "has 1 samples for 2"),
        (Numbers(3), {"drop_last": True}, "no epoch would have a batch"),
        (Numbers(8), {"prefetch_factor": 2}, "DataLoader refuses the options: prefetch_factor"),
        (Numbers(8), {"persistent_workers": True}, "DataLoader refuses the options: persistent_workers"),
        (Numbers(8), {"num_workers": 1, "multiprocessing_context": "warp"}, "multiprocessing_context"),
    ],
)
def test_options_are_checked_at_construction(dataset: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        ResumableLoader(dataset, **{"global_batch_size": 4, "seed": 0, **options})
    assert says in str(caught.value)


def test_numpy_integers_are_integers() -> None:
    loader = make(24, np.int64(4), seed=np.uint8(0), data_rank=np.int32(0), data_size=np.int32(1))  # type: ignore[arg-type]
    assert flat(loader) == order(24)
    json.dumps(loader.state_dict())


def test_default_group_is_the_data_axis() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    early = make(24, 4)
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        from torch.distributed.device_mesh import init_device_mesh

        loader = make(24, 4)
        assert flat(loader) == order(24)[2::4]
        alone = make(24, 4, data_rank=0, data_size=1)
        assert flat(alone) == order(24)
        with pytest.raises(UsageError, match=r"rank 0 of 1, but .* rank 2 of 4"):
            iter(early)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert flat(make(24, 4, data_mesh=mesh["dp"])) == [i for n, i in enumerate(order(24)) if n % 4 >= 2]
        with pytest.raises(UsageError, match=r'2 dimensions .*\n.*mesh\["dp"\]'):
            make(24, 4, data_mesh=mesh)
        with pytest.raises(UsageError, match="one of the two ways"):
            make(24, 4, data_mesh=mesh["dp"], data_rank=0, data_size=2)
    finally:
        dist.destroy_process_group()
