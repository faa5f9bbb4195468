"""Host memory that files are read into and written from: page-aligned, in huge pages, and no business of forks.

Huge pages lie contiguous in memory, so that the device takes a block in few pieces; scattered small pages made the
same direct writes a third slower. A process forked meanwhile, a loader's worker, does not get the mapping at all: it
neither copies pages when this process writes to them, nor holds an older content of them, nor changes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final

HUGE_BYTES: Final = 2 << 20
"""What one huge page holds on common machines; regions begin at a multiple of it."""


class HostMemory:
    """A mapping of at least `size_bytes`. Raises OSError when the host has no such memory."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(-(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
        # Without a way to keep forks out, a shared mapping at least has one content for all.
        keeps_out = hasattr(mmap, "MADV_DONTFORK")
        flags = mmap.MAP_ANONYMOUS | (mmap.MAP_PRIVATE if keeps_out else mmap.MAP_SHARED)
        self._map = mmap.mmap(-1, self.size_bytes + HUGE_BYTES, flags=flags)
        if keeps_out:
            self._map.madvise(mmap.MADV_DONTFORK)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a hint: not every kernel has them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = -begin % HUGE_BYTES
        self.address = begin + self._start

    def view(self) -> memoryview:
        """Return the memory; it stays while somebody has the view."""
        return memoryview(self._map)[self._start : self._start + self.size_bytes]
