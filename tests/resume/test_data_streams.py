"""Streams cut anywhere, through real checkpoints: the concatenated items are those of the unbroken run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import shardkeep as sk


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()


class Shards(IterableDataset[int]):
    """Whole numbers in shards, each rank every `size`-th shard; notes what is read. Splits by shard."""

    def __init__(self, count: int = 6, length: int = 10, rank: int = 0, size: int = 1) -> None:
        self.shards = [[s, 0] for s in range(count) if s % size == rank]
        self.all, self.length = list(self.shards), length
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while any(at < self.length for _, at in self.shards):
            shard = next(shard for shard in self.shards if shard[1] < self.length)
            shard[1] += 1
            self.read.append(shard[0] * self.length + shard[1] - 1)
            yield self.read[-1]
        for shard in self.shards:
            shard[1] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"shards": [list(shard) for shard in self.shards]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shards = [list(shard) for shard in state["shards"]]

    def split_state(self, states: list[Any], rank: int, world_size: int) -> dict[str, Any]:
        every = sorted(shard for state in states for shard in state["shards"])
        return {"shards": every[rank::world_size]}


def pack_7(leftover: list[int], item: int) -> tuple[list[list[int]], list[int]]:
    items = [*leftover, item]
    return ([items], []) if len(items) == 7 else ([], items)


def keep_others(item: int) -> bool:
    return item % 3 != 0


def plain_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(24), **{"batch_size": 4, "collate_fn": list, **options})


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stateful(**options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(24), **{"batch_size": 4, "collate_fn": ids_only, **options})


def ids_only(samples: list[Any]) -> list[int]:
    return [sample[0] for sample in samples]


def hub(shuffle: bool = False) -> Any:
    import datasets

    found = datasets.Dataset.from_dict({"i": list(range(60))}).to_iterable_dataset(num_shards=3)
    return found.shuffle(seed=1, buffer_size=16) if shuffle else found


SOURCES: dict[str, Callable[[], sk.StreamLoader]] = {
    "filter and pack": lambda: sk.StreamLoader(sk.Pack(sk.Filter(Shards(), keep_others), pack_7)),
    "shuffle": lambda: sk.StreamLoader(sk.Shuffle(Shards(), buffer_size=13, seed=2), batch_size=4, collate_fn=list),
    "shuffle, filter, drop": lambda: sk.StreamLoader(
        sk.Filter(sk.Shuffle(Shards(), buffer_size=70, seed=2), keep_others),
        batch_size=7,
        collate_fn=list,
        drop_last=True,
    ),
    "in order": lambda: sk.StreamLoader(plain_loader(batch_size=5)),
    "in order, workers": lambda: sk.StreamLoader(plain_loader(num_workers=2)),
    "shuffled, generator": lambda: sk.StreamLoader(plain_loader(shuffle=True, generator=seeded())),
    "shuffled, generator, workers": lambda: sk.StreamLoader(
        plain_loader(shuffle=True, generator=seeded(), num_workers=2, persistent_workers=True)
    ),
    "replacement": lambda: sk.StreamLoader(
        plain_loader(sampler=RandomSampler(Numbers(24), replacement=True, num_samples=50, generator=seeded()))
    ),
    "weights": lambda: sk.StreamLoader(
        plain_loader(sampler=WeightedRandomSampler([1.0, 2.0] * 12, 24, generator=seeded()))
    ),
    "subset": lambda: sk.StreamLoader(plain_loader(sampler=SubsetRandomSampler(range(5, 22), generator=seeded()))),
    "distributed": lambda: sk.StreamLoader(
        plain_loader(sampler=DistributedSampler(Numbers(24), num_replicas=2, rank=1, seed=3))
    ),
    "list": lambda: sk.StreamLoader(plain_loader(sampler=[5, 3, 3, 9, 20, 7])),
    "torchdata": lambda: sk.StreamLoader(stateful()),
    "torchdata, shuffled": lambda: sk.StreamLoader(stateful(shuffle=True)),
    "torchdata, workers": lambda: sk.StreamLoader(stateful(shuffle=True, num_workers=2)),
    "torchdata over a step": lambda: sk.StreamLoader(stateful_over_step()),
    "hub": lambda: sk.StreamLoader(hub(), batch_size=7, collate_fn=numbers_of),
    "hub, buffer": lambda: sk.StreamLoader(hub(shuffle=True), batch_size=7, collate_fn=numbers_of),
    "hub, filter": lambda: sk.StreamLoader(
        sk.Shuffle(hub().map(plus_one).filter(even), buffer_size=9, seed=0), batch_size=4, collate_fn=numbers_of
    ),
}


def stateful_over_step() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    step = sk.Pack(sk.Filter(Shards(), keep_others), pack_7)
    return StatefulDataLoader(step, batch_size=2, collate_fn=list, num_workers=1, persistent_workers=True)


def numbers_of(rows: list[Any]) -> list[int]:
    return [row["i"] for row in rows]


def plus_one(row: dict[str, int]) -> dict[str, int]:
    return {"i": row["i"] + 1}


def even(row: dict[str, int]) -> bool:
    return row["i"] % 2 == 0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        yield


def train(root: Path, name: str, stop: int, trace: dict[int, Any], *, save_every: int = 1) -> None:
    """One start of a job: batches and a draw of the global streams go into `trace`, by step."""
    random.seed(11)
    torch.manual_seed(11)
    loader = SOURCES[name]()
    state = {"loader": loader}
    with sk.CheckpointManager(root, save_every=save_every, keep=sk.Keep(last=1)) as manager:
        manager.resume(state)
        for step, batch in manager.steps(loader, stop=stop):
            trace[step] = (batch, random.random(), float(torch.rand(1)))
            manager.after_step(step, state)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_any_hops_are_exact(name: str, tmp_path: Path) -> None:
    """huggingface/datasets#8308 and #7447, meta-pytorch/data#1251, mosaicml/streaming#800: over three passes."""
    whole: dict[int, Any] = {}
    steps = 19
    train(tmp_path / "whole", name, steps, whole, save_every=100)
    hopped: dict[int, Any] = {}
    for stop in (1, 2, 5, 6, 7, 13, steps):
        train(tmp_path / "hops", name, stop, hopped)
    assert hopped == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_cut_is_exact(name: str, tmp_path: Path) -> None:
    whole: dict[int, Any] = {}
    train(tmp_path / "whole", name, 16, whole, save_every=100)
    for cut in range(1, 16):
        hopped: dict[int, Any] = {}
        train(tmp_path / str(cut), name, cut, hopped)
        train(tmp_path / str(cut), name, 16, hopped)
        assert hopped == whole, cut


def test_filtered_items_are_not_read_again_and_a_pack_goes_on_half_filled() -> None:
    """mosaicml/streaming#800: the state counted what was yielded, not what was read."""
    source = Shards()
    loader = sk.StreamLoader(sk.Pack(sk.Filter(source, keep_others), pack_7))
    first = next(iter(loader))
    state = loader.state_dict()
    again = Shards()
    resumed = sk.StreamLoader(sk.Pack(sk.Filter(again, keep_others), pack_7))
    resumed.load_state_dict(state)
    second = next(iter(resumed))
    assert first + second == [i for i in range(60) if i % 3][:14]
    assert source.read + again.read == list(range(second[-1] + 1))
    # Inside a half-filled pack:
    pack = sk.Pack(Shards(count=1), lambda left, item: ([], [*left, item]) if item < 4 else ([left, item], []))
    assert next(iter(pack)) == [0, 1, 2, 3]
    state = pack.state_dict()
    assert state["ready"] == [4]
    other = sk.Pack(Shards(count=1), lambda left, item: ([item], []))
    other.load_state_dict(state)
    assert list(other) == [4, 5, 6, 7, 8, 9]


def test_leftovers_of_a_pass_go_into_the_next() -> None:
    pack = sk.Pack(Shards(count=1), pack_7)
    assert [next(iter(pack)), list(pack)] == [[0, 1, 2, 3, 4, 5, 6], []]
    assert next(iter(pack)) == [7, 8, 9, 0, 1, 2, 3]


def test_a_shuffle_gives_every_item_once_a_pass_and_in_another_order() -> None:
    shuffle = sk.Shuffle(Shards(), buffer_size=16, seed=4)
    first, second = list(shuffle), list(shuffle)
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second
    assert first != list(range(60))
    assert max(item - place for place, item in enumerate(first)) < 16


def test_skipped_samples_of_a_sampler_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = sk.StreamLoader(plain_loader(shuffle=True, generator=seeded()))
    trained = [i for _, batch in zip(range(2), loader, strict=False) for i, _ in batch]
    fetched: list[int] = []

    class Noting(Numbers):
        def __getitem__(self, index: int) -> tuple[int, float]:
            fetched.append(index)
            return super().__getitem__(index)

    again = sk.StreamLoader(DataLoader(Noting(24), batch_size=4, collate_fn=list, shuffle=True, generator=seeded(99)))
    again.load_state_dict(loader.state_dict())
    rest = [i for batch in again for i, _ in batch]
    assert sorted(trained + rest) == list(range(24))
    assert fetched == rest


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "plain shuffle": (lambda: plain_loader(shuffle=True), "ResumableLoader"),
    "random sampler": (lambda: plain_loader(sampler=RandomSampler(Numbers(24))), "generator=torch.Generator"),
    "stream in a loader": (lambda: DataLoader(Shards(), batch_size=2), "StreamLoader"),
    "no batches": (lambda: DataLoader(Numbers(24), batch_size=None), "ResumableLoader"),
    "generator": (lambda: (i for i in range(3)), "ResumableLoader"),
    "list": (lambda: [1, 2, 3], "state_dict"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_brought_back_is_refused_with_the_fix(name: str) -> None:
    """wyim-pgl/transgenic#59: a plain shuffle draws another permutation after a resume."""
    make, fix = REFUSED[name]
    with pytest.raises(sk.UnsupportedState) as caught:
        sk.StreamLoader(make())
    assert fix in str(caught.value)


@pytest.mark.parametrize("make", [plain_loader, hub], ids=["torch", "hub"])
def test_a_bare_source_in_the_state_is_refused_by_name(make: Any, tmp_path: Path) -> None:
    with (
        sk.CheckpointManager(tmp_path) as manager,
        pytest.raises(sk.UnsupportedState, match=r"reader: .*\n.*StreamLoader"),
    ):
        manager.save(1, {"reader": make()})


def test_another_sampler_is_refused() -> None:
    loader = sk.StreamLoader(plain_loader(shuffle=True, generator=seeded()))
    next(iter(loader))
    for other in (plain_loader(), plain_loader(shuffle=True, generator=seeded(), batch_size=3)):
        with pytest.raises(sk.StateMismatch, match="another DataLoader"):
            sk.StreamLoader(other).load_state_dict(loader.state_dict())


def split(
    world: list[sk.StreamLoader], make: Callable[[int, int], sk.StreamLoader], size: int
) -> list[sk.StreamLoader]:
    states = [loader.state_dict() for loader in world]
    found = [make(rank, size) for rank in range(size)]
    for loader in found:
        loader.load_state_dict(loader.merge_states(states))
    return found


@pytest.mark.parametrize("worlds", [(2, 3), (3, 2), (4, 1), (1, 4), (2, 1, 3, 2)])
def test_positions_split_over_another_world(worlds: tuple[int, ...]) -> None:
    def make(rank: int, size: int) -> sk.StreamLoader:
        steps = sk.Shuffle(sk.Filter(Shards(count=12, rank=rank, size=size), keep_others), buffer_size=9, seed=1)
        return sk.StreamLoader(steps, batch_size=2, collate_fn=list, data_rank=rank, data_size=size)

    world = [make(rank, worlds[0]) for rank in range(worlds[0])]
    seen: list[int] = []
    for size in worlds[1:]:
        for loader in world:
            for _ in range(3):
                seen += next(iter(loader))
        world = split(world, make, size)
    seen += [item for loader in world for batch in loader for item in batch]
    assert sorted(seen) == [i for i in range(120) if i % 3]


def test_a_source_that_cannot_be_split_is_refused() -> None:
    def make(rank: int, size: int) -> sk.StreamLoader:
        return sk.StreamLoader(plain_loader(), data_rank=rank, data_size=size)

    world = [make(rank, 2) for rank in range(2)]
    for loader in world:
        next(iter(loader))
    with pytest.raises(sk.StateMismatch, match=r"cannot be split over 3[\s\S]*ResumableLoader"):
        split(world, make, 3)
    with pytest.raises(sk.StateMismatch, match="rank 1 of 2"):
        make(0, 2).load_state_dict(world[1].state_dict())
    assert [loader.merge_states([w.state_dict() for w in world])["rank"] for loader in world] == [0, 1]


class Shaky:
    """Ten numbers; the fourth cannot be read the first time."""

    def __init__(self) -> None:
        self.at = 0
        self.fails = True

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            if self.at == 3 and self.fails:
                self.fails = False
                raise OSError("not now")
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_after_an_error_nothing_is_skipped_without_a_word() -> None:
    loader = sk.StreamLoader(Shaky(), batch_size=2)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    saved = loader.state_dict()
    with pytest.raises(OSError, match="not now"):
        next(batches)
    with pytest.raises(sk.UsageError, match="cannot go on: its source or collate_fn raised OSError after batch 1"):
        list(loader)
    with pytest.raises(sk.UsageError, match="cannot say where it is"):
        loader.state_dict()
    loader.load_state_dict(saved)
    assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_a_position_between_batches_is_saved_after_an_error() -> None:
    loader = sk.StreamLoader(Shaky())
    seen: list[int] = []
    with pytest.raises(OSError, match="not now"):
        seen.extend(loader)
    other = sk.StreamLoader(Shaky())
    other.load_state_dict(loader.state_dict())
    assert seen == [0, 1, 2]
    with pytest.raises(OSError, match="not now"):
        next(iter(other))
