"""The real engine against a dict: saves, crashes, restarts, prunes, rollbacks, stale writers, damage, in any order.

The model is a dict of step -> content for each branch that a process believes in; what storage shows must be that of
the newest process. A state is three numbers, so that a run of dozens of operations takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardkeep import knobs
from shardkeep.engine.checkpoint import Checkpoint
from shardkeep.engine.locate import find_checkpoint
from shardkeep.engine.prune import plan_prune, prune
from shardkeep.engine.run import claim_generation, list_generations, list_step_folders, read_run_id, scan_run
from shardkeep.engine.verify import verify_run, verify_step
from shardkeep.errors import CheckpointError, Fenced
from shardkeep.format.names import StepRef
from shardkeep.manager.manager import CheckpointManager
from shardkeep.plan.retention import Keep
from shardkeep.testing.faults import Fault, FaultKind, FaultStore
from shardkeep.testing.lossy import LossyStore
from tests.crash.jobs import Sink, manage


@dataclass
class Job:
    """A process: its manager, the numbers of its generation and step, and whether it still runs."""

    manager: CheckpointManager
    generation: int
    step: int
    alive: bool = True


@dataclass
class Armed:
    """A fault that strikes at the n-th call from now; 0: none."""

    kind: FaultKind = "kill"
    left: int = 0
    struck: list[Any] = field(default_factory=list)


class Run(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = LossyStore()
        self.disk: Any = self.machine
        self.jobs: list[Job] = []
        # What the newest process and every reader must see, and every content ever given to a save.
        self.history: dict[int, int] = {}
        self.branches: dict[StepRef, dict[int, int]] = {}
        self.unsure: dict[int, int] = {}
        self.pruned: set[StepRef] = set()
        self.count = 0
        self.armed = Armed()
        self._knobs = knobs.override(RETRY_BASE_S=0.0, RETRIES=1)
        self._knobs.__enter__()

    def teardown(self) -> None:
        self._knobs.__exit__(None, None, None)

    def _strikes(self, kind: FaultKind) -> bool:
        if self.armed.left <= 0 or self.armed.kind != kind:
            return False
        self.armed.left -= 1
        return self.armed.left == 0

    def store(self) -> FaultStore:
        machine = self.machine

        def die() -> None:
            self.machine = LossyStore(machine.power_cut(), seed=self.count)
            for job in self.jobs:
                job.alive = False

        kinds: tuple[FaultKind, ...] = ("kill", "torn", "no_space", "lost_answer")
        plan = [Fault(kind=k, when=lambda call, k=k: self._strikes(k), times=None) for k in kinds]
        return FaultStore(machine, plan, die=die)

    @property
    def newest(self) -> Job:
        return self.jobs[-1]

    def can_save(self) -> bool:
        newest = bool(self.jobs) and self.newest.alive
        return newest and self.newest.generation == max(list_generations(self.machine))

    # What processes do

    @rule()
    def start(self) -> None:
        state = {"x": torch.zeros(3, dtype=torch.int64)}
        self.armed.left = 0
        manager = manage(self.store())
        report = manager.resume(state)
        self._settle()
        assert report.fresh == (not self.history)
        if self.history:
            assert report.step == max(self.history)
            assert state["x"].tolist() == [self.history[report.step]] * 3
        self.jobs.append(Job(manager, report.generation, report.step))

    def _settle(self) -> None:
        """A save that a fault cut short is there or is not; after a start that is certain."""
        view = scan_run(self.machine)
        assert view is not None
        for ref in view.timeline:
            if ref.step in self.unsure and ref.step not in self.history:
                with Checkpoint(self.machine, find_checkpoint(self.machine, ref.step)) as opened:
                    assert opened["x"].tensor().tolist() == [self.unsure[ref.step]] * 3
                self.history[ref.step] = self.unsure[ref.step]
        self.unsure = {}
        self._remember()

    @precondition(can_save)
    @rule(
        by=st.integers(1, 3),
        fault=st.sampled_from([None, None, "kill", "torn", "no_space", "lost_answer"]),
        at=st.integers(1, 10),
    )
    def save(self, by: int, fault: FaultKind | None, at: int) -> None:
        job = self.newest
        self.count += 1
        step = job.step + by
        self.armed = Armed(kind=fault or "kill", left=at if fault else 0)
        try:
            job.manager.save(step, {"x": torch.full((3,), self.count)})
        except CheckpointError:
            if fault is None:
                raise
            if fault in ("kill", "torn"):
                assert not job.alive
                self.unsure[step] = self.count
                return
            # The process lives and knows: it asks storage.
            job.step = step
            if job.manager.latest() == step:
                self.history[step] = self.count
            else:
                self.unsure[step] = self.count
        else:
            job.step = step
            self.history[step] = self.count
            if fault is None:
                self.unsure = {}  # what was left behind is gone
        finally:
            self.armed.left = 0
        if job.alive:
            self._remember()

    def _remember(self) -> None:
        view = scan_run(self.machine)
        if view is not None:
            for ref in view.timeline:
                self.branches[ref] = {s: c for s, c in self.history.items() if s <= ref.step}

    @precondition(lambda self: any(job.alive for job in self.jobs))
    @rule(at=st.integers(0, 5))
    def stale_writer(self, at: int) -> None:
        """An old process goes on: it is told, and changes nothing."""
        job = self.jobs[at % len(self.jobs)]
        if job.alive and job.generation < max(list_generations(self.machine)):
            with contextlib.suppress(Fenced):
                job.manager.save(job.step + 1, {"x": torch.full((3,), -1)})
                raise AssertionError("a stale process saved")

    @precondition(lambda self: bool(self.history) and not self.unsure)
    @rule(
        keep=st.sampled_from([Keep(last=1), Keep(last=2), Keep(every=2), Keep(last=0)]),
        fault=st.sampled_from([None, "kill", "no_space", "lost_answer"]),
        at=st.integers(1, 8),
    )
    def prune(self, keep: Keep, fault: FaultKind | None, at: int) -> None:
        store = self.store()
        view = scan_run(self.machine)
        assert view is not None
        plan = plan_prune(store, view, keep, live=None)
        head = view.generations[view.head].parent
        assert view.timeline[-1] not in plan.steps
        assert head not in plan.steps
        self.armed = Armed(kind=fault or "kill", left=at if fault else 0)
        with contextlib.suppress(CheckpointError):
            prune(store, plan, view, Sink(), by_generation=view.head)
        self.armed.left = 0
        view = scan_run(self.machine)
        assert view is not None
        there = {ref.step for ref in view.timeline}
        planned = {ref.step for ref in plan.steps}
        gone = self.history.keys() - there
        assert gone <= planned, "only what was planned went"
        if fault is None:
            assert gone == planned
        self.pruned |= {ref for ref in plan.steps if ref.step in gone}
        for step in gone:
            del self.history[step]

    @precondition(lambda self: bool(self.branches) and not self.unsure)
    @rule(at=st.integers(0, 20))
    def rollback(self, at: int) -> None:
        """To any step that was ever seen, on the timeline or on a branch that was left: undo is the same."""
        ref = sorted(self.branches)[at % len(self.branches)]
        run_id = read_run_id(self.machine)
        assert run_id is not None
        record = claim_generation(self.machine, run_id, ref, world_size=0, environment={})
        if record is None:
            assert ref in self.pruned
            return
        assert ref not in self.pruned
        view = scan_run(self.machine)
        assert view is not None
        standing = {other.step for other in view.timeline}
        lost = {other.step for other in self.pruned}
        expected = {s: c for s, c in self.branches[ref].items() if s in standing or s not in lost}
        self.history = expected

    @precondition(lambda self: not self.unsure)
    @rule()
    def verify(self) -> None:
        view = scan_run(self.machine)
        if view is None:
            return
        assert not verify_run(self.machine).listed
        for ref in view.timeline:
            folder = list_step_folders(self.machine, ref.generation)[ref]
            assert not verify_step(self.machine, view.run_id, folder, full=True).findings.listed

    # What must hold after each of them

    @invariant()
    def readers_see_the_history(self) -> None:
        view = scan_run(self.machine)
        found = [ref.step for ref in view.timeline] if view is not None else []
        if self.unsure:
            assert [s for s in found if s not in self.unsure] == sorted(self.history)
            return
        assert found == sorted(self.history)
        if found:
            with Checkpoint(self.machine, find_checkpoint(self.machine)) as opened:
                assert opened["x"].tensor().tolist() == [self.history[found[-1]]] * 3


Run.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRun = Run.TestCase
