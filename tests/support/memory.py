"""The host memory that a piece of work takes, as the kernel counts it.

Not `tracemalloc`: before Python 3.12.9 its `stop` crashes a process in which other threads allocate
(python/cpython#128679), and it sees nothing of what C code maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Peak:
    """Filled in when the `with` block ends."""

    extra_bytes: int = 0


@contextmanager
def watch_peak() -> Iterator[Peak]:
    """Give the growth of this process's resident memory at its highest, in bytes, over a `with` block."""
    peak = Peak()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark begins anew
    before = _read_status("VmRSS:")
    try:
        yield peak
    finally:
        peak.extra_bytes = _read_status("VmHWM:") - before


def _read_status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))
