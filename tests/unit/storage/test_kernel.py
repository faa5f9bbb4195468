"""Hints to the kernel: right where they can be checked, harmless where they are not had."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.storage import kernel

PAGES = 64
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A durable file of PAGES pages, none of which is in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE))
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    # Read-ahead would bring in neighbours of the pages that a test reads.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if kernel.looks_cached(fd, 0, mmap.PAGESIZE):
        os.close(fd)
        pytest.skip("this file system lives in memory, or keeps its pages")
    yield fd
    os.close(fd)


def touch(fd: int, *pages: int) -> None:
    for page in pages:
        os.pread(fd, 1, page * mmap.PAGESIZE)


def test_a_range_looks_cached_when_its_ends_and_its_middle_are(file: int) -> None:
    whole = (0, PAGES * mmap.PAGESIZE)
    for pages in ((0,), (0, PAGES - 1), (0, PAGES - 1, PAGES // 2)):
        touch(file, *pages)
        assert kernel.looks_cached(file, *whole) is (len(pages) == 3)
    assert kernel.looks_cached(file, 0, 1)
    assert not kernel.looks_cached(file, mmap.PAGESIZE, 1)
    assert not kernel.looks_cached(file, mmap.PAGESIZE - 1, 2)
    assert not kernel.looks_cached(file, 0, 0)
    assert not kernel.looks_cached(file, 1 << 50, 1)


def test_both_ways_to_ask_agree(file: int) -> None:
    """mincore stands in for cachestat on kernels before 6.5."""
    touch(file, 0, 3, PAGES - 1)
    offsets = [page * mmap.PAGESIZE + at for page in range(PAGES) for at in (0, mmap.PAGESIZE - 1)]
    resident = [kernel.is_resident(file, offset) for offset in offsets]
    assert resident == [kernel.looks_cached(file, offset, 1) for offset in offsets]
    assert any(resident)
    assert not all(resident)
    assert not kernel.is_resident(file, PAGES * mmap.PAGESIZE)


def test_asking_touches_nothing(file: int) -> None:
    for page in range(PAGES):
        assert not kernel.is_resident(file, page * mmap.PAGESIZE)
    assert not any(kernel.looks_cached(file, page * mmap.PAGESIZE, 1) for page in range(PAGES))


def test_what_is_no_file_is_not_cached() -> None:
    read_fd, write_fd = os.pipe()
    assert not kernel.looks_cached(read_fd, 0, 1)
    os.close(read_fd)
    os.close(write_fd)


def test_room_is_reserved_or_refused(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    code = kernel.reserve_room(fd, 1 << 20)
    if code == 0:
        assert os.fstat(fd).st_size == 1 << 20
        assert os.fstat(fd).st_blocks * 512 >= 1 << 20
        assert kernel.reserve_room(fd, 1 << 62) in (errno.ENOSPC, errno.EFBIG)
    os.close(fd)
    assert kernel.reserve_room(fd, 1) in (errno.EBADF, errno.ENOSYS)


def test_dirty_pages_are_sent_off(file: int) -> None:
    os.pwrite(file, bytes(1 << 16), 0)
    if not kernel.start_writing(file, 0, 1 << 16):
        pytest.skip("no sync_file_range here")
    read_fd, write_fd = os.pipe()
    assert not kernel.start_writing(write_fd, 0, 1)
    os.close(read_fd)
    os.close(write_fd)


def test_idle_priority_is_of_one_thread_and_ends() -> None:
    number = _IOPRIO_GET.get(os.uname().machine)
    if number is None:
        pytest.skip("the number of ioprio_get is not known here")
    libc = ctypes.CDLL(None)
    found: list[tuple[bool, int]] = []

    def get() -> int:
        return int(libc.syscall(ctypes.c_long(number), 1, 0)) >> 13

    def work() -> None:
        for idle in (True, False):
            found.append((kernel.set_io_priority(idle=idle), get()))

    before = get()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(True, 3), (True, before)] or not found[0][0]
    assert get() == before
