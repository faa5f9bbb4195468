"""N steps straight equal k steps, new processes, and the rest: weights, moments, losses, samples, draws and rates."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import shardkeep as sk
from tests.support.ranks import mark, run_ranks, start_ranks
from tests.support.training import Arrays, Step, build, find_differences, gather, train

STEPS = 8
Run = tuple[int, list[Step], Arrays]

slow = pytest.mark.slow
CASES = [
    pytest.param("plain", 1, marks=slow),
    pytest.param("ddp", 1, marks=slow),
    pytest.param("ddp", 2, marks=slow),
    ("ddp", 3),
    pytest.param("ddp", 4, marks=slow),
    pytest.param("fsdp", 1, marks=slow),
    ("fsdp", 2),
    pytest.param("fsdp", 3, marks=slow),
    pytest.param("fsdp", 4, marks=slow),
    pytest.param("tp", 1, marks=slow),
    ("tp", 2),
    pytest.param("tp", 3, marks=slow),
    pytest.param("tp", 4, marks=slow),
    ("fsdp_tp", 4),
    pytest.param("hsdp", 4, marks=slow),
]


def run(rank: int, world_size: int, layout: str, root: str, stop: int, every: int | None, stall: int = 0) -> Run:
    """Start, resume, train to `stop`; hang in the middle of step `stall`, for the test to kill."""

    def hang(step: int) -> None:
        if step == stall:
            mark("in the middle")
            time.sleep(60)

    state = build(layout, world_size, rank=rank)
    with sk.CheckpointManager(root, save_every=every) as manager:
        begin = manager.resume(state).step
        log = train(state, manager, stop=stop, at=hang)
        return begin, log, gather(state)


def check_same(straight: list[Run], hops: list[list[Run]], begins: list[int]) -> None:
    """Every rank's log over the hops is its straight log, and the end is the same."""
    assert [[begin for begin, _, _ in hop] for hop in hops] == [[begin] * len(straight) for begin in begins]
    for rank, (_, log, end) in enumerate(straight):
        together: list[Step] = []
        for hop in hops:
            begin, steps, _ = hop[rank]
            together = [step for step in together if step.number <= begin] + steps
        assert [step.number for step in log] == list(range(1, STEPS + 1))
        assert together == log
        assert find_differences(hops[-1][rank][2], end) == []
        assert any(name.startswith("optimizer/exp_avg_sq/") for name in end)


@pytest.mark.parametrize(("layout", "world_size"), CASES)
def test_two_restarts_change_nothing(layout: str, world_size: int, tmp_path: Path) -> None:
    """The second restart goes on from what the first one restored, in the next epoch."""
    straight = run_ranks(run, world_size, layout, str(tmp_path / "straight"), STEPS, None)
    hops: list[list[Run]] = [
        run_ranks(run, world_size, layout, str(tmp_path / "hops"), stop, 1) for stop in (3, 5, STEPS)
    ]
    check_same(straight, hops, [0, 3, 5])
    losses = [step.loss for step in straight[0][1]]
    assert len(set(losses)) == STEPS
    if world_size > 1 and layout not in ("tp", "fsdp_tp"):
        assert straight[0][1][0].ids != straight[1][1][0].ids


@pytest.mark.parametrize(
    ("layout", "world_size"), [("fsdp", 3), pytest.param("ddp", 4, marks=slow), pytest.param("tp", 2, marks=slow)]
)
def test_a_rank_killed_in_the_middle_of_a_step_costs_only_steps(layout: str, world_size: int, tmp_path: Path) -> None:
    """Gradients are there, the update is not; the next start goes on from the newest checkpoint."""
    straight = run_ranks(run, world_size, layout, str(tmp_path / "straight"), STEPS, None)
    root = str(tmp_path / "killed")
    with start_ranks(run, world_size, layout, root, STEPS, 2, 5) as ranks:
        ranks.wait_for_mark(world_size - 1, "in the middle")
        ranks.kill(world_size - 1)
    after: list[Run] = run_ranks(run, world_size, layout, root, STEPS, 2)
    assert [begin for begin, _, _ in after] == [4] * world_size
    for (_, log, end), (_, steps, last) in zip(straight, after, strict=True):
        assert steps == log[4:]
        assert find_differences(last, end) == []


def run_both(rank: int, world_size: int, layout: str, root: str) -> list[Any]:
    return [run(rank, world_size, layout, f"{root}/{every}", 6, every) for every in (None, 1)]


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("ddp", marks=slow), pytest.param("tp", marks=slow)])
def test_saves_between_any_two_steps_change_no_bit(layout: str, tmp_path: Path) -> None:
    for without, with_saves in run_ranks(run_both, 2, layout, str(tmp_path)):
        assert with_saves[1] == without[1]
        assert find_differences(with_saves[2], without[2]) == []
