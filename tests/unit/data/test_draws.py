"""Draws of transforms: a function of seed, epoch and sample, wherever a sample is fetched."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from shardkeep.data.draws import Request, SeededDataset
from shardkeep.data.loader import ResumableLoader
from shardkeep.errors import UsageError
from shardkeep.order.draws import draw_below, iter_draw_seeds
from shardkeep.order.permutation import derive_key


class Drawing(Dataset[Any]):
    """Draws from all three generators, also with those functions that keep half a pair for the next call."""

    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (index, random.random(), random.gauss(0, 1), float(np.random.randn()), torch.randn(3).tolist())


class Batchwise(Drawing):
    def __getitems__(self, ids: list[int]) -> list[tuple[Any, ...]]:
        assert type(ids) is list
        noise = np.random.rand(len(ids)).tolist()
        return [(i, n) for i, n in zip(ids, noise, strict=True)]


class Told(Dataset[Any]):
    """Tells what a worker is told about itself."""

    def __init__(self) -> None:
        self.opened = -1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.opened


def open_in_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Told
    info.dataset.opened = 100 + worker


def collate_with_a_draw(samples: list[Any]) -> tuple[Any, ...]:
    return (samples, random.random(), float(np.random.rand()), float(torch.rand(1)))


def build(dataset: Any = None, **options: Any) -> ResumableLoader:
    return ResumableLoader(dataset or Drawing(), **{"global_batch_size": 4, "seed": 5, "collate_fn": list, **options})


def epochs(loader: Any, count: int = 2) -> list[Any]:
    return [batch for _ in range(count) for batch in loader]


@contextmanager
def unmoved_generators() -> Iterator[None]:
    """Fail if anything inside moves a global generator, a kept half of a normal pair included."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn(1)
    generator = np.random.mtrand.get_bit_generator()
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    after = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert np.random.mtrand.get_bit_generator() is generator
    assert before[0] == after[0]
    assert all(np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 2, "prefetch_factor": 5},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ],
    ids=["one", "prefetch", "persistent", "spawn"],
)
def test_workers_prefetch_and_start_method_change_no_draw(options: dict[str, Any]) -> None:
    with unmoved_generators():
        expected = epochs(build())
        assert epochs(build(**options)) == expected
    first, second = (
        {sample[0]: sample[1:] for batch in half for sample in batch} for half in (expected[:6], expected[6:])
    )
    assert first.keys() == second.keys() == set(range(24))
    assert all(first[i] != second[i] for i in first)  # each epoch draws anew
    assert len({sample[k] for sample in first.values() for k in (0, 1, 2)}) == 72


def test_draws_do_not_come_from_the_global_streams() -> None:
    with unmoved_generators():
        one = epochs(build())
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    assert epochs(build()) == one
    assert epochs(build(seed=6)) != one


def test_world_and_batch_size_change_no_draw() -> None:
    whole = [sample for batch in epochs(build(), 1) for sample in batch]
    ranks = [build(global_batch_size=6, data_rank=rank, data_size=3) for rank in range(3)]
    parts = [sample for shares in zip(*ranks, strict=True) for share in shares for sample in share]
    assert parts == whole


def test_a_subset_draws_per_sample_and_a_batch_fetcher_per_batch() -> None:
    subset = Subset(Drawing(30), range(24))
    assert epochs(build(subset)) == epochs(build())
    assert epochs(build(Batchwise())) == epochs(build(Batchwise(), num_workers=2))
    assert epochs(build(Subset(Batchwise(), range(24)))) == epochs(build(Batchwise()))
    noise = [sample[1] for batch in epochs(build(Batchwise())) for sample in batch]
    assert len(set(noise)) == len(noise)


def test_collate_draws_per_batch() -> None:
    here = epochs(build(collate_fn=collate_with_a_draw))
    assert epochs(build(collate_fn=collate_with_a_draw, num_workers=2)) == here
    assert len({batch[1] for batch in here}) == len({batch[2] for batch in here}) == len({b[3] for b in here}) == 12


def test_collate_draws_under_the_seeds_of_its_first_position() -> None:
    """Not on from wherever the last sample's transforms came to."""
    batches = epochs(build(collate_fn=collate_with_a_draw), 1)
    python, for_numpy, for_torch = next(iter_draw_seeds(5, 0, [8], domain="collate"))
    drawn = float(torch.rand(1, generator=torch.Generator().manual_seed(for_torch)))
    assert batches[2][1:] == (random.Random(python).random(), float(np.random.RandomState(for_numpy).rand()), drawn)


def test_an_error_leaves_the_global_streams_alone() -> None:
    class Failing(Drawing):
        def __getitem__(self, index: int) -> Any:
            torch.rand(1)
            raise RuntimeError("no such file")

    with unmoved_generators(), pytest.raises(RuntimeError, match="no such file"):
        next(iter(build(Failing())))


def test_workers_see_the_dataset_they_were_given() -> None:
    loader = build(Told(), num_workers=1, worker_init_fn=open_in_worker, global_batch_size=2)
    assert epochs(loader, 1) == [[100, 100], [100, 100]]


def test_a_foreign_numpy_generator_is_put_back() -> None:
    own = np.random.mtrand.get_bit_generator()
    expected = epochs(build(), 1)
    other = np.random.PCG64(3)
    np.random.mtrand.set_bit_generator(other)
    try:
        assert epochs(build(), 1) == expected
        assert np.random.mtrand.get_bit_generator() is other
        assert epochs(build(num_workers=1), 1) == expected
    finally:
        np.random.mtrand.set_bit_generator(own)


def test_without_seeding_samples_draw_from_the_process() -> None:
    torch.manual_seed(0)
    one = epochs(build(seed_samples=False), 1)
    two = epochs(build(seed_samples=False), 1)
    assert one != two
    assert [s[0] for b in one for s in b] == [s[0] for b in two for s in b]
    assert type(build(seed_samples=False)._fetcher) is DataLoader


def test_streams_of_a_sample_are_the_seeded_ones() -> None:
    """The fast way to seed gives what the documented functions give."""
    python, for_numpy, for_torch = next(iter_draw_seeds(5, 0, [7], domain="sample"))
    found = SeededDataset(Drawing(), list, 5).__getitems__(Request(ids=[7], epoch=0, start=0))[0]
    own_numpy = np.random.RandomState(for_numpy)
    own_torch = torch.Generator().manual_seed(for_torch)
    own = random.Random(python)
    assert found == (
        7, own.random(), own.gauss(0, 1), float(own_numpy.randn()), torch.randn(3, generator=own_torch).tolist()
    )  # fmt: skip


def test_seeds_are_pinned() -> None:
    """Checkpoints depend on them: they never change."""
    assert list(iter_draw_seeds(0, 0, [0, 1], domain="sample")) == PINNED
    assert list(iter_draw_seeds(0, 0, [1], domain="sample")) == PINNED[1:]
    assert [draw_below(derive_key(0, 0, domain="shuffle"), n, 1000) for n in range(4)] == PINNED_PICKS
    assert len(set(iter_draw_seeds(1, 2, range(10_000), domain="sample"))) == 10_000
    assert list(iter_draw_seeds(0, 0, [-1], domain="sample"))  # any integer index


PINNED = [(18030437134402904671, 3875969069, 1799859097), (18260033991267205570, 765128189, 4104968989)]
PINNED_PICKS = [11, 95, 983, 48]


def test_a_mixture_refuses_no_shuffle() -> None:
    from shardkeep.data.mixture import Mixture

    with pytest.raises(UsageError, match="shuffle=False"):
        build(Mixture([(Drawing(), 1)]), shuffle=False)


def best(call: Any, count: int) -> float:
    times = []
    for _ in range(60):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times) / count * 1e6


class Index(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.slow
def test_seeding_costs_little() -> None:
    """Under 10 microseconds a sample, and under 100 a batch to put the process's streams back."""
    seeded = SeededDataset(Index(), list, 7)
    request = Request(ids=range(256), epoch=3, start=0)

    def put_back() -> None:
        with seeded._kept_generators():
            pass

    assert best(lambda: seeded._fetch(request), 256) < 10
    assert best(put_back, 1) < 100
