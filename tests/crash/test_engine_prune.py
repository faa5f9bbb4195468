"""Prunes that are interrupted, and prunes that race with starts: nothing comes back, nothing that must stay goes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep import knobs
from shardkeep.engine.checkpoint import Checkpoint
from shardkeep.engine.listing import list_everything, list_timeline
from shardkeep.engine.locate import find_checkpoint
from shardkeep.engine.prune import PrunePlan, plan_prune, prune, remove_step
from shardkeep.engine.recover import confirm_commit, roll_forward
from shardkeep.engine.run import claim_generation, list_step_folders, read_run_id, scan_run, write_mark
from shardkeep.errors import CheckpointError, Fenced, NotFound, StorageError
from shardkeep.format.names import COMMIT_RECORD, PRUNE_INTENT, StepRef
from shardkeep.format.records import PruneRecord, encode_record
from shardkeep.plan.retention import Keep
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faults import Fault, FaultKind, FaultStore
from shardkeep.testing.lossy import LossyStore
from tests.crash.jobs import Sink, check_clean, committed, digest, make_state, manage, save_at
from tests.crash.steps import Stepper

TWO = Keep(last=2)


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    with knobs.override(RETRY_BASE_S=0.0):
        yield


def copy(store: MemoryStore) -> MemoryStore:
    made = MemoryStore()
    for info in store.list_objects(""):
        made.put(info.key, store.get(info.key, limit_bytes=1 << 30))
    return made


def run_of(*steps: int) -> MemoryStore:
    store = MemoryStore()
    manager = manage(store)
    manager.resume(make_state(1))
    for step in steps:
        save_at(manager, step)
    return store


def do_prune(store: Store, keep: Keep) -> None:
    view = scan_run(store)
    assert view is not None
    prune(store, plan_prune(store, view, keep, live=None), view, Sink(), by_generation=view.head)


KINDS: list[FaultKind] = ["kill", "io_error", "no_space", "lost_answer"]


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_at_every_call(kind: FaultKind) -> None:
    """Steps 10 to 40, the two newest stay; 10 is gone for good as soon as its removal was decided."""
    first = run_of(10, 20, 30, 40)
    counted = FaultStore(copy(first))
    do_prune(counted, TWO)
    for call in range(1, len(counted.log) + 1):
        machine = LossyStore(copy(first), seed=call)
        store = FaultStore(machine, [Fault(kind=kind, at_call=call)], die=machine.power_cut)
        with pytest.raises(StorageError):
            do_prune(store, TWO)
        disk = machine.power_cut()
        begun = {key for verb, key in store.calls[: call if kind == "lost_answer" else call - 1] if verb == "put"}
        decided = {10 * at for at in (1, 2) if f"g0001/step-000000{at}0/{PRUNE_INTENT}" in begun}
        _check_gone(disk, decided)
        view = scan_run(disk)
        assert view is not None
        roll_forward(disk, view, Sink())
        _check_gone(disk, decided)
        state = make_state(1)
        assert manage(disk).resume(state).step == 40
        assert digest(state) == digest(make_state(40))
        do_prune(disk, TWO)
        assert committed(disk) == [30, 40]
        check_clean(disk)


def _check_gone(disk: MemoryStore, decided: set[int]) -> None:
    found = committed(disk)
    assert found == [step for step in (10, 20, 30, 40) if step not in decided]
    assert [entry.ref.step for entry in list_timeline(disk).entries] == found
    counted = [entry.ref.step for entry in list_everything(disk).entries if entry.state == "committed"]
    assert counted == found
    for step in decided:
        with pytest.raises(NotFound):
            find_checkpoint(disk, step)
    for step in found:
        with Checkpoint(disk, find_checkpoint(disk, step)) as opened:
            assert opened.values()["note"] == {"step": step}


def test_the_order_of_a_removal() -> None:
    """Intent, the look at the generations, commit record, parts, the rest, intent."""
    store = FaultStore(run_of(10, 20))
    do_prune(store, Keep(last=1))
    folder = f"{StepRef(10, 1).folder}/"
    calls = [(verb, key.removeprefix(folder)) for verb, key in store.calls if verb not in ("get", "list_objects")]
    begin = calls.index(("put", PRUNE_INTENT))
    assert calls[begin - 1] == calls[begin + 1] == ("list_folders", "")
    removed = [name for verb, name in calls[begin:] if verb == "delete"]
    assert removed[:2] == [COMMIT_RECORD, "part-r00000.json"]
    assert removed[-1] == PRUNE_INTENT
    assert len(removed) == len(set(removed)) > 6


def test_a_resume_finishes_what_was_begun() -> None:
    disk = run_of(10, 20, 30)
    view = scan_run(disk)
    assert view is not None
    ref = view.timeline[0]
    disk.put(ref.key(PRUNE_INTENT), encode_record(PruneRecord(run_id=view.run_id, ref=ref, by_generation=1)))
    manage(disk).resume(make_state(1))
    assert committed(disk) == [20, 30]
    check_clean(disk)


# Races


class Race:
    """A start that resumes from a step, and a stale job that prunes it, one store call at a time."""

    def __init__(self, disk: MemoryStore, target: StepRef) -> None:
        self.disk = disk
        self.target = target
        run_id = read_run_id(disk)
        assert run_id is not None
        self.run_id = run_id

    def claim(self, store: Store) -> Any:
        return claim_generation(store, self.run_id, self.target, world_size=1, environment={})

    def remove(self, store: Store) -> Any:
        try:
            return remove_step(store, list_step_folders(self.disk, 1)[self.target], self.run_id, 1)
        except Fenced:
            return "withdrawn"


def race(first: MemoryStore, order: Callable[[Stepper], None]) -> tuple[MemoryStore, Any, Any]:
    disk = copy(first)
    contest = Race(disk, StepRef(10, 1))
    stepper = Stepper(disk, [contest.claim, contest.remove])
    order(stepper)
    claimed, removed = stepper.finish()
    return disk, claimed, removed


def test_claimant_and_pruner_in_every_order() -> None:
    """All interleavings of their calls up to the decisions; both may lose, both may never win."""
    first = run_of(10, 20)
    outcomes = set()
    for pattern in range(1 << 9):

        def order(stepper: Stepper, pattern: int = pattern) -> None:
            for bit in range(9):
                stepper.step(pattern >> bit & 1)

        disk, claimed, removed = race(first, order)
        outcomes.add((claimed is not None, removed is True))
        there = list_step_folders(disk, 1).get(StepRef(10, 1))
        if claimed is not None:
            assert removed == "withdrawn", pattern
            assert there is not None
            assert there.committed
            assert not there.pruning
            view = scan_run(disk)
            assert view is not None
            confirm_commit(disk, view, StepRef(10, 1))
            assert view.timeline == (StepRef(10, 1),)
        else:
            assert committed(disk) == ([20] if removed is True else [10, 20]), "the timeline is as it was"
    assert outcomes == {(True, False), (False, True), (False, False)}


def test_a_claim_that_lost_leaves_the_timeline_as_it_was() -> None:
    """The start chose step 10 just before the old job saved step 20 and pruned 10: it goes on from 20, not afresh."""
    disk = run_of(10, 20)
    run_id = read_run_id(disk)
    assert run_id is not None
    intent = PruneRecord(run_id=run_id, ref=StepRef(10, 1), by_generation=1)
    disk.put(StepRef(10, 1).key(PRUNE_INTENT), encode_record(intent))
    assert claim_generation(disk, run_id, StepRef(10, 1), world_size=1, environment={}) is None
    state = make_state(1)
    report = manage(disk).resume(state)
    assert (report.step, report.fresh) == (20, False)
    check_clean(disk)


def test_a_start_races_a_job_that_still_saves_and_prunes() -> None:
    """Cut in at every call of the old job: the start resumes from what is newest, exactly, and never afresh."""
    first = run_of(10)
    newest = set()
    call = 0
    while True:
        call += 1
        disk = copy(first)
        found: list[int] = []

        def start(disk: MemoryStore = disk, found: list[int] = found) -> None:
            state = make_state(1)
            report = manage(disk).resume(state)
            assert digest(state) == digest(make_state(report.step))
            found.append(report.step)

        old_disk = _Interrupted(disk, call, start)
        old = manage(old_disk, keep=Keep(last=1), tolerate=0)
        old._own(_claim_of(disk))
        with contextlib.suppress(Fenced):
            save_at(old, 20)
        if not found:
            break
        newest.add(found[0])
        assert max(committed(disk)) == found[0]
        state = make_state(1)
        assert manage(disk).resume(state).step == found[0]
        with pytest.raises(Fenced):
            save_at(old, 30)
        assert max(committed(disk)) == found[0]
    assert call > 20
    assert newest == {10, 20}


def _claim_of(disk: MemoryStore) -> Any:
    from shardkeep.manager.resume import Claim

    run_id = read_run_id(disk)
    assert run_id is not None
    return Claim(run_id=run_id, generation=1, nonce="", parent=None, lines=())


class _Interrupted(FaultStore):
    """Runs something else just before one of its calls."""

    def __init__(self, inner: Store, at_call: int, cut_in: Callable[[], None]) -> None:
        lock = threading.Lock()

        def now(call: Any) -> bool:
            if call.number == at_call and lock.acquire(blocking=False):
                cut_in()
            return False

        super().__init__(inner, [Fault(kind="delay", when=now)])


def test_the_intent_of_a_pruner_that_died_before_it_withdrew_is_void() -> None:
    """Step 10 is what generation 2 went on from; generation 1 decided to remove it after that, and died."""
    disk = run_of(10, 20)
    run_id = read_run_id(disk)
    assert run_id is not None
    ref = StepRef(10, 1)
    assert claim_generation(disk, run_id, ref, world_size=0, environment={}) is not None
    disk.put(ref.key(PRUNE_INTENT), encode_record(PruneRecord(run_id=run_id, ref=ref, by_generation=1)))
    assert committed(disk) == [10]
    do_prune(disk, Keep(last=1))
    state = make_state(1)
    manager = manage(disk, keep=Keep(last=1))
    assert manager.resume(state).step == 10
    assert digest(state) == digest(make_state(10))
    save_at(manager, 11)
    assert committed(disk) == [10, 11], "the parent of the live generation stays"
    # The next start goes on from step 11; then nothing protects step 10, and the void intent does not either.
    last = manage(disk, keep=Keep(last=1))
    assert last.resume(make_state(1)).step == 11
    save_at(last, 12)
    assert committed(disk) == [11, 12]


def test_a_stale_job_harms_nothing_and_is_told() -> None:
    disk = MemoryStore()
    old = manage(disk, keep=Keep(last=1))
    old.resume(make_state(1))
    save_at(old, 10)
    new = manage(disk, keep=Keep(last=1))
    assert new.resume(make_state(1)).step == 10
    with pytest.raises(Fenced):
        save_at(old, 20)
    old._places.retention.sweep(Keep(last=0))
    save_at(new, 20)
    view = scan_run(disk)
    assert view is not None
    plan = PrunePlan(steps=view.timeline, unfinished=(), orphans=(), removed_bytes=0)
    with pytest.raises(Fenced):
        prune(disk, plan, view, Sink(), by_generation=1)
    with pytest.raises(Fenced):
        save_at(old, 30)
    # Its keep rules apply to the new job's steps: 10 is its parent, 20 the newest.
    assert committed(disk) == [10, 20]
    check_clean(disk)


def test_rollback_undo_and_a_crash_before_the_first_save() -> None:
    disk = run_of(10, 20, 30)
    run_id = read_run_id(disk)
    assert run_id is not None

    def rollback(ref: StepRef) -> None:
        assert claim_generation(disk, run_id, ref, world_size=0, environment={}) is not None

    rollback(StepRef(10, 1))
    assert manage(disk).latest() == 10
    rollback(StepRef(30, 1))
    assert committed(disk) == [10, 20, 30], "undone"
    rollback(StepRef(20, 1))
    resumed = manage(disk)
    assert resumed.resume(make_state(1)).step == 20
    # It dies before it saves; so does the next one.
    for _ in range(2):
        state = make_state(1)
        again = manage(disk)
        assert again.resume(state).step == 20
        assert digest(state) == digest(make_state(20))
        assert again.latest() == 20
    save_at(again, 25)
    assert committed(disk) == [10, 20, 25]
    rollback(StepRef(30, 1))
    assert committed(disk) == [10, 20, 30]
    rollback(StepRef(25, 5 + 2))
    assert committed(disk) == [10, 20, 25]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 1), min_size=4, max_size=40))
def test_a_full_start_against_a_prune_in_random_orders(choices: list[int]) -> None:
    """The stale job of generation 1 prunes step 10 while a start resumes from it, all their calls interleaved."""
    disk = run_of(10, 20)
    write_mark(disk, _run_id(disk), "quarantine", StepRef(20, 1), "so that step 10 is what a start takes")

    def start(store: Store) -> Any:
        state = make_state(1)
        report = manage(store).resume(state)
        assert digest(state) == digest(make_state(report.step))
        return report

    contest = Race(disk, StepRef(10, 1))
    stepper = Stepper(disk, [start, contest.remove])
    for choice in choices:
        stepper.step(choice)
    started, removed = stepper.finish()
    if removed is True:
        # What is left is quarantined, and that is an error, never a fresh start.
        assert isinstance(started, CheckpointError), started
        return
    if isinstance(started, CheckpointError):
        # Both gave way: it looked while the removal was decided and not yet taken back. The next start finds it.
        assert removed == "withdrawn"
        started = manage(disk).resume(make_state(1))
    assert started.step == 10
    assert committed(disk) == [10]


def _run_id(disk: MemoryStore) -> str:
    found = read_run_id(disk)
    assert found is not None
    return found
