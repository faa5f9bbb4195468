"""A disk that is full or fails at every store call of a save: a typed error on every rank, nothing else changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardkeep import knobs
from shardkeep.engine.prune import plan_prune, prune
from shardkeep.engine.run import RunView, list_step_folders, scan_run
from shardkeep.errors import AlreadyExists, CheckpointError, OutOfSpace, PeerFailure, StorageError
from shardkeep.format.names import COMMIT_RECORD
from shardkeep.plan.retention import Keep
from shardkeep.ranks.base import Group
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faults import Call, Fault, FaultKind, FaultStore
from tests.crash.jobs import (
    Sink,
    check_clean,
    committed,
    digest,
    get_all,
    live_digest,
    make_state,
    manage,
    run_world,
    save_at,
)


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    with knobs.override(RETRY_BASE_S=0.0, RETRIES=1, PEER_SILENCE_S=20.0, BARRIER_TIMEOUT_S=20.0):
        yield


class Switch:
    """The number of the call that fails, counted from when it is armed; 0: none."""

    def __init__(self, kind: FaultKind) -> None:
        self.at = 0
        self.seen = 0
        # A retried call fails again: this is trouble that stays.
        self.times = 1 if kind == "no_space" else 2

    def arm(self, at: int) -> None:
        self.at, self.seen = at, 0

    def matches(self, call: Call) -> bool:
        self.seen += 1
        return self.at > 0 and self.at <= self.seen < self.at + self.times


def attempt(kind: FaultKind, world_size: int, rank: int, at: int) -> tuple[bool, MemoryStore, list[Any]]:
    """Save 10; save 20 with a failure at a rank's call; then 20 again and 30, on the same managers.

    Returns whether the failure came, the disk, and what the failed save gave on each rank.
    """
    disk, elsewhere, switch = MemoryStore(), MemoryStore(), Switch(kind)
    fault = Fault(kind=kind, when=switch.matches, times=None)
    stores = [FaultStore(disk, [fault] if at_rank == rank else []) for at_rank in range(world_size)]
    failed: list[Any] = [None] * world_size
    came: list[bool] = []

    def body(store: Store, group: Group) -> None:
        manager = manage(store, group, keep=Keep(last=5))
        manager.resume(make_state(1, group.rank))
        save_at(manager, 10)
        state = make_state(20, group.rank)
        state["model"].train(False)
        before = live_digest(state)
        if group.rank == rank:
            switch.arm(at)
        try:
            manager.save(20, state)
        except CheckpointError as error:
            failed[group.rank] = error
        if group.rank == rank:
            came.append(switch.seen >= at)
            switch.arm(0)
        group.agree("test.between", lambda: b"", lambda found: b"")
        assert live_digest(state) == before
        save_at(manage(elsewhere, group), 20)
        was_committed = manager.latest() == 20
        assert was_committed or failed[group.rank] is not None
        group.agree("test.looked", lambda: b"", lambda found: b"")
        if was_committed:
            # The failure came after the commit (in the prune, which only reports it), or its answer was lost.
            assert failed[group.rank] is None or kind == "lost_answer"
            with pytest.raises((AlreadyExists, PeerFailure)):
                manager.save(20, state)
        else:
            manager.save(20, state)
        save_at(manager, 30)

    get_all(run_world(stores, body))
    return came[0], disk, failed


def check(kind: FaultKind, rank: int, disk: MemoryStore, failed: list[Any]) -> None:
    if any(failed):
        wanted = {"no_space": OutOfSpace}.get(kind, StorageError)
        assert isinstance(failed[rank], wanted), failed
        assert all(isinstance(error, PeerFailure) for at, error in enumerate(failed) if at != rank), failed
        assert all(rank in error.causes for at, error in enumerate(failed) if at != rank)
    assert committed(disk) == [10, 20, 30]
    # KEEP: nothing of the failed try is left once a later save was committed.
    check_clean(disk)
    for world_rank in range(len(failed)):
        state = make_state(1, world_rank)
        if len(failed) == 1:
            manage(disk).resume(state, step=20)
            assert digest(state) == digest(make_state(20))


@pytest.mark.parametrize("kind", ["no_space", "io_error", "lost_answer"])
def test_every_call_of_one_rank(kind: FaultKind) -> None:
    at, failures = 0, 0
    while True:
        at += 1
        came, disk, failed = attempt(kind, 1, 0, at)
        check(kind, 0, disk, failed)
        failures += failed[0] is not None
        if not came:
            break
    assert at > 10
    assert failures > 8


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["no_space", "io_error"])
def test_every_call_of_two_ranks(kind: FaultKind, rank: int, stride: int) -> None:
    at, failures = 1, 0
    while True:
        came, disk, failed = attempt(kind, 2, rank, at)
        check(kind, rank, disk, failed)
        failures += failed[rank] is not None
        if not came:
            break
        at += stride
    assert failures


def test_right_after_a_failed_save_only_earlier_checkpoints_are_there() -> None:
    """Every call but the commit: the failed try cleans up by itself, before anything else happens."""
    for at in range(1, 12):
        disk, switch = MemoryStore(), Switch("no_space")
        store = FaultStore(disk, [Fault(kind="no_space", when=switch.matches, times=None)])
        manager = manage(store)
        manager.resume(make_state(1))
        save_at(manager, 10)
        switch.arm(at)
        with pytest.raises(OutOfSpace):
            save_at(manager, 20)
        switch.arm(0)
        assert [ref.step for ref in list_step_folders(disk, 1)] == [10], at
        assert manager.latest() == 10
        assert manage(disk).resume(make_state(1)).step == 10


@pytest.mark.parametrize("first", [True, False])
def test_a_save_that_failed_while_it_was_opened_leaves_no_plan_behind(first: bool) -> None:
    """The state has another structure than at the last save that succeeded, if any: all of it must be stored."""
    disk, switch = MemoryStore(), Switch("no_space")
    manager = manage(FaultStore(disk, [Fault(kind="no_space", when=switch.matches, times=None)]))
    manager.resume({"x": torch.zeros(2)})
    if not first:
        manager.save(1, {"x": torch.ones(2)})
    state = {"x": torch.full((2,), 3.0), "y": torch.full((5,), 4.0)}
    for at in (1, 2):
        switch.arm(at)
        with contextlib.suppress(OutOfSpace):
            manager.save(2 * at, state)
        assert switch.seen >= at
    switch.arm(0)
    manager.save(7, state)
    back = {"x": torch.zeros(2), "y": torch.zeros(5)}
    assert manage(disk).resume(back).step == 7
    assert back["x"].tolist() == [3.0] * 2
    assert back["y"].tolist() == [4.0] * 5


def test_a_lost_answer_to_the_commit_is_a_success() -> None:
    disk = MemoryStore()
    lost = Fault(kind="lost_answer", when=lambda call: call.verb == "put" and call.key.endswith(COMMIT_RECORD))
    manager = manage(FaultStore(disk, [lost]))
    manager.resume(make_state(1))
    save_at(manager, 10)
    assert committed(disk) == [10]
    check_clean(disk)


def test_a_lost_answer_that_stays_lost_is_an_error_and_the_checkpoint_counts() -> None:
    """Nobody can know then; what is there is whole, and the same step is refused rather than made twice."""
    disk = MemoryStore()
    lost = Fault(
        kind="lost_answer", times=2, when=lambda call: call.verb == "put" and call.key.endswith(COMMIT_RECORD)
    )
    manager = manage(FaultStore(disk, [lost]))
    manager.resume(make_state(1))
    with pytest.raises(StorageError):
        save_at(manager, 10)
    assert manager.latest() == 10
    with pytest.raises(AlreadyExists):
        save_at(manager, 10)
    save_at(manager, 20)
    assert committed(disk) == [10, 20]
    check_clean(disk)


def test_a_failed_commit_is_forgotten_and_the_step_saved_again() -> None:
    """CRASH-6, CRASH-10: the second try has its own folder; the first one's files are never read, and go."""
    disk = MemoryStore()
    full = Fault(kind="no_space", when=lambda call: call.verb == "put" and call.key.endswith(COMMIT_RECORD))
    manager = manage(FaultStore(disk, [full]))
    manager.resume(make_state(1))
    with pytest.raises(OutOfSpace):
        save_at(manager, 10)
    assert manager.latest() is None
    # It differs from the first try, so that a mixture would show.
    manager.save(10, make_state(11))
    state = make_state(1)
    assert manage(disk).resume(state).step == 10
    assert digest(state) == digest(make_state(11))
    check_clean(disk)


def test_a_failed_save_is_reported_and_the_run_goes_on() -> None:
    """ASYNC-3: save 2 of 5 fails; steps 1, 3, 4, 5 are there, and retention never counted on 2."""
    disk, sink = MemoryStore(), Sink()
    full = Fault(kind="no_space", times=None, when=lambda call: "step-00000002" in call.key and call.verb == "writer")
    manager = manage(FaultStore(disk, [full]), save_every=1, events=sink, keep=Keep(last=4))
    manager.resume(make_state(1))
    assert [manager.after_step(step, make_state(step)) for step in range(1, 6)] == [True, False, True, True, True]
    assert committed(disk) == [1, 3, 4, 5]
    assert sink.names().count("save.failed") == 1
    check_clean(disk)


def test_too_many_failures_in_a_row_are_raised() -> None:
    disk = MemoryStore()
    full = Fault(kind="no_space", times=None, when=lambda call: call.verb == "writer")
    manager = manage(FaultStore(disk, [full]), save_every=1, tolerate=2)
    manager.resume(make_state(1))
    assert [manager.after_step(step, make_state(step)) for step in (1, 2)] == [False, False]
    with pytest.raises(OutOfSpace):
        manager.after_step(3, make_state(3))
    assert manager.latest() is None
    view = scan_run(disk)
    assert view is not None
    assert not view.folders


def test_a_store_of_limited_size_recovers_when_room_is_made() -> None:
    """CRASH-8: no injected error, a store that is really full."""
    disk = MemoryStore(capacity_bytes=85_000)
    manager = manage(disk)
    manager.resume(make_state(1))
    save_at(manager, 1)
    save_at(manager, 2)
    with pytest.raises(OutOfSpace):
        save_at(manager, 3)
    assert committed(disk) == [1, 2]
    view = scan_run(disk)
    assert view is not None
    do_prune(disk, view, Keep(last=1))
    save_at(manager, 3)
    assert committed(disk) == [2, 3]
    check_clean(disk)


def do_prune(disk: MemoryStore, view: RunView, keep: Keep) -> None:
    prune(disk, plan_prune(disk, view, keep, live=None), view, Sink(), by_generation=view.head)
