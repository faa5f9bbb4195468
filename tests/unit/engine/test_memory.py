"""What a job remembers of its run between prunes: cheap passes, and nothing removed by an outdated memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkeep.engine.memory import RunMemory
from shardkeep.engine.prune import plan_prune, prune
from shardkeep.engine.run import list_generations, list_step_folders, scan_run, write_mark
from shardkeep.engine.save import SaveOptions
from shardkeep.events import Event
from shardkeep.format.names import COMMIT_RECORD, PRUNE_INTENT, StepRef
from shardkeep.plan.retention import Best, Keep
from shardkeep.testing.faults import FaultStore
from tests.support.fake_state import FakeRun, small_state

SMALL = {"model/embed.weight": small_state()["model/embed.weight"]}


class Quiet:
    def emit(self, event: Event) -> None:
        return


def committed(run: FakeRun, generation: int | None = None) -> list[int]:
    folders = list_step_folders(run.store, generation or run.generation)
    return [ref.step for ref, folder in folders.items() if folder.committed]


class Job:
    """A run whose every save is followed by a pass of a memory."""

    def __init__(self, root: Path, keep: Keep) -> None:
        self.run = FakeRun(root)
        self.keep = keep
        self.begin()

    def begin(self) -> None:
        self.store = FaultStore(self.run.store)
        self.memory = RunMemory(self.store, run_id=self.run.run_id, generation=self.run.generation)

    def save(self, step: int, loss: float = 0.0) -> None:
        self.run.save(step, SMALL, options=SaveOptions(metrics={"loss": loss}))
        self.sweep()

    def sweep(self) -> list[int] | None:
        found = self.memory.plan(self.keep)
        if found is None:
            return None
        view, plan = found
        removed = prune(self.store, plan, view, Quiet(), by_generation=self.run.generation)
        return [ref.step for ref in removed]


def same_as_scan(job: Job) -> None:
    """The memory plans what a look at everything plans."""
    view = scan_run(job.run.store)
    assert view is not None
    fresh = plan_prune(job.run.store, view, job.keep, live=job.run.generation)
    found = job.memory.plan(job.keep)
    assert found is not None
    assert found[1] == fresh
    assert found[0].timeline == view.timeline


def test_a_pass_costs_the_same_however_many_checkpoints_there_are(tmp_path: Path) -> None:
    job = Job(tmp_path, Keep(every=1, best=Best(metric="loss", count=1)))
    costs = []
    for step in range(1, 31):
        before = len(job.store.log)
        job.save(step)
        costs.append(len(job.store.log) - before)
    assert len(set(costs[2:])) == 1, costs
    calls = job.store.log[-costs[-1] :]
    assert sum(call.verb == "get" for call in calls) <= 2, "the run's record and the new commit record"
    assert not any(call.verb == "list_objects" and call.key == "g0001/" for call in calls)
    assert committed(job.run) == list(range(1, 31))


def test_retention_goes_on_as_without_a_memory(tmp_path: Path) -> None:
    job = Job(tmp_path, Keep(last=3, every=10, best=Best(metric="loss", count=2)))
    for step in range(1, 25):
        job.save(step, loss=abs(step - 5.2))
        same_as_scan(job)
    assert committed(job.run) == [5, 6, 10, 20, 22, 23, 24]
    assert list_generations(job.run.store) == (1,)


def test_the_files_of_what_is_removed_are_listed_anew(tmp_path: Path) -> None:
    job = Job(tmp_path, Keep(last=2))
    job.save(1)
    job.save(2)
    (job.run.folder(1) / "notes.txt").write_text("came later")
    job.save(3)
    assert not job.run.folder(1).exists()


def test_marks_are_seen_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, Keep(last=2))
    job.save(1)
    job.save(2)
    write_mark(job.run.store, job.run.run_id, "hold", StepRef(1, 1), "mine")
    job.save(3)
    job.save(4)
    assert committed(job.run) == [1, 3, 4]


@pytest.mark.parametrize("how", ["removed", "being removed", "commit record lost"])
def test_what_another_prune_took_is_not_counted_among_the_kept(tmp_path: Path, how: str) -> None:
    """Keep(last=2) of 3, 4 and 5 where 4 is gone: 3 has to stay."""
    job = Job(tmp_path, Keep(last=2))
    job.save(3)
    job.save(4)
    folder = job.run.folder(4)
    if how == "being removed":
        (folder / PRUNE_INTENT).write_bytes(b"begun")
    elif how == "commit record lost":
        (folder / COMMIT_RECORD).unlink()
    else:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    job.save(5)
    assert 3 in committed(job.run)
    assert 5 in committed(job.run)


def test_a_newer_generation_ends_it(tmp_path: Path) -> None:
    job = Job(tmp_path, Keep(last=1))
    job.save(1)
    generation = job.run.generation
    job.run.save(2, SMALL)
    job.run.claim(StepRef(1, 1))
    assert job.memory.plan(job.keep) is None
    assert committed(job.run, generation) == [1, 2]


def test_older_generations_and_given_up_tries_are_removed_once(tmp_path: Path) -> None:
    job = Job(tmp_path, Keep(last=2))
    for step in (1, 2):
        job.save(step)
    job.run.claim(StepRef(2, 1))
    job.begin()
    job.save(3)
    job.run.save(4, SMALL)
    (job.run.folder(4) / COMMIT_RECORD).unlink()
    assert job.sweep() == [4]
    assert job.sweep() == []
    job.save(5)
    job.save(6)
    assert committed(job.run, 1) == [2], "the parent stays"
    assert committed(job.run) == [5, 6]
    same_as_scan(job)


def test_steps_that_are_being_saved_are_not_given_up(tmp_path: Path) -> None:
    job = Job(tmp_path, Keep(last=2))
    job.save(1)
    job.run.save(2, SMALL)
    (job.run.folder(2) / COMMIT_RECORD).unlink()
    found = job.memory.plan(job.keep, settled=1)
    assert found is not None
    assert found[1].all == ()
    assert job.sweep() == [2]
