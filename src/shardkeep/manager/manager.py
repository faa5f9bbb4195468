"""`CheckpointManager`: when to save, what to keep, how to resume. Everything it does, `engine` does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from shardkeep.engine.journal import prune_journals
from shardkeep.engine.prune import plan_prune, prune
from shardkeep.engine.run import scan_run
from shardkeep.engine.save import SaveOptions, Saver
from shardkeep.errors import CheckpointError, PeerFailure, StorageError, UsageError
from shardkeep.events import Event, EventSink, LogSink
from shardkeep.format.names import StepRef, is_asset
from shardkeep.manager.guards import Guards
from shardkeep.manager.overrides import Overrides
from shardkeep.manager.policies import Steps, as_number
from shardkeep.manager.proof import ReplayProof
from shardkeep.manager.resume import Claim, ResumeReport, claim_next, resume_run
from shardkeep.manager.watch import WatchedSink, find_watch
from shardkeep.plan.replay import ReplayReport
from shardkeep.plan.retention import Keep
from shardkeep.ranks.base import Group
from shardkeep.ranks.connect import connect
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_store
from shardkeep.storage.retry import RetryingStore


class CheckpointManager:
    """Saves a training run by policy and resumes it exactly. Every rank makes the same calls in the same order.

    Args:
        root: the run's folder, shared by all nodes.
        save_every: at which steps `after_step` saves; an int stands for `Steps`. None: only `save` does.
        keep: which checkpoints stay; by default all.
        assets: files stored beside every checkpoint (`{"config.json": b"..."}`).
        tolerate: how many saves in a row may fail in `after_step` before it raises; each is reported as an event. The
            run goes on meanwhile.
        events: receives what happens; the logger `shardkeep` by default.
        store, group: to use others than those that `root` and `torch.distributed` give.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: Steps | int | None = None,
        keep: Keep | None = None,
        assets: Mapping[str, bytes] | None = None,
        tolerate: int = 3,
        events: EventSink | None = None,
        store: Store | None = None,
        group: Group | None = None,
    ) -> None:
        for name in assets or {}:
            if not is_asset(name):
                raise UsageError(f"assets[{name!r}]: expected a plain file name that shardkeep does not use itself")
        if tolerate < 0:
            raise UsageError(f"tolerate={tolerate}: expected 0 or more")
        self._store: Store = RetryingStore(store if store is not None else open_store(root))
        self._every = Steps(save_every) if isinstance(save_every, int) else save_every
        if not isinstance(self._every, Steps | None):
            raise UsageError(
                f"save_every={save_every!r}: expected a number of steps or None",
                advice="save_every=100 saves every 100 steps",
            )
        if not isinstance(keep, Keep | None):
            raise UsageError(
                f"keep={keep!r}: expected shardkeep.Keep(...) or None",
                advice="keep=shardkeep.Keep(last=3) keeps the newest three",
            )
        self._keep = keep or Keep()
        self._assets = dict(assets or {})
        self._tolerate = tolerate
        self._events = events or LogSink()
        self._watch = find_watch()
        if self._watch is not None:
            self._events = WatchedSink(self._events, self._watch)
        self._group = group
        self._claim: Claim | None = None
        self._saver: Saver | None = None
        self._proof: ReplayProof | None = None
        self._guards: Guards | None = None
        self._overrides: Mapping[str, str] = {}
        self._step = 0
        self._failures = 0
        self._left_behind = False

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
        if not isinstance(state, Mapping):
            raise UsageError(
                f"resume() was given a {type(state).__name__}; expected a dict of names",
                advice='pass the whole state, such as {"model": model, "optimizer": optimizer, "loader": loader}',
            )
        if self._claim is not None:
            raise UsageError(
                "resume() or save() was called before on this manager; nothing was changed",
                advice="call resume() once, before the first save; to go back to a checkpoint, make a new "
                "CheckpointManager and resume with that",
            )
        overrides = Overrides(state, override)
        self._guards = Guards(self._events, self.group.rank)
        self._guards.before_resume(state)
        report, claim = resume_run(
            self._store, self.group, self._events, state, fresh=fresh, step=step, cast=cast, overrides=overrides
        )
        proof = self._own(claim)
        self._step = report.step
        self._overrides = report.overrides
        self._retain(Keep())
        self._say("resume.done", str(report), step=report.step, generation=report.generation)
        for change in report.environment:
            self._say("resume.environment", f"{change}; {change.advice}", level="warning")
        self._warn_inexact(state)
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
        self._saver = Saver(self._store, self.group, run_id=claim.run_id, generation=claim.generation, start=start)
        self._proof = ReplayProof(
            self._store,
            self.group,
            self._events,
            run_id=claim.run_id,
            generation=claim.generation,
            start=claim.parent.step if claim.parent is not None else 0,
        )
        return self._proof

    def _warn_inexact(self, state: Mapping[str, Any]) -> None:
        from shardkeep.state.ddp import find_inexact_ddp

        for line in find_inexact_ddp(state):
            self._say("resume.inexact", line, level="warning")

    def steps(self, loader: Iterable[Any], *, stop: int) -> Iterator[tuple[int, Any]]:
        """Yield `(step, batch)` from where the resume left off, through as many epochs as it takes, up to `stop`.

        `step` counts optimizer steps from 1: in the loop's body it is the number that will be done at its end.
        """
        step = self._step
        if self._guards is not None:
            self._guards.before_loop(loader)
        if self._watch is not None:
            self._watch.before_loop()
        while step < stop:
            before = step
            for batch in loader:
                step += 1
                yield step, batch
                if step >= stop:
                    return
            if step == before:
                raise UsageError(
                    f"the loader gave no batch for step {step + 1}", advice="check its length and drop_last"
                )

    def after_step(self, step: int, state: Mapping[str, Any], **metrics: Any) -> bool:
        """Save when the policy says so; return whether a checkpoint was committed.

        Args:
            step: optimizer steps done. Equal on all ranks.
            metrics: numbers of the step (`loss=loss`), for the journal and the checkpoint. A tensor on a device is
                read only when saving.

        A save that storage or a peer fails is reported, and the run goes on; after `tolerate` failures in a
        row the error is raised. Errors that no retry can help (unsupported state, a newer generation) are raised.
        """
        self._step = step
        due = self._every is not None and self._every.is_due(step)
        numbers = {name: as_number(name, value) for name, value in metrics.items()} if due else {}
        if self._proof is not None:
            self._proof.take(step, state, metrics, extra=numbers)
        if self._guards is not None:
            self._guards.at_step(state)
        if self._watch is not None:
            self._watch.take(step, state, {name: as_number(name, value) for name, value in metrics.items()})
        if not due:
            return False
        try:
            self.save(step, state, metrics=numbers)
        except (StorageError, PeerFailure) as error:
            if isinstance(error, PeerFailure) and not error.transient:
                raise
            self._failures += 1
            self._events.emit(
                Event(
                    name="save.failed",
                    level="error",
                    text=f"step {step} was not saved (failure {self._failures} in a row): {error}",
                    fields={"step": step, "rank": self.group.rank, "failures_count": self._failures},
                )
            )
            if self._failures > self._tolerate:
                raise
            return False
        return True

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        healthy: bool = True,
    ) -> StepRef:
        """Save now; on return the checkpoint is committed and durable, on every rank.

        The training state is not changed, whatever happens. Raises as `engine.save.Saver.save`, and UsageError when
        the run has checkpoints and neither `resume()` nor `fresh=True` was called.
        """
        from shardkeep.state.capture import capture

        if self._saver is None:
            self._own(self._claim_first())
        assert self._saver is not None
        options = SaveOptions(
            metrics={name: as_number(name, value) for name, value in (metrics or {}).items()},
            healthy=healthy,
            assets=self._assets,
            overrides=self._overrides,
            chain=self._proof.chain() if self._proof is not None else None,
        )
        if self._guards is not None:
            self._guards.at_save(state)
        if self._watch is not None:
            self._watch.take(step, state, options.metrics)
        try:
            saved = self._saver.save(step, lambda: capture(state), options)
        except BaseException:
            self._left_behind = True
            raise
        self._failures = 0
        self._step = step
        total = saved.shard_bytes
        self._say("save.committed", f"{saved.ref} is committed ({total} bytes)", step=step, total_bytes=total)
        if self._proof is not None:
            self._proof.committed(saved.ref)
        if self._keep != Keep() or self._left_behind:
            self._retain(self._keep)
        return saved.ref

    def _claim_first(self) -> Claim:
        def refuse(found: list[bytes]) -> bytes:
            view = scan_run(self._store)
            if view is not None and view.timeline:
                raise UsageError(
                    f"{self._store.url}: the run has checkpoints (the newest is {view.timeline[-1]}), and this start "
                    "did not say how it goes on",
                    advice="call manager.resume(state) before the first save, or resume(state, fresh=True)",
                )
            return b""

        self.group.agree("save.first", lambda: b"", refuse)
        return claim_next(self._store, self.group, self._events, fresh=True, step=None)

    def _retain(self, keep: Keep) -> None:
        """Remove what `keep` does not keep, and what failed saves left; the coordinator alone.

        A failure is reported, and the run goes on: the next prune tries again.
        """
        if self.group.rank != 0 or self._claim is None:
            return
        try:
            view = scan_run(self._store)
            if view is not None and (view.run_id, view.head) == (self._claim.run_id, self._claim.generation):
                plan = plan_prune(self._store, view, keep, live=self._claim.generation)
                removed = prune(self._store, plan, view, self._events, by_generation=self._claim.generation)
                kept = [r.step for r, folder in view.folders.items() if folder.committed and r not in removed]
                if removed and kept:
                    prune_journals(self._store, view.numbers, before=min(kept))
                self._left_behind = False
        except CheckpointError as error:
            self._say("prune.failed", f"old checkpoints were not removed: {error}", level="warning")

    def latest(self) -> int | None:
        """Return the newest committed step on the timeline, as storage has it now, or None."""
        view = scan_run(self._store)
        timeline = view.timeline if view is not None else ()
        return timeline[-1].step if timeline else None

    def close(self) -> None:
        """Give back connections; harmless twice."""
        if self._proof is not None:
            self._proof.close()
        if self._group is not None:
            self._group.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _say(self, name: str, text: str, *, level: str = "info", **fields: int) -> None:
        if self.group.rank == 0:
            self._events.emit(Event(name=name, level=level, text=text, fields=dict(fields)))
