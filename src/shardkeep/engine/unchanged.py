"""Frozen shard files that are what an earlier checkpoint holds: cloned there by the store, not written again.

What decides is the digests of the bytes in memory now against those of the file in storage, leaf by leaf, header
included. No counter of changes and no promise of the caller's is believed. What a clone makes is an object of the
checkpoint's own: digests, part record and every later reader are as if it had been written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardkeep import knobs
from shardkeep.engine.blocks import run_blocks
from shardkeep.engine.parallel import run_parallel
from shardkeep.engine.phases import PhaseTimes
from shardkeep.engine.reader import PartReader
from shardkeep.engine.run import read_commit
from shardkeep.engine.writer import ShardFile
from shardkeep.errors import CheckpointError, NotFound, StorageError
from shardkeep.format.digests import BLOCK_BYTES
from shardkeep.format.names import StepRef
from shardkeep.storage.base import Store

_REFUSALS_COUNT: Final = 2
"""After so many saves in a row that could not clone, a store is one that cannot; once may be too many links."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A shard file in a store: its key, its size, the digests of its leaves one after the other."""

    key: str
    size_bytes: int
    digests: bytes


class Unchanged:
    """What one rank knows of the frozen files in each store: those of the last checkpoint committed there.

    Args:
        parent: the checkpoint that this start resumed from; its files count until a save is committed.
    """

    def __init__(self, run_id: str, rank: int, parent: StepRef | None) -> None:
        self._run_id, self._rank, self._parent = run_id, rank, parent
        self._known: dict[Store, Mapping[str, Origin]] = {}
        self._refusals: dict[Store, int] = {}

    def take_over(self, store: Store, ref: StepRef, files: Sequence[ShardFile], spent: PhaseTimes) -> None:
        """Clone the files that did not change into the folder of `ref`; `is_cloned` of each file says so.

        Those are durable on return. All others are to be written, whatever the reason: nothing that a store does here
        makes a save fail.
        """
        for file in files:
            file.is_cloned = False
        frozen = [file for file in files if file.plan.frozen]
        if not frozen or self._refusals.get(store, 0) >= _REFUSALS_COUNT:
            return
        with spent.phase("part"):
            self._clone_same(store, ref, frozen, spent)

    def _clone_same(self, store: Store, ref: StepRef, frozen: Sequence[ShardFile], spent: PhaseTimes) -> None:
        known = self._find(store, {file.plan.name for file in frozen})
        pairs = [(file, known[file.plan.name]) for file in frozen if file.plan.name in known]
        same = _find_same(pairs, spent)
        refused: list[CheckpointError] = []

        def clone(pair: tuple[ShardFile, Origin]) -> None:
            file, origin = pair
            with spent.phase("clone"):
                error = clone_quietly(store, origin.key, ref.key(file.plan.name))
            file.is_cloned = error is None
            if isinstance(error, StorageError):  # not a source that was pruned meanwhile
                refused.append(error)

        run_parallel(same, clone, thread_count=knobs.get_int("IO_THREADS"), name="shardkeep-clone")
        if same:
            self._refusals[store] = self._refusals.get(store, 0) + 1 if refused else 0

    def remember(self, store: Store, ref: StepRef, files: Sequence[ShardFile]) -> None:
        """Take note of a checkpoint that is committed: its frozen files are what the next save is compared with."""
        self._known[store] = {
            file.plan.name: Origin(ref.key(file.plan.name), file.plan.size_bytes, bytes(file.digests))
            for file in files
            if file.plan.frozen
        }

    def _find(self, store: Store, names: Collection[str]) -> Mapping[str, Origin]:
        if store not in self._known:
            origins = {}
            if self._parent is not None:
                # Without them all is written, as in a first save.
                with contextlib.suppress(CheckpointError):
                    origins = read_origins(store, self._parent, run_id=self._run_id, rank=self._rank, names=names)
            self._known[store] = origins
        return self._known[store]


def clone_quietly(store: Store, source: str, target: str) -> CheckpointError | None:
    """Clone an object, durable on return; what went wrong is returned, and the target is free to be written."""
    try:
        store.clone(source, target)
    except (NotFound, StorageError) as error:
        # It may be there all the same, its answer lost; a writer wants the key free.
        with contextlib.suppress(StorageError):
            store.delete([target])
        return error
    return None


def describe_part(part: PartReader) -> dict[str, Origin]:
    """Return the shards of a part by name, as its digests file has them. Raises NotFound, Corrupt, StorageError."""
    return {
        shard.name: Origin(part.ref.key(shard.name), shard.size_bytes, bytes(part.digests.leaves(at)))
        for at, shard in enumerate(part.record.shards)
    }


def read_origins(store: Store, ref: StepRef, *, run_id: str, rank: int, names: Collection[str]) -> dict[str, Origin]:
    """Return those shards of a rank's part that have one of these names, as its digests file describes them.

    Raises:
        NotCommitted, NotFound, Corrupt, StorageError.
    """
    commit = read_commit(store, ref, run_id=run_id)
    if rank >= commit.world_size:
        return {}
    found = describe_part(PartReader(store, commit, rank))
    return {name: origin for name, origin in found.items() if name in names}


def _find_same(pairs: Sequence[tuple[ShardFile, Origin]], spent: PhaseTimes) -> list[tuple[ShardFile, Origin]]:
    """Return the pairs of the same bytes; a file is looked at up to its first difference."""
    changed = {file.plan.name for file, origin in pairs if file.plan.size_bytes != origin.size_bytes}

    def compare(task: tuple[ShardFile, Origin, int], block: memoryview) -> None:
        file, origin, offset = task
        if file.plan.name in changed:
            return
        _, at, digests = file.take_block(offset, block, spent)
        if origin.digests[at : at + len(digests)] != digests:
            changed.add(file.plan.name)

    tasks = [
        (file, origin, offset)
        for file, origin in pairs
        if file.plan.name not in changed
        for offset in range(0, file.plan.size_bytes, BLOCK_BYTES)
    ]
    run_blocks(tasks, compare, thread_count=knobs.get_int("IO_THREADS"))
    return [pair for pair in pairs if pair[0].plan.name not in changed]
