"""What one start does about old checkpoints after its saves: retention by policy, and what failed saves left."""

from __future__ import annotations

from shardkeep.engine.journal import prune_journals
from shardkeep.engine.memory import RunMemory
from shardkeep.engine.prune import prune
from shardkeep.errors import CheckpointError
from shardkeep.events import Event, EventSink
from shardkeep.format.names import StepRef
from shardkeep.manager.resume import Claim
from shardkeep.plan.retention import Keep
from shardkeep.storage.base import Store


class Retention:
    """Removes checkpoints of the generation that `claim` owns, and of those before it.

    One rank `leads`, of those that see the same objects; the others remove nothing.

    Attributes:
        left_behind: a failed save may have left files that nothing names.
        settled: the last step that was dealt with, where a later one may be under way meanwhile; else None.
        waiting: checkpoints that stay, whatever the rule says: they are still to be copied elsewhere.
    """

    def __init__(self, store: Store, events: EventSink, claim: Claim, *, leads: bool) -> None:
        self._store = store
        self._leads = leads
        self._events = events
        self._claim = claim
        self._memory = RunMemory(store, run_id=claim.run_id, generation=claim.generation)
        self.left_behind = False
        self.settled: int | None = None
        self.waiting: frozenset[StepRef] = frozenset()

    def after_save(self, keep: Keep) -> None:
        """Look whether there is something to remove, where that is possible at all."""
        if keep != Keep() or self.left_behind:
            self.sweep(keep)

    def sweep(self, keep: Keep, *, cached: bool = False) -> tuple[StepRef, ...]:
        """Remove what `keep` does not keep, and what failed saves left; return what was removed.

        A failure is reported, and the run goes on: the next sweep tries again.

        Args:
            cached: this is a faster place, see `RunMemory.plan`.
        """
        removed: tuple[StepRef, ...] = ()
        if not self._leads:
            return removed
        try:
            found = self._memory.plan(keep, settled=self.settled, waiting=self.waiting, cached=cached)
            if found is not None:
                view, plan = found
                removed = prune(self._store, plan, view, self._events, by_generation=self._claim.generation)
                kept = [r.step for r, folder in view.folders.items() if folder.committed and r not in removed]
                if removed and kept:
                    prune_journals(self._store, view.numbers, before=min(kept))
                self.left_behind = False
        except CheckpointError as error:
            text = f"old checkpoints were not removed: {error}"
            self._events.emit(Event(name="prune.failed", level="warning", text=text))
        return removed
