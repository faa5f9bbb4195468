"""Host memory for one staged checkpoint: mapped and touched once, ahead of the first save, then used again.

The first touch of fresh memory costs more than copying into it (page faults; on a virtual machine several times
more than writing it to a disk), so it happens in the background, before the memory is needed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import Final

from shardkeep.engine.hostmemory import HostMemory
from shardkeep.errors import StorageError, UsageError

_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14; mmap has no name for it yet
_TOUCH_BYTES: Final = 8 << 20
"""So much is touched between two looks at whether the memory is wanted now."""


class Arena:
    """A page-aligned region that grows when asked for more. One user at a time."""

    def __init__(self) -> None:
        self._memory: HostMemory | None = None
        self._toucher: threading.Thread | None = None
        self._wanted = threading.Event()
        self._pid = os.getpid()

    @property
    def size_bytes(self) -> int:
        """Bytes mapped."""
        return self._memory.size_bytes if self._memory is not None else 0

    def prepare(self, size_bytes: int) -> None:
        """Map at least so many bytes and touch them in the background; returns at once.

        Raises:
            StorageError: the host has no such memory. UsageError: this is a fork of the process that saves.
        """
        self._check_process()
        self._settle()
        if self.size_bytes >= size_bytes:
            return
        memory = self._grow(size_bytes)
        self._wanted.clear()
        # Daemon: a process that ends does not wait for memory that it never used.
        self._toucher = threading.Thread(
            target=_touch, args=(memory, self._wanted), name="shardkeep-arena", daemon=True
        )
        self._toucher.start()

    def take(self, size_bytes: int) -> memoryview:
        """Return the first `size_bytes` of the region; what was there before is to be overwritten.

        Raises:
            StorageError: the host has no such memory. UsageError: this is a fork of the process that saves.
        """
        self._check_process()
        self._settle()
        memory = self._memory
        if memory is None or memory.size_bytes < size_bytes:
            memory = self._grow(size_bytes)
        return memory.view()[:size_bytes]

    def _check_process(self) -> None:
        # A fork has no such mapping.
        if os.getpid() != self._pid:
            raise UsageError(
                f"memory for saving belongs to process {self._pid}, this is its fork {os.getpid()}",
                advice="save in the process that trains, not in a forked worker",
            )

    def _grow(self, size_bytes: int) -> HostMemory:
        # Dropped first: the old and the new region together may be more than the host has.
        self._memory = None
        try:
            self._memory = HostMemory(size_bytes)
        except OSError as error:
            raise StorageError(
                f"no memory to stage {size_bytes} bytes on the host: {error}",
                advice="free host memory, raise its limit (ulimit -v, the job's), or save with mode='blocking', "
                "which needs a few blocks only",
            ) from error
        return self._memory

    def _settle(self) -> None:
        """End the touching: from here on the region's bytes are the user's alone."""
        self._wanted.set()
        if self._toucher is not None:
            self._toucher.join()
            self._toucher = None

    def close(self) -> None:
        """Give the memory back once nobody looks at it any more; harmless twice, and in a fork."""
        if os.getpid() == self._pid:
            self._settle()
        self._memory = None


def _touch(memory: HostMemory, wanted: threading.Event) -> None:
    """Give every page of a region its memory, with the interpreter lock released, until the region is wanted."""
    libc = ctypes.CDLL(None, use_errno=True)
    region = memory.view()
    populates = True
    zero_fd = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start in range(0, len(region), _TOUCH_BYTES):
            if wanted.is_set():
                return
            size_bytes = min(_TOUCH_BYTES, len(region) - start)
            if populates:
                where = ctypes.c_void_p(memory.address + start)
                populates = not libc.madvise(where, ctypes.c_size_t(size_bytes), _POPULATE_WRITE)
                if not populates and ctypes.get_errno() == errno.ENOMEM:
                    return  # no memory left: the save itself will tell
            if not populates:
                # Kernels before 5.14. Nobody has used the region yet, so zeros do no harm.
                os.preadv(zero_fd, [region[start : start + size_bytes]], 0)
    finally:
        os.close(zero_fd)
