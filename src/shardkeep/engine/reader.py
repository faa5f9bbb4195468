"""Read byte ranges of shards straight into place, every leaf checked against its digest in the same pass."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from shardkeep import knobs
from shardkeep.engine.blocks import run_blocks
from shardkeep.engine.phases import PhaseTimes
from shardkeep.engine.run import read_twice, record_limit
from shardkeep.errors import Corrupt, NotFound
from shardkeep.format.digests import (
    BLOCK_BYTES,
    LEAF_BYTES,
    DigestTable,
    find_bad_leaf,
    find_bad_leaf_in,
    leaf_count,
)
from shardkeep.format.names import StepRef, format_digests, format_part, is_shard
from shardkeep.format.records import CommitRecord, PartRecord, decode_record
from shardkeep.plan.reads import Segment, plan_ranges
from shardkeep.spec.tensors import HostBytes, MappedBytes
from shardkeep.storage.base import CachingStore, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Bytes of a shard file that go to a local tensor."""

    key: str
    segment: Segment
    data: HostBytes


class PartReader:
    """One rank's part of one committed checkpoint: its record, checked, and its digests, read when first needed."""

    def __init__(self, store: Store, commit: CommitRecord, rank: int) -> None:
        self.store = store
        self.ref = commit.ref
        self.rank = rank
        self.record = read_twice(lambda: _read_part(store, commit, rank))
        self._digests: DigestTable | None = None
        self._lock = threading.Lock()

    @property
    def digests(self) -> DigestTable:
        """The part's leaf digests, whose sha256 the part record names."""
        with self._lock:
            if self._digests is None:
                self._digests = read_twice(self._read_digests)
            return self._digests

    def read_cached(self, shard: int, begin: int, buffers: Sequence[memoryview]) -> bool:
        """Fill buffers one after the other from this host's memory, if it holds the bytes; return whether it did."""
        if not isinstance(self.store, CachingStore):
            return False
        return self.store.read_cached_into(self.ref.key(self.record.shards[shard].name), begin, buffers)

    def _read_digests(self) -> DigestTable:
        key = self.ref.key(format_digests(self.rank))
        data = get_checked(self.store, key, self.ref)
        found = hashlib.sha256(data).hexdigest()
        if len(data) != self.record.digests.size_bytes or found != self.record.digests.sha256:
            raise Corrupt(
                f"{key}: expected {self.record.digests.size_bytes} bytes of sha256 {self.record.digests.sha256}, "
                f"found {len(data)} of {found}",
                step=self.ref.step,
                rank=self.rank,
            )
        return DigestTable(data, [shard.size_bytes for shard in self.record.shards])

    def describe(self, shard: int, begin: int, end: int) -> str:
        """Return the names of the tensors that have bytes in `[begin, end)` of a shard, for messages."""
        names = [
            key
            for key, chunks in self.record.tensors.items()
            for chunk in chunks
            if chunk.shard == shard and chunk.begin < end and begin < chunk.end
        ]
        names += [
            f"{key} of rank {self.rank}"
            for key, own in self.record.per_rank.items()
            if own.shard == shard and own.begin < end and begin < own.end
        ]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return shown or "the header"


def get_checked(store: Store, key: str, ref: StepRef) -> bytes:
    """Return a whole object that a commit record reaches; that it is missing is damage."""
    try:
        return store.get(key, limit_bytes=record_limit())
    except NotFound:
        raise Corrupt(f"{key}: missing, though {ref} is committed", step=ref.step) from None


def _read_part(store: Store, commit: CommitRecord, rank: int) -> PartRecord:
    key = commit.ref.key(format_part(rank))
    data = get_checked(store, key, commit.ref)
    summary = commit.parts[rank]
    found = hashlib.sha256(data).hexdigest()
    if (len(data), found) != (summary.size_bytes, summary.sha256):
        raise Corrupt(
            f"{key}: expected {summary.size_bytes} bytes of sha256 {summary.sha256}, found {len(data)} of {found}",
            step=commit.ref.step,
            rank=rank,
        )
    return check_part(decode_record(PartRecord, data, where=key), key)


def check_part(part: PartRecord, key: str) -> PartRecord:
    """Refuse a part whose names or ranges reach outside of its own files."""
    for shard in part.shards:
        if not is_shard(shard.name) or shard.size_bytes < 8:
            raise Corrupt(f"{key}: shard {shard.name!r} of {shard.size_bytes} bytes is not a shard's name or size")
    ranges = [(name, c.shard, c.begin, c.end) for name, chunks in part.tensors.items() for c in chunks]
    ranges += [(name, own.shard, own.begin, own.end) for name, own in part.per_rank.items()]
    for name, number, begin, end in ranges:
        if not 0 <= number < len(part.shards) or not 0 <= begin <= end <= part.shards[number].size_bytes:
            raise Corrupt(f"{key}: {name} lies at bytes {begin}..{end} of shard {number}, which has no such bytes")
    return part


@dataclass(frozen=True, slots=True)
class _Range:
    """A leaf-aligned range of one shard and the copies that begin in or reach into it."""

    reader: PartReader
    shard: int
    begin: int
    end: int
    copies: Sequence[Copy]


def read_copies(wanted: Iterable[tuple[PartReader, int, Sequence[Copy]]], spent: PhaseTimes | None = None) -> int:
    """Carry out copies and return the bytes read from storage.

    Args:
        wanted: per part and shard number, the copies out of that shard.
        spent: takes the seconds of the phases `read`, `digest` and `copy`, added up over the threads.

    Raises:
        Corrupt: a leaf does not match its digest, twice; the message names shard, range and tensors. The targets
            are then partly overwritten.
    """
    tasks: list[_Range] = []
    for reader, shard, copies in wanted:
        ordered = sorted(copies, key=lambda copy: copy.segment.source)
        begins = [copy.segment.source for copy in ordered]
        # How far the copies up to each one reach: ascending, also where copies overlap.
        reach = list(accumulate((copy.segment.source + copy.segment.length for copy in ordered), max))
        size = reader.record.shards[shard].size_bytes
        for begin, end in plan_ranges([copy.segment for copy in ordered], size, LEAF_BYTES, BLOCK_BYTES):
            low, high = bisect_right(reach, begin), bisect_left(begins, end)
            tasks.append(_Range(reader, shard, begin, end, ordered[low:high]))
    times = spent or PhaseTimes()
    run_blocks(tasks, lambda task, block: _read_range(task, block, times), thread_count=knobs.get_int("IO_THREADS"))
    return sum(task.end - task.begin for task in tasks)


def _read_range(task: _Range, block: memoryview, spent: PhaseTimes) -> None:
    data = block[: task.end - task.begin]
    buffers = _find_buffers(task, data)
    if buffers is not None and _read_in_place(task, buffers, spent):
        return
    read_verified(task.reader, task.shard, task.begin, data, spent, ask_memory=buffers is None)
    with spent.phase("copy"):
        for copy in task.copies:
            source, target, length = copy.segment.source, copy.segment.target, copy.segment.length
            start, stop = max(source, task.begin), min(source + length, task.end)
            if start < stop:
                copy.data.copy_in(target + start - source, data[start - task.begin : stop - task.begin])


def _read_in_place(task: _Range, buffers: Sequence[memoryview], spent: PhaseTimes) -> bool:
    """Read what this host's memory holds straight to where it belongs, verified there; return whether that worked.

    If not, the targets may hold anything, and are written again from what is read from storage.
    """
    with spent.phase("read"):
        if not task.reader.read_cached(task.shard, task.begin, buffers):
            return False
    first = task.begin // LEAF_BYTES
    digests = task.reader.digests.leaves(task.shard, first, first + leaf_count(task.end - task.begin))
    with spent.phase("digest"):
        return find_bad_leaf_in(buffers, digests) is None


def _find_buffers(task: _Range, block: memoryview) -> list[memoryview] | None:
    """Return the memory that takes the range's bytes, in order: of the targets, and of `block` what nobody wants."""
    buffers: list[memoryview] = []
    at = task.begin
    for copy in task.copies:
        start, stop = max(copy.segment.source, task.begin), min(copy.segment.source + copy.segment.length, task.end)
        if start >= stop:
            continue
        if start < at or not isinstance(copy.data, MappedBytes):
            return None  # wanted twice, or not plain memory
        shift = copy.segment.target - copy.segment.source
        memory = copy.data.find_memory(start + shift, stop + shift)
        if memory is None:
            return None
        if at < start:
            buffers.append(block[at - task.begin : start - task.begin])
        buffers.append(memory)
        at = stop
    if at < task.end:
        buffers.append(block[at - task.begin : task.end - task.begin])
    return buffers


def read_verified(
    reader: PartReader,
    shard: int,
    begin: int,
    data: memoryview,
    spent: PhaseTimes | None = None,
    *,
    ask_memory: bool = True,
) -> None:
    """Fill `data` with a shard's bytes from the leaf boundary `begin` on, and check every leaf.

    What this host's memory holds is taken from there. A mismatch is read again from storage, so that a slip of the
    transport, or of that memory, is not taken for damage.

    Args:
        spent: takes the seconds of the phases `read` and `digest`.
        ask_memory: False: this host's memory was asked before.
    """
    times = spent or PhaseTimes()
    plan = reader.record.shards[shard]
    key = reader.ref.key(plan.name)
    first = begin // LEAF_BYTES
    digests = reader.digests.leaves(shard, first, first + leaf_count(len(data)))
    with times.phase("read"):
        in_memory = ask_memory and reader.read_cached(shard, begin, [data])
    if in_memory:
        with times.phase("digest"):
            if find_bad_leaf(data, digests) is None:
                return
    bad: int | None = None
    for _ in range(2):
        try:
            with times.phase("read"):
                read_twice(partial(reader.store.read_into, key, begin, data))
        except NotFound:
            raise Corrupt(
                f"{key}: missing, though {reader.ref} is committed", step=reader.ref.step, rank=reader.rank
            ) from None
        with times.phase("digest"):
            bad = find_bad_leaf(data, digests)
        if bad is None:
            return
    assert bad is not None
    start = begin + bad * LEAF_BYTES
    end = min(start + LEAF_BYTES, plan.size_bytes)
    raise Corrupt(
        f"{key}: bytes {start}..{end} of {plan.size_bytes} are not what was written "
        f"(leaf {start // LEAF_BYTES}; written by rank {reader.rank}; holds {reader.describe(shard, start, end)})",
        step=reader.ref.step,
        rank=reader.rank,
    )
