"""Which rank writes a chunk that several hold: balanced by bytes, decided once per structure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Final

import msgspec

from shardkeep.format.records import LayoutTable, TensorRecord
from shardkeep.spec.chunks import Chunk, split_rows
from shardkeep.spec.dtypes import get_dtype
from shardkeep.spec.layout import iter_chunks

_SPLIT_BYTES: Final = 16 << 20
"""A replicated optimizer tensor is cut only when its pieces stay at least this large."""


def assign_owners(table: LayoutTable) -> LayoutTable:
    """Return the table with `owner` and `split` chosen so that the busiest rank writes as little as possible.

    Longest-processing-time-first over the tensors that have a choice (Graham 1969), after those that have
    none. Model tensors stay whole, so that a step folder of an unsharded model opens anywhere; large optimizer
    tensors are cut by rows.
    """
    loads: dict[int, int] = {}
    choices: list[tuple[int, str, tuple[int, ...]]] = []
    records = dict(table.tensors)
    for key, record in table.tensors.items():
        size_bytes = math.prod(record.shape) * get_dtype(record.dtype).itemsize_bytes
        sharded = bool(record.layout.boxes) or any(text != "R" for text in record.layout.placements)
        if not sharded and len(table.meshes[record.layout.meshes[0]].ranks) * len(record.layout.meshes) > 1:
            holders = tuple(sorted({r for n in record.layout.meshes for r in table.meshes[n].ranks}))
            choices.append((size_bytes, key, holders))
            continue
        chunks = list(iter_chunks(record.shape, record.layout, table.meshes))
        if chunks and all(len(holders) > 1 for _, holders in chunks):
            choices.append((size_bytes // len(chunks), key, chunks[0][1]))
            continue
        itemsize = get_dtype(record.dtype).itemsize_bytes
        for chunk, holders in chunks:
            owner = holders[0]
            loads[owner] = loads.get(owner, 0) + chunk.numel * itemsize
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for size_bytes, key, holders in sorted(choices, key=lambda choice: (-choice[0], choice[1])):
        record = records[key]
        split = _split_count(record, size_bytes, len(holders))
        heap = heaps.get(holders)
        if heap is None:
            heap = heaps[holders] = [(loads.get(rank, 0), at) for at, rank in enumerate(holders)]
            heapq.heapify(heap)
        if split > 1:
            records[key] = msgspec.structs.replace(record, split=split)
            heaps[holders] = heap = [(load + size_bytes // split, at) for load, at in heap]
            heapq.heapify(heap)
            continue
        load, at = heapq.heappop(heap)
        records[key] = msgspec.structs.replace(record, owner=at)
        heapq.heappush(heap, (load + size_bytes, at))
    return msgspec.structs.replace(table, tensors=records)


def _split_count(record: TensorRecord, size_bytes: int, holder_count: int) -> int:
    """Return in how many pieces to cut a replicated tensor: all holders take one, or it stays whole."""
    whole_only = record.role != "state" or record.section == "model" or not record.shape
    sharded = bool(record.layout.boxes) or any(text != "R" for text in record.layout.placements)
    if whole_only or sharded or size_bytes < holder_count * _SPLIT_BYTES or record.shape[0] < holder_count:
        return 1
    return holder_count


def iter_pieces(record: TensorRecord, table: LayoutTable) -> Iterator[tuple[Chunk, int]]:
    """Yield every piece of a tensor that is stored, with the rank that writes it."""
    for chunk, holders in iter_chunks(record.shape, record.layout, table.meshes):
        pieces = split_rows(chunk, record.split) if record.split > 1 else [chunk]
        for at, piece in enumerate(pieces):
            yield piece, holders[(record.owner + at) % len(holders)]
