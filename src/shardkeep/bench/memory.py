"""Memory: pages that the host has taken back, and how much of it a process takes at its peak."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PAGE_BYTES: Final = 4096
_PROBE_BYTES: Final = 128 << 20
_SLOW_PAGE_S: Final = 2.5e-6
_BLOCK_BYTES: Final = 8 << 20
_LEAVE_FREE_BYTES: Final = 1 << 30
_CAP_BYTES: Final = 64 << 30
_SPARSE_BYTES: Final = 1 << 42
_SAMPLE_S: Final = 0.002


def read_meminfo(name: str) -> int:
    """Return a line of the kernel's memory report in bytes (`MemFree`, `MemAvailable`); 0 where there is none."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


class PageWarmer:
    """Keeps free memory small by filling it with page cache that can be given up at once.

    Some virtual machines give free pages back to their host within seconds, and the first write to such a page
    then costs 10 us and more: three seconds per GiB for all that allocates or goes through the page cache. A machine
    that has run for a while has no free pages, only page cache, so that is what is measured. The pages are those
    of holes in a sparse file, so no disk is read. Where a first write is cheap, nothing is done.
    """

    def __init__(self, folder: Path, *, wanted: bool = True) -> None:
        self.page_s = measure_first_touch()
        self.needed = wanted and self.page_s > _SLOW_PAGE_S
        self.filled_bytes = 0
        self._offset = 0
        self._fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600) if self.needed else None
        if self._fd is not None:
            os.ftruncate(self._fd, _SPARSE_BYTES)
            self._block = mmap.mmap(-1, _BLOCK_BYTES)

    def refill(self) -> None:
        """Fill what became free; cheap when it became free just now."""
        if self._fd is None:
            return
        begin = self.filled_bytes
        while read_meminfo("MemFree") > _LEAVE_FREE_BYTES and self.filled_bytes - begin < _CAP_BYTES:
            for _ in range(8):
                os.preadv(self._fd, [self._block], self._offset)
                self._offset += _BLOCK_BYTES
                self.filled_bytes += _BLOCK_BYTES
            if self._offset > _SPARSE_BYTES // 2:
                self._offset = 0

    def close(self) -> None:
        """Give the memory back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def measure_first_touch() -> float:
    """Return what the first write to a page of fresh memory costs, in seconds."""
    memory = mmap.mmap(-1, _PROBE_BYTES)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    begin = time.monotonic()
    for offset in range(0, _PROBE_BYTES, _PAGE_BYTES):
        memory[offset] = 1
    took_s = time.monotonic() - begin
    memory.close()
    return took_s / (_PROBE_BYTES // _PAGE_BYTES)


def read_resident() -> int:
    """Return the memory of this process and its children that nothing could reclaim, in bytes.

    Anonymous and shared memory; mapped files are page cache and not in it. Of children only what is anonymous is
    counted, since what they share with this process is counted here.
    """
    total = _read_status(os.getpid(), ("RssAnon", "RssShmem"))
    return total + sum(_read_status(pid, ("RssAnon",)) for pid in _list_children(os.getpid()))


def _read_status(pid: int, names: tuple[str, ...]) -> int:
    total = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(names):
                total += int(line.split()[1]) << 10
    return total


def _list_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found + [below for child in found for below in _list_children(child)]


def read_io() -> tuple[int, int]:
    """Return the bytes that this process has read so far by calls, and from a disk."""
    found = {"rchar": 0, "read_bytes": 0}
    with contextlib.suppress(OSError), open("/proc/self/io") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value)
    return found["rchar"], found["read_bytes"]


def count_read(before: tuple[int, int], after: tuple[int, int]) -> int:
    """Return the bytes read between two looks: calls miss what is mapped, disks miss what is cached."""
    return max(after[0] - before[0], after[1] - before[1])


class PeakSampler:
    """Watches this process's memory from a thread; `extra_bytes` is the peak above what it was at the start."""

    def __init__(self) -> None:
        self.extra_bytes = 0
        self._before = read_resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._look()

    def _look(self) -> None:
        self.extra_bytes = max(self.extra_bytes, read_resident() - self._before)

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()


@contextlib.contextmanager
def sample_peak() -> Iterator[PeakSampler]:
    """Watch memory for the length of a `with` block."""
    with PeakSampler() as sampler:
        yield sampler
