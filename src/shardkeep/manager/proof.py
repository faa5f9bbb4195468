"""The replay proof of one start: its journal, and whether steps taken again are the steps that were recorded.

The coordinator compares step by step. Every rank keeps digests of its own steps, which go into its part of each
checkpoint, and compares its own part where an earlier generation saved the same step. No rank talks to another for
it, but for one phase at the resume. Nothing here stops training: what cannot be compared is named.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from shardkeep.engine.journal import History, JournalWriter, read_history
from shardkeep.engine.run import read_commit
from shardkeep.engine.same_step import compare_parts, format_comparison
from shardkeep.errors import CheckpointError
from shardkeep.events import Event, EventSink
from shardkeep.format.names import StepRef
from shardkeep.format.records import StepChain
from shardkeep.plan.replay import METRIC, Recorded, ReplayReport, compare_values, find_divergence
from shardkeep.ranks.base import Group
from shardkeep.storage.base import Store


class _Chain:
    """Digests of the steps after `since`, a stream for each quantity."""

    def __init__(self, since: int) -> None:
        self.since = since
        self._digests: dict[str, tuple[int, Any]] = {}

    def add(self, values: Mapping[str, str]) -> None:
        for name, text in values.items():
            count, digest = self._digests.get(name) or (0, xxhash.xxh3_64())
            digest.update(f"{text}\n".encode())
            self._digests[name] = count + 1, digest

    def record(self) -> StepChain | None:
        if not self._digests:
            return None
        digests = {name: (count, digest.hexdigest()) for name, (count, digest) in sorted(self._digests.items())}
        return StepChain(since=self.since, digests=digests)


class ReplayProof:
    """Follows the steps of one start on one rank. `committed` and `abandoned` may come from another thread."""

    def __init__(
        self, store: Store, group: Group, events: EventSink, *, run_id: str, generation: int, start: int
    ) -> None:
        from shardkeep.state.observe import Observer

        self._store = store
        self._group = group
        self._events = events
        self._run_id = run_id
        self._generation = generation
        self._observer = Observer()
        # The first covers the steps since the last commit; a later one those since the save that is under way.
        self._chains = [_Chain(start)]
        self._lock = threading.Lock()
        self._steps: Mapping[int, Recorded] = {}
        self._commits: dict[int, StepRef] = {}
        self._suspects: tuple[str, ...] = ()
        self._highest = start
        self._quantities: frozenset[str] | None = None
        self._journal: JournalWriter | None = None
        if group.rank == 0:
            self._journal = JournalWriter(
                store, events, run_id=run_id, generation=generation, world_size=group.world_size
            )
        self.report = ReplayReport(start=start, last=start, expected_count=0)

    def begin(self, parent: StepRef, *, suspects: Sequence[str] = (), overridden: Sequence[str] = ()) -> None:
        """Look for what is recorded of the steps beyond `parent`; all ranks call it alike, right after the restore.

        Args:
            suspects: what differs from the surroundings of the save, for the text about a difference.
            overridden: what was changed on purpose; nothing is compared then.
        """
        found: list[History] = []

        def look(_posted: list[bytes]) -> bytes:
            try:
                history = read_history(self._store, run_id=self._run_id, parent=parent, generation=self._generation)
            except CheckpointError as error:
                history = History(steps={}, commits=(), left_out=(f"the journal could not be read: {error}",))
            found.append(history)
            return msgspec.json.encode(history.commits)

        verdict = self._group.agree("replay.plan", lambda: b"", look)
        commits = msgspec.json.decode(verdict, type=tuple[StepRef, ...])
        self._suspects = tuple(suspects)
        history = found[0] if found else History(steps={}, commits=())
        last = max(history.steps, default=parent.step)
        self.report = ReplayReport(
            start=parent.step, last=last, expected_count=len(history.steps), left_out=history.left_out
        )
        if overridden:
            reason = f"not compared, because {', '.join(overridden)} was changed on purpose"
            self._update(left_out=(*history.left_out, reason), is_over=True)
        else:
            self._steps = history.steps
            self._commits = {ref.step: ref for ref in commits}
        self._announce()

    def _announce(self) -> None:
        report = self.report
        if report.status != "running":
            self._say("replay.nothing", str(report))
            return
        whose = ", ".join(str(number) for number in sorted({line.generation for line in self._steps.values()}))
        text = f"{report.expected_count} steps up to {report.last} were recorded by generation {whose}; "
        self._say("replay.begun", f"{text}they are compared as they are taken again")
        worlds = sorted({r.world_size for r in self._steps.values()} - {self._group.world_size})
        if worlds:
            self._leave_out(
                f"recorded by {', '.join(map(str, worlds))} ranks and taken again by {self._group.world_size}: sums "
                "round differently, so metrics are not compared"
            )

    def take(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any], *, extra: Mapping[str, Any]
    ) -> None:
        """Take note of a step that is done.

        Args:
            metrics: numbers of the step; those that lie on a device are left alone.
            extra: numbers that were read from a device because this step is saved; for the journal alone.
        """
        values = self._observer.observe(state, metrics)
        with self._lock:
            for chain in self._chains:
                chain.add(values)
        self._highest = max(self._highest, step)
        if self._journal is not None:
            for name, value in extra.items():
                values.setdefault(f"{METRIC}{name}", float(value).hex())
            self._journal.add(step, values)
            if not self.report.is_over:
                self._compare(step, values)

    def _compare(self, step: int, values: Mapping[str, str]) -> None:
        report, recorded = self.report, self._steps.get(step)
        if recorded is not None:
            same_world = recorded.world_size == self._group.world_size
            compared, _ = compare_values(recorded.values, values, same_world=same_world)
            divergence = find_divergence(
                step,
                recorded,
                values,
                world_size=self._group.world_size,
                alike_count=report.compared_count,
                suspects=self._suspects,
            )
            if divergence is not None:
                self._update(divergence=divergence, is_over=True)
                self._say("replay.differs", str(self.report), level="warning", step=step)
                return
            if compared:
                known = frozenset(compared)
                self._quantities = known if self._quantities is None else self._quantities & known
                self._update(
                    compared_count=report.compared_count + 1,
                    quantities=tuple(name for name in compared if name in self._quantities),
                    generations=tuple(sorted({*report.generations, recorded.generation})),
                )
        if step >= report.last and report.expected_count:
            self._finish()

    def _finish(self) -> None:
        self._update(is_over=True)
        same_world = all(line.world_size == self._group.world_size for line in self._steps.values())
        if same_world and not any(name.startswith(METRIC) for name in self.report.quantities):
            self._leave_out(
                "no metric was recorded at every step, so results were not compared: give after_step() the loss as "
                "a float"
            )
        self._steps = {}
        name = "replay.identical" if self.report.status == "identical" else "replay.nothing"
        self._say(name, str(self.report), step=self.report.last)

    def chain(self) -> StepChain | None:
        """Return the digests of this rank's steps since the last commit, for its part of the next one."""
        with self._lock:
            return self._chains[0].record()

    def cut(self, step: int) -> None:
        """Begin a chain at a step that is being saved; whether the save succeeds says which chain goes on."""
        with self._lock:
            self._chains.append(_Chain(step))

    def abandoned(self) -> None:
        """Forget the cut: the save failed."""
        with self._lock:
            del self._chains[1:]

    def committed(self, ref: StepRef) -> None:
        """Go on with the chain begun at the cut, make the journal durable, and compare with an earlier checkpoint."""
        with self._lock:
            del self._chains[:-1]
        if self._journal is not None and self._highest > self.report.start:
            self._journal.flush()
        earlier = self._commits.pop(ref.step, None)
        if earlier is not None:
            self._compare_saved(earlier, ref)

    def _compare_saved(self, earlier: StepRef, ref: StepRef) -> None:
        rank, step = self._group.rank, ref.step
        try:
            before, now = (read_commit(self._store, at, run_id=self._run_id) for at in (earlier, ref))
            found = compare_parts(self._store, before, now, rank)
        except CheckpointError as error:
            self._add_saved(f"step {step} could not be compared with {earlier}: {error}")
            return
        if not found.comparable:
            self._add_saved(
                f"step {step} was saved in another layout by generation {earlier.generation}: not compared"
            )
        elif found.same:
            text = (
                f"step {step} is bit for bit what generation {earlier.generation} saved ({found.shard_bytes} bytes)"
            )
            self._add_saved(text)
            self._say("replay.save_identical", text, step=step)
        else:
            text = (
                f"step {step} is not what generation {earlier.generation} saved, on rank {rank}: "
                f"{format_comparison(found)} differ"
            )
            self._add_saved(text, differ=True)
            self._events.emit(
                Event(name="replay.save_differs", level="warning", text=text, fields={"step": step, "rank": rank})
            )

    def close(self) -> None:
        """Write what the journal still holds and say how far the comparison came; harmless twice."""
        if self._journal is not None and self._highest > self.report.start:
            self._journal.close()
        if self.report.status == "running" and self.report.compared_count:
            self._update(is_over=True)
            self._say("replay.unfinished", str(self.report))

    def _add_saved(self, text: str, *, differ: bool = False) -> None:
        with self._lock:
            report = self.report
            self.report = dataclasses.replace(
                report, saved=(*report.saved, text), saved_differ=report.saved_differ or differ
            )

    def _leave_out(self, text: str) -> None:
        self._update(left_out=(*self.report.left_out, text))

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self.report = dataclasses.replace(self.report, **changes)

    def _say(self, name: str, text: str, *, level: str = "info", **fields: int) -> None:
        if self._group.rank == 0:
            self._events.emit(Event(name=name, level=level, text=text, fields=dict(fields)))
