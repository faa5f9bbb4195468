"""`PosixWriter`: one large file written by several threads, past the page cache where that works."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Literal

from shardkeep.errors import StorageError
from shardkeep.storage import durable
from shardkeep.storage.coverage import Coverage
from shardkeep.storage.oserrors import map_os_error, mapped


class PosixWriter:
    """Writes one object under its final name. Implements `ObjectWriter`; made by `PosixStore.writer`.

    Blocks at offsets that are multiples of 4096 bytes, in page-aligned memory, go straight to the device; all else
    (a short tail, an odd offset or address) goes through the page cache of the same file. After the first
    failure the file is removed and every later call raises.
    """

    def __init__(self, folder_fd: int, name: str, *, size_bytes: int, key: str, path: str) -> None:
        """Create the file and reserve its space. Raises OSError, with nothing left behind."""
        self._name = name
        self._key = key
        self._path = path
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._coverage = Coverage(size_bytes, key=key)
        self._users_count = 0
        self._state: Literal["open", "finishing", "finished", "failed"] = "open"
        self._direct_fd: int | None = None
        flags = durable.FILE_FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._fd = os.open(name, flags, 0o666, dir_fd=folder_fd)
        try:
            durable.reserve(self._fd, size_bytes)
            if size_bytes >= durable.ALIGN_BYTES:
                self._direct_fd = durable.open_direct(folder_fd, name, os.O_WRONLY)
            self._folder_fd = os.dup(folder_fd)
        except BaseException:
            durable.unlink_quietly(folder_fd, name)
            if self._direct_fd is not None:
                os.close(self._direct_fd)
            os.close(self._fd)
            raise
        self._fds = [fd for fd in (self._folder_fd, self._fd, self._direct_fd) if fd is not None]

    def write_at(self, offset: int, block: memoryview) -> None:
        """Write a block; see `ObjectWriter.write_at`. Returns when the file system has it, not yet durable."""
        view = block.cast("B")
        with self._lock:
            self._check_open()
            self._coverage.claim(offset, len(view))
            self._users_count += 1
        with self._using():
            with mapped("write", self._path, key=self._key):
                done = 0 if self._direct_fd is None else durable.write_direct(self._direct_fd, view, offset)
                durable.write_buffered(self._fd, view[done:], offset + done)

    def finish(self) -> None:
        """Make the object durable: bytes, size, then its directory entry; see `ObjectWriter.finish`."""
        with self._lock:
            self._check_open()
            self._state = "finishing"
            writing_count = self._users_count
            self._users_count += 1
        with self._using():
            if writing_count:
                raise self._refuse(f"{writing_count} writes are still going on")
            self._coverage.check_whole()
            with mapped("make durable", self._path, key=self._key):
                self._make_durable()
            self._end()

    def abort(self) -> None:
        """Give up: remove the file as far as possible. Never raises; harmless after `finish`."""
        with self._lock:
            if self._state not in ("finished", "failed"):
                self._fail()

    def _make_durable(self) -> None:
        # ORDER: bytes and size before the folder's entry; a reader then finds either nothing or the whole object.
        os.fsync(self._fd)
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes != self._size_bytes:
            raise self._refuse(f"expected {self._size_bytes} bytes, found {size_bytes}: something else writes to it")
        # CRASH: until the folder is synced, a power cut may take the whole file; no commit record names it yet.
        try:
            durable.fsync_folder(self._folder_fd)
        except durable.FolderNotDurable as error:
            raise map_os_error(error, "make durable", self._path, key=self._key, retryable=False) from error

    def _end(self) -> None:
        with self._lock:
            if self._state == "failed":
                raise self._refuse("the writer was aborted while it finished")
            self._state = "finished"

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Use the descriptors (the caller has counted itself); whoever leaves last after the end closes them."""
        try:
            yield
        except BaseException:
            # A failed write or fsync may have dropped pages, and a second try would report success: the file is
            # worth nothing any more.
            with self._lock:
                self._users_count -= 1
                self._fail()
            raise
        with self._lock:
            self._users_count -= 1
            self._close_if_unused()

    def _fail(self) -> None:
        """Remove the file, once. The lock is held, so that no descriptor is closed meanwhile."""
        if self._state != "failed":
            self._state = "failed"
            durable.unlink_quietly(self._folder_fd, self._name)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._users_count == 0 and self._state in ("finished", "failed"):
            while self._fds:
                with contextlib.suppress(OSError):
                    os.close(self._fds.pop())

    def _check_open(self) -> None:
        if self._state != "open":
            how = "failed" if self._state == "failed" else "ended"
            raise self._refuse(f"the writer has {how} before", advice="begin the object again under another key")

    def _refuse(self, what: str, advice: str | None = None) -> StorageError:
        return StorageError(f"{self._path}: {what}", retryable=False, key=self._key, advice=advice)
