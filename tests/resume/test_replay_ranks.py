"""The replay proof over ranks: each rank's steps are in its part; other world sizes compare what they can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import shardkeep as sk
from shardkeep.engine.locate import find_checkpoint
from shardkeep.events import Event
from shardkeep.plan.replay import ReplayReport
from shardkeep.storage.resolve import open_store
from tests.support.ranks import run_ranks
from tests.support.training import build, step_once

Result = tuple[ReplayReport, list[tuple[str, str]]]


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def job(rank: int, world_size: int, layout: str, root: str, stop: int, resume: int | None, spoil: int = -1) -> Result:
    """Train, saving at 3 and 6; rank `spoil` draws once more in the first step of the loop."""
    state, sink = build(layout, world_size, rank=rank), Sink()
    with sk.CheckpointManager(root, events=sink) as manager:
        begin = manager.resume(state, step=resume).step
        for step, batch in manager.steps(state["loader"], stop=stop):
            if rank == spoil and step == begin + 1:
                torch.rand(1)
            loss = step_once(state, batch)
            manager.after_step(step, state, loss=loss)
            if step in (3, 6):
                manager.save(step, state)
        return manager.replay, [(event.name, event.text) for event in sink.events]


def test_every_rank_proves_its_own_part(tmp_path: Path) -> None:
    root = str(tmp_path)
    run_ranks(job, 2, "fsdp", root, 7, None)
    found: list[Result] = run_ranks(job, 2, "fsdp", root, 7, 3)
    assert [report.status for report, _ in found] == ["identical", "nothing recorded"]
    assert found[0][0].compared_count == 4
    assert all("bit for bit" in report.saved[0] for report, _ in found)
    part = find_checkpoint(open_store(root), 6)
    assert part.world_size == 2


def test_a_rank_that_draws_otherwise_is_found_by_its_own_part(tmp_path: Path) -> None:
    """Only rank 1's dropout differs: rank 0 sees it one step later, in the weights; rank 1 names its stream."""
    root = str(tmp_path)
    run_ranks(job, 2, "fsdp", root, 7, None)
    found: list[Result] = run_ranks(job, 2, "fsdp", root, 7, 3, 1)
    first, second = found
    assert first[0].divergence is not None
    assert (first[0].divergence.step, first[0].divergence.quantity) == (5, "metric/loss")
    assert "rng/torch" in second[0].saved[0]
    assert "steps before it (metric/loss)" in second[0].saved[0]
    assert "on rank 1" in second[0].saved[0]
    assert "replay.save_differs" in [name for name, _ in second[1]]
    assert "replay.differs" not in [name for name, _ in second[1]], "the coordinator compares steps"


def test_another_world_size_compares_samples_and_rates(tmp_path: Path) -> None:
    root = str(tmp_path)
    run_ranks(job, 2, "fsdp", root, 7, None)
    found: list[Any] = run_ranks(job, 3, "fsdp", root, 7, 3)
    report = found[0][0]
    assert report.status == "identical"
    assert report.quantities == ("samples/loader", "lr/optimizer")
    assert "recorded by 2 ranks and taken again by 3" in str(report)
    assert "loss" not in str(report).splitlines()[0]
    assert "in another layout" in report.saved[0]
