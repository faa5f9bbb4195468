"""Destinations that take their bytes from all over a range of a file: strided views, and boxes of many short rows."""

from __future__ import annotations

from typing import Final

from shardkeep.plan.strides import Region, iter_moves
from shardkeep.spec.tensors import HostBytes

_FORMATS: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


class RegionSink:
    """`HostBytes` to fill with a region's source, offset for offset; what is the region's goes on to its target."""

    def __init__(self, region: Region, target: HostBytes) -> None:
        self._region = region
        self._target = target

    @property
    def nbytes(self) -> int:
        return self._region.end

    def copy_out(self, start: int, out: memoryview) -> None:
        """Put what the target has of the source's bytes `start .. start + len(out)` in place; others stay."""
        for move in iter_moves(self._region, start, start + len(out)):
            found = bytearray(move.length * move.count)
            self._target.copy_out(move.target, memoryview(found))
            for index in range(move.count):
                at = move.source - start + index * move.step
                out[at : at + move.length] = found[index * move.length : (index + 1) * move.length]

    def copy_in(self, start: int, data: memoryview) -> None:
        """Take the source's bytes `start .. start + len(data)`; may be called from several threads."""
        for move in iter_moves(self._region, start, start + len(data)):
            at = move.source - start
            if move.count == 1:
                self._target.copy_in(move.target, data[at : at + move.length])
            else:
                self._target.copy_in(move.target, _gather(data, at, move.length, move.count, move.step))


def _gather(data: memoryview, at: int, length: int, count: int, step: int) -> memoryview:
    """Return `count` elements of `length` bytes that lie `step` apart, one after another."""
    if step == 0:
        return memoryview(bytes(data[at : at + length]) * count)
    text = _FORMATS.get(length)
    if text is not None and step % length == 0:
        span = data[at : at + (count - 1) * step + length]
        return memoryview(span.cast("B").cast(text)[:: step // length].tobytes())  # type: ignore[call-overload]
    gathered = bytearray(count * length)
    for index in range(count):
        source = at + index * step
        gathered[index * length : (index + 1) * length] = data[source : source + length]
    return memoryview(gathered)
