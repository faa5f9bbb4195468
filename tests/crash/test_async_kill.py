"""SIGKILL of a real process at every store call of a save in the background: the newest committed one is whole."""

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


def job(rank: int, world_size: int, root: str, step: int, mode: str, plan: list[Fault]) -> int:
    """Resume, save in the background, change everything meanwhile, and close; return the calls of the store."""
    import torch

    from shardkeep.ranks.connect import connect

    store = FaultStore(PosixStore(root), plan)
    with manage(store, connect(), keep=Keep(last=1), mode=mode) as manager:
        state = make_state(1, rank)
        report = manager.resume(state)
        if not report.fresh:
            assert digest(state) == digest(make_state(report.step, rank))
        state = make_state(step, rank)
        manager.save(step, state)
        state["own"].value.zero_()
        state["note"]["step"] = -1
        for parameter in state["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optimizer"].step()
        if step == 10:
            manager.wait()
            save_at(manager, 11)
    return len(store.log)


def strike(root: str, world_size: int, victim: int, kind: FaultKind, at_call: int, mode: str) -> tuple[bool, int]:
    """Save 10 and 11, then kill a rank in the job that saves 20; start again. Returns if it died, the resumed one."""
    with start_ranks(job, world_size, root, 10, mode, [], env=_ENV) as ranks:
        ranks.results(timeout_s=30)
    began_s = time.monotonic()
    with start_ranks(_second_job, world_size, root, 20, mode, victim, kind, at_call, env=_ENV) as ranks:
        outcomes = ranks.collect(timeout_s=30)
        died = outcomes[victim].exit_code == -9
        if not died:
            assert outcomes[victim].value < at_call
        # The others learn of it soon: no hang.
        assert max(outcome.seconds for outcome in outcomes) < 10, time.monotonic() - began_s
    store = PosixStore(root)
    before = committed(store)
    with knobs.override(RETRY_BASE_S=0.0):
        step = restart(store, world_size, keep=Keep(last=1))
    assert step in (11, 20)
    assert step >= max(before)
    check_clean(store)
    return died, step


def _second_job(
    rank: int, world_size: int, root: str, step: int, mode: str, victim: int, kind: FaultKind, at_call: int
) -> int:
    return job(rank, world_size, root, step, mode, [Fault(kind=kind, at_call=at_call)] if rank == victim else [])


def sweep(tmp_path: Path, world_size: int, victim: int, kind: FaultKind, mode: str, first: int, stride: int) -> None:
    at, seen = first, []
    while True:
        died, step = strike(str(tmp_path / f"{at}"), world_size, victim, kind, at, mode)
        if not died:
            break
        seen.append(step)
        at += stride
    assert seen
    assert seen[0] == 11


@pytest.mark.parametrize(("mode", "kind"), [("async", "kill"), ("overlap", "torn")])
def test_one_rank_sampled(tmp_path: Path, mode: str, kind: FaultKind) -> None:
    sweep(tmp_path, 1, 0, kind, mode, 8 if kind == "kill" else 15, 28)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [0, 1])
def test_two_ranks_sampled(tmp_path: Path, victim: int) -> None:
    sweep(tmp_path, 2, victim, "kill", "async", 6, 9)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["async", "overlap"])
@pytest.mark.parametrize("kind", ["kill", "torn"])
def test_one_rank_at_every_call(tmp_path: Path, mode: str, kind: FaultKind) -> None:
    sweep(tmp_path, 1, 0, kind, mode, 1, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", [0, 1])
def test_two_ranks_at_every_call(tmp_path: Path, victim: int) -> None:
    sweep(tmp_path, 2, victim, "kill", "async", 1, 1)
