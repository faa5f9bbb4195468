"""Which bytes of a strided region lie in a window of its source: what a block that was read gives to a destination.

A transposed view takes single elements from all over its base, so its copies are never listed: they are found block
by block, in time that grows with what the block holds and in no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

from shardkeep.spec.chunks import Chunk, intersect


class Region(Struct, frozen=True, gc=False, kw_only=True):
    """Elements at regular distances in a source, and where they go in a target; all in bytes.

    Attributes:
        sizes: how many elements in each dimension; none is 0.
        sources, targets: the distance of neighbours in each dimension; the last one's target is `item_bytes`.
        begin: of the first element in the source; `target`: in the target.
    """

    sizes: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    item_bytes: int
    begin: int
    target: int

    @property
    def end(self) -> int:
        """Behind the last byte in the source."""
        return self.begin + _span(self.sizes, self.sources) + self.item_bytes


class Move(Struct, frozen=True, gc=False, array_like=True):
    """`count` times `length` bytes, `step` apart from `source` on, that go to `target` one after another."""

    source: int
    target: int
    length: int
    count: int
    step: int


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def plan_view(shape: tuple[int, ...], strides: tuple[int, ...], offset_bytes: int, item_bytes: int) -> Region | None:
    """Return the region of a strided view, gathered row-major; None for a view without elements.

    Args:
        strides: in elements, from 0 on; `offset_bytes`: of the view's first element in its base.
    """
    if math.prod(shape) == 0:
        return None
    sources = [stride * item_bytes for stride in strides]
    return _fold(shape, sources, _row_major(shape, item_bytes), item_bytes, offset_bytes, 0)


def plan_box(stored: Chunk, begin: int, wanted: Chunk, item_bytes: int) -> Region | None:
    """Return the region that fills `wanted` as far as `stored` covers it; None where they share no element.

    Args:
        begin: where the stored chunk's bytes start in its file.
    """
    common = intersect(stored, wanted)
    if common is None:
        return None
    sources, targets = _row_major(stored.sizes, item_bytes), _row_major(wanted.sizes, item_bytes)
    first = sum((c - s) * step for c, s, step in zip(common.offsets, stored.offsets, sources, strict=True))
    target = sum((c - w) * step for c, w, step in zip(common.offsets, wanted.offsets, targets, strict=True))
    return _fold(common.sizes, sources, targets, item_bytes, begin + first, target)


def _row_major(shape: tuple[int, ...], item_bytes: int) -> list[int]:
    return [math.prod(shape[dim + 1 :]) * item_bytes for dim in range(len(shape))]


def _fold(
    sizes: Sequence[int], sources: Sequence[int], targets: Sequence[int], item_bytes: int, begin: int, target: int
) -> Region:
    """Return the region with as few dimensions as say the same: neighbours on both sides become one."""
    folded: list[tuple[int, int, int]] = []
    for size, source, goal in zip(sizes, sources, targets, strict=True):
        if size == 1:
            continue
        if folded and folded[-1][1] == source * size and folded[-1][2] == goal * size:
            folded[-1] = (folded[-1][0] * size, source, goal)
        else:
            folded.append((size, source, goal))
    if not folded or folded[-1][2] != item_bytes:
        folded.append((1, item_bytes, item_bytes))
    columns = tuple(zip(*folded, strict=True))
    return Region(
        sizes=columns[0], sources=columns[1], targets=columns[2], item_bytes=item_bytes, begin=begin, target=target
    )


def count_runs(region: Region) -> int:
    """Return how many contiguous copies the region is."""
    contiguous = region.sources[-1] == region.item_bytes
    return math.prod(region.sizes[:-1]) if contiguous else math.prod(region.sizes)


def iter_ranges(region: Region, gap_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ascending source ranges `(begin, end)` that hold all elements, and no gap of more than `gap_bytes`.

    But for the smaller ones that are inside of it; so there are at most as many ranges as such gaps fit in.
    """
    ordered = sorted(zip(region.sources, region.sizes, strict=True), reverse=True)
    yield from _iter_ranges(ordered, region.begin, region.item_bytes, gap_bytes)


def _iter_ranges(
    dims: list[tuple[int, int]], begin: int, item_bytes: int, gap_bytes: int
) -> Iterator[tuple[int, int]]:
    if dims:
        stride, size = dims[0]
        inner = sum((count - 1) * step for step, count in dims[1:]) + item_bytes
        if stride - inner > gap_bytes:
            for at in range(size):
                yield from _iter_ranges(dims[1:], begin + at * stride, item_bytes, gap_bytes)
            return
    yield begin, begin + sum((count - 1) * step for step, count in dims) + item_bytes


def iter_moves(region: Region, low: int, high: int) -> Iterator[Move]:
    """Yield what the source's bytes `[low, high)` hold of a region; elements that the window cuts go in part."""
    yield from _iter_moves(region, 0, region.begin, region.target, low, high)


def _iter_moves(region: Region, dim: int, source: int, target: int, low: int, high: int) -> Iterator[Move]:
    size, step, goal = region.sizes[dim], region.sources[dim], region.targets[dim]
    last = dim == len(region.sizes) - 1
    inner = _span(region.sizes[dim + 1 :], region.sources[dim + 1 :]) + region.item_bytes
    if step == 0:
        first, stop = (0, size) if source + inner > low and source < high else (0, 0)
    else:
        # Those of which any byte is in the window.
        first = max(0, (low - inner - source) // step + 1)
        stop = min(size, -(-(high - source) // step))
    if not last:
        for at in range(first, stop):
            yield from _iter_moves(region, dim + 1, source + at * step, target + at * goal, low, high)
    elif first < stop:
        yield from _iter_run(region, source, target, range(first, stop), low, high)


def _iter_run(region: Region, source: int, target: int, indexes: range, low: int, high: int) -> Iterator[Move]:
    """Yield a run along the last dimension: whole elements together, those that the window cuts by themselves."""
    item, step = region.item_bytes, region.sources[-1]
    first, stop = indexes.start, indexes.stop

    def part(at: int) -> Move:
        place = source + at * step
        begin, end = max(place, low), min(place + item, high)
        return Move(begin, target + at * item + begin - place, end - begin, 1, 0)

    def is_cut(at: int) -> bool:
        return source + at * step < low or source + at * step + item > high

    if step == item:
        begin, end = max(source + first * item, low), min(source + stop * item, high)
        yield Move(begin, target + begin - source, end - begin, 1, 0)
    elif step == 0 and is_cut(first):
        yield from map(part, indexes)
    else:
        if is_cut(first):
            yield part(first)
            first += 1
        tail = [part(stop - 1)] if stop > first and is_cut(stop - 1) else []
        stop -= len(tail)
        if stop > first:
            yield Move(source + first * step, target + first * item, item, stop - first, step)
        yield from tail
