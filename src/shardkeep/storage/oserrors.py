"""The operating system's errors as shardkeep's, each with the path, what was done, and what to do next."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from shardkeep.errors import CheckpointError, Denied, NotFound, OutOfSpace, StorageError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP})
_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
# Trouble that passes: devices and servers that answer again, memory and descriptors that others give back,
# a folder that a prune took away in between.
_PASSING: Final = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EINTR,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOLCK,
        errno.ENOENT,
        errno.EREMOTEIO,
        errno.ECOMM,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EPIPE,
    }
)


@contextlib.contextmanager
def mapped(doing: str, path: str, *, key: str, missing_ok: bool = False) -> Iterator[None]:
    """Raise every OSError of the block as an error of `shardkeep.errors`; see `map_os_error`."""
    try:
        yield
    except CheckpointError:  # NotFound is an OSError too
        raise
    except OSError as error:
        raise map_os_error(error, doing, path, key=key, missing_ok=missing_ok) from error


def map_os_error(
    error: OSError, doing: str, path: str, *, key: str, missing_ok: bool = False, retryable: bool | None = None
) -> CheckpointError:
    """Return the error to raise instead of `error`.

    Args:
        doing: what failed, as in "cannot <doing> <path>".
        missing_ok: a path that is not there is NotFound, not a failure of the store.
        retryable: overrides what the code of the error says.
    """
    code = error.errno or 0
    name = errno.errorcode.get(code, str(code))
    if missing_ok and code in _MISSING:
        return NotFound(f"no object {path}", key=key)
    text = f"cannot {doing} {path}: {name}, {os.strerror(code) if code else error}"
    if code in _FULL:
        return OutOfSpace(text, key=key, advice=_advise_full(path))
    if code in _DENIED:
        return Denied(text, key=key, advice=_ADVICE_LINK if code == errno.ELOOP else _advise_denied(path))
    passing = code in _PASSING if retryable is None else retryable
    return StorageError(text, retryable=passing, key=key, advice=None if passing else _advise_other(code, path))


_ADVICE_LINK: Final = (
    "replace the symbolic link by the file or folder itself; stores follow no links below their root"
)


def _advise_full(path: str) -> str:
    return f"free space or raise the quota (df -h {os.path.dirname(path)}), then save again"


def _advise_denied(path: str) -> str:
    return f"check the owner, mode and mount of {os.path.dirname(path)} (ls -ld, findmnt -T)"


def _advise_other(code: int, path: str) -> str:
    if code == errno.EFBIG:
        return "raise the limit on file sizes (ulimit -f), or set SHARDKEEP_SHARD_BYTES below it"
    if code == errno.ENOTDIR:
        return f"a file stands where a folder must be: ls -ld {os.path.dirname(path)} and the folders above it"
    if code == errno.ENAMETOOLONG:
        return "choose a shorter path for the run"
    return f"look at the file system of {os.path.dirname(path)} (findmnt -T, dmesg)"
