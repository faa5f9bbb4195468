"""The power goes at every single store call of a start, a save and a prune: the next start finds all or the old."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardkeep import knobs
from shardkeep.engine.recover import find_commit
from shardkeep.engine.run import list_step_folders, read_run_id, scan_run
from shardkeep.errors import PeerFailure, StorageError
from shardkeep.format.names import COMMIT_RECORD, StepRef
from shardkeep.format.records import encode_record
from shardkeep.plan.retention import Keep
from shardkeep.ranks.base import Group
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faults import Fault, FaultKind, FaultStore
from shardkeep.testing.lossy import LossyStore
from tests.crash.jobs import check_clean, committed, digest, get_all, make_state, manage, restart, run_world, save_at

ONE = Keep(last=1)


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    with knobs.override(RETRY_BASE_S=0.0, PEER_SILENCE_S=20.0, BARRIER_TIMEOUT_S=20.0):
        yield


def copy(store: MemoryStore) -> MemoryStore:
    made = MemoryStore()
    for info in store.list_objects(""):
        made.put(info.key, store.get(info.key, limit_bytes=1 << 30))
    return made


def begin(world_size: int) -> MemoryStore:
    """A run whose first start saved step 10."""
    store = MemoryStore()

    def body(rank_store: Store, group: Group) -> None:
        manager = manage(rank_store, group)
        manager.resume(make_state(1, group.rank))
        save_at(manager, 10)

    get_all(run_world([store] * world_size, body))
    return store


def second_start(rank_store: Store, group: Group) -> str:
    """Resume, save step 20, and prune step 10."""
    state = make_state(1, group.rank)
    manager = manage(rank_store, group, keep=ONE)
    assert manager.resume(state).step == 10
    save_at(manager, 20)
    return digest(state)


def count_calls(world_size: int) -> list[int]:
    disk = begin(world_size)
    stores = [FaultStore(disk) for _ in range(world_size)]
    get_all(run_world(stores, second_start))
    # A few more than were counted: whether there are as many in the other thread is up to chance.
    return [len(store.log) for store in stores]


def cut(world_size: int, rank: int, call: int, kind: FaultKind, first: MemoryStore) -> MemoryStore:
    """Run the second start until the power goes at a call of a rank; return what the disk holds then."""
    machine = LossyStore(copy(first), seed=call)
    disks: list[MemoryStore] = []
    stores = [
        FaultStore(
            machine,
            [Fault(kind=kind, at_call=call)] if at == rank else [],
            die=lambda: disks.append(machine.power_cut()),
        )
        for at in range(world_size)
    ]
    results = run_world(stores, second_start)
    if not disks:
        get_all(results)
        return machine.power_cut()
    if world_size > 1 or "prune.failed" not in repr(results):
        assert all(isinstance(r, (StorageError, PeerFailure, str)) for r in results), results
    return disks[0]


@pytest.mark.parametrize("kind", ["kill", "torn"])
def test_power_cut_at_every_call_of_one_rank(kind: FaultKind) -> None:
    first = begin(1)
    outcomes = []
    (total,) = count_calls(1)
    for call in range(1, total + 1):
        disk = cut(1, 0, call, kind, first)
        was_committed = committed(disk)
        step = restart(disk, 1, keep=ONE)
        assert step in (10, 20), call
        assert step >= max(was_committed), call
        assert committed(disk) in ([step, step + 10], [20], [30]), call
        check_clean(disk)
        outcomes.append(step)
    assert outcomes == sorted(outcomes), "once the new one is there it stays"
    assert set(outcomes) == {10, 20}


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [0, 1])
def test_power_cut_at_every_call_of_two_ranks(rank: int, stride: int) -> None:
    first = begin(2)
    totals = count_calls(2)
    outcomes = set()
    for call in range(1, totals[rank] + 1, stride):
        disk = cut(2, rank, call, "kill", first)
        step = restart(disk, 2, keep=ONE)
        assert step in (10, 20), call
        check_clean(disk)
        outcomes.add(step)
    assert 10 in outcomes


def test_a_start_rolls_forward_what_lacked_only_its_record() -> None:
    disk = begin(2)

    def body(rank_store: Store, group: Group) -> None:
        manager = manage(rank_store, group)
        manager.resume(make_state(1, group.rank))
        save_at(manager, 20)

    get_all(run_world([disk] * 2, body))
    ref = StepRef(20, 2)
    wrote = disk.get(ref.key(COMMIT_RECORD), limit_bytes=1 << 30)
    disk.delete([ref.key(COMMIT_RECORD)])
    assert committed(disk) == [10]
    assert restart(disk, 2) == 20
    assert disk.get(ref.key(COMMIT_RECORD), limit_bytes=1 << 30) == wrote, "the same record, byte for byte"
    check_clean(disk)


def test_no_try_that_lacks_anything_is_rolled_forward() -> None:
    """Every file of a complete try taken away in turn, and every one cut short."""
    disk = begin(2)
    get_all(run_world([disk] * 2, second_start))
    run_id = read_run_id(disk)
    assert run_id is not None
    ref = StepRef(20, 2)
    names = sorted(list_step_folders(disk, 2)[ref].files)
    commit = disk.get(ref.key(COMMIT_RECORD), limit_bytes=1 << 30)
    disk.delete([ref.key(COMMIT_RECORD)])
    whole = find_commit(disk, list_step_folders(disk, 2)[ref], run_id)
    assert whole is not None
    from shardkeep.engine.run import WRITER

    assert encode_record(whole, writer=WRITER) == commit
    needed = [name for name in names if name not in (COMMIT_RECORD, "model.safetensors.index.json")]
    assert len(needed) >= 6
    for name in needed:
        key = ref.key(name)
        data = disk.get(key, limit_bytes=1 << 30)
        disk.delete([key])
        assert find_commit(disk, list_step_folders(disk, 2)[ref], run_id) is None, name
        disk.put(key, data[:-1])
        assert find_commit(disk, list_step_folders(disk, 2)[ref], run_id) is None, name
        disk.put(key, data)
    assert find_commit(disk, list_step_folders(disk, 2)[ref], run_id) == whole


def test_what_starts_that_died_young_left_goes_at_the_next_one() -> None:
    """Three starts in a row die in their first save: each is its own generation off the next one's chain."""
    disk = begin(1)
    for _ in range(3):
        machine = LossyStore(copy(disk))
        found: list[MemoryStore] = []
        dying = Fault(kind="kill", when=lambda call: call.verb == "put" and call.key.endswith("part-r00000.json"))
        store = FaultStore(
            machine, [dying], die=lambda machine=machine, found=found: found.append(machine.power_cut())
        )
        manager = manage(store)
        manager.resume(make_state(1))
        with pytest.raises(StorageError):
            save_at(manager, 20)
        disk = found[0]
    assert restart(disk, 1) == 10
    check_clean(disk)
    view = scan_run(disk)
    assert view is not None
    assert len(view.folders) == 2
