"""From what a person types to a committed checkpoint: a run's URL and a step, or a step folder's own path."""

from __future__ import annotations

from typing import Literal

from shardkeep.engine.recover import choose_steps
from shardkeep.engine.run import RunView, read_commit, scan_run
from shardkeep.errors import NotCommitted, NotFound
from shardkeep.format.names import StepRef
from shardkeep.format.records import CommitRecord
from shardkeep.storage.base import Store

StepChoice = int | Literal["latest"]


def find_checkpoint(store: Store, step: StepChoice = "latest") -> CommitRecord:
    """Return the commit record of a step on the run's timeline; changes nothing.

    Raises:
        NotFound: no run, or no such step. NotCommitted: there are only saves that were never completed. Corrupt: the
            commit record is damaged (an older step is never taken instead).
    """
    view = scan_run(store)
    if view is None:
        raise NotFound(
            f"{store.url}: there is no run here (no run.json)", advice="check the path; it names the run's root"
        )
    return read_commit(store, choose_step(store, view, step), run_id=view.run_id)


def choose_step(store: Store, view: RunView, step: StepChoice) -> StepRef:
    """Return the step meant, without a look at its record. Raises NotFound, NotCommitted."""
    chosen = choose_steps(store, view, step=None if step == "latest" else step)
    if chosen:
        return chosen[0]
    if view.timeline:
        raise NotFound(
            f"{store.url}: every checkpoint is quarantined as damaged ({len(view.timeline)} of them)",
            advice=f"shardkeep verify {store.url}; name a step to read it all the same",
        )
    tries = [ref for ref, folder in view.folders.items() if not folder.committed]
    if tries:
        raise NotCommitted(
            f"{store.url}: no checkpoint is committed; {len(tries)} saves were begun, the last at {tries[-1]}",
            advice="start the training again: a complete one is committed then",
        )
    raise NotFound(f"{store.url}: the run has no checkpoint yet", advice="start the training: it saves by its policy")
