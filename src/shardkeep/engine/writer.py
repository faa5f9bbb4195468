"""Write one rank's part: shards block by block, leaves digested while hot, then the part record.

A shard comes straight from the live tensors through `IO_THREADS` blocks of 8 MiB, whatever the state's size, or from
an image of it in memory, where it was staged.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardkeep import knobs
from shardkeep.engine.blocks import run_blocks
from shardkeep.engine.parallel import run_parallel
from shardkeep.engine.phases import PhaseTimes
from shardkeep.engine.run import WRITER
from shardkeep.errors import CheckpointError
from shardkeep.format.digests import BLOCK_BYTES, DIGEST_BYTES, LEAF_BYTES, digest_leaves, leaf_count
from shardkeep.format.names import StepRef, format_digests, format_part
from shardkeep.format.records import FileRecord, PartRecord, PartSummary, encode_record
from shardkeep.plan.shards import ShardPlan, describe_shards
from shardkeep.spec.chunks import Chunk, iter_runs
from shardkeep.spec.dtypes import get_dtype
from shardkeep.spec.tensors import HostBytes, LocalTensor
from shardkeep.storage.base import ObjectWriter, Store
from shardkeep.storage.kernel import set_io_priority


@dataclass(frozen=True, slots=True)
class Source:
    """Where an item's bytes come from: `data`'s bytes from `start` on."""

    data: HostBytes
    start: int


def find_source(tensor: LocalTensor, chunk: Chunk) -> Source:
    """Return the local bytes of `chunk`, which is a whole local piece or a run of its rows."""
    for piece in tensor.pieces:
        if piece.chunk == chunk:
            return Source(piece.data, 0)
        if all(
            o <= c and c + n <= o + m
            for o, m, c, n in zip(piece.chunk.offsets, piece.chunk.sizes, chunk.offsets, chunk.sizes, strict=True)
        ):
            runs = list(iter_runs(chunk, piece.chunk))
            if len(runs) == 1:
                return Source(piece.data, runs[0][0] * get_dtype(tensor.dtype).itemsize_bytes)
    held = [piece.chunk for piece in tensor.pieces]
    raise CheckpointError(f"{tensor.key}: the plan asks this rank for {chunk}, it holds {held}", key=tensor.key)


class ShardFile:
    """One shard on its way to storage: filled and written block by block, by any thread, then made durable.

    Attributes:
        plan: the file's layout.
        sources: where each item's bytes come from, in the order of the items.
        memory: the file's image, once it is staged; None: blocks are filled from the sources.
        gives_way: says whether other reads and writes of this host come first, asked before each block.
        is_cloned: the store has made the file from one of the same bytes (`engine.unchanged`): not to be written.
    """

    def __init__(self, plan: ShardPlan, tensors: Mapping[str, LocalTensor]) -> None:
        self.plan = plan
        self.sources = [find_source(tensors[item.outgoing.key], item.outgoing.chunk) for item in plan.items]
        self.memory: memoryview | None = None
        self.gives_way: Callable[[], bool] | None = None
        self.is_cloned = False
        self.digests = bytearray(leaf_count(plan.size_bytes) * DIGEST_BYTES)
        self._begins = [item.begin for item in plan.items]
        self._lock = threading.Lock()
        self._writer: ObjectWriter | None = None

    def write_block(self, store: Store, key: str, offset: int, block: memoryview, spent: PhaseTimes) -> None:
        """Write the block at `offset`, through `block` where the file has no image."""
        with self._lock:
            if self._writer is None:
                self._writer = store.writer(key, self.plan.size_bytes)
            writer = self._writer
        data, _, _ = self.take_block(offset, block, spent)
        if self.gives_way is not None:
            set_io_priority(idle=self.gives_way())
        with spent.phase("write"):
            writer.write_at(offset, data)

    def take_block(self, offset: int, block: memoryview, spent: PhaseTimes) -> tuple[memoryview, int, bytes]:
        """Return the bytes of the block at `offset`, where its digests begin in the file's, and these.

        The bytes lie in `block` where the file has no image. The digests are kept.
        """
        end = min(offset + BLOCK_BYTES, self.plan.size_bytes)
        if self.memory is not None:
            data = self.memory[offset:end]
        else:
            data = block[: end - offset]
            with spent.phase("copy"):
                self._fill(offset, data)
        with spent.phase("digest"):
            found = digest_leaves(data)
        at = offset // LEAF_BYTES * DIGEST_BYTES
        self.digests[at : at + len(found)] = found
        return data, at, found

    def finish(self, spent: PhaseTimes) -> None:
        """Make the file durable, once every block is written."""
        assert self._writer is not None
        with spent.phase("sync"):
            self._writer.finish()
        self._writer = None  # a peer may fail yet, and the file go to another place

    def _fill(self, offset: int, data: memoryview) -> None:
        """Make `data` the file's bytes from `offset` on."""
        end = offset + len(data)
        header = self.plan.header
        if offset < len(header):
            part = header[offset:end]
            data[: len(part)] = part
        at = max(bisect_right(self._begins, offset) - 1, 0)
        for number in range(at, len(self.plan.items)):
            item = self.plan.items[number]
            if item.begin >= end:
                break
            start, stop = max(item.begin, offset), min(item.end, end)
            if start < stop:
                source = self.sources[number]
                source.data.copy_out(source.start + start - item.begin, data[start - offset : stop - offset])

    def abort(self) -> None:
        """Give up what was begun on storage."""
        with self._lock:
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()


def write_part(
    store: Store,
    record: PartRecord,
    files: Sequence[ShardFile],
    spent: PhaseTimes,
    confirm: Callable[[], None] = lambda: None,
) -> PartSummary:
    """Write this rank's shards, digests and part record; all durable on return, in this order.

    Shards that are cloned are there already.

    Args:
        record: everything but what follows from `files` (shards, tensors, digests).
        spent: takes the seconds of each phase, added up over the threads.
        confirm: called when all bytes are durable, before the record says so; what it raises takes all back.

    Raises:
        StorageError: nothing counts until a commit record names it; what was written is removed again, as
            far as the store lets us.
    """
    ref = record.ref
    plans = [file.plan for file in files]
    to_write = [file for file in files if not file.is_cloned]
    try:
        run_blocks(
            [(file, offset) for file in to_write for offset in range(0, file.plan.size_bytes, BLOCK_BYTES)],
            lambda task, block: task[0].write_block(store, ref.key(task[0].plan.name), task[1], block, spent),
            thread_count=knobs.get_int("IO_THREADS"),
        )
        # All at the end: a flush in the middle makes the device stop the writes of the next file.
        run_parallel(to_write, lambda file: file.finish(spent), thread_count=len(to_write), name="shardkeep-sync")
        with spent.phase("records"):
            digests = b"".join(bytes(file.digests) for file in files)
            store.put(ref.key(format_digests(record.rank)), digests)
            # ORDER: before the part record, by which the next start may commit the checkpoint.
            confirm()
            return _write_record(store, record, plans, digests)
    except BaseException:
        for file in files:
            file.abort()
        remove_quietly(store, ref, own_names(record.rank, [plan.name for plan in plans]))
        raise


def _write_record(store: Store, record: PartRecord, plans: Sequence[ShardPlan], digests: bytes) -> PartSummary:
    shards, chunks, own = describe_shards(plans)
    part = PartRecord(
        run_id=record.run_id,
        ref=record.ref,
        rank=record.rank,
        world_size=record.world_size,
        plan=record.plan,
        shards=shards,
        digests=FileRecord(len(digests), hashlib.sha256(digests).hexdigest()),
        tensors=chunks,
        per_rank=own,
        values=record.values,
        facts=record.facts,
        journal=record.journal,
    )
    data = encode_record(part, writer=WRITER)
    # ORDER: the part comes after every shard and the digests are durable; a part that exists is complete.
    store.put(record.ref.key(format_part(record.rank)), data)
    return summarize_part(part, data)


def summarize_part(part: PartRecord, data: bytes) -> PartSummary:
    """Return how the commit record names a part, of its record and that record's bytes."""
    return PartSummary(
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        shard_bytes=sum(shard.size_bytes for shard in part.shards),
        shard_count=len(part.shards),
    )


def own_names(rank: int, shards: list[str]) -> list[str]:
    """Return a rank's files in a step's folder, in the order in which they are removed: the part first."""
    return [format_part(rank), format_digests(rank), *shards]


def remove_quietly(store: Store, ref: StepRef, names: Sequence[str]) -> None:
    """Remove files of an uncommitted try; what cannot be removed is an orphan that the next prune finds."""
    with contextlib.suppress(CheckpointError):
        store.delete([ref.key(name) for name in names])
