"""The coverage proof: chunks tile a tensor, without gap or overlap.

A chunk is the sum of its 2^d corners, each with a sign: how often an element is covered is the sum of the signed
corners at or before it in every dimension (a summed-area table, Crow 1984, backwards). So chunks tile a tensor
if and only if their corners cancel but for the corners of the tensor itself. That takes O(chunks * 2^d) for any
arrangement, d being the dimensions that are cut at all; the first corner that does not cancel is an element that is
not covered exactly once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

from shardkeep.spec.chunks import Chunk, is_inside

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
