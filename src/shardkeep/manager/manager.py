"""`CheckpointManager`: when to save, what to keep, how to resume. Everything it does, `engine` does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from shardkeep.engine.run import scan_run
from shardkeep.engine.save import Committed, SaveOptions, Saver
from shardkeep.errors import PeerFailure, StateChanged, StorageError
from shardkeep.events import Event, EventSink, LogSink
from shardkeep.format.names import StepRef
from shardkeep.manager.background import (
    BackgroundSaves,
    Busy,
    Mode,
    Tolerance,
    check_options,
    check_process,
    describe_commit,
    describe_failure,
)
from shardkeep.manager.guards import Guards
from shardkeep.manager.loop import iterate_steps
from shardkeep.manager.overrides import Overrides
from shardkeep.manager.policies import Minutes, Steps, Tier, as_number
from shardkeep.manager.preempt import PREEMPTION, Lookout, Preemptible, Preemption
from shardkeep.manager.proof import ReplayProof
from shardkeep.manager.resume import Claim, ResumeReport, check_resume, claim_first, list_inexact, resume_run
from shardkeep.manager.sinks import SafeSink
from shardkeep.manager.tiers import Places
from shardkeep.manager.watch import WatchedSink, find_watch
from shardkeep.plan.replay import ReplayReport
from shardkeep.plan.retention import Keep
from shardkeep.ranks.base import Group
from shardkeep.ranks.connect import connect
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_store
from shardkeep.storage.retry import RetryingStore


class CheckpointManager(Preemptible):
    """Saves a training run by policy and resumes it exactly. Every rank makes the same calls in the same order.

    Args:
        root: the run's folder, shared by all nodes.
        save_every: at which steps `after_step` saves; an int stands for `Steps`, `Minutes` goes by the clock. None:
            only `save` does.
        preemption: which signals and notices make the run save and stop (`should_stop`); None: none.
        keep: which checkpoints stay; by default all.
        tiers: faster places before the root, the fastest first, each with a rule of its own (`Tier`).
        assets: files stored beside every checkpoint (`{"config.json": b"..."}`).
        mode: `"async"`: a save returns when the state is copied to host memory, of which it takes as much as this
            rank saves, and is written from there while training goes on. `"overlap"`: parameters and optimizer states
            are copied while training goes on, too, and only the optimizer's next step waits. `"blocking"`: it returns
            when the checkpoint is committed, and takes a few blocks of memory.
        busy: what `after_step` does when a save is due and the one before is still under way: `"wait"` for it, or
            `"skip"` this one and say so.
        tolerate: how many saves in a row may fail in `after_step` before it raises; each is reported as an event. The
            run goes on meanwhile.
        events: receives what happens; the logger `shardkeep` by default.
        store, group: to use others than those that `root` and `torch.distributed` give.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: Steps | Minutes | int | None = None,
        preemption: Preemption | None = PREEMPTION,
        keep: Keep | None = None,
        tiers: Sequence[Tier] = (),
        assets: Mapping[str, bytes] | None = None,
        mode: Mode = "blocking",
        busy: Busy = "wait",
        tolerate: int = 3,
        events: EventSink | None = None,
        store: Store | None = None,
        group: Group | None = None,
    ) -> None:
        check_options(save_every=save_every, keep=keep, assets=assets, mode=mode, busy=busy, tolerate=tolerate)
        self._every = Steps(save_every) if isinstance(save_every, int) else save_every
        self._assets = dict(assets or {})
        self._mode: Mode = mode
        self._busy: Busy = busy
        self._tolerance = Tolerance(tolerate)
        self._events: EventSink = SafeSink(events or LogSink())
        self._watch = find_watch()
        if self._watch is not None:
            self._events = WatchedSink(self._events, self._watch)
        self._lookout = Lookout(preemption, self._every, self._events, tiers)
        place = RetryingStore(store if store is not None else open_store(root), events=self._events)
        self._places = Places(place, tiers, keep or Keep(), self._events)
        self._store = self._places.store
        self._group = group
        self._claim: Claim | None = None
        self._saver: Saver | None = None
        self._background: BackgroundSaves | None = None
        self._proof: ReplayProof | None = None
        self._guards: Guards | None = None
        self._overrides: Mapping[str, str] = {}
        self._step = 0
        self._pid = os.getpid()

    @property
    def step(self) -> int:
        """Optimizer steps done: that of the resumed checkpoint, then the last one given to `after_step`."""
        return self._step

    @property
    def group(self) -> Group:
        """The ranks that save together; connected when first used, which all ranks must do alike."""
        if self._group is None:
            self._group = connect()
        return self._group

    @property
    def replay(self) -> ReplayReport:
        """How far the steps taken since the resume are proved to be those that were recorded before.

        Steps are compared by the coordinator, checkpoints by every rank for its own part.
        """
        return self._proof.report if self._proof is not None else ReplayReport(start=0, last=0, expected_count=0)

    def resume(
        self,
        state: Mapping[str, Any],
        *,
        fresh: bool = False,
        step: int | None = None,
        cast: bool = False,
        override: Mapping[str, Any] | None = None,
    ) -> ResumeReport:
        """Bring `state` back to the newest complete checkpoint, or start fresh when there is none; it says which.

        Args:
            state: name -> model, optimizer, scheduler, loader or value; filled in place, RNG last.
            fresh: start a new timeline, whatever is there; nothing is removed.
            step: this step of the timeline and no other.
            cast: let stored dtypes be converted to the live ones.
            override: what to change on purpose, listed in the report and in every checkpoint of this start:
                `{"optimizer/lr": 1e-4}` sets an option after the restore, `{"scheduler": scheduler}` leaves a part of
                the state as it is. Equal on all ranks.

        Raises:
            StateMismatch: stored and live entries differ, by name; nothing was restored. Corrupt: all checkpoints (or
                the one asked for) are damaged. NotFound: no such step. StorageError, PeerFailure.
        """
        check_resume(state, again=self._claim is not None)
        overrides = Overrides(state, override)
        self._guards = Guards(self._events, self.group.rank)
        self._guards.before_resume(state)
        self._places.look(self.group)
        report, claim = resume_run(
            self._store, self.group, self._events, state, fresh=fresh, step=step, cast=cast, overrides=overrides
        )
        proof = self._own(claim)
        self._step = report.step
        self._overrides = report.overrides
        self._say("resume.done", str(report), step=report.step, generation=report.generation)
        for change in report.environment:
            self._say("resume.environment", f"{change}; {change.advice}", level="warning")
        for line in list_inexact(state):
            self._say("resume.inexact", line, level="warning")
        if report.parent is not None:
            proof.begin(
                report.parent,
                suspects=[str(change) for change in report.environment],
                overridden=sorted(report.overrides),
            )
        self._guards.after_resume(state, fresh=report.fresh)
        if self._watch is not None:
            self._watch.begin(report.step, state, rank=self.group.rank, world_size=self.group.world_size)
        return report

    def _own(self, claim: Claim) -> ReplayProof:
        self._claim = claim
        start = claim.parent.step if claim.parent is not None else 0
        self._places.own(self.group, claim, self._every)
        self._saver = Saver(
            self._store,
            self.group,
            run_id=claim.run_id,
            generation=claim.generation,
            parent=claim.parent,
            prepare=self._places.prepare,
            passed_over=self._places.passed_over,
        )
        if self._mode != "blocking":
            self._background = BackgroundSaves(self._saver, self.group, self._events, self._mode)
        run_id, number = claim.run_id, claim.generation
        self._proof = ReplayProof(
            self._store, self.group, self._events, run_id=run_id, generation=number, start=start
        )
        return self._proof

    def steps(self, loader: Iterable[Any], *, stop: int) -> Iterator[tuple[int, Any]]:
        """Yield `(step, batch)` from where the resume left off, through as many epochs as it takes, up to `stop`.

        It ends early after the save of a run that is told to stop (`should_stop`).
        `step` counts optimizer steps from 1: in the loop's body it is the number that will be done at its end.
        """
        if self._guards is not None:
            self._guards.before_loop(loader)
        if self._watch is not None:
            self._watch.before_loop()
        self._lookout.begin(self.group)
        yield from iterate_steps(loader, start=self._step, stop=stop, ends=lambda: self._lookout.is_done)

    def after_step(self, step: int, state: Mapping[str, Any], **metrics: Any) -> bool:
        """Save when the policy says so; return whether a save was made or, in the background, begun.

        Args:
            step: optimizer steps done. Equal on all ranks.
            metrics: numbers of the step (`loss=loss`), for the journal and the checkpoint. A tensor on a device is
                read only when saving.

        A save that storage or a peer fails is reported, and the run goes on; after `tolerate` failures in a
        row the error is raised. Errors that no retry can help (unsupported state, a newer generation) are raised. A
        save in the background that failed counts at the next step that saves, or at `wait`.
        """
        check_process(self._pid)
        self._step = step
        due = self._places.find_due(step, root=self._lookout.is_due(self.group, step), clocked=self._lookout.clocked)
        numbers = {name: as_number(name, value) for name, value in metrics.items()} if due else {}
        if self._proof is not None:
            self._proof.take(step, state, metrics, extra=numbers)
        if self._guards is not None:
            self._guards.at_step(state)
        if self._watch is not None:
            self._watch.take(step, state, {name: as_number(name, value) for name, value in metrics.items()})
        if not due:
            if self._background is not None:
                self._background.prepare(state)
            return False
        may_skip = self._busy == "skip" and not self._lookout.must_save
        if may_skip and self._background is not None and self._background.is_busy():
            self._say("save.skipped", f"step {step} is not saved: the save before is still under way", step=step)
            return False
        if self._lookout.must_save:
            due = self._places.find_lasting()
        self._tolerance.passes(self.wait)
        return self._lookout.save(
            step,
            save=lambda: self._tolerance.passes(lambda: self._save(step, state, numbers, due)),
            wait=lambda: self._tolerance.passes(self.wait) and self._places.is_lasting(step),
        )

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        healthy: bool = True,
    ) -> StepRef:
        """Save now. In blocking mode the checkpoint is committed and durable on return, on every rank.

        In the other modes it is staged, and durable when `wait` returns; a save that is still under way is waited for
        first, and what went wrong with it is raised here, with nothing begun.

        The training state is not changed, whatever happens. Raises as `engine.save.Saver.save`, and UsageError when
        the run has checkpoints and neither `resume()` nor `fresh=True` was called.
        """
        numbers = {name: as_number(name, value) for name, value in (metrics or {}).items()}
        return self._save(step, state, numbers, self._places.find_due(step, root=True), healthy=healthy)

    def _save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        due: Sequence[int],
        *,
        healthy: bool = True,
    ) -> StepRef:
        check_process(self._pid)
        self.wait()
        if self._saver is None:
            self._places.look(self.group)
            self._own(claim_first(self._store, self.group, self._events))
        assert self._saver is not None
        assert self._proof is not None
        options = SaveOptions(
            metrics=metrics,
            healthy=healthy,
            assets=self._assets,
            overrides=self._overrides,
            chain=self._proof.chain(),
        )
        if self._guards is not None:
            self._guards.at_save(state)
        if self._watch is not None:
            self._watch.take(step, state, options.metrics)
        self._proof.cut(step)
        self._lookout.begun(step)
        try:
            if self._background is not None:
                stores = self._places.get_stores(due)
                ref = self._background.start(step, state, options, stores, lambda end: self._ended(step, due, end))
            else:
                ref = self._save_blocking(step, state, options, due)
        except BaseException as error:
            self._give_up(step, due, error)
            raise
        self._step = step
        return ref

    def _save_blocking(
        self, step: int, state: Mapping[str, Any], options: SaveOptions, due: Sequence[int]
    ) -> StepRef:
        from shardkeep.state.capture import capture

        assert self._saver is not None
        committed = self._saver.save(step, lambda: capture(state), options, stores=self._places.get_stores(due))
        self._tolerance.reset()
        self._follow_up(committed, due)
        return committed.ref

    def wait(self) -> StepRef | None:
        """Wait until the save under way is committed and durable; return it, or None when there is none.

        Raises what went wrong with it, once: as `save`, and StateChanged in overlap mode.
        """
        if self._background is None:
            return None
        check_process(self._pid)
        ref = self._background.land()
        if ref is not None:
            self._tolerance.reset()
        return ref

    def _ended(self, step: int, due: Sequence[int], end: Committed | BaseException) -> None:
        """Do what follows a save in the background; called there. It never raises: the ranks would part ways."""
        try:
            if isinstance(end, BaseException):
                self._give_up(step, due, end)
            else:
                self._follow_up(end, due)
        except Exception as error:  # noqa: BLE001  # reported; the checkpoint is what it is
            text = f"step {step}: what follows a save did not work: {type(error).__name__}: {error}"
            self._events.emit(Event(name="save.follow_up_failed", level="error", text=text, fields={"step": step}))

    def _give_up(self, step: int, due: Sequence[int], error: BaseException) -> None:
        self._lookout.begun(None)
        if self._proof is not None:
            self._proof.abandoned()
        self._tolerance.forgives = self._places.failed(due, error)
        if isinstance(error, StorageError | PeerFailure | StateChanged):
            self._events.emit(describe_failure(error, step, self.group.rank, self._tolerance.failures_count + 1))

    def _follow_up(self, committed: Committed, due: Sequence[int]) -> None:
        if self.group.rank == 0:
            self._events.emit(describe_commit(committed))
        assert self._proof is not None
        self._places.landed(committed.ref, due[committed.place], due)
        self._proof.committed(committed.ref)

    def latest(self) -> int | None:
        """Return the newest committed step on the timeline, as storage has it now, or None."""
        view = scan_run(self._store)
        timeline = view.timeline if view is not None else ()
        return timeline[-1].step if timeline else None

    def close(self) -> None:
        """Wait for the save under way (raises as `wait`) and what goes on to other places, and give all back.

        Harmless twice, and in a forked process.
        """
        try:
            _ = self.wait() if os.getpid() == self._pid else None
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if os.getpid() != self._pid:
            return  # a fork that unwinds: all of it is its parent's
        self._lookout.close()
        if self._background is not None:
            self._background.close()
        self._places.close()
        if self._proof is not None:
            self._proof.close()
        if self._group is not None:
            self._group.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What became of a save under way was reported; an error at hand matters more.
        (self.close if error is None else self._give_back)()

    def _say(self, name: str, text: str, *, level: str = "info", **fields: int) -> None:
        if self.group.rank == 0:
            self._events.emit(Event(name=name, level=level, text=text, fields=dict(fields)))
