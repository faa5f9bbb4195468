"""A restore reads the parts of which it takes something, and no others, whatever the number of ranks that saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shardkeep.engine.catalog import make_catalog
from shardkeep.engine.opened import CheckpointReader
from shardkeep.engine.restore import check_wants, encode_wants, list_stored, restore
from shardkeep.engine.run import read_commit
from shardkeep.engine.save import SaveOptions
from shardkeep.errors import Corrupt, StateMismatch
from shardkeep.format.names import StepRef
from shardkeep.format.records import CommitRecord, RankValues
from shardkeep.ranks.base import Group
from shardkeep.spec.tensors import Catalog, LocalTensor
from shardkeep.testing.faults import FaultStore
from tests.support.fake_state import FakeRun, ThreadWorld, make_tensor

STATE = {
    "model/embed": make_tensor(np.arange(48 * 5, dtype=np.float32).reshape(48, 5), placement="S0"),
    "model/wide": make_tensor(np.arange(3 * 24, dtype=np.int64).reshape(3, 24), placement="S1"),
}
REF = StepRef(step=1, generation=1)


def save(root: Path, world_size: int, **values: Any) -> tuple[FakeRun, CommitRecord]:
    run = FakeRun(root, world_size=world_size)
    run.save(1, STATE, values={"scheduler": {"last_epoch": 3}, **values}, options=SaveOptions())
    return run, read_commit(run.store, REF)


def forget(commit: CommitRecord) -> CommitRecord:
    """Return the record as earlier versions wrote it."""
    return msgspec.structs.replace(commit, facts=msgspec.structs.replace(commit.facts, per_rank=None))


def parts_read(store: FaultStore) -> list[int]:
    """Return the ranks whose part was read, each as often as it was."""
    return sorted(int(call.key[-10:-5]) for call in store.log if call.verb == "get" and "part-r" in call.key)


class Wants:
    """What a rank of a world wants of STATE and the values."""

    problems = ()

    def __init__(self, catalog: Catalog, rank: int, world_size: int) -> None:
        self.tensors: tuple[LocalTensor, ...] = tuple(STATE[key].local(key, rank, world_size) for key in STATE)
        for tensor in self.tensors:
            for piece in tensor.pieces:
                piece.data.copy_in(0, memoryview(bytes(piece.data.nbytes)))
        self.consumed_tensors = frozenset(STATE)
        self.consumed_values = frozenset({"scheduler", "rng"} & set(catalog.values))
        self.found = {name: catalog.values[name] for name in sorted(self.consumed_values)}


def resume(run: FakeRun, commit: CommitRecord, world_size: int) -> tuple[list[FaultStore], list[Wants]]:
    """Restore on so many ranks; return their stores and what they wanted."""
    stores = [FaultStore(run.store) for _ in range(world_size)]
    made: dict[int, Wants] = {}

    def work(group: Group) -> None:
        def plan(catalog: Catalog) -> Wants:
            made[group.rank] = Wants(catalog, group.rank, group.world_size)
            return made[group.rank]

        restore(stores[group.rank], group, commit, plan, lambda wants: None)

    ThreadWorld(world_size).run(work)
    for rank, wants in made.items():
        for tensor in wants.tensors:
            expected = STATE[tensor.key].local(tensor.key, rank, world_size)
            for got, wanted in zip(tensor.pieces, expected.pieces, strict=True):
                assert got.data.data == wanted.data.data  # type: ignore[attr-defined]
    return stores, [made[rank] for rank in range(world_size)]


@pytest.mark.parametrize("old", [False, True], ids=["new record", "old record"])
def test_eight_ranks_to_six(tmp_path: Path, old: bool) -> None:
    run, commit = save(tmp_path, 8)
    stores, wants = resume(run, forget(commit) if old else commit, 6)
    for rank, store in enumerate(stores):
        assert wants[rank].found["rng"]["rank"] == rank
        read = parts_read(store)
        if old:
            assert set(read) == set(range(8))
            continue
        # A sixth of the rows lies in at most three eighths; and its own, for the random streams.
        low, high = 48 * rank // 6, 48 * (rank + 1) // 6 - 1
        assert set(read) == {rank, *range(low // 6, high // 6 + 1)}
        assert len(read) == len(set(read)), "each once"


def test_a_restart_in_the_same_layout_reads_its_own_part(tmp_path: Path) -> None:
    run, commit = save(tmp_path, 8)
    stores, wants = resume(run, commit, 8)
    assert [parts_read(store) for store in stores] == [[rank] for rank in range(8)]
    assert [w.found["rng"]["rank"] for w in wants] == list(range(8))


def test_a_rank_that_is_new_takes_what_the_first_has(tmp_path: Path) -> None:
    run, commit = save(tmp_path, 2)
    stores, wants = resume(run, commit, 4)
    assert [w.found["rng"]["rank"] for w in wants] == [0, 1, 0, 0]
    assert set(parts_read(stores[3])) == {0, 1}
    assert [make_catalog(CheckpointReader(run.store, commit), rank, 4).is_new for rank in range(4)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("world_size", [1, 3, 6, 8, 9])
def test_records_of_both_kinds_show_the_same(tmp_path: Path, world_size: int) -> None:
    run, commit = save(tmp_path, 8)
    for rank in range(world_size):
        new, old = (
            make_catalog(CheckpointReader(run.store, record), rank, world_size) for record in (commit, forget(commit))
        )
        assert dict(new.values) == dict(old.values)
        assert {name: list(found) for name, found in new.differing.items()} == {
            name: list(found) for name, found in old.differing.items()
        }
        assert list(new.differing) == list(old.differing) == ["rng"]


def test_looking_at_names_reads_nothing(tmp_path: Path) -> None:
    run, commit = save(tmp_path, 8)
    store = FaultStore(run.store)
    catalog = make_catalog(CheckpointReader(store, commit), 1, 6)
    assert sorted(catalog.values) == ["rng", "scheduler"]
    assert "rng" in catalog.differing
    assert len(catalog.differing["rng"]) == 8
    assert "nothing" not in catalog.values
    assert parts_read(store) == []
    assert catalog.differing["rng"][5]["rank"] == 5
    assert [table["rank"] for table in catalog.differing["rng"][2:4]] == [2, 3]
    assert parts_read(store) == [2, 3, 5]
    with pytest.raises(IndexError):
        catalog.differing["rng"][8]
    with pytest.raises(KeyError):
        catalog.values["nothing"]


def test_facts_say_who_keeps_what(tmp_path: Path) -> None:
    _, commit = save(tmp_path, 3)
    assert commit.facts.per_rank == (RankValues(("rng",), ((0, 3),)),)


def test_a_part_that_lacks_what_the_facts_promise_is_damage(tmp_path: Path) -> None:
    run, commit = save(tmp_path, 2)
    facts = msgspec.structs.replace(commit.facts, per_rank=(RankValues(("ghost", "rng"), ((0, 2),)),))
    catalog = make_catalog(CheckpointReader(run.store, msgspec.structs.replace(commit, facts=facts)), 0, 3)
    with pytest.raises(Corrupt, match="part 0: ghost"):
        catalog.values["ghost"]
    with pytest.raises(Corrupt, match="part 1: ghost"):
        catalog.differing["ghost"][1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_no_rank_asks_for_is_named(tmp_path: Path, world_size: int) -> None:
    run, commit = save(tmp_path, 2)
    reader = CheckpointReader(run.store, commit)
    stored = list_stored(commit)

    def post(tensors: set[str], values: set[str]) -> bytes:
        return encode_wants(stored, tensors, values, (), ())

    everything = [post({"model/embed"}, {"rng"}), post({"model/wide"}, {"scheduler"})]
    check_wants(everything + everything[:1] * (world_size - 2), reader, strict=True)
    with pytest.raises(StateMismatch) as raised:
        check_wants([post({"model/embed"}, {"scheduler"})] * world_size, reader, strict=True)
    assert [problem.partition(":")[0] for problem in raised.value.problems] == ["model/wide", "rng"]
    check_wants([post(set(), set())] * world_size, reader, strict=False)
