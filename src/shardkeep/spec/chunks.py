"""Box algebra: a chunk is an N-d box of a tensor.

A 0-d tensor has the one chunk `Chunk((), ())`, which holds one element. A chunk with a zero size is empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from msgspec import Struct


class Chunk(Struct, frozen=True, gc=False, array_like=True, order=True):
    """The box `offsets[d] .. offsets[d] + sizes[d]` (half-open) in every dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def whole(shape: Sequence[int]) -> Chunk:
    """Return the chunk that is the whole tensor of `shape`."""
    return Chunk((0,) * len(shape), tuple(shape))


def is_inside(chunk: Chunk, shape: Sequence[int]) -> bool:
    """Say whether `chunk` is a well-formed box within a tensor of `shape`."""
    return len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def intersect(a: Chunk, b: Chunk) -> Chunk | None:
    """Return the common box of two chunks of one tensor, or None where it is empty."""
    offsets: list[int] = []
    sizes: list[int] = []
    for ao, az, bo, bz in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start = max(ao, bo)
        size = min(ao + az, bo + bz) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return Chunk(tuple(offsets), tuple(sizes))


def iter_runs(part: Chunk, outer: Chunk) -> Iterator[tuple[int, int]]:
    """Yield `(start, count)` in elements: where `part` lies in the row-major elements of `outer`.

    `part` must lie within `outer` and be non-empty. Runs ascend and are as long as contiguity allows.
    """
    ndim = len(outer.sizes)
    relative = tuple(p - o for p, o in zip(part.offsets, outer.offsets, strict=True))
    strides = [1] * ndim
    for d in range(ndim - 2, -1, -1):
        strides[d] = strides[d + 1] * outer.sizes[d + 1]
    # The innermost dimensions that `part` spans entirely fold into one run, together with the next one.
    inner = ndim
    while inner > 0 and part.sizes[inner - 1] == outer.sizes[inner - 1]:
        inner -= 1
    fold = max(inner - 1, 0)
    count = math.prod(part.sizes[fold:])
    base = sum(r * s for r, s in zip(relative, strides, strict=True))
    index = [0] * fold
    while True:
        yield base + sum(i * strides[d] for d, i in enumerate(index)), count
        for d in range(fold - 1, -1, -1):
            index[d] += 1
            if index[d] < part.sizes[d]:
                break
            index[d] = 0
        else:
            return


def split_rows(chunk: Chunk, count: int) -> list[Chunk]:
    """Cut a chunk along dimension 0 in at most `count` pieces of nearly equal rows, ascending.

    No piece has zero rows; a chunk that has none, or is a single element of a 0-d tensor, stays whole.
    """
    if not chunk.sizes:
        return [chunk]
    rows = chunk.sizes[0]
    count = max(1, min(count, rows))
    edges = [rows * i // count for i in range(count + 1)]
    return [
        Chunk((chunk.offsets[0] + start, *chunk.offsets[1:]), (stop - start, *chunk.sizes[1:]))
        for start, stop in itertools.pairwise(edges)
    ]
