"""Destinations of another dtype: they take stored bytes and write rounded values. Only on request."""

from __future__ import annotations

import threading
from typing import Any

import torch

from shardkeep.spec.tensors import HostBytes

_STEP_BYTES = 4 << 20


def can_cast(stored: torch.dtype, live: torch.dtype) -> bool:
    """Say whether values may be converted: between floating types, or between complex ones, never across.

    Integers are not converted: what does not fit would wrap around without a sign.
    """
    packed = "x2"  # two elements in one byte: there is no conversion
    if str(stored).endswith(packed) or str(live).endswith(packed):
        return False
    return (stored.is_floating_point and live.is_floating_point) or (stored.is_complex and live.is_complex)


class CastBytes:
    """The `HostBytes` of a live tensor, spoken to in the stored dtype.

    Elements that a block's edge cuts wait until their last byte is in. Several threads may copy at once. Rounding
    is torch's own, to nearest even.
    """

    __slots__ = ("_count", "_cut", "_inner", "_live", "_lock", "_stored")

    def __init__(self, inner: HostBytes, stored: torch.dtype, live: torch.dtype) -> None:
        self._inner = inner
        self._stored = stored
        self._live = live
        self._count = inner.nbytes // live.itemsize
        self._cut: dict[int, dict[int, int]] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._count * self._stored.itemsize

    @property
    def inner(self) -> HostBytes:
        """The live bytes."""
        return self._inner

    def onto(self, inner: HostBytes) -> CastBytes:
        """Return the same conversion, into other live bytes."""
        return CastBytes(inner, self._stored, self._live)

    def copy_out(self, start: int, out: memoryview) -> None:
        """Write the live values in the stored dtype, bytes `start .. start + len(out)`."""
        size, live_size = self._stored.itemsize, self._live.itemsize
        first, last = start // size, -(-(start + len(out)) // size)
        raw = bytearray((last - first) * live_size)
        if raw:
            self._inner.copy_out(first * live_size, memoryview(raw))
            values = _as_bytes(torch.frombuffer(raw, dtype=self._live).to(self._stored))
            out[:] = values[start - first * size : start - first * size + len(out)]

    def copy_in(self, start: int, data: memoryview) -> None:
        """Take stored bytes `start .. start + len(data)`; write the values of all elements that are complete."""
        size, stop = self._stored.itemsize, start + len(data)
        first, last = -(-start // size), stop // size
        if first > last:
            self._take_cut(start, data)
            return
        self._take_cut(start, data[: first * size - start])
        step = max(1, _STEP_BYTES // size)
        for at in range(first, last, step):
            end = min(at + step, last)
            self._write(at, data[at * size - start : end * size - start])
        self._take_cut(last * size, data[last * size - start :])

    def _take_cut(self, start: int, data: memoryview) -> None:
        size = self._stored.itemsize
        if not len(data):
            return
        index = start // size
        with self._lock:
            held = self._cut.setdefault(index, {})
            held.update(enumerate(data, start - index * size))
            if len(held) < size:
                return
            del self._cut[index]
        self._write(index, memoryview(bytes(held[at] for at in range(size))))

    def _write(self, index: int, data: memoryview) -> None:
        values = torch.frombuffer(bytearray(data), dtype=self._stored).to(self._live)
        self._inner.copy_in(index * self._live.itemsize, _as_bytes(values))


def _as_bytes(values: torch.Tensor) -> memoryview:
    array: Any = values.contiguous().view(torch.uint8).numpy()
    return memoryview(array)
