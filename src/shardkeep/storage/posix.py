"""`PosixStore`: objects are files below a folder, on a local disk or a shared file system.

An object's path is the root plus its key. Nothing below the root is reached through a symbolic link, and names that
are no keys (hidden and temporary files, `lost+found`) are never listed. The root itself may be a link and is made
at the first write. Descriptors live as long as one call (a writer: until `finish` or `abort`), so a pruned file
gives its space back at once and the root can be unmounted.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from shardkeep.errors import AlreadyExists, Corrupt, NotFound, StorageError, UsageError
from shardkeep.storage import durable, folders
from shardkeep.storage.base import Capabilities, ObjectInfo
from shardkeep.storage.keys import check_folder, check_key, check_prefix, is_part
from shardkeep.storage.oserrors import map_os_error, mapped
from shardkeep.storage.posix_writer import PosixWriter
from shardkeep.storage.survey import find_free_bytes

_T = TypeVar("_T")

DIRECT_READ_BYTES: Final = 256 << 10
"""Shorter reads go through the page cache, whose read-ahead serves their neighbours."""

_VANISH_TRIES: Final = 8
_READ_BYTES: Final = 1 << 30


class PosixStore:
    """Objects as files below `root`. Implements `Store`; safe for threads, processes and machines.

    Durable on return means: fsync of the file, of its folder, and of every folder above that was made on the way.
    """

    def __init__(self, root: str | Path, *, shared: bool = True) -> None:
        text = os.fspath(root)
        if not text or "\0" in text:
            raise UsageError(f"root {text!r}: expected the path of a folder", advice="give the folder of the run")
        self._root = os.path.abspath(text)
        self._known = folders.KnownFolders()
        self._capabilities = Capabilities(exclusive_create=True, write_offsets_multiple_bytes=1, shared=shared)

    @property
    def url(self) -> str:
        """The absolute path of the root; `open_store` takes it back."""
        return self._root

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Store a small object as a whole, durable on return, visible all at once; see `Store.put`."""
        folder, name = self._split(key)

        def work(folder_fd: int) -> None:
            if not if_absent:
                durable.put_replacing(folder_fd, name, data)
            elif not durable.put_exclusive(folder_fd, name, data):
                self._accept_identical(folder_fd, name, data, key)

        with self._mapped("write", key):
            self._in_made_folder(folder, work)

    def writer(self, key: str, size_bytes: int) -> PosixWriter:
        """Begin a large object under its final name, with its space reserved.

        Every writer must be ended by `finish` or `abort`.

        Raises:
            AlreadyExists: the key is taken: an object is never changed in place.
            OutOfSpace: its size does not fit; nothing is left behind.
        """
        folder, name = self._split(key)
        if size_bytes < 0:
            raise StorageError(f"{key}: size {size_bytes}: expected 0 or more", retryable=False, key=key)
        with self._mapped("create", key):
            try:
                return self._in_made_folder(
                    folder,
                    lambda folder_fd: PosixWriter(
                        folder_fd, name, size_bytes=size_bytes, key=key, path=self._path(key)
                    ),
                )
            except FileExistsError as error:
                raise self._refuse_existing(key) from error

    def clone(self, source: str, target: str) -> None:
        """Give an object a second name, a hard link: no more room, the same blocks; see `Store.clone`."""
        folder, name = self._split(target)

        with self._mapped("link", source, missing_ok=True), self._opened(source) as (source_fd, _, _):
            there = source.rpartition("/")[2]

            def link(folder_fd: int) -> None:
                os.link(there, name, src_dir_fd=source_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
                # ORDER: the entry is durable before anyone is told; the bytes are since they were finished.
                durable.fsync_folder(folder_fd)

            try:
                self._in_made_folder(folder, link)
            except FileExistsError as error:
                raise self._refuse_existing(target) from error

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """Return a whole object. Raises NotFound; Corrupt when it is larger than the limit."""
        with self._mapped("read", key, missing_ok=True), self._opened(key) as (_, fd, size_bytes):
            if size_bytes > limit_bytes:
                raise Corrupt(f"{self._path(key)}: expected at most {limit_bytes} bytes, found {size_bytes}", key=key)
            data = _read_whole(fd, size_bytes)
            if len(data) != size_bytes:
                raise self._short(key, size_bytes, len(data))
            return data

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes `offset ..`; long aligned reads pass by the page cache."""
        view = buffer.cast("B")
        if offset < 0:
            raise StorageError(f"{key}: offset {offset}: expected 0 or more", retryable=False, key=key)
        with self._mapped("read", key, missing_ok=True), self._opened(key) as (folder_fd, fd, size_bytes):
            if offset + len(view) > size_bytes:
                raise self._short(key, offset + len(view), size_bytes)
            done = 0
            if len(view) >= DIRECT_READ_BYTES and offset % durable.ALIGN_BYTES == 0:
                direct_fd = durable.open_direct(folder_fd, key.rpartition("/")[2], os.O_RDONLY)
                if direct_fd is not None:
                    with durable.closing(direct_fd):
                        done = durable.read_direct(direct_fd, view, offset)
            done += durable.read_all(fd, view[done:], offset + done)
            if done != len(view):
                raise self._short(key, offset + len(view), offset + done)

    def read_cached_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Fill buffers from the page cache if that seems to hold the bytes; see `CachingStore`."""
        from shardkeep.storage import kernel  # ctypes, not for every start of the command

        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        length = sum(map(len, views))
        try:
            with self._opened(key) as (_, fd, size_bytes):
                if offset + length > size_bytes or not kernel.looks_cached(fd, offset, length):
                    return False
                return durable.read_scattered(fd, views, offset) == length
        except (OSError, NotFound):
            return False

    def find_free_bytes(self) -> int | None:
        """Return what the file system of the root has left; before the root is made, of the folder above it."""
        return find_free_bytes(self._root)

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size. Raises NotFound."""
        check_key(key)
        with self._mapped("look at", key, missing_ok=True):
            # Most heads ask for what is not there (a prune intent): one call says so, without a walk of the folders.
            os.stat(self._path(key), follow_symlinks=False)
            with self._opened(key) as (_, _, size_bytes):
                return ObjectInfo(key=key, size_bytes=size_bytes)

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """Return every object whose key starts with `prefix`, ascending by key."""
        check_prefix(prefix)
        top, _, start = prefix.rpartition("/")
        found: list[ObjectInfo] = []
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            files, below = self._scan(folder)
            base = f"{folder}/" if folder else ""
            found += (
                ObjectInfo(key=base + name, size_bytes=size)
                for name, size in files
                if (base + name).startswith(prefix)
            )
            waiting += (base + name for name in below if folder != top or name.startswith(start))
        return sorted(found, key=lambda info: info.key)

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of the folders right below `prefix`, ascending; links are none."""
        check_folder(prefix)
        return sorted(self._scan(prefix.rstrip("/"))[1])

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects in the order given, each durably before the next; then folders that became empty."""
        wanted = list(keys)
        touched = {self._split(key)[0] for key in wanted}  # all keys are checked before the first is removed
        for key in wanted:
            folder, name = self._split(key)
            with self._mapped("delete", key):
                self._delete_one(folder, name)
        # ORDER: deepest first, so that a folder is empty by the time its turn comes.
        for folder in sorted(touched, key=lambda name: (-name.count("/"), name)):
            with self._mapped("remove the empty folder", folder):
                folders.remove_if_empty(self._root, folder, self._known)

    def _delete_one(self, folder: str, name: str) -> None:
        try:
            folder_fd = folders.open_folder(self._root, folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        with durable.closing(folder_fd):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=folder_fd)
            # ORDER: a commit record is gone for good before the shards that it names. Also when it was missing:
            # a process that was killed right after the unlink may be the one that removed it.
            durable.fsync_folder(folder_fd)

    def _scan(self, folder: str) -> tuple[list[tuple[str, int]], list[str]]:
        """Return the objects (name, size) and the folders right in a folder; nothing when there is none."""
        files: list[tuple[str, int]] = []
        below: list[str] = []
        with self._mapped("list", folder):
            try:
                folder_fd = folders.open_folder(self._root, folder)
            except (FileNotFoundError, NotADirectoryError):
                return files, below
            with durable.closing(folder_fd), os.scandir(folder_fd) as entries:
                for entry in entries:
                    if not is_part(entry.name):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):  # pruned since
                            files.append((entry.name, entry.stat(follow_symlinks=False).st_size))
        return files, below

    def _accept_identical(self, folder_fd: int, name: str, data: bytes, key: str) -> None:
        """Take an object that is there already for ours if it holds the same bytes, and make it durable."""
        with durable.closing(durable.open_to_read(folder_fd, name)) as fd:
            status = os.fstat(fd)
            same = stat.S_ISREG(status.st_mode) and status.st_size == len(data) and _read_whole(fd, len(data)) == data
            if not same:
                raise AlreadyExists(
                    f"{self._path(key)} exists with other bytes ({status.st_size}, ours are {len(data)})",
                    key=key,
                    advice="another process got there first: read what it wrote before going on",
                )
            # ORDER: whoever wrote it may have died between link and fsync of the folder.
            os.fsync(fd)
        durable.fsync_folder(folder_fd)

    def _in_made_folder(self, folder: str, work: Callable[[int], _T]) -> _T:
        """Run `work` on the folder, made where missing; again when a prune took the empty folder away meanwhile."""
        for _ in range(_VANISH_TRIES):
            try:
                with durable.closing(folders.make_folder(self._root, folder, self._known)) as folder_fd:
                    return work(folder_fd)
            except FileNotFoundError:
                continue
        with durable.closing(folders.make_folder(self._root, folder, self._known)) as folder_fd:
            return work(folder_fd)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int, int]]:
        """Open an object: its folder's descriptor, its own, its size in bytes."""
        folder, name = self._split(key)
        with durable.closing(folders.open_folder(self._root, folder)) as folder_fd:
            with durable.closing(durable.open_to_read(folder_fd, name)) as fd:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise NotFound(f"no object {self._path(key)}: it is not a regular file", key=key)
                yield folder_fd, fd, status.st_size

    @contextlib.contextmanager
    def _mapped(self, doing: str, key: str, *, missing_ok: bool = False) -> Iterator[None]:
        path = self._path(key)
        with mapped(doing, path, key=key, missing_ok=missing_ok):
            try:
                yield
            except durable.FolderNotDurable as error:
                raise map_os_error(error, f"{doing} durably", path, key=key, retryable=False) from error

    def _refuse_existing(self, key: str) -> AlreadyExists:
        return AlreadyExists(
            f"{self._path(key)} exists; an object is never changed in place",
            key=key,
            advice="write under another key, or delete the object first",
        )

    def _split(self, key: str) -> tuple[str, str]:
        check_key(key)
        folder, _, name = key.rpartition("/")
        return folder, name

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key) if key else self._root

    def _short(self, key: str, expected: int, found: int) -> Corrupt:
        return Corrupt(f"{self._path(key)}: expected at least {expected} bytes, found {found}", key=key)


def _read_whole(fd: int, size_bytes: int) -> bytes:
    """Read up to `size_bytes` from the start; one allocation for objects below 1 GiB."""
    pieces: list[bytes] = []
    done = 0
    while done < size_bytes:
        piece = os.pread(fd, min(size_bytes - done, _READ_BYTES), done)
        if not piece:
            break
        pieces.append(piece)
        done += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
