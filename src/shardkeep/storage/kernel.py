"""What Linux can do for files and Python has no name for: reserve room, look into the page cache, give way to others.

Plain calls through the C library, which release the interpreter lock. All but `reserve_room` are hints: where the
kernel, the file system or a sandbox does not have them they do nothing and say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from functools import lru_cache
from typing import Any, Final

_CACHESTAT: Final = 451  # Linux 6.5; one number for every processor
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "loongarch64": 30, "ppc64le": 273, "s390x": 282}
_THIS_THREAD: Final = (1, 0)  # IOPRIO_WHO_PROCESS, the calling thread
_IDLE_CLASS: Final = 3 << 13
_START_WRITING: Final = 2  # SYNC_FILE_RANGE_WRITE
_INTERRUPTED_TRIES: Final = 100


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def reserve_room(fd: int, size_bytes: int) -> int:
    """Give an empty file its size, with room on the device; return 0, or the number of an error (ENOSYS: none)."""
    libc = _libc()
    call = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    code = errno.ENOSYS
    for _ in range(_INTERRUPTED_TRIES):
        if call is not None:
            code = ctypes.get_errno() if call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) else 0
        if code != errno.EINTR:
            break
    return code


def looks_cached(fd: int, offset: int, length: int) -> bool:
    """Say whether the page cache seems to hold a file's bytes `offset .. offset + length`: both ends and the middle.

    Asks cachestat(2), and mincore(2) on kernels before 6.5. Both tell strangers nothing (mincore tells them "all of
    it"), so of other users' files the answer is False. Samples, as a look at every page takes a tenth of the time in
    which the bytes are copied; a wrong answer costs time, nothing else.
    """
    if not sys.platform.startswith("linux") or length <= 0:
        return False
    if os.geteuid() not in (0, os.fstat(fd).st_uid):
        return False
    libc = _libc()
    return all(_is_page_cached(libc, fd, at) for at in (offset, offset + length - 1, offset + length // 2))


def start_writing(fd: int, offset: int, length: int) -> bool:
    """Tell the kernel to begin writing dirty pages of a range; return whether it took the hint.

    Written this way, a large file never fills the memory with dirty pages that its `fsync` has to wait for.
    """
    call = getattr(_libc(), "sync_file_range", None)
    return call is not None and call(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _START_WRITING) == 0


def set_io_priority(*, idle: bool) -> bool:
    """Let the calling thread's requests wait for everybody else's (`idle`), or not any more; return whether it took.

    Only some schedulers (bfq, mq-deadline) tell requests apart by it.
    """
    number = _IOPRIO_SET.get(os.uname().machine) if sys.platform.startswith("linux") else None
    if number is None:
        return False
    priority = _IDLE_CLASS if idle else 0
    with contextlib.suppress(OSError, AttributeError):
        return bool(_libc().syscall(ctypes.c_long(number), *_THIS_THREAD, priority) == 0)
    return False


def _is_page_cached(libc: Any, fd: int, offset: int) -> bool:
    found = _CacheStat()
    where = _Range(offset=offset, length=1)
    number = ctypes.c_long(_CACHESTAT)
    if libc.syscall(number, fd, ctypes.byref(where), ctypes.byref(found), 0) == 0:
        return bool(found.cached)
    return is_resident(fd, offset)


def is_resident(fd: int, offset: int) -> bool:
    """Ask mincore(2) about the page of a file that holds the byte at `offset`; the page is not touched."""
    first = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with mmap.mmap(fd, offset - first + 1, flags=mmap.MAP_PRIVATE, offset=first) as mapped:
            mark = ctypes.c_ubyte()
            page = ctypes.c_ubyte.from_buffer(mapped, (offset - first) // mmap.PAGESIZE * mmap.PAGESIZE)
            try:
                failed = _libc().mincore(ctypes.byref(page), ctypes.c_size_t(1), ctypes.byref(mark))
            finally:
                del page  # a mapping that is still looked at cannot be closed
            return not failed and bool(mark.value & 1)
    except (OSError, ValueError, AttributeError):
        return False


@lru_cache(maxsize=1)
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
