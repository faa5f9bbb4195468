"""From what a person types to a store."""

from __future__ import annotations

import os
import re
from typing import Final

from shardkeep.errors import UsageError
from shardkeep.storage.base import Store
from shardkeep.storage.posix import PosixStore

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # two letters at least; pathlib makes s3:/ of s3://
_SUPPORTED: Final = "a path, file:///absolute/path, s3://, gs://, az://, abfs://, https://"
_REMOTE: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "http", "https"})


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Say whether `url` names something that is reached through a service, and is no path."""
    scheme = _SCHEME.match(os.fspath(url))
    return scheme is not None and scheme[1].lower() in _REMOTE


def open_store(url: str | os.PathLike[str]) -> Store:
    """Return the store that `url` names: a path (`~` is the home folder), a `file://` URL or an object store's.

    Touches nothing: a folder is made at the first write, a service is asked at the first call. The URL of a service
    may have gone through `pathlib`, which makes one slash of two.

    Raises:
        UsageError: another scheme, no path at all, a URL with a user, password or query (they are not repeated), or
            obstore, which services need, is not installed.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else url
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"url {text!r}: expected {_SUPPORTED}", advice="give the folder of the run")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return PosixStore(os.path.expanduser(text))
    if is_remote(text):
        rest = text[len(scheme[1]) + 1 :]
        return _open_remote(scheme[1].lower(), rest[2:] if rest.startswith("//") else rest[1:])
    if scheme[1].lower() != "file":
        raise UsageError(
            f"there is no store for {scheme[1]!r} URLs; supported are {_SUPPORTED}",
            advice="give a path on a file system that all ranks share",
        )
    from urllib.parse import unquote, urlsplit  # not for every start of the command

    parts = urlsplit(text)
    path = unquote(parts.path)
    shown = "file: with a user" if "@" in parts.netloc else repr(text)  # what is before an @ may be a secret
    if (
        parts.netloc not in ("", "localhost")
        or parts.query
        or parts.fragment
        or not path.startswith("/")
        or "\0" in path
    ):
        raise UsageError(
            f"url {shown}: expected file:///absolute/path",
            advice="write three slashes after file:, and %3F and %23 for ? and #",
        )
    return PosixStore(path)


def _open_remote(scheme: str, rest: str) -> Store:
    from shardkeep.storage.http_store import HttpStore  # with numpy and threads, which a path does without
    from shardkeep.storage.object_connect import connect
    from shardkeep.storage.objects import ObjectStore

    connection = connect(scheme, rest)
    return ObjectStore(connection) if connection.writable else HttpStore(connection)
