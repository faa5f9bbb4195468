"""`save`, `load` and `open`: one checkpoint, without a policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from shardkeep.engine.checkpoint import Checkpoint
from shardkeep.engine.locate import StepChoice, find_checkpoint
from shardkeep.engine.prune import remove_step
from shardkeep.engine.restore import restore
from shardkeep.engine.run import list_step_folders, scan_run
from shardkeep.engine.save import SaveOptions, Saver
from shardkeep.errors import AlreadyExists
from shardkeep.events import LogSink
from shardkeep.format.names import StepRef
from shardkeep.format.records import CommitRecord
from shardkeep.manager.policies import as_number
from shardkeep.manager.resume import claim_next
from shardkeep.ranks.base import Group
from shardkeep.ranks.connect import connect
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_store
from shardkeep.storage.retry import RetryingStore


def save(
    root: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int = 0,
    overwrite: bool = False,
    metrics: Mapping[str, float] | None = None,
) -> StepRef:
    """Save one checkpoint of `state` under `root`; committed and durable on return. All ranks call it alike.

    Args:
        root: a folder that holds no checkpoint yet, or with `overwrite` one whose checkpoint this one replaces: the
            old one is removed after the new one is committed.

    Raises:
        AlreadyExists: there is a checkpoint and `overwrite` was not given. Else as `CheckpointManager.save`.
    """
    from shardkeep.state.capture import capture

    numbers = {name: as_number(name, value) for name, value in (metrics or {}).items()}
    store = RetryingStore(open_store(root))
    group = connect()
    try:
        before = _check_free(store, group, overwrite)
        claim = claim_next(store, group, LogSink(), fresh=True, step=None)
        saver = Saver(store, group, run_id=claim.run_id, generation=claim.generation)
        saved = saver.save(step, lambda: capture(state), SaveOptions(metrics=numbers))
        if before and group.rank == 0:
            _remove_replaced(store, claim.run_id, claim.generation, before)
        return saved.ref
    finally:
        group.close()


def _check_free(store: Store, group: Group, overwrite: bool) -> tuple[StepRef, ...]:
    def decide(found: list[bytes]) -> bytes:
        view = scan_run(store)
        timeline = view.timeline if view is not None else ()
        if timeline and not overwrite:
            raise AlreadyExists(
                f"{store.url} holds a checkpoint already ({timeline[-1]})",
                advice="save elsewhere, pass overwrite=True to replace it, or use CheckpointManager to add steps",
            )
        return msgspec.json.encode(timeline)

    return msgspec.json.decode(group.agree("save.free", lambda: b"", decide), type=tuple[StepRef, ...])


def _remove_replaced(store: Store, run_id: str, generation: int, before: tuple[StepRef, ...]) -> None:
    for number in sorted({ref.generation for ref in before}):
        for folder in list_step_folders(store, number).values():
            if folder.ref in before:
                remove_step(store, folder, run_id, generation)


def load(
    root: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: StepChoice = "latest",
    cast: bool = False,
    strict: bool = True,
) -> CommitRecord:
    """Restore `state` in place from a checkpoint under `root`; changes nothing there. All ranks call it alike.

    Args:
        strict: every stored entry must be taken and RNG is restored too. False: fill what the live state has and
            leave the rest, RNG included; entries that the live state wants must still be there.
        cast: let stored dtypes be converted to the live ones.

    Raises:
        NotFound: no run or no such step there. NotCommitted, StateMismatch, Corrupt, StorageError, PeerFailure.
    """
    from shardkeep.state.restore import plan_restore

    store = RetryingStore(open_store(root))
    group = connect()
    try:
        verdict = group.agree(
            "load.choose", lambda: b"", lambda found: msgspec.json.encode(find_checkpoint(store, step))
        )
        commit = msgspec.json.decode(verdict, type=CommitRecord)
        origin = (int(commit.run_id[:15], 16), commit.ref.generation, group.rank)
        restore(
            store,
            group,
            commit,
            lambda catalog: plan_restore(state, catalog, cast=cast, strict=strict),
            lambda plan: plan.finish(rng_derivation=origin),
            strict=strict,
        )
        return commit
    finally:
        group.close()


def open(root: str | os.PathLike[str], *, step: StepChoice = "latest") -> Checkpoint:
    """Open a committed checkpoint for lazy, partial, verified reading. Needs no torch until tensors are indexed.

    Raises:
        NotFound, NotCommitted, Corrupt, IncompatibleFormat, StorageError.
    """
    store = RetryingStore(open_store(root))
    return Checkpoint(store, find_checkpoint(store, step))
