"""Remove checkpoints by policy, and what failed saves left behind.

The order of one removal: look for a newer generation, prune intent, look again (a newer one exists: withdraw),
commit record, parts, everything else, intent. A start claims its generation before it looks at its parent's
intent, so that of a pruner and a start that race, one sees the other. An interrupted removal is finished by the
next prune; a step whose removal was decided is never loaded again.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shardkeep.engine.listing import read_brief
from shardkeep.engine.run import WRITER, RunView, StepFolder, is_void, list_generations, scan_run
from shardkeep.errors import AlreadyExists, Corrupt, Fenced
from shardkeep.events import Event, EventSink
from shardkeep.format.names import COMMIT_RECORD, PRUNE_INTENT, StepRef, find_part
from shardkeep.format.records import CommitBrief, PruneRecord, decode_metrics, encode_record
from shardkeep.plan.retention import Candidate, Keep, plan_removal
from shardkeep.storage.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What a prune would remove.

    Attributes:
        steps: committed steps on the timeline that no rule keeps.
        unfinished: steps whose removal began before and was interrupted.
        orphans: tries that were never committed and never can be: of a generation older than the live one, or given
            up by the live one.
        removed_bytes: size of it all.
    """

    steps: tuple[StepRef, ...]
    unfinished: tuple[StepRef, ...]
    orphans: tuple[StepRef, ...]
    removed_bytes: int

    @property
    def all(self) -> tuple[StepRef, ...]:
        return tuple(sorted({*self.steps, *self.unfinished, *self.orphans}))


def plan_prune(
    store: Store,
    view: RunView,
    keep: Keep,
    *,
    live: int | None,
    settled: int | None = None,
    briefs: dict[StepRef, CommitBrief] | None = None,
    cached: bool = False,
) -> PrunePlan:
    """Decide what to remove, from what storage shows now. Removes nothing.

    Args:
        live: the generation that is saving now and whose uncommitted tries are given up, those up to the step
            `settled` (None: all; later ones may be under way); None when nobody saves (offline): then only older
            generations' tries are orphans.
        cached: this is no root, which alone must hold the checkpoint that the live generation resumed from.
        briefs: what is known of commit records, which never change; those that are read are added.
    """
    timeline = view.timeline
    parent = view.generations[view.head].parent if view.head and not cached else None
    briefs = {} if briefs is None else briefs
    # Without a rule nothing that counts is removed, whatever it is.
    candidates = [_candidate(store, view, ref, briefs) for ref in timeline] if keep != Keep() else []
    steps = plan_removal(candidates, keep, parent=parent)
    unfinished = tuple(ref for ref, folder in view.folders.items() if folder.pruning)
    orphans = tuple(
        ref
        for ref, folder in view.folders.items()
        if not folder.committed
        and not folder.pruning
        and ref not in view.held
        and (ref.generation < view.head or (live == view.head and (settled is None or ref.step <= settled)))
    )
    sizes = sum(sum(view.folders[ref].files.values()) for ref in {*steps, *unfinished, *orphans})
    return PrunePlan(steps=steps, unfinished=unfinished, orphans=orphans, removed_bytes=sizes)


def _candidate(store: Store, view: RunView, ref: StepRef, briefs: dict[StepRef, CommitBrief]) -> Candidate:
    held = ref in view.held
    brief = briefs.get(ref)
    if brief is None:
        brief, _ = read_brief(store, ref, view.run_id)
        if brief is not None:
            # Of thousands of parts nothing is needed here.
            briefs[ref] = msgspec.structs.replace(brief, parts=())
    if brief is None:
        # A damaged record is for verify to report; retention neither counts on it nor rates it.
        return Candidate(ref=ref, metrics={}, healthy=False, held=held, damaged=True)
    damaged = ref in view.quarantined
    metrics = decode_metrics(brief.facts.metrics)
    return Candidate(ref=ref, metrics=metrics, healthy=brief.facts.healthy, held=held, damaged=damaged)


def prune(
    store: Store, plan: PrunePlan, view: RunView, events: EventSink, *, by_generation: int
) -> tuple[StepRef, ...]:
    """Carry out a plan; return what was removed, durable.

    Args:
        by_generation: the generation on whose behalf; when a newer one exists, nothing more is removed.

    Raises:
        Fenced: a newer generation owns the run. StorageError: what was removed stays removed; run it again.
    """
    removed: list[StepRef] = []
    for ref in plan.all:
        _check_newest(store, by_generation, ref)
        if not remove_step(store, view.folders[ref], view.run_id, by_generation):
            continue
        events.emit(
            Event(
                name="prune.removed",
                text=f"removed {ref}",
                fields={"step": ref.step, "generation": ref.generation},
            )
        )
        removed.append(ref)
    return tuple(removed)


def remove_step(store: Store, folder: StepFolder, run_id: str, by_generation: int) -> bool:
    """Remove one try at a step in an order that no crash can turn into a half checkpoint.

    Returns False, and leaves it, when another process has just begun to remove it: that one's intent is its own.
    """
    ref = folder.ref
    intent = ref.key(PRUNE_INTENT)
    if not folder.pruning:
        record = PruneRecord(run_id=run_id, ref=ref, by_generation=by_generation)
        # ORDER: intent, then the second look at the generations, then the commit record.
        try:
            store.put(intent, encode_record(record, writer=WRITER), if_absent=True)
        except AlreadyExists:
            if not is_void(store, ref):
                return False
            store.put(intent, encode_record(record, writer=WRITER))
        try:
            _check_newest(store, by_generation, ref)
        except Fenced:
            store.delete([intent])
            raise
    names = sorted(folder.files.keys() - {PRUNE_INTENT, COMMIT_RECORD})
    parts = [name for name in names if find_part(name) is not None]
    others = [name for name in names if find_part(name) is None]
    # ORDER: commit record, then parts: without parts nobody can write the record again. CRASH: anywhere here the
    # intent is still there, so that the step is neither loaded nor rolled forward, and the next prune goes on.
    store.delete([ref.key(name) for name in (COMMIT_RECORD, *parts, *others)])
    store.delete([intent])
    return True


def _check_newest(store: Store, generation: int, ref: StepRef) -> None:
    newest = max(list_generations(store), default=0)
    if newest > generation:
        raise Fenced(
            f"generation {newest} has taken over this run; generation {generation} removes no more ({ref} stays)",
            step=ref.step,
            advice="stop this process: a newer start of the run is at work",
        )


def rescan(store: Store) -> RunView:
    """Return the run as it is now; there must be one."""
    view = scan_run(store)
    if view is None:
        raise Corrupt(f"{store.url}: the run's record is gone")
    return view
