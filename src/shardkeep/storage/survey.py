"""What a folder's file system tells: its room and kind, whether nodes can share it, which folders are missing."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Final

from shardkeep.storage import durable

MEMORY_KINDS: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_SHARED_KINDS: Final = frozenset(
    {
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "cifs",
        "smb3",
        "9p",
        "virtiofs",
        "glusterfs",
        "ocfs2",
        "gfs2",
    }
)


def find_free_bytes(path: str) -> int | None:
    """Return the bytes this process could write where `path` is, or would be made, at most; None: it does not tell.

    What is set aside for root counts for root. Some network file systems say 0 of 0 for "not known".
    """
    try:
        status = os.statvfs(find_existing(path))
    except OSError:
        return None
    blocks_count = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    return blocks_count * status.f_frsize if status.f_blocks else None


def find_kind(path: str) -> str | None:
    """Return the type of the file system that holds `path`, or the folder it would be made in; None: not known."""
    there = os.path.realpath(find_existing(path))
    found: tuple[int, str] | None = None
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            head, _, tail = line.partition(" - ")
            fields, kind = head.split(), tail.split()
            if len(fields) < 5 or not kind:
                continue
            mount = _unescape(fields[4])
            is_above = there == mount or there.startswith(mount.rstrip("/") + "/")
            # The last of two mounts on one folder hides the first.
            if is_above and (found is None or len(mount) >= found[0]):
                found = len(mount), kind[0]
    return found[1] if found else None


def is_shareable(kind: str | None) -> bool:
    """Say whether file systems of a kind are made to be seen by several nodes."""
    return kind is not None and (kind in _SHARED_KINDS or kind.startswith("fuse"))


def find_existing(path: str) -> str:
    """Return `path` or the nearest folder above it that is there."""
    path = os.path.abspath(path)
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def list_missing(path: str) -> tuple[str, ...]:
    """Return the folders that a first write to `path` would make, the deepest first."""
    there, missing = find_existing(path), []
    path = os.path.abspath(path)
    while path != there:
        missing.append(path)
        path = os.path.dirname(path)
    return tuple(missing)


def remove_folders(paths: tuple[str, ...]) -> None:
    """Remove folders that are empty, in the order given; the first one in use ends it."""
    with contextlib.suppress(OSError):
        for path in paths:
            os.rmdir(path)


def reads_direct(path: str) -> bool:
    """Say whether a file of a page or more can be read past the page cache. Raises OSError."""
    folder, name = os.path.split(path)
    with durable.closing(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as folder_fd:
        fd = durable.open_direct(folder_fd, name, os.O_RDONLY)
        if fd is None:
            return False
        page = mmap.mmap(-1, durable.ALIGN_BYTES)
        with durable.closing(fd), memoryview(page) as view:
            return durable.read_direct(fd, view, 0) == durable.ALIGN_BYTES


def _unescape(text: str) -> str:
    return text.encode().decode("unicode_escape") if "\\" in text else text
