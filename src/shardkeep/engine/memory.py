"""What the coordinator of a job remembers of its run from one prune to the next, so that a pass costs little.

A run of many ranks has tens of thousands of files per checkpoint, and a pass follows every save. Only what never
changes is remembered: what a commit record says, and that a step was committed. What may change is looked at in every
pass: the generations, the marks, the steps that are there, those not committed; and before anything is removed,
whether what is kept still stands. When any of it is not as remembered, everything is read anew.
"""

from __future__ import annotations

import dataclasses

from shardkeep.engine.prune import PrunePlan, plan_prune
from shardkeep.engine.run import (
    RunView,
    StepFolder,
    exists,
    list_generations,
    list_step_files,
    read_marks,
    read_run_id,
    scan_run,
)
from shardkeep.format.names import COMMIT_RECORD, PRUNE_INTENT, StepRef, find_step, format_generation
from shardkeep.format.records import CommitBrief
from shardkeep.plan.retention import Keep
from shardkeep.storage.base import Store


class RunMemory:
    """Plans the prunes of one generation of one run; used by one thread, and never by two processes for one run."""

    def __init__(self, store: Store, *, run_id: str, generation: int) -> None:
        self._store = store
        self._run_id = run_id
        self._generation = generation
        self._view: RunView | None = None
        self._briefs: dict[StepRef, CommitBrief] = {}

    def plan(
        self,
        keep: Keep,
        *,
        settled: int | None = None,
        waiting: frozenset[StepRef] = frozenset(),
        cached: bool = False,
    ) -> tuple[RunView, PrunePlan] | None:
        """Return the run as it is now and what to remove of it; None when it is not this generation's any more.

        The files of all that is to be removed are listed anew. Raises as `scan_run`.

        Args:
            settled: the last step that was dealt with: later ones of this generation stay, as they may still be
                written or wait to be copied. None: nothing goes on meanwhile.
            waiting: checkpoints that are not removed for now, whole or not.
            cached: this is a faster place for some of a root's checkpoints, with room neither for the one that this
                start resumed from, nor for those of older generations that are on no timeline any more.
        """
        remembered = self._recall()
        for view in (remembered, None) if remembered is not None else (None,):
            view = view or self._look()
            if view is None:
                return None
            live = [ref for ref in view.folders if ref.generation == self._generation]
            later = {ref for ref in live if settled is not None and ref.step > settled}
            seen = dataclasses.replace(view, held=view.held | waiting | later)
            plan = plan_prune(
                self._store, seen, keep, live=self._generation, settled=settled, briefs=self._briefs, cached=cached
            )
            if cached:
                lost = _find_abandoned(seen, self._generation)
                plan = dataclasses.replace(plan, orphans=tuple(sorted({*plan.orphans, *lost})))
            if view is not remembered or not plan.all or self._stands(view, plan):
                return self._with_files(view, plan)
        raise AssertionError("a view that was just read is planned with")

    def _look(self) -> RunView | None:
        """Read everything anew, and remember it."""
        self._view = None
        view = scan_run(self._store)
        if view is None or (view.run_id, view.head) != (self._run_id, self._generation):
            return None
        self._view = view
        return view

    def _recall(self) -> RunView | None:
        """Return the run from what is remembered and what may have changed; None where that does not fit together."""
        seen = self._view
        if seen is None or read_run_id(self._store) != self._run_id or list_generations(self._store) != seen.numbers:
            return None
        prefix = f"{format_generation(self._generation)}/"
        names = self._store.list_folders(prefix)
        live = [ref for name in names if (ref := find_step(self._generation, name)) is not None]
        older = [ref for ref in seen.folders if ref.generation != self._generation]
        folders: dict[StepRef, StepFolder] = {}
        for ref in sorted([*older, *live]):
            folder = seen.folders.get(ref)
            if folder is None or not folder.committed or folder.pruning:
                folder = StepFolder(ref=ref, files=list_step_files(self._store, ref))
            if folder.files:
                folders[ref] = folder
        quarantined, held = read_marks(self._store)
        self._view = dataclasses.replace(seen, folders=folders, quarantined=quarantined, held=held)
        return self._view

    def _stands(self, view: RunView, plan: PrunePlan) -> bool:
        """Say whether what is kept is still there: someone else may prune the run too."""
        for ref in view.timeline:
            if ref not in plan.steps and (
                exists(self._store, ref.key(PRUNE_INTENT)) or not exists(self._store, ref.key(COMMIT_RECORD))
            ):
                return False
        return True

    def _with_files(self, view: RunView, plan: PrunePlan) -> tuple[RunView, PrunePlan]:
        found = {ref: StepFolder(ref=ref, files=list_step_files(self._store, ref)) for ref in plan.all}
        there = {ref for ref, folder in found.items() if folder.files}
        current = dataclasses.replace(view, folders={**view.folders, **found})
        plan = PrunePlan(
            steps=tuple(ref for ref in plan.steps if ref in there),
            unfinished=tuple(ref for ref in plan.unfinished if ref in there),
            orphans=tuple(ref for ref in plan.orphans if ref in there),
            removed_bytes=sum(sum(folder.files.values()) for folder in found.values()),
        )
        # Whatever comes of it, these are listed again in the next pass.
        kept = {ref: _shorten(folder) for ref, folder in view.folders.items() if ref not in found}
        forgotten = {ref: StepFolder(ref=ref, files={PRUNE_INTENT: 0}) for ref in found}
        self._view = dataclasses.replace(view, folders={**kept, **forgotten})
        self._briefs = {ref: brief for ref, brief in self._briefs.items() if ref in kept}
        return current, plan


def _find_abandoned(view: RunView, live: int) -> list[StepRef]:
    """Return the committed checkpoints that a start which went back, or began anew, left behind it."""
    timeline = set(view.timeline)
    return [
        ref
        for ref, folder in view.folders.items()
        if folder.committed and not folder.pruning and ref.generation < live and ref not in timeline | view.held
    ]


def _shorten(folder: StepFolder) -> StepFolder:
    """Return a committed step's folder with no more than that: its files may be tens of thousands."""
    if not folder.committed or folder.pruning:
        return folder
    return StepFolder(ref=folder.ref, files={COMMIT_RECORD: folder.files[COMMIT_RECORD]})
