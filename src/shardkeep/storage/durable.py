"""Files that survive a power cut: the few system calls in the one right order.

Plain functions over file descriptors; names are relative to an open folder, so that no symbolic link and no folder
swapped in between can lead a write elsewhere. They raise OSError; `posix` maps it. What is relied on: `fsync` of
a file makes its bytes and size durable, `fsync` of a folder its entries; `link` and `rename` within a folder
are atomic. (POSIX.1-2024 fsync, link, rename; why no step can be left out: Pillai et al., "All File Systems Are
Not Created Equal", OSDI 2014.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Final

TEMPORARY_PREFIX: Final = ".tmp-"
ALIGN_BYTES: Final = 4096
"""Offsets and lengths of direct I/O are multiples of this: the largest logical block of common devices."""

WRITE_SOON_BYTES: Final = 1 << 20
"""Buffered blocks of this size on are sent to the device at once; shorter ones are left to the kernel to gather."""

FILE_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW
_READ_FLAGS: Final = FILE_FLAGS | os.O_RDONLY | os.O_NONBLOCK  # NONBLOCK: a fifo must not hang the open
_VECTOR_COUNT: Final = 512  # at most IOV_MAX, 1024 on Linux
_UNSUPPORTED: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
_NO_RESERVE: Final = _UNSUPPORTED | {errno.ENOSYS, errno.ENODEV}
_NO_LINK: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class FolderNotDurable(OSError):
    """`fsync` of a folder failed. The kernel says so only once: a second try that succeeds would prove nothing."""


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of a block."""
    try:
        yield fd
    finally:
        os.close(fd)


def fsync_folder(folder_fd: int) -> None:
    """Make the entries of a folder durable. File systems that cannot (EINVAL) write them through anyway."""
    try:
        os.fsync(folder_fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise FolderNotDurable(error.errno, error.strerror) from error


def open_to_read(folder_fd: int, name: str) -> int:
    """Open a file to read; ELOOP when it is a symbolic link."""
    return os.open(name, _READ_FLAGS, dir_fd=folder_fd)


def open_direct(folder_fd: int, name: str, access: int) -> int | None:
    """Open a file a second time, past the page cache; None where the file system has no such thing."""
    flag: int = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        return os.open(name, FILE_FLAGS | access | flag, dir_fd=folder_fd)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise


def reserve(fd: int, size_bytes: int) -> None:
    """Give an empty file its final size, with room on the device where the file system can promise that.

    Calls `fallocate` itself: `posix_fallocate` of the C library writes into every block where that is not supported.
    """
    if size_bytes == 0:
        return
    from shardkeep.storage import kernel  # ctypes, not for every start of the command

    code = kernel.reserve_room(fd, size_bytes)
    if code in _NO_RESERVE:
        os.ftruncate(fd, size_bytes)
    elif code:
        raise OSError(code, os.strerror(code))


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, however short the single writes are."""
    done = 0
    while done < len(data):
        count = os.pwrite(fd, data[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "a write of no bytes")
        done += count


def write_buffered(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` through the page cache; of a large block, let the device begin at once."""
    write_all(fd, data, offset)
    if len(data) >= WRITE_SOON_BYTES:
        from shardkeep.storage import kernel

        kernel.start_writing(fd, offset, len(data))


def write_direct(fd: int, data: memoryview, offset: int) -> int:
    """Write the aligned head of `data` past the page cache; return how many bytes that were.

    What is left (a short tail, an address or block size the device does not take, all of it where a file system
    opens such files but refuses to write them) goes through `write_buffered`. No page is ever touched both ways by
    different blocks, as only pages that a block covers wholly are written here.
    """
    body = len(data) - len(data) % ALIGN_BYTES if offset % ALIGN_BYTES == 0 else 0
    done = 0
    while done < body and done % ALIGN_BYTES == 0:
        try:
            count = os.pwrite(fd, data[done:body], offset + done)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                break
            raise
        if count == 0:
            break
        done += count
    return done


def read_all(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer`; return how many bytes there were before the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def read_scattered(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill buffers one after the other; return how many bytes there were before the end of the file."""
    waiting, done = list(buffers), 0
    while waiting:
        count = os.preadv(fd, waiting[:_VECTOR_COUNT], offset + done)
        if count == 0:
            break
        done += count
        while waiting and count >= len(waiting[0]):
            count -= len(waiting.pop(0))
        if count:
            waiting[0] = waiting[0][count:]
    return done


def read_direct(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill the aligned head of `buffer` past the page cache; return how many bytes that were."""
    body = len(buffer) - len(buffer) % ALIGN_BYTES if offset % ALIGN_BYTES == 0 else 0
    done = 0
    while done < body and done % ALIGN_BYTES == 0:
        try:
            count = os.preadv(fd, [buffer[done:body]], offset + done)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                break
            raise
        if count == 0:
            break
        done += count
    return done


def put_replacing(folder_fd: int, name: str, data: bytes) -> None:
    """Make `name` hold `data`, durable on return; at every moment it holds the old bytes or the new ones."""
    temporary = _write_temporary(folder_fd, data)
    try:
        # ORDER: the bytes are durable (in _write_temporary) before the name leads to them.
        os.replace(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        unlink_quietly(folder_fd, temporary)
        raise
    # CRASH: before the next line returns, a power cut may bring back the old object, whole.
    fsync_folder(folder_fd)


def put_exclusive(folder_fd: int, name: str, data: bytes) -> bool:
    """Make `name` hold `data`, durable on return, if no such name exists; return False if one does.

    `link` decides between machines. Where there are no hard links, an exclusive create does; a crash can then
    leave a torn object under the name (readers find its digest wrong), never a wrong winner.
    """
    temporary = _write_temporary(folder_fd, data)
    try:
        # ORDER: the bytes are durable (in _write_temporary) before the name leads to them.
        os.link(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        try:
            _write_new(folder_fd, name, data)
        except FileExistsError:
            return False
    finally:
        # CRASH: killed before this, the temporary name stays; `folders.remove_if_empty` sweeps it up.
        unlink_quietly(folder_fd, temporary)
    # ORDER: the entry is durable before anyone is told.
    fsync_folder(folder_fd)
    return True


def unlink_quietly(folder_fd: int, name: str) -> None:
    """Remove a file as far as possible."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder_fd)


def _write_temporary(folder_fd: int, data: bytes) -> str:
    """Write a durable file under a name nobody else uses; return the name."""
    name = f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    _write_new(folder_fd, name, data)
    return name


def _write_new(folder_fd: int, name: str, data: bytes) -> None:
    """Create a file that must not exist and make its bytes durable; after a failure it is gone, never retried."""
    fd = os.open(name, FILE_FLAGS | os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder_fd)
    try:
        with closing(fd):
            write_all(fd, memoryview(data), 0)
            os.fsync(fd)
    except BaseException:
        unlink_quietly(folder_fd, name)
        raise
