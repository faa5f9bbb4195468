"""Which bytes go where on a restore: wanted chunks onto stored chunks, by intersection."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from shardkeep.spec.chunks import Chunk, intersect, iter_runs


class Segment(Struct, frozen=True, gc=False, array_like=True):
    """`length` bytes from `source` (an offset in a file) to `target` (an offset in a local tensor's bytes)."""

    source: int
    target: int
    length: int


def iter_segments(stored: Chunk, begin: int, wanted: Chunk, itemsize_bytes: int) -> Iterator[Segment]:
    """Yield the copies that fill `wanted` as far as `stored` covers it, ascending in both offsets.

    Args:
        begin: where the stored chunk's bytes start in its file.
    """
    common = intersect(stored, wanted)
    if common is None:
        return
    sources = iter_runs(common, stored)
    targets = iter_runs(common, wanted)
    source, source_left = next(sources)
    target, target_left = next(targets)
    remaining = common.numel
    while True:
        count = min(source_left, target_left)
        yield Segment(begin + source * itemsize_bytes, target * itemsize_bytes, count * itemsize_bytes)
        remaining -= count
        if not remaining:
            return
        source, source_left = (source + count, source_left - count) if source_left > count else next(sources)
        target, target_left = (target + count, target_left - count) if target_left > count else next(targets)


def plan_ranges(segments: list[Segment], size_bytes: int, leaf_bytes: int, block_bytes: int) -> list[tuple[int, int]]:
    """Return the leaf-aligned ranges `(begin, end)` to read from a file of `size_bytes`.

    They cover every segment, share no leaf, ascend, and none is longer than `block_bytes` (a multiple of leaves).
    """
    ranges: list[list[int]] = []
    for segment in sorted(segments, key=lambda segment: segment.source):
        if not segment.length:
            continue
        begin = segment.source // leaf_bytes * leaf_bytes
        end = min(-(-(segment.source + segment.length) // leaf_bytes) * leaf_bytes, size_bytes)
        if ranges and begin <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], end)
        else:
            ranges.append([begin, end])
    blocks: list[tuple[int, int]] = []
    for begin, end in ranges:
        # Cut at multiples of the block, so that long sequential reads stay aligned.
        while begin < end:
            stop = min(end, (begin // block_bytes + 1) * block_bytes)
            blocks.append((begin, stop))
            begin = stop
    return blocks
