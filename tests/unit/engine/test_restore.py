"""A resume under flaky reads, damage and missing things: it recovers, falls back and says so, or raises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardkeep as sk
from shardkeep import knobs
from shardkeep.engine.run import list_generations, read_marks
from shardkeep.errors import CheckpointError, Corrupt, NotFound, PeerFailure, StateMismatch, StorageError
from shardkeep.format.names import COMMIT_RECORD, StepRef
from shardkeep.plan.retention import Keep
from shardkeep.ranks.base import Group
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faults import Call, Fault, FaultStore
from tests.crash.jobs import Sink, committed, digest, get_all, make_state, manage, run_world, save_at

READS = ("get", "read_into", "head", "list_objects", "list_folders")


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    with knobs.override(RETRY_BASE_S=0.0, RETRIES=2, PEER_SILENCE_S=20.0, BARRIER_TIMEOUT_S=20.0):
        yield


def run_of(*steps: int, world_size: int = 1) -> MemoryStore:
    store = MemoryStore()

    def body(rank_store: Store, group: Group) -> None:
        manager = manage(rank_store, group)
        manager.resume(make_state(1, group.rank))
        for step in steps:
            save_at(manager, step)

    get_all(run_world([store] * world_size, body))
    return store


def copy(store: MemoryStore) -> MemoryStore:
    made = MemoryStore()
    for info in store.list_objects(""):
        made.put(info.key, store.get(info.key, limit_bytes=1 << 30))
    return made


def content(store: MemoryStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key, limit_bytes=1 << 30) for info in store.list_objects("")}


def flip(store: MemoryStore, key: str, at: int = -1) -> None:
    data = bytearray(store.get(key, limit_bytes=1 << 30))
    data[at] ^= 0x10
    store.put(key, bytes(data))


def resume(store: Store, group: Group) -> int:
    state = make_state(1, group.rank)
    report = manage(store, group).resume(state)
    assert report.fresh or digest(state) == digest(make_state(report.step, group.rank))
    return report.step


def count_reads(first: MemoryStore, world_size: int, rank: int) -> int:
    stores = [FaultStore(copy_of) for copy_of in [copy(first)] * world_size]
    get_all(run_world(stores, resume))
    return sum(call.verb in READS for call in stores[rank].log)


def nth_read(number: int) -> Fault:
    seen = [0]

    def matches(call: Call) -> bool:
        seen[0] += call.verb in READS
        return call.verb in READS and seen[0] == number

    return Fault(kind="io_error", when=matches)


def lasting(number: int) -> Fault:
    """From the given read on, this one and the repeats of it fail: one more than RETRIES."""
    seen = [0]

    def matches(call: Call) -> bool:
        seen[0] += call.verb in READS
        return call.verb in READS and number <= seen[0] <= number + 2

    return Fault(kind="io_error", when=matches, times=None)


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_trouble_that_passes_is_waited_out(world_size: int, rank: int) -> None:
    first = run_of(10, 20, world_size=world_size)
    total = count_reads(first, world_size, rank)
    assert total > 5
    for number in range(1, total + 1, 1 if world_size == 1 else 3):
        disk = copy(first)
        stores = [FaultStore(disk, [nth_read(number)] if at == rank else []) for at in range(world_size)]
        assert get_all(run_world(stores, resume)) == [20] * world_size
        assert read_marks(disk)[0] == frozenset()


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_trouble_that_stays_is_raised_and_never_taken_for_damage(world_size: int, rank: int) -> None:
    first = run_of(10, 20, world_size=world_size)
    raised = 0
    for number in range(1, count_reads(first, world_size, rank) + 1, 1 if world_size == 1 else 3):
        disk = copy(first)
        stores = [FaultStore(disk, [lasting(number)] if at == rank else []) for at in range(world_size)]
        results = run_world(stores, resume)
        if results[rank] != 20:  # the last reads belong to the retention, which reports and goes on
            raised += 1
            assert isinstance(results[rank], StorageError), results
            assert all(isinstance(r, (StorageError, PeerFailure)) for r in results), results
        assert read_marks(disk)[0] == frozenset()
        assert committed(disk) == [10, 20]
        assert get_all(run_world([disk] * world_size, resume)) == [20] * world_size
    assert raised >= 2


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_bit_that_flips_on_the_way_once_is_read_again(world_size: int, rank: int) -> None:
    first = run_of(10, 20, world_size=world_size)
    counted = [FaultStore(copy_of) for copy_of in [copy(first)] * world_size]
    get_all(run_world(counted, resume))
    flipped = 0
    for number, call in enumerate(counted[rank].log, start=1):
        if call.verb in ("get", "read_into"):
            disk = copy(first)
            plan = [Fault(kind="bit_flip", at_call=number)]
            stores = [FaultStore(disk, plan if at == rank else []) for at in range(world_size)]
            assert get_all(run_world(stores, resume)) == [20] * world_size, call
            assert read_marks(disk)[0] == frozenset(), call
            flipped += 1
    assert flipped > 5


def test_a_flip_while_rolling_forward_does_not_lose_the_step() -> None:
    first = run_of(10, 20)
    first.delete([StepRef(20, 1).key(COMMIT_RECORD)])
    counted = FaultStore(copy(first))
    assert get_all(run_world([counted], resume)) == [20]
    for number, call in enumerate(counted.log, start=1):
        if call.verb in ("get", "read_into"):
            store = FaultStore(copy(first), [Fault(kind="bit_flip", at_call=number)])
            assert get_all(run_world([store], resume)) == [20], call


@pytest.mark.parametrize("world_size", [1, 2])
def test_damage_that_stays_is_marked_reported_and_passed_over(world_size: int) -> None:
    first = run_of(10, 20, world_size=world_size)
    names = [info.key for info in first.list_objects(f"{StepRef(20, 1).folder}/")]
    needed = [key for key in names if not key.endswith("index.json")]
    assert len(needed) >= 6
    for key in needed:
        disk, sinks = copy(first), [Sink() for _ in range(world_size)]
        flip(disk, key, -40 if key.endswith(".json") else -1)

        def body(store: Store, group: Group, sinks: list[Sink] = sinks, key: str = key) -> str:
            state = make_state(1, group.rank)
            manager = manage(store, group, events=sinks[group.rank])
            report = manager.resume(state)
            assert report.step == 10
            assert digest(state) == digest(make_state(10, group.rank))
            return str(report)

        for text in get_all(run_world([disk] * world_size, body)):
            assert "step 20 of generation 1 is damaged and was passed over" in text
            assert key.rpartition("/")[2] in text
        assert "resume.damaged" in sinks[0].names()
        assert read_marks(disk)[0] == {StepRef(20, 1)}
        # KEEP: nothing of it is removed, and the next start goes straight to the older one.
        assert content(disk).keys() >= set(names)
        assert get_all(run_world([disk] * world_size, resume)) == [10] * world_size


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["part-r00000.json", "digests-r00000.bin", COMMIT_RECORD])
def test_damage_that_one_rank_alone_sees_takes_all_ranks_to_the_same_step(name: str, rank: int) -> None:
    first = run_of(10, 20, world_size=2)
    bad = Fault(
        kind="bit_flip", times=None, when=lambda call: call.verb == "get" and call.key == StepRef(20, 1).key(name)
    )
    disk = copy(first)
    stores = [FaultStore(disk, [bad] if at == rank else []) for at in range(2)]
    assert get_all(run_world(stores, resume)) == [10, 10]
    assert read_marks(disk)[0] == {StepRef(20, 1)}


def test_a_missing_shard_is_damage() -> None:
    disk = run_of(10, 20)
    shard = next(info.key for info in disk.list_objects(StepRef(20, 1).folder) if info.key.endswith(".safetensors"))
    disk.delete([shard])
    assert get_all(run_world([disk], resume)) == [10]


def test_the_step_that_was_asked_for_is_never_replaced() -> None:
    disk = run_of(10, 20)
    flip(disk, StepRef(20, 1).key("digests-r00000.bin"))
    with pytest.raises(Corrupt, match="digests"):
        manage(disk).resume(make_state(1), step=20)
    state = make_state(1)
    assert manage(disk).resume(state, step=10).step == 10
    assert digest(state) == digest(make_state(10))


def test_when_all_are_damaged_nothing_is_started_or_removed() -> None:
    """FRESH-3: found but unreadable is an error, the first time and every time."""
    disk = run_of(10, 20)
    for step in (10, 20):
        shards = [i.key for i in disk.list_objects(StepRef(step, 1).folder) if i.key.endswith(".safetensors")]
        flip(disk, shards[0])
    before = content(disk)
    for _ in range(2):
        with pytest.raises(Corrupt, match="none can be read"):
            manage(disk, keep=Keep(last=1)).resume(make_state(1))
        after = content(disk)
        assert {key: after.get(key) for key in before} == before
    state = make_state(1)
    report = manage(disk).resume(state, fresh=True)
    assert report.fresh
    assert {key: content(disk).get(key) for key in before} == before


def test_three_ways_of_having_nothing() -> None:
    """FRESH-1: no run, a run without a checkpoint, a run with incomplete ones only; and a step that is not there."""
    nothing = MemoryStore()
    with pytest.raises(NotFound):
        manage(nothing).resume(make_state(1), step=5)
    assert not nothing.list_objects(""), "asking for a step creates no run"
    first = manage(nothing).resume(make_state(1))
    assert first.fresh
    assert "no checkpoint" in str(first)
    empty = manage(nothing).resume(make_state(1))
    assert empty.fresh

    halves = run_of(10)
    halves.delete([StepRef(10, 1).key(COMMIT_RECORD), StepRef(10, 1).key("part-r00000.json")])
    half = manage(halves).resume(make_state(1))
    assert half.fresh
    assert "never completed" in str(half)
    with pytest.raises(NotFound, match="no committed step 10"):
        manage(halves).resume(make_state(1), step=10)


def test_a_damaged_record_of_the_run_is_never_a_fresh_start() -> None:
    for key in ("run.json", "g0001/generation.json"):
        disk = run_of(10)
        flip(disk, key, 80)
        before = content(disk)
        with pytest.raises(CheckpointError, match=key.rpartition("/")[2]):
            manage(disk).resume(make_state(1))
        disk.delete([key])
        with pytest.raises(Corrupt):
            manage(disk).resume(make_state(1))
        after = content(disk)
        assert {k: v for k, v in after.items() if k != key} == {k: v for k, v in before.items() if k != key}


def test_numbering_goes_on_from_the_resumed_step() -> None:
    """KEEP-4: resumed at 5, the next save is 6; 5 again is another generation's and replaces nothing."""
    disk = run_of(5)
    manager = manage(disk)
    assert manager.resume(make_state(1)).step == manager.step == 5
    save_at(manager, 6)
    assert committed(disk) == [5, 6]
    assert list_generations(disk) == (1, 2)
    with pytest.raises(StorageError, match="committed already"):
        save_at(manager, 6)


def test_ranks_that_see_another_root_are_told() -> None:
    disks = [run_of(10), run_of(10)]
    results = run_world(disks, resume)
    assert all(isinstance(result, CheckpointError) for result in results), results
    assert "not shared" in str(results[1])


def test_a_value_per_rank_that_nothing_takes_is_not_dropped(tmp_path: Path) -> None:
    with sk.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": 1, "own": sk.PerRank(3)})
    state: dict[str, object] = {"a": 0}
    with sk.CheckpointManager(tmp_path) as manager, pytest.raises(StateMismatch, match="own: stored, but nothing"):
        manager.resume(state)
    assert state == {"a": 0}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_value_per_rank_is_not_taken_from_another_rank(world_size: int) -> None:
    store = MemoryStore()

    def state(rank: int, *, saving: bool) -> dict[str, object]:
        has_own = rank == 0 or not saving
        return {"a": 1, **({"own": sk.PerRank(rank)} if has_own else {})}

    def save(rank_store: Store, group: Group) -> None:
        manage(rank_store, group).save(1, state(group.rank, saving=True))

    def load(rank_store: Store, group: Group) -> object:
        found = state(group.rank, saving=False)
        manage(rank_store, group).resume(found)
        return found

    get_all(run_world([store] * world_size, save))
    found = run_world([store] * world_size, load)
    if world_size == 1:
        assert get_all(found) == [{"a": 1, "own": sk.PerRank(0)}]
    else:
        assert "own: in the state, not in the checkpoint (rank 1)" in str(found[0])
