"""One committed checkpoint as one rank reads it: parts, opened when first needed, and where a chunk's bytes are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

from shardkeep.engine.phases import PhaseTimes
from shardkeep.engine.reader import Copy, PartReader, get_checked, read_copies
from shardkeep.engine.run import read_twice
from shardkeep.engine.views import RegionSink
from shardkeep.errors import Corrupt
from shardkeep.format.digests import LEAF_BYTES
from shardkeep.format.names import format_part
from shardkeep.format.records import CommitRecord, LayoutTable, PartValues, StoredChunk, ViewRecord, decode_record
from shardkeep.plan.owners import iter_pieces
from shardkeep.plan.reads import Segment, iter_segments
from shardkeep.plan.strides import Region, count_runs, iter_ranges, plan_box, plan_view
from shardkeep.spec.chunks import Chunk, intersect, whole
from shardkeep.spec.dtypes import get_dtype
from shardkeep.spec.tensors import HostBytes
from shardkeep.storage.base import Store

_MANY_RUNS: Final = 256
"""A box of more rows than this is taken out of the blocks as they are read; its copies are not listed."""

_GAP_BYTES: Final = LEAF_BYTES
"""A gap in what is wanted of a file, up to which it is read over."""


class CheckpointReader:
    """One committed checkpoint, opened by one rank: its parts are read when first needed, and checked."""

    def __init__(self, store: Store, commit: CommitRecord) -> None:
        self.store = store
        self.commit = commit
        self._parts: dict[int, PartReader] = {}
        self._values: dict[int, dict[str, Any]] = {}

    @property
    def table(self) -> LayoutTable:
        return self.commit.facts.layout

    def part(self, rank: int) -> PartReader:
        """Return the part of a saving rank. Raises Corrupt."""
        if rank not in self._parts:
            if not 0 <= rank < self.commit.world_size:
                raise Corrupt(f"{self.commit.ref}: its layout names rank {rank} of {self.commit.world_size}")
            self._parts[rank] = PartReader(self.store, self.commit, rank)
        return self._parts[rank]

    def find_stored(self, key: str, wanted: Chunk) -> Iterator[tuple[PartReader, Chunk, int, int]]:
        """Yield `(part, stored chunk, shard, begin)` for every stored chunk that overlaps `wanted`."""
        record = self.table.tensors[key]
        for chunk, owner in iter_pieces(record, self.table, within=wanted if wanted.numel else None):
            if wanted.numel == 0 or intersect(chunk, wanted) is not None:
                part = self.part(owner)
                for stored in part.record.tensors.get(key, ()):
                    if stored.chunk == chunk:
                        _check_size(key, stored, chunk.numel * get_dtype(record.dtype).itemsize_bytes, owner)
                        yield part, chunk, stored.shard, stored.begin
                        break
                else:
                    raise Corrupt(
                        f"{key}: the layout says that rank {owner} stored chunk {chunk}, its part lacks it",
                        step=self.commit.ref.step,
                        rank=owner,
                    )

    def copies_of(
        self, key: str, chunk: Chunk, data: HostBytes, *, own_rank: int | None
    ) -> Iterator[tuple[PartReader, int, Copy]]:
        """Yield the copies that fill `data` with `chunk` of `key`.

        Args:
            own_rank: the saving rank whose own copy of a per-rank tensor is wanted, if any.
        """
        if own_rank is not None and key in self.table.per_rank:
            part = self.part(own_rank)
            own = part.record.per_rank.get(key)
            if own is not None:
                for segment in iter_segments(whole(own.shape), own.begin, chunk, get_dtype(own.dtype).itemsize_bytes):
                    yield part, own.shard, Copy(key=key, segment=segment, data=data)
                return
        view = self.table.views.get(key)
        if view is not None:
            yield from self._view_copies(key, view, data)
            return
        if chunk.numel == 0:
            return
        record = self.table.tensors[key]
        item_bytes = get_dtype(record.dtype).itemsize_bytes
        if own_rank is not None:
            # Nearly all that a rank wants at a restart in the same layout: just what it wrote.
            part = self.part(own_rank)
            for mine in part.record.tensors.get(key, ()):
                if mine.chunk == chunk:
                    _check_size(key, mine, chunk.numel * item_bytes, own_rank)
                    yield (
                        part,
                        mine.shard,
                        Copy(key=key, segment=Segment(mine.begin, 0, mine.end - mine.begin), data=data),
                    )
                    return
        for part, stored, shard, begin in self.find_stored(key, chunk):
            if stored == chunk:
                segment = Segment(begin, 0, chunk.numel * item_bytes)
                yield part, shard, Copy(key=key, segment=segment, data=data)
                continue
            region = plan_box(stored, begin, chunk, item_bytes)
            if region is not None and count_runs(region) > _MANY_RUNS:
                size = stored.numel * item_bytes
                for copy in _iter_region_copies(key, region, data, begin, begin + size, 0):
                    yield part, shard, copy
                continue
            for segment in iter_segments(stored, begin, chunk, item_bytes):
                yield part, shard, Copy(key=key, segment=segment, data=data)

    def _view_copies(self, key: str, view: ViewRecord, data: HostBytes) -> Iterator[tuple[PartReader, int, Copy]]:
        base = self.table.tensors[view.base]
        unit = get_dtype(base.dtype).itemsize_bytes
        region = plan_view(view.shape, view.strides, view.offset_bytes, get_dtype(view.dtype).itemsize_bytes)
        if region is None:
            return
        for part, stored, shard, begin in self.find_stored(view.base, whole(base.shape)):
            first = stored.offsets[0] * unit
            for copy in _iter_region_copies(key, region, data, first, first + stored.numel * unit, begin - first):
                yield part, shard, copy

    def plan_copies(
        self, wanted: Iterable[tuple[str, Chunk, HostBytes]], *, own_rank: int | None = None
    ) -> list[tuple[PartReader, int, list[Copy]]]:
        """Return the copies that fill every destination with its chunk, by part and shard; reads no tensors."""
        grouped: dict[tuple[int, int], list[Copy]] = {}
        parts: dict[int, PartReader] = {}
        for key, chunk, data in wanted:
            for part, shard, copy in self.copies_of(key, chunk, data, own_rank=own_rank):
                parts[part.rank] = part
                grouped.setdefault((part.rank, shard), []).append(copy)
        return [(parts[rank], shard, grouped[rank, shard]) for rank, shard in sorted(grouped)]

    def read(
        self,
        wanted: Iterable[tuple[str, Chunk, HostBytes]],
        *,
        own_rank: int | None = None,
        spent: PhaseTimes | None = None,
    ) -> int:
        """Fill every destination with its chunk, verified; return the bytes read.

        Args:
            spent: takes the seconds of the phases; see `read_copies`.
        """
        return read_copies(self.plan_copies(wanted, own_rank=own_rank), spent)

    def values_of(self, rank: int) -> dict[str, Any]:
        """Return the encoded values of a saving rank; of a part that is not open, they are all that is kept."""
        if rank in self._parts:
            return self._parts[rank].record.values
        if rank not in self._values:
            self._values[rank] = read_twice(lambda: _read_values(self.store, self.commit, rank))
        return self._values[rank]

    def read_value_parts(self, own_rank: int | None) -> dict[int, dict[str, Any]]:
        """Return the encoded values by saving rank: own first, then every holder's."""
        ranks = dict.fromkeys([own_rank] if own_rank is not None else [])
        ranks.update(dict.fromkeys(holder.rank for holder in self.commit.facts.holders))
        return {rank: self.part(rank).record.values for rank in ranks}


def _check_size(key: str, stored: StoredChunk, expected: int, rank: int) -> None:
    if stored.end - stored.begin != expected:
        raise Corrupt(
            f"{key}: chunk {stored.chunk} takes {expected} bytes, its part gives it {stored.end - stored.begin}",
            rank=rank,
        )


def _iter_region_copies(key: str, region: Region, data: HostBytes, low: int, high: int, shift: int) -> Iterator[Copy]:
    """Yield the copies out of the source's bytes `[low, high)`, which lie `shift` further on in their file."""
    sink = RegionSink(region, data)
    for begin, end in iter_ranges(region, _GAP_BYTES):
        start, stop = max(begin, low), min(end, high)
        if start < stop:
            yield Copy(key=key, segment=Segment(start + shift, start, stop - start), data=sink)


def _read_values(store: Store, commit: CommitRecord, rank: int) -> dict[str, Any]:
    key = commit.ref.key(format_part(rank))
    data = get_checked(store, key, commit.ref)
    summary, found = commit.parts[rank], hashlib.sha256(data).hexdigest()
    if (len(data), found) != (summary.size_bytes, summary.sha256):
        raise Corrupt(
            f"{key}: expected {summary.size_bytes} bytes of sha256 {summary.sha256}, found {len(data)} of {found}",
            step=commit.ref.step,
            rank=rank,
        )
    return decode_record(PartValues, data, where=key).values
