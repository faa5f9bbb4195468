"""SIGKILL of a real process at its store calls, on a real disk: CRASH-1, CRASH-2."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardkeep import knobs
from shardkeep.plan.retention import Keep
from shardkeep.storage.posix import PosixStore
from shardkeep.testing.faults import Fault, FaultKind, FaultStore
from tests.crash.jobs import check_clean, committed, digest, make_state, manage, restart, save_at
from tests.support.ranks import start_ranks

_ENV = {"SHARDKEEP_PEER_SILENCE_S": "0.6", "SHARDKEEP_RETRY_BASE_S": "0", "SHARDKEEP_BARRIER_TIMEOUT_S": "20"}


def first_job(rank: int, world_size: int, root: str) -> None:
    _run(rank, FaultStore(PosixStore(root)), 10)


def second_job(rank: int, world_size: int, root: str, victim: int, kind: FaultKind, at_call: int) -> int:
    plan = [Fault(kind=kind, at_call=at_call)] if rank == victim else []
    store = FaultStore(PosixStore(root), plan)
    _run(rank, store, 20)
    return len(store.log)


def _run(rank: int, store: FaultStore, step: int) -> None:
    from shardkeep.ranks.connect import connect

    with manage(store, connect(), keep=Keep(last=1)) as manager:
        state = make_state(1, rank)
        report = manager.resume(state)
        if not report.fresh:
            assert digest(state) == digest(make_state(report.step, rank))
        save_at(manager, step)


def strike(tmp_path: Path, world_size: int, victim: int, kind: FaultKind, at_call: int) -> tuple[bool, int]:
    """Save 10, then kill a rank in the job that saves 20; start again. Returns if it died, and what was resumed."""
    root = str(tmp_path / f"{victim}-{kind}-{at_call}")
    with start_ranks(first_job, world_size, root, env=_ENV) as ranks:
        ranks.results(timeout_s=30)
    began_s = time.monotonic()
    with start_ranks(second_job, world_size, root, victim, kind, at_call, env=_ENV) as ranks:
        outcomes = ranks.collect(timeout_s=30)
        died = outcomes[victim].exit_code == -9
        if not died:
            assert outcomes[victim].value is not None, outcomes
            assert outcomes[victim].value < at_call
        # The others learn of it soon: no hang.
        assert max(outcome.seconds for outcome in outcomes) < 10, time.monotonic() - began_s
    store = PosixStore(root)
    before = committed(store)
    with knobs.override(RETRY_BASE_S=0.0):
        step = restart(store, world_size, keep=Keep(last=1))
    assert step in (10, 20)
    assert step >= max(before)
    check_clean(store)
    return died, step


def sweep(tmp_path: Path, world_size: int, victim: int, kind: FaultKind, first: int, stride: int) -> None:
    at, seen = first, []
    while True:
        died, step = strike(tmp_path, world_size, victim, kind, at)
        if not died:
            break
        seen.append(step)
        at += stride
    assert seen
    assert seen[0] == 10


@pytest.mark.parametrize("kind", ["kill", "torn"])
def test_one_rank_sampled(tmp_path: Path, kind: FaultKind) -> None:
    sweep(tmp_path, 1, 0, kind, 3 if kind == "kill" else 5, 12)


@pytest.mark.parametrize("victim", [0, 1])
def test_two_ranks_sampled(tmp_path: Path, victim: int) -> None:
    sweep(tmp_path, 2, victim, "kill", 6, 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["kill", "torn"])
def test_one_rank_at_every_call(tmp_path: Path, kind: FaultKind) -> None:
    sweep(tmp_path, 1, 0, kind, 1, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_two_ranks_at_every_call(tmp_path: Path, victim: int) -> None:
    sweep(tmp_path, 2, victim, "kill", 1, 1)
