"""Folders below a root: opened part by part without following links, made durable, removed when empty."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections import OrderedDict
from typing import Final

from shardkeep.storage.durable import TEMPORARY_PREFIX, closing, fsync_folder

STALE_TEMPORARY_S: Final = 3600.0
"""A temporary file this old belongs to a process that died: no `put` lasts that long."""

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_REMOVED: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.EACCES, errno.EPERM})


class KnownFolders:
    """The folders whose entries this process has made durable; at most `limit` of them, the last used ones."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._folders: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, folder: str) -> bool:
        with self._lock:
            return folder in self._folders

    def add(self, folder: str) -> None:
        with self._lock:
            self._folders[folder] = None
            self._folders.move_to_end(folder)
            if len(self._folders) > self._limit:
                self._folders.popitem(last=False)

    def forget(self, folder: str) -> None:
        with self._lock:
            self._folders.pop(folder, None)


def open_folder(root: str, folder: str) -> int:
    """Open `folder` (`/`-separated, below `root`; empty: the root itself).

    Raises:
        OSError: ENOENT or ENOTDIR when there is none, ELOOP when a part is a symbolic link.
    """
    fd = os.open(root, _FLAGS)
    for part in _parts(folder):
        with closing(fd):
            child_fd = _open_child(fd, part)
        fd = child_fd
    return fd


def make_folder(root: str, folder: str, known: KnownFolders) -> int:
    """Open `folder`, made first where it is missing; it and all folders above it are durable on return."""
    fd = _make_root(root, known_durable="" in known)
    known.add("")
    walked: list[str] = []
    for part in _parts(folder):
        walked.append(part)
        path = "/".join(walked)
        with closing(fd):
            child_fd = _make_child(fd, part, known_durable=path in known)
        fd = child_fd
        known.add(path)
    return fd


def remove_if_empty(root: str, folder: str, known: KnownFolders) -> None:
    """Remove `folder` and those above it that are left without an entry, never the root; durable on return.

    Temporary files that dead processes left are swept up. Folders that may not be removed stay: that is housekeeping.
    """
    while folder:
        above, _, name = folder.rpartition("/")
        try:
            with closing(open_folder(root, above)) as above_fd:
                try:
                    _remove_folder(above_fd, name)
                except FileNotFoundError:
                    pass
                else:
                    fsync_folder(above_fd)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            if error.errno in _NOT_REMOVED:
                return
            raise
        known.forget(folder)
        folder = above


def _parts(folder: str) -> list[str]:
    return folder.split("/") if folder else []


def _open_child(folder_fd: int, name: str) -> int:
    try:
        return os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=folder_fd)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _make_child(folder_fd: int, name: str, *, known_durable: bool) -> int:
    try:
        child_fd = _open_child(folder_fd, name)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder_fd)
        child_fd = _open_child(folder_fd, name)
        known_durable = False
    if not known_durable:
        try:
            # ORDER: a folder's entry before anything inside it is called durable, also when another process made
            # the folder and may have died before this line.
            fsync_folder(folder_fd)
        except BaseException:
            os.close(child_fd)
            raise
    return child_fd


def _make_root(path: str, *, known_durable: bool) -> int:
    """Open the absolute path (links in it are followed), made first where it is missing, with its parents."""
    above = os.path.dirname(path)
    try:
        root_fd = os.open(path, _FLAGS)
    except FileNotFoundError:
        if above == path:
            raise
        with closing(_make_root(above, known_durable=True)) as above_fd:
            return _make_child(above_fd, os.path.basename(path), known_durable=False)
    if not known_durable:
        try:
            # It existed: a folder above it that may not be opened is not this store's to care for.
            with contextlib.suppress(PermissionError), closing(os.open(above, _FLAGS)) as above_fd:
                fsync_folder(above_fd)
        except BaseException:
            os.close(root_fd)
            raise
    return root_fd


def _remove_folder(above_fd: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=above_fd)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        with closing(_open_child(above_fd, name)) as folder_fd:
            if not _sweep_temporaries(folder_fd):
                raise
        os.rmdir(name, dir_fd=above_fd)


def _sweep_temporaries(folder_fd: int) -> bool:
    """Remove the temporary files of dead processes, if the folder holds nothing else; return whether it did."""
    names = sorted(os.listdir(folder_fd))
    if not all(name.startswith(TEMPORARY_PREFIX) for name in names):
        return False
    oldest_kept_s = time.time() - STALE_TEMPORARY_S
    if any(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mtime > oldest_kept_s for name in names):
        return False
    for name in names:
        os.unlink(name, dir_fd=folder_fd)
    return True
