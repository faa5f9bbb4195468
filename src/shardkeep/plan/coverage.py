"""The coverage proof: chunks tile a tensor, without gap or overlap.

The volumes must add up to the tensor's and no two chunks may overlap. Disjointness is shown by cutting
the set recursively at planes that cross no chunk, which takes O(n log n) for every layout that ranks make; what
cannot be cut is compared pair by pair.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from shardkeep.spec.chunks import Chunk, intersect, is_inside


def find_coverage_problem(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> str | None:
    """Return why `chunks` do not tile a tensor of `shape`, or None when they do."""
    for chunk in chunks:
        if not is_inside(chunk, shape):
            return f"chunk {format_chunk(chunk)} does not lie within {list(shape)}"
    if math.prod(shape) == 0:
        return None if chunks else "no rank stores it"
    full = [chunk for chunk in chunks if chunk.numel]
    if overlap := _find_overlap(full):
        return f"chunks {format_chunk(overlap[0])} and {format_chunk(overlap[1])} overlap"
    missing = math.prod(shape) - sum(chunk.numel for chunk in full)
    return f"{missing} of {math.prod(shape)} elements are in no chunk" if missing else None


def _find_overlap(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    pending = [chunks]
    while pending:
        group = pending.pop()
        if len(group) < 2:
            continue
        parts = _cut(group)
        if parts is None:
            for a, b in itertools.combinations(sorted(group), 2):
                if intersect(a, b) is not None:
                    return a, b
        else:
            pending += parts
    return None


def _cut(group: list[Chunk]) -> list[list[Chunk]] | None:
    """Cut a group at every plane of the first dimension that has one, or return None."""
    for dim in range(len(group[0].offsets)):
        ordered = sorted(group, key=lambda chunk, dim=dim: chunk.offsets[dim])  # type: ignore[misc]
        parts: list[list[Chunk]] = []
        reach = -1
        for chunk in ordered:
            if chunk.offsets[dim] >= reach:
                parts.append([])
            parts[-1].append(chunk)
            reach = max(reach, chunk.offsets[dim] + chunk.sizes[dim])
        if len(parts) > 1:
            return parts
    return None


def format_chunk(chunk: Chunk) -> str:
    """Return a chunk as Python would slice it: `[0:4,2:8]`."""
    return "[" + ",".join(f"{o}:{o + s}" for o, s in zip(chunk.offsets, chunk.sizes, strict=True)) + "]"
