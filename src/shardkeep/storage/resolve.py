"""From what a person types to a store."""

from __future__ import annotations

import os
import re
from typing import Final

from shardkeep.errors import UsageError
from shardkeep.storage.base import Store
from shardkeep.storage.posix import PosixStore

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # two letters at least; pathlib makes s3:/ of s3://
_SUPPORTED: Final = "a path or file:///absolute/path"


def open_store(url: str | os.PathLike[str]) -> Store:
    """Return the store that `url` names: a path (`~` is the home folder) or a `file://` URL.

    Touches nothing: the folder is made at the first write.

    Raises:
        UsageError: another scheme, or no path at all.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else url
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"url {text!r}: expected {_SUPPORTED}", advice="give the folder of the run")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return PosixStore(os.path.expanduser(text))
    if scheme[1].lower() != "file":
        raise UsageError(
            f"url {text!r}: there is no store for {scheme[1]!r}; supported are {_SUPPORTED}",
            advice="give a path on a file system that all ranks share",
        )
    from urllib.parse import unquote, urlsplit  # not for every start of the command

    parts = urlsplit(text)
    path = unquote(parts.path)
    if (
        parts.netloc not in ("", "localhost")
        or parts.query
        or parts.fragment
        or not path.startswith("/")
        or "\0" in path
    ):
        raise UsageError(
            f"url {text!r}: expected file:///absolute/path",
            advice="write three slashes after file:, and %3F and %23 for ? and #",
        )
    return PosixStore(path)
