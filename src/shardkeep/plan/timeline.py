"""Which checkpoints count: the timeline, and what follows from it.

A generation's parent is the commit it resumed from. The timeline is the newest generation's commits and,
recursively, its parent's commits up to the step of that parent. So a rollback is a new generation with an older
parent, undoing it is another, and what a stale generation commits after it was left is on no timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardkeep.errors import Corrupt
from shardkeep.format.names import StepRef


def plan_timeline(
    parents: Mapping[int, StepRef | None], commits: Iterable[StepRef], *, head: int | None = None
) -> tuple[StepRef, ...]:
    """Return the committed steps that count, ascending by step.

    Args:
        parents: generation -> the commit it resumed from, or None for a fresh start.
        commits: every committed try at every step.
        head: the generation to look from; the newest by default.

    Raises:
        Corrupt: a parent names a generation that does not exist or is not older than its child.
    """
    by_generation: dict[int, list[StepRef]] = {}
    for ref in commits:
        by_generation.setdefault(ref.generation, []).append(ref)
    if not parents:
        return ()
    generation = max(parents) if head is None else head
    limit: StepRef | None = None
    # Steps at or above it are not what the generations looked at so far went on from.
    ceiling: int | None = None
    chosen: dict[int, StepRef] = {}
    while True:
        if generation not in parents:
            what = "is a parent but" if limit is not None else "was asked for, but"
            raise Corrupt(
                f"generation {generation} {what} its record is missing",
                advice="restore its generation.json from another copy of the run, or start with fresh=True",
            )
        for ref in sorted(by_generation.get(generation, [])):
            # The parent itself counts, later tries at its step and later steps of its generation do not.
            counts = limit is None or ref.step < limit.step or ref == limit
            if counts and (ceiling is None or ref.step < ceiling):
                kept = chosen.get(ref.step)
                if kept is None or kept.generation == ref.generation:
                    chosen[ref.step] = ref
        parent = parents[generation]
        if parent is None:
            return tuple(chosen[step] for step in sorted(chosen))
        if parent.generation >= generation:
            raise Corrupt(f"generation {generation} names generation {parent.generation} as its parent: not older")
        # A child may have saved below the step it began at; then no ancestor counts beyond the child's own limit.
        if limit is not None:
            ceiling = limit.step if ceiling is None else min(ceiling, limit.step)
        limit, generation = parent, parent.generation
