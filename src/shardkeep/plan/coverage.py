"""The coverage proof: chunks tile a tensor, without gap or overlap.

A chunk is the sum of its 2^d corners, each with a sign: how often an element is covered is the sum of the signed
corners at or before it in every dimension (a summed-area table, Crow 1984, backwards). So chunks tile a tensor
if and only if their corners cancel but for the corners of the tensor itself. That takes O(chunks * 2^d) for any
arrangement, d being the dimensions that are cut at all; the first corner that does not cancel is an element that is
not covered exactly once.

Chunks by rule are a grid, all combinations of the cuts of each dimension, and a grid tiles a tensor if and only if
its cuts tile each dimension: that is proved in O(cuts), without a look at any chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Final

from shardkeep.errors import Corrupt, UnsupportedState
from shardkeep.format.records import LayoutTable, TensorRecord
from shardkeep.spec.chunks import Chunk, is_inside, split_rows, whole
from shardkeep.spec.layout import Mesh, iter_dim_cuts

MAX_CUT_DIMS: Final = 8
"""Chunks that are cut in more dimensions than this are not proved: no parallelism makes them."""


def find_coverage_problem(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> str | None:
    """Return why `chunks` do not tile a tensor of `shape`, or None when they do.

    Empty chunks count for nothing, but a tensor without elements needs one. Linear in the number of chunks.
    """
    for chunk in chunks:
        if not is_inside(chunk, shape):
            return f"chunk {format_chunk(chunk)} does not lie within {list(shape)}"
    if math.prod(shape) == 0:
        return None if chunks else "no rank stores it"
    full = [chunk for chunk in chunks if chunk.numel]
    cut = [dim for dim in range(len(shape)) if any(chunk.sizes[dim] != shape[dim] for chunk in full)]
    if len(cut) > MAX_CUT_DIMS:
        return f"its chunks are cut in {len(cut)} dimensions; up to {MAX_CUT_DIMS} are supported"
    at = _find_uneven(shape, full, cut)
    return None if at is None else _describe(shape, full, cut, at)


class CoverageProof:
    """Proves of one table's tensors that their stored pieces tile them; equal cases are proved once."""

    def __init__(self, table: LayoutTable) -> None:
        self._table = table
        self._proved: dict[tuple[object, ...], str | None] = {}

    def find_problem(self, record: TensorRecord) -> str | None:
        """Return why the pieces of a tensor, as `plan.owners` gives them to ranks, do not tile it, or None."""
        layout = record.layout
        if layout.boxes:
            if layout.meshes or record.split != 1:
                return "explicit chunks that are on meshes or split by rows too"
            return find_coverage_problem(record.shape, list({box.chunk for box in layout.boxes}))
        case = (record.shape, layout.meshes, layout.placements, record.split)
        if case not in self._proved:
            self._proved[case] = self._find_rule_problem(record)
        return self._proved[case]

    def _find_rule_problem(self, record: TensorRecord) -> str | None:
        layout, shape = record.layout, record.shape
        if not layout.meshes:
            return "no rank stores it"
        if not all(0 <= number < len(self._table.meshes) for number in layout.meshes):
            return f"lies on meshes {list(layout.meshes[:8])} of {len(self._table.meshes)}"
        grids = []
        for number in layout.meshes:
            mesh = self._table.meshes[number]
            # Each place of a grid is a coordinate of the mesh, so each must have its rank.
            if math.prod(mesh.shape) != len(mesh.ranks) or len(layout.placements) != len(mesh.shape):
                return f"{len(layout.placements)} placements, mesh {list(mesh.shape)} over {len(mesh.ranks)} ranks"
            try:
                problem, grid = _prove_grid(shape, mesh, layout.placements)
            except (Corrupt, UnsupportedState) as error:
                return error.message
            if problem is not None:
                return problem
            grids.append(grid)
        if math.prod(shape) and any(grid != grids[0] for grid in grids):
            return f"its chunks on meshes {list(layout.meshes[:8])} are not the same, and so overlap"
        return None if record.split == 1 else _find_split_problem(record)


_Grid = list[tuple[int, list[tuple[int, int]]]]
"""By dimension that is cut: the cuts as `(offset, size)`."""


def _prove_grid(shape: tuple[int, ...], mesh: Mesh, placements: tuple[str, ...]) -> tuple[str | None, _Grid]:
    """Return why the cuts of some dimension do not tile it, or None; and the cuts that cut anything."""
    grid: _Grid = []
    for dim, cuts in iter_dim_cuts(shape, mesh, placements) if math.prod(shape) else ():
        problem = _find_gap(cuts, shape[dim])
        if problem is not None:
            return f"dimension {dim} of {list(shape)}: {problem}", grid
        if len(cuts) > 1:
            grid.append((dim, cuts))
    return None, grid


def _find_gap(cuts: Iterable[tuple[int, int]], size: int) -> str | None:
    """Return where ascending ranges do not tile `[0, size)`, or None."""
    end = 0
    for offset, length in cuts:
        if offset != end or length < 1:
            return f"a cut begins at {offset} where {end} is the next that no cut has"
        end = offset + length
    return None if end == size else f"its cuts end at {end}"


def _find_split_problem(record: TensorRecord) -> str | None:
    """Return why the pieces by rows do not tile a replicated tensor, or None."""
    if record.layout.is_cut:
        return "its chunks are split by rows"
    if not record.shape or not math.prod(record.shape):
        return None
    pieces = split_rows(whole(record.shape), record.split)
    return _find_gap([(piece.offsets[0], piece.sizes[0]) for piece in pieces], record.shape[0])


def _find_uneven(shape: tuple[int, ...], chunks: list[Chunk], dims: list[int]) -> tuple[int, ...] | None:
    """Return the place, in `dims`, of the first element that is not covered exactly once, or None."""
    signs = [1 if sum(corner) % 2 == 0 else -1 for corner in itertools.product((0, 1), repeat=len(dims))]
    counts: dict[tuple[int, ...], int] = {}
    for weight, group in ((1, chunks), (-1, (Chunk((0,) * len(shape), shape),))):
        for chunk in group:
            edges = [(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for dim in dims]
            for corner, sign in zip(itertools.product(*edges), signs, strict=True):
                counts[corner] = counts.get(corner, 0) + sign * weight
    # Of the corners left, none lies before the smallest one, so its count is that of its element.
    return min((corner for corner, count in counts.items() if count), default=None)


def _describe(shape: tuple[int, ...], chunks: list[Chunk], dims: list[int], at: tuple[int, ...]) -> str:
    place = list(zip(dims, at, strict=True))
    holding = [
        chunk for chunk in chunks if all(0 <= index - chunk.offsets[dim] < chunk.sizes[dim] for dim, index in place)
    ]
    if len(holding) > 1:
        first, second = sorted(holding)[:2]
        return f"chunks {format_chunk(first)} and {format_chunk(second)} overlap"
    element = [0] * len(shape)
    for dim, index in place:
        element[dim] = index
    total = math.prod(shape)
    missing = max(total - sum(chunk.numel for chunk in chunks), 1)
    return f"{missing} of {total} elements are in no chunk, the first at {element}"


def format_chunk(chunk: Chunk) -> str:
    """Return a chunk as Python would slice it: `[0:4,2:8]`."""
    if len(chunk.offsets) != len(chunk.sizes):
        return f"[offsets {list(chunk.offsets)}, sizes {list(chunk.sizes)}]"
    return "[" + ",".join(f"{o}:{o + s}" for o, s in zip(chunk.offsets, chunk.sizes, strict=True)) + "]"
