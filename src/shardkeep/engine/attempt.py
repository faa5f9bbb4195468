"""May this process still save, and into which folder? Asked by the coordinator before each save."""

from __future__ import annotations

from shardkeep.engine.run import exists, list_generations, read_generation, read_run_id
from shardkeep.errors import AlreadyExists, Fenced, NotFound, StorageError, UsageError
from shardkeep.format.names import COMMIT_RECORD, find_step, format_generation
from shardkeep.storage.base import Store


def choose_attempt(store: Store, step: int, *, run_id: str, generation: int, newest_step: int) -> int:
    """Return the number of a try whose folder nothing was ever written to.

    Args:
        newest_step: the last one that this start saved or resumed from.

    Raises:
        UsageError: the step lies before that. Fenced: a later generation owns the run, or the root is another run's
            now. AlreadyExists: this generation committed the step before. StorageError.
    """
    if step < newest_step:
        raise UsageError(
            f"step {step}: this start is at step {newest_step} already, and the next one would go on from "
            "there, not from what is saved now",
            step=step,
            advice="count on from manager.step, as manager.steps() does, or begin with resume(state, fresh=True)",
        )
    _check_root(store, step, run_id, generation)
    newest = max(list_generations(store), default=0)
    if newest > generation:
        raise Fenced(
            f"generation {newest} has taken over this run; this process is generation {generation}",
            step=step,
            advice="stop this process: what it would save, nobody would ever read",
        )
    tries = [
        ref
        for name in store.list_folders(f"{format_generation(generation)}/")
        if (ref := find_step(generation, name)) and ref.step == step
    ]
    for ref in tries:
        if exists(store, ref.key(COMMIT_RECORD)):
            raise AlreadyExists(
                f"{ref} is committed already",
                step=step,
                advice="save a later step, or start the job again: each start has folders of its own",
            )
    return max((ref.attempt for ref in tries), default=0) + 1


def _check_root(store: Store, step: int, run_id: str, generation: int) -> None:
    """Raise unless the root still is that of this run: it may have been removed, unmounted or exchanged."""
    url = store.url
    try:
        found = read_run_id(store)
        owner = read_generation(store, generation).run_id
    except NotFound:
        found = owner = None
    if found is None:
        raise StorageError(
            f"{url}: generation {generation}, which this process claimed there, is gone: the root was "
            "removed or is not mounted; what is saved there now could not be resumed",
            retryable=False,
            step=step,
            advice=f"bring the root back (findmnt -T {url}), or start the job again",
        )
    if (found, owner) != (run_id, run_id):
        raise Fenced(
            f"{url} holds another run ({found}) than the one that this process began there ({run_id})",
            step=step,
            advice="stop this process, and give each run a root of its own",
        )
