"""`ObjectClient`: one bucket and prefix through obstore, call by call, with every error mapped. Knows no protocol.

Nothing is repeated here but the parts of a multipart upload: those bytes may be gone by the time that an error
reaches `RetryingStore`, which repeats everything else. obstore repeats them for RETRY_BUDGET_S each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardkeep.errors import AlreadyExists, Corrupt, NotFound, StorageError
from shardkeep.storage.base import ObjectInfo
from shardkeep.storage.object_errors import mapped

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Handle

NONCE: Final = "shardkeepnonce"
"""Metadata of what a writer uploaded: says whose object it is when an answer got lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An opened bucket.

    Attributes:
        url: as a person writes it, without secrets; no `/` at the end.
        calls: obstore's store below the prefix, which repeats nothing.
        uploads: the same, which repeats what it sends.
        conditional: the service has exclusive creates; None: find out before the first one.
        writable: False where there is nothing but reading.
        folders_linger: lists may show folders that have nothing below them any more.
    """

    url: str
    calls: Handle
    uploads: Handle
    conditional: bool | None
    writable: bool = True
    folders_linger: bool = False


class ObjectClient:
    """The calls that the store, its uploads and its claims are made of. Safe for threads.

    Attributes:
        conditional: as in `Connection`; the store sets it when it has found out.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._handle = connection.calls
        self._reached = False
        self.conditional = connection.conditional

    @property
    def url(self) -> str:
        return self._connection.url

    def where(self, key: str) -> str:
        """Return an object's URL for messages."""
        return f"{self.url}/{key}" if key else self.url

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """Store an object with one request. Raises AlreadyExists with `create` when there is one."""
        import obstore

        with self._mapped("write", key):
            obstore.put(self._handle, key, data, mode="create" if create else "overwrite", use_multipart=False)

    def put_whole(self, key: str, data: Any, *, nonce: str) -> None:
        """Store a writer's object of one part. Raises AlreadyExists where the service can tell. Repeats nothing."""
        import obstore

        with self._mapped("upload", key):
            obstore.put(
                self._handle,
                key,
                data,
                mode="create" if self.conditional else "overwrite",
                use_multipart=False,
                attributes={NONCE: nonce},
            )

    def put_parts(self, key: str, parts: Iterator[Any], *, part_bytes: int, parallel: int, nonce: str) -> None:
        """Store an object from an iterator of its parts, each sent as it is, without a copy, `parallel` at a time."""
        import obstore

        with self._mapped("upload", key):
            obstore.put(
                self._connection.uploads,
                key,
                parts,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=parallel,
                attributes={NONCE: nonce},
            )

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the service. Raises NotFound when there is no source; may replace a target."""
        import obstore

        with self._mapped("copy", source, missing_ok=True):
            obstore.copy(self._handle, source, target)

    def find_upload(self, key: str) -> tuple[int, str | None]:
        """Return an object's size and the nonce of the writer that made it (None: not told). Raises NotFound.

        Part of a writer's `finish`, which nobody repeats, and of copies, which are not to be made again: repeated
        here, as uploads are.
        """
        import obstore

        with self._mapped("look at", key, missing_ok=True):
            result = obstore.get(self._connection.uploads, key, options={"head": True})
            return result.meta["size"], result.attributes.get(NONCE)

    def head(self, key: str) -> int:
        """Return an object's size. Raises NotFound."""
        import obstore

        with self._mapped("look at", key, missing_ok=True):
            return obstore.head(self._handle, key)["size"]

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """Return a whole object. Raises NotFound; Corrupt when it is larger than the limit."""
        import obstore

        with self._mapped("read", key, missing_ok=True):
            result = obstore.get(self._handle, key)
            size_bytes = result.meta["size"]
            if size_bytes > limit_bytes:
                raise Corrupt(f"{self.where(key)}: expected at most {limit_bytes} bytes, found {size_bytes}", key=key)
            data = bytes(result.bytes())
        if len(data) != size_bytes:
            raise self._cut_off(key, size_bytes, len(data))
        return data

    def read_into(self, key: str, offset: int, view: memoryview) -> None:
        """Fill `view`, which is not empty, with bytes `offset ..` of an object, with one request."""
        import obstore

        end = offset + len(view)
        try:
            with self._mapped("read", key, missing_ok=True):
                data = obstore.get_range(self._handle, key, start=offset, length=len(view))
        except StorageError as error:
            if not error.retryable:
                self.check_reaches(key, end)  # a range beyond the end is refused in many ways
            raise
        found = len(data)
        if found != len(view):
            self.check_reaches(key, end)
            raise self._cut_off(key, len(view), found)
        view[:] = memoryview(data)

    def check_reaches(self, key: str, end: int) -> None:
        """Raise Corrupt when an object has fewer than `end` bytes."""
        size_bytes = self.head(key)
        if size_bytes < end:
            raise Corrupt(f"{self.where(key)}: expected at least {end} bytes, found {size_bytes}", key=key)

    def list_below(self, folder: str) -> list[ObjectInfo]:
        """Return every object below a folder (empty, or ending in `/`), in no order."""
        import obstore

        found: list[ObjectInfo] = []
        with self._mapped("list", folder):
            for batch in obstore.list(self._handle, folder.rstrip("/") or None, chunk_size=1000):
                found += (ObjectInfo(key=meta["path"], size_bytes=meta["size"]) for meta in batch)
        return found

    def list_folders(self, folder: str) -> list[str]:
        """Return the names right below a folder that have something below them, in no order."""
        import obstore

        with self._mapped("list", folder):
            found = obstore.list_with_delimiter(self._handle, folder.rstrip("/") or None)["common_prefixes"]
            paths = [path.rstrip("/") for path in found]
            if self._connection.folders_linger:
                paths = [path for path in paths if any(obstore.list(self._handle, path, chunk_size=1))]
        return [path.rpartition("/")[2] for path in paths]

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""
        import obstore

        try:
            with self._mapped("delete", key, missing_ok=True):
                obstore.delete(self._handle, key)
        except NotFound:
            return

    def refuse_existing(self, key: str) -> AlreadyExists:
        """Return the error for a writer whose key is taken."""
        return AlreadyExists(
            f"{self.where(key)} exists; an object is never changed in place",
            key=key,
            advice="write under another key, or delete the object first",
        )

    def _cut_off(self, key: str, expected: int, found: int) -> StorageError:
        return StorageError(
            f"cannot read {self.where(key)}: the answer ended after {found} of {expected} bytes", key=key
        )

    @contextlib.contextmanager
    def _mapped(self, doing: str, key: str, *, missing_ok: bool = False) -> Iterator[None]:
        with mapped(doing, self.where(key), key=key, missing_ok=missing_ok, reached=self._reached):
            yield
            self._reached = True
