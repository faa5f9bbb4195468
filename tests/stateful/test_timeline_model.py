"""A run lived through at random: starts, saves, crashes, rollbacks, stale writers, prunes; `latest` against a dict.

The model knows nothing of generations: every process carries the history that it believes in, a plain dict of
step -> content. What a reader finds through `plan_timeline` must be the history of the newest process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardkeep.format.names import StepRef
from shardkeep.plan.retention import Best, Candidate, Keep, plan_removal
from shardkeep.plan.timeline import plan_timeline


@dataclass
class Process:
    """A start of the job: where it is, and what it believes was saved."""

    generation: int
    parent: StepRef | None
    step: int
    history: dict[int, str]
    tries: dict[int, int] = field(default_factory=dict)


class Run(RuleBasedStateMachine):
    """`parents`, `objects` and `held` are storage; the rest is what the model knows besides."""

    def __init__(self) -> None:
        super().__init__()
        self.parents: dict[int, StepRef | None] = {}
        self.objects: dict[StepRef, str] = {}
        self.lineage: dict[StepRef, dict[int, str]] = {}
        self.healthy: dict[StepRef, bool] = {}
        self.held: set[StepRef] = set()
        self.live: list[Process] = []
        self.writes = 0

    @property
    def newest(self) -> Process:
        return self.live[-1]

    def timeline(self) -> tuple[StepRef, ...]:
        return plan_timeline(self.parents, self.objects)

    def start(self, parent: StepRef | None) -> None:
        generation = max(self.parents, default=0) + 1
        history: dict[int, str] = {}
        if parent is not None:
            # What its writer believed when it wrote it, less what was pruned since.
            there = set(self.objects.values())
            history = {step: text for step, text in self.lineage[parent].items() if text in there}
        self.parents[generation] = parent
        self.live.append(Process(generation, parent, parent.step if parent else 0, history))

    @rule()
    def resume(self) -> None:
        timeline = self.timeline()
        expected = max(self.newest.history, default=None) if self.live else None
        assert (timeline[-1].step if timeline else None) == expected
        self.start(timeline[-1] if timeline else None)

    @rule()
    def start_afresh(self) -> None:
        self.start(None)

    @precondition(lambda self: len(self.timeline()) > 1)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.timeline()))
        history = {step: text for step, text in self.newest.history.items() if step <= chosen.step}
        self.start(chosen)
        assert self.newest.history == history

    @precondition(lambda self: len(self.objects) > 0)
    @rule(data=st.data())
    def undo_a_rollback(self, data: st.DataObject) -> None:
        """Go to any commit at all, on whatever branch it is."""
        self.start(data.draw(st.sampled_from(sorted(self.objects))))

    @precondition(lambda self: bool(self.live))
    @rule(steps=st.integers(1, 3), healthy=st.booleans())
    def save(self, steps: int, healthy: bool) -> None:
        self.commit(self.newest, steps, healthy)

    @precondition(lambda self: bool(self.live))
    @rule(steps=st.integers(1, 3))
    def crash_in_a_save(self, steps: int) -> None:
        """No commit record: only the number of the try is used up."""
        process = self.newest
        step = process.step + steps
        process.tries[step] = process.tries.get(step, 0) + 1

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data(), steps=st.integers(1, 9))
    def save_by_a_stale_writer(self, data: st.DataObject, steps: int) -> None:
        process = data.draw(st.sampled_from(self.live[:-1]))
        before = self.timeline()
        taken = process.step + steps in {ref.step for ref in self.objects if ref.generation == process.generation}
        if not taken:
            self.commit(process, steps, True)
        assert self.timeline() == before

    def commit(self, process: Process, steps: int, healthy: bool) -> None:
        process.step += steps
        attempt = process.tries.get(process.step, 0) + 1
        ref = StepRef(step=process.step, generation=process.generation, attempt=attempt)
        self.writes += 1
        self.objects[ref] = process.history[process.step] = f"write {self.writes}"
        self.lineage[ref] = dict(process.history)
        self.healthy[ref] = healthy

    @precondition(lambda self: len(self.timeline()) > 0)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        self.held.add(data.draw(st.sampled_from(self.timeline())))

    @precondition(lambda self: bool(self.live))
    @rule(last=st.integers(0, 3), every=st.none() | st.integers(1, 4), best=st.booleans())
    def prune(self, last: int, every: int | None, best: bool) -> None:
        timeline = self.timeline()
        candidates = [
            Candidate(
                ref=ref, metrics={"loss": float(ref.step % 5)}, healthy=self.healthy[ref], held=ref in self.held
            )
            for ref in timeline
        ]
        keep = Keep(last=last, every=every, best=Best(metric="loss") if best else None)
        removed = plan_removal(candidates, keep, parent=self.newest.parent)
        for ref in removed:
            assert ref not in self.held
            assert ref != self.newest.parent
            # The commits of other branches are out of the pruner's sight.
            assert ref in timeline
            self.newest.history.pop(ref.step)
            del self.objects[ref]
        if timeline:
            assert self.timeline()[-1] == timeline[-1]
        healthy = [ref for ref in timeline if self.healthy[ref]]
        if healthy:
            assert healthy[-1] in self.timeline()

    @invariant()
    def readers_see_the_history_of_the_newest_process(self) -> None:
        found = {ref.step: self.objects[ref] for ref in self.timeline()}
        assert found == (self.newest.history if self.live else {})


TestRun = Run.TestCase
TestRun.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
