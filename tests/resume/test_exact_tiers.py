"""Bit-identical resumes over tiers: from the memory tier with the root behind, from the root with the tier lost."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import shardkeep as sk
from shardkeep.storage.posix import PosixStore
from tests.crash.test_tiers_kill import whole_steps
from tests.resume.test_exact_layouts import STEPS, Run, check_same
from tests.resume.test_exact_layouts import run as run_without_tiers
from tests.support.ranks import mark, run_ranks, start_ranks
from tests.support.training import build, find_differences, gather, train

slow = pytest.mark.slow
CASES = [
    ("ddp", "async"),
    ("fsdp", "blocking"),
    pytest.param("ddp", "blocking", marks=slow),
    pytest.param("ddp", "overlap", marks=slow),
    pytest.param("fsdp", "async", marks=slow),
    pytest.param("fsdp", "overlap", marks=slow),
]


def run(rank: int, world_size: int, layout: str, folder: str, mode: Any, stop: int, stall: int = 0) -> Run:
    """Start, resume, train to `stop`; hang in the middle of step `stall`, for the test to kill."""

    def hang(step: int) -> None:
        if step == stall:
            mark("in the middle")
            time.sleep(60)

    state = build(layout, world_size, rank=rank)
    tiers = [sk.Tier(f"{folder}/ram", every=1)]
    with sk.CheckpointManager(f"{folder}/root", save_every=3, mode=mode, tiers=tiers) as manager:
        begin = manager.resume(state).step
        log = train(state, manager, stop=stop, at=hang)
        return begin, log, gather(state)


@pytest.mark.parametrize(("layout", "mode"), CASES)
def test_restarts_from_the_tier_and_from_the_root_change_nothing(layout: str, mode: str, tmp_path: Path) -> None:
    """The first restart finds the tier ahead of the root, the second one finds no tier: its node is gone."""
    straight: list[Run] = run_ranks(run_without_tiers, 2, layout, str(tmp_path / "straight"), STEPS, None)
    root = PosixStore(tmp_path / "root")
    hops: list[list[Run]] = [run_ranks(run, 2, layout, str(tmp_path), mode, 5)]
    assert (whole_steps(PosixStore(tmp_path / "ram")), whole_steps(root)) == ([5], [3])
    hops.append(run_ranks(run, 2, layout, str(tmp_path), mode, 7))
    assert whole_steps(root) == [3, 5, 6]
    shutil.rmtree(tmp_path / "ram")
    hops.append(run_ranks(run, 2, layout, str(tmp_path), mode, STEPS))
    check_same(straight, hops, [0, 5, 6])


@pytest.mark.parametrize(("layout", "mode"), [("fsdp", "async"), pytest.param("ddp", "overlap", marks=slow)])
def test_a_rank_killed_in_the_middle_of_a_step_goes_on_from_the_tier(layout: str, mode: str, tmp_path: Path) -> None:
    straight: list[Run] = run_ranks(run_without_tiers, 2, layout, str(tmp_path / "straight"), STEPS, None)
    with start_ranks(run, 2, layout, str(tmp_path), mode, STEPS, 6) as ranks:
        ranks.wait_for_mark(1, "in the middle")
        ranks.kill(1)
    after: list[Run] = run_ranks(run, 2, layout, str(tmp_path), mode, STEPS)
    (begin,) = {begin for begin, _, _ in after}
    assert begin in (4, 5)  # the save of step 5 may have been under way
    for (_, log, end), (_, steps, last) in zip(straight, after, strict=True):
        assert steps == log[begin:]
        assert find_differences(last, end) == []
