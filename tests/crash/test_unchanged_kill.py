"""A save that clones what did not change is cut at every call: the next start finds it whole, or the one before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkeep import knobs
from shardkeep.errors import StorageError
from shardkeep.plan.retention import Keep
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.posix import PosixStore
from shardkeep.testing.faults import Fault, FaultKind, FaultStore
from shardkeep.testing.lossy import LossyStore
from tests.crash.jobs import check_clean, committed, manage
from tests.support.adapters import make_adapted, same_state, train_to
from tests.support.ranks import start_ranks

ROWS = 40


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    with knobs.override(RETRY_BASE_S=0.0):
        yield


def job(rank: int, world_size: int, place: Store | str, kind: FaultKind | None = None, at_call: int = 0) -> Any:
    """Save step 10, or resume and save 20 and 30, each with a clone; keeps one checkpoint."""
    plan = [Fault(kind=kind, at_call=at_call)] if kind else []
    store = FaultStore(PosixStore(place) if isinstance(place, str) else place, plan)
    with manage(store, keep=Keep(last=1)) as manager:
        state = make_adapted(0, rows=ROWS)
        report = manager.resume(state)
        assert report.fresh or same_state(state, make_adapted(report.step, rows=ROWS))
        for step in (10,) if report.fresh else (20, 30):
            train_to(state, step)
            if step > report.step:
                manager.save(step, state)
    return [(call.verb, call.key) for call in store.log]


def check_next_start(store: Store) -> None:
    before = committed(store)
    state = make_adapted(0, rows=ROWS)
    with manage(store, keep=Keep(last=1)) as manager:
        step = manager.resume(state).step
        assert step >= max(before)
        assert step in (10, 20, 30)
        assert same_state(state, make_adapted(step, rows=ROWS))
        train_to(state, 40)
        manager.save(40, state)
    assert committed(store) == [step, 40]
    check_clean(store)


def begin() -> MemoryStore:
    store = MemoryStore()
    job(0, 1, store)
    return store


def test_power_cut_at_every_call() -> None:
    calls = job(0, 1, begin())
    assert [verb for verb, _ in calls].count("clone") == 2
    for at in range(1, len(calls) + 1):
        lossy = LossyStore(begin(), seed=at)
        survived: list[MemoryStore] = []
        store = FaultStore(
            lossy, [Fault(kind="kill", at_call=at)], die=lambda lossy=lossy, to=survived: to.append(lossy.power_cut())
        )
        with contextlib.suppress(StorageError):  # after the commit it is only told
            job(0, 1, store)
        check_next_start(survived[0])


@pytest.mark.parametrize("kind", ["io_error", "lost_answer"])
def test_an_error_at_every_call_is_waited_out(kind: FaultKind) -> None:
    """The repeats make it whole, or the clone is written instead."""
    calls = job(0, 1, begin())
    for at, (verb, _) in enumerate(calls, 1):
        if verb in ("writer", "write_at", "finish", "abort"):
            continue
        store = begin()
        job(0, 1, store, kind, at)
        assert committed(store) == [10, 30]  # the parent stays
        check_clean(store)


def kill_at(root: str, at: int) -> None:
    job(0, 1, root)
    with start_ranks(job, 1, root, "kill", at) as ranks:
        (outcome,) = ranks.collect(timeout_s=60)
    assert outcome.exit_code == -9
    with knobs.override(RETRY_BASE_S=0.0):
        check_next_start(PosixStore(root))


def list_calls(root: str) -> list[tuple[str, str]]:
    job(0, 1, root)
    calls: list[tuple[str, str]] = job(0, 1, root)
    return calls


def test_killed_before_and_after_a_clone(tmp_path: Path) -> None:
    verbs = [verb for verb, _ in list_calls(str(tmp_path / "counted"))]
    first = verbs.index("clone") + 1
    for at in (first, first + 1):
        kill_at(str(tmp_path / str(at)), at)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_every_call(tmp_path: Path) -> None:
    for at in range(1, len(list_calls(str(tmp_path / "counted"))) + 1):
        kill_at(str(tmp_path / str(at)), at)
