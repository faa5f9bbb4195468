"""Which rank writes a chunk that several hold: balanced by bytes, decided once per structure."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct

from shardkeep.format.records import LayoutTable, TensorRecord
from shardkeep.spec.chunks import Chunk, intersect, split_rows
from shardkeep.spec.dtypes import get_dtype
from shardkeep.spec.layout import Layout, chunk_at, coordinate_at, get_holders, iter_chunks, iter_numels

_SPLIT_BYTES: Final = 16 << 20
"""A replicated optimizer tensor is cut only when its pieces stay at least this large."""

_SMALL_BYTES: Final = 256
"""Replicated tensors below this (step counters) stay with their first holder, so that ranks open few files."""


class _Choice(Struct, frozen=True):
    """A tensor whose every chunk has several holders, with those of its first (and largest) chunk."""

    size_bytes: int
    key: str
    holders: tuple[int, ...]


def assign_owners(table: LayoutTable) -> LayoutTable:
    """Return the table with `owner` and `split` chosen so that the busiest rank writes as little as possible.

    Longest-processing-time-first over the tensors that have a choice (Graham 1969), after those that have
    none. Model tensors stay whole, so that a step folder of an unsharded model opens anywhere; large optimizer
    tensors are cut by rows. Deterministic.

    Raises:
        Corrupt, UnsupportedState: placements that cut no tensor of this shape.
    """
    choices: list[_Choice] = []
    fixed: dict[tuple[tuple[int, ...], int, Layout], int] = {}
    holders_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    for key, record in table.tensors.items():
        itemsize = get_dtype(record.dtype).itemsize_bytes
        numbers = record.layout.meshes
        if record.layout.is_cut:
            first = _find_choice(record, table)
        else:
            if numbers not in holders_of:
                holders_of[numbers] = tuple(sorted({rank for n in numbers for rank in table.meshes[n].ranks}))
            first = (math.prod(record.shape), holders_of[numbers]) if len(holders_of[numbers]) > 1 else None
        if first is None:
            place = (record.shape, itemsize, record.layout)
            fixed[place] = fixed.get(place, 0) + 1
        else:
            choices.append(_Choice(first[0] * itemsize, key, first[1]))
    if not choices:
        return table
    loads: defaultdict[int, int] = defaultdict(int)
    for (shape, itemsize, layout), count in fixed.items():
        for numel, holders in iter_numels(shape, layout, table.meshes):
            loads[holders[0]] += numel * itemsize * count
    choices.sort(key=lambda choice: (-choice.size_bytes, choice.key))
    return msgspec.structs.replace(table, tensors={**table.tensors, **_choose(table, choices, loads)})


def _find_choice(record: TensorRecord, table: LayoutTable) -> tuple[int, tuple[int, ...]] | None:
    """Return the largest chunk's elements and the first one's holders, or None where some chunk has one holder."""
    layout = record.layout
    empty = 0 in record.shape
    if len(layout.meshes) == 1 and not empty:
        # On one mesh all chunks have equally many holders, and the first is the largest.
        mesh = table.meshes[layout.meshes[0]]
        holders = get_holders(mesh, layout.placements)[0]
        first = chunk_at(record.shape, mesh.shape, layout.placements, (0,) * len(mesh.shape))
        return (first.numel, holders) if len(holders) > 1 else None
    found = list(iter_numels(record.shape, layout, table.meshes))
    if not found or not all(len(holders) > 1 for _, holders in found):
        return None
    return max(numel for numel, _ in found), found[0][1]


def _choose(table: LayoutTable, choices: list[_Choice], loads: defaultdict[int, int]) -> dict[str, TensorRecord]:
    """Return the records of `choices` with their owners; adds what each rank gets to `loads`."""
    chosen: dict[str, TensorRecord] = {}
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    # Of the many tensors of a few shapes and layouts, the chunks are found once.
    chunks: dict[tuple[tuple[int, ...], Layout], list[tuple[int, tuple[int, ...]]]] = {}
    for choice in choices:
        record, holders = table.tensors[choice.key], choice.holders
        if choice.size_bytes < _SMALL_BYTES and not record.layout.is_cut:
            chosen[choice.key] = record
            loads[holders[0]] += choice.size_bytes
            continue
        split = _split_count(record, choice.size_bytes, len(holders))
        if split > 1:
            chosen[choice.key] = msgspec.structs.replace(record, split=split)
            for rank in holders:
                loads[rank] += choice.size_bytes // split
            continue
        heap = heaps.get(holders)
        if heap is None:
            heap = heaps[holders] = [(loads[rank], at) for at, rank in enumerate(holders)]
            heapq.heapify(heap)
        # Loads only grow: an entry that is out of date goes back with what it is now.
        while (load := loads[holders[heap[0][1]]]) != heap[0][0]:
            heapq.heapreplace(heap, (load, heap[0][1]))
        at = heap[0][1]
        chosen[choice.key] = msgspec.structs.replace(record, owner=at)
        if record.layout.is_cut:
            itemsize = get_dtype(record.dtype).itemsize_bytes
            place = (record.shape, record.layout)
            if place not in chunks:
                chunks[place] = list(iter_numels(*place, table.meshes))
            for numel, ranks in chunks[place]:
                loads[ranks[at % len(ranks)]] += numel * itemsize
        else:
            loads[holders[at]] += choice.size_bytes
    return chosen


def _split_count(record: TensorRecord, size_bytes: int, holder_count: int) -> int:
    """Return in how many pieces to cut a replicated tensor: all holders take one, or it stays whole."""
    whole_only = record.role != "state" or record.section == "model" or not record.shape or record.layout.is_cut
    if whole_only or size_bytes < holder_count * _SPLIT_BYTES or record.shape[0] < holder_count:
        return 1
    return holder_count


def iter_pieces(
    record: TensorRecord, table: LayoutTable, *, within: Chunk | None = None
) -> Iterator[tuple[Chunk, int]]:
    """Yield every piece of a tensor that is stored, ascending, with the rank that writes it.

    Args:
        within: only pieces that overlap this chunk, found without a look at the others.
    """
    for chunk, holders in iter_chunks(record.shape, record.layout, table.meshes, within=within):
        pieces = split_rows(chunk, record.split) if record.split > 1 else [chunk]
        for at, piece in enumerate(pieces):
            if within is None or record.split == 1 or intersect(piece, within) is not None:
                yield piece, holders[(record.owner + at) % len(holders)]


def iter_own_pieces(table: LayoutTable, rank: int) -> Iterator[tuple[str, TensorRecord, Chunk]]:
    """Yield what `rank` writes, by key and ascending chunk: O(its tensors), whatever the number of ranks."""
    places = {number: mesh.ranks.index(rank) for number, mesh in enumerate(table.meshes) if rank in mesh.ranks}
    for key, record in table.tensors.items():
        if record.layout.boxes or not math.prod(record.shape):
            found: Iterator[tuple[Chunk, int]] = iter_pieces(record, table)
        else:
            found = _iter_around(record, table, _find_held(record.shape, record.layout, table, places))
        for piece, owner in found:
            if owner == rank:
                yield key, record, piece


class RankPieces:
    """The pieces of any rank, as `iter_own_pieces` yields them, without a look at tensors that it has nothing of."""

    def __init__(self, table: LayoutTable) -> None:
        self._table = table
        self._places: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for number, mesh in enumerate(table.meshes):
            for at, rank in enumerate(mesh.ranks):
                self._places[rank][number] = at
        self._by_meshes: defaultdict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
        self._outright: defaultdict[int, list[tuple[int, str, Chunk]]] = defaultdict(list)
        self._numbers: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        for at, (key, record) in enumerate(table.tensors.items()):
            if record.layout.boxes or not math.prod(record.shape):
                for chunk, owner in iter_pieces(record, table):
                    self._outright[owner].append((at, key, chunk))
            else:
                self._by_meshes[record.layout.meshes].append((at, key))
        for numbers in self._by_meshes:
            for number in numbers:
                self._numbers[number].add(numbers)

    def of(self, rank: int) -> Iterator[tuple[str, TensorRecord, Chunk]]:
        """Yield what `iter_own_pieces` yields."""
        places = self._places.get(rank, {})
        found = list(self._outright.get(rank, ()))
        for numbers in {numbers for number in places for numbers in self._numbers.get(number, ())}:
            for at, key in self._by_meshes[numbers]:
                record = self._table.tensors[key]
                held = _find_held(record.shape, record.layout, self._table, places)
                found += [
                    (at, key, piece) for piece, owner in _iter_around(record, self._table, held) if owner == rank
                ]
        for _, key, piece in sorted(found):
            yield key, self._table.tensors[key], piece


def _find_held(shape: tuple[int, ...], layout: Layout, table: LayoutTable, places: dict[int, int]) -> list[Chunk]:
    """Return the distinct non-empty chunks that a rank at these places of the meshes holds, ascending."""
    held: set[Chunk] = set()
    for number in layout.meshes:
        if number in places:
            mesh_shape = table.meshes[number].shape
            held.add(chunk_at(shape, mesh_shape, layout.placements, coordinate_at(mesh_shape, places[number])))
    return sorted(chunk for chunk in held if chunk.numel)


def _iter_around(record: TensorRecord, table: LayoutTable, held: list[Chunk]) -> Iterator[tuple[Chunk, int]]:
    found: dict[Chunk, int] = {}
    for chunk in held:
        found.update(iter_pieces(record, table, within=chunk))
    yield from sorted(found.items())
