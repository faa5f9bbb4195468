"""What the machine can do at best, and files made durable, evicted or read: no checkpoint in sight."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from shardkeep.engine.hostmemory import HostMemory

BLOCK_BYTES: Final = 8 << 20
ALIGN_BYTES: Final = 4096


def list_files(folder: Path) -> list[Path]:
    """Return every file below a folder (or the file itself), by path."""
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def count_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in list_files(folder))


def make_durable(folder: Path) -> None:
    """Fsync every file below a folder, every folder, and the folder above."""
    for path in (*list_files(folder), *(below for below in folder.rglob("*") if below.is_dir())):
        _fsync(path)
    _fsync(folder)
    _fsync(folder.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def evict(folder: Path) -> None:
    """Drop a folder's files from the page cache; they are made durable first, since dirty pages stay."""
    for path in list_files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm(folder: Path) -> None:
    """Bring a folder's files into the page cache."""
    buffer = bytearray(BLOCK_BYTES)
    for path in list_files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                continue


def allows_direct(folder: Path) -> bool:
    """Return whether files of this file system can be opened past the page cache."""
    path = folder / "direct-probe"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return True


class RawMover:
    """Moves bytes between the disk and a few aligned blocks that were touched before: the limit for everyone."""

    def __init__(self, *, threads: int = 2, direct: bool = True) -> None:
        self._flag = os.O_DIRECT if direct else 0
        self._blocks = [HostMemory(BLOCK_BYTES).view() for _ in range(threads)]
        noise = os.urandom(1 << 16) * (BLOCK_BYTES >> 16)
        for block in self._blocks:
            block[:] = noise

    def write(self, path: Path, size_bytes: int) -> float:
        """Write a new file, fsync it and its folder; return the seconds."""
        begin = time.monotonic()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flag, 0o600)
        try:
            size = -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
            with contextlib.suppress(OSError):  # a file system that cannot reserve space
                os.posix_fallocate(fd, 0, size)
            self._move(iter(_cut(size)), functools.partial(_write_block, fd))
            os.fsync(fd)
        finally:
            os.close(fd)
        _fsync(path.parent)
        return time.monotonic() - begin

    def read(self, paths: list[Path]) -> float:
        """Read whole files; return the seconds."""
        begin = time.monotonic()
        for path in paths:
            fd = os.open(path, os.O_RDONLY | self._flag)
            try:
                size = os.fstat(fd).st_size
                self._move(iter(_cut(size, whole=True)), functools.partial(_read_block, fd))
            finally:
                os.close(fd)
        return time.monotonic() - begin

    def _move(self, pieces: Iterator[tuple[int, int]], call: Callable[[memoryview, int], int]) -> None:
        lock = threading.Lock()
        failures: list[BaseException] = []

        def work(view: memoryview) -> None:
            try:
                while not failures:
                    with lock:
                        piece = next(pieces, None)
                    if piece is None:
                        return
                    call(view[: piece[1]], piece[0])
            except OSError as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(block,)) for block in self._blocks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def _write_block(fd: int, view: memoryview, offset: int) -> int:
    written = os.pwrite(fd, view, offset)
    if written != len(view):  # a limit that wrote less than it should would look fast
        raise OSError(errno.EIO, f"wrote {written} of {len(view)} bytes")
    return written


def _read_block(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


def _cut(size_bytes: int, *, whole: bool = False) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of blocks; with `whole` the last is a whole block, as a direct read wants it."""
    for offset in range(0, size_bytes, BLOCK_BYTES):
        yield offset, BLOCK_BYTES if whole else min(BLOCK_BYTES, size_bytes - offset)
