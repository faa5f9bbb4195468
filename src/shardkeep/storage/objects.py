"""`ObjectStore`: objects of S3 and what speaks like it, Google Cloud Storage, Azure Blob Storage, and HTTP to read.

Needs no rename, append, link or fsync of the service: a put that is acknowledged is durable and visible, everywhere,
at once (S3 since 2020, GCS, Azure). An object's name is the prefix of the URL plus its key. Names that are no keys
are never listed. Calls are not repeated here: `RetryingStore` does that.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable

from shardkeep.errors import AlreadyExists, NotFound, StorageError
from shardkeep.storage.base import Capabilities, ObjectInfo, ObjectWriter
from shardkeep.storage.keys import check_folder, check_key, check_prefix, is_part
from shardkeep.storage.object_claims import put_by_claim
from shardkeep.storage.object_client import Connection
from shardkeep.storage.object_reader import ObjectReader
from shardkeep.storage.object_upload import ObjectUpload


class ObjectStore(ObjectReader):
    """A bucket, or a prefix in one. Implements `Store`; safe for threads, processes and machines.

    Args:
        connection: from `object_connect.connect`.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            exclusive_create=self._client.conditional is not False,
            write_offsets_multiple_bytes=1,
            shared=True,
            remote=True,
        )

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Store a small object as a whole, durable on return, visible all at once; see `Store.put`."""
        check_key(key)
        if not if_absent:
            self._client.put(key, data)
        elif self._is_conditional():
            try:
                self._client.put(key, data, create=True)
            except AlreadyExists:
                self._accept_identical(key, data)
        else:
            put_by_claim(self._client, key, data)

    def writer(self, key: str, size_bytes: int) -> ObjectWriter:
        """Begin an object that appears at `finish`. Raises AlreadyExists here, or there after a race."""
        check_key(key)
        if size_bytes < 0:
            raise StorageError(f"{key}: size {size_bytes}: expected 0 or more", retryable=False, key=key)
        try:
            self._client.head(key)
        except NotFound:
            return ObjectUpload(self._client, key, size_bytes)
        raise self._client.refuse_existing(key)

    def clone(self, source: str, target: str) -> None:
        """Let the service copy an object; see `Store.clone`. Services limit the size (S3: 5 GiB): StorageError."""
        check_key(source)
        check_key(target)
        size_bytes = self._client.head(source)
        # A condition on copies is beyond most services. One process alone makes this key, as it does a writer's.
        with contextlib.suppress(NotFound):
            self._client.head(target)
            raise self._client.refuse_existing(target)
        lost: StorageError | None = None
        try:
            self._client.copy(source, target)
        except StorageError as error:
            if not error.retryable:
                raise
            lost = error  # of the answer alone, maybe: what is there decides
        try:
            found, _ = self._client.find_upload(target)  # which waits out trouble
        except NotFound as missing:
            raise lost or missing from None
        if found != size_bytes:  # Azure may answer before it has copied
            raise StorageError(
                f"{self._client.where(target)}: expected a copy of {size_bytes} bytes, found {found}",
                retryable=False,
                key=target,
            )

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """Return every object whose key starts with `prefix`, ascending by key."""
        check_prefix(prefix)
        folder = prefix[: prefix.rfind("/") + 1]
        found = [
            info
            for info in self._client.list_below(folder)
            if info.key.startswith(prefix) and all(is_part(part) for part in info.key.split("/"))
        ]
        return sorted(found, key=lambda info: info.key)

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of the folders right below `prefix`, ascending."""
        check_folder(prefix)
        return sorted({name for name in self._client.list_folders(prefix) if is_part(name)})

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects in the order given, each for good before the next; missing ones are no error."""
        wanted = list(keys)
        for key in wanted:
            check_key(key)
        for key in wanted:
            # ORDER: one request after another: a bulk delete removes in no order, and a commit record goes first.
            self._client.delete(key)

    def _accept_identical(self, key: str, data: bytes) -> None:
        """Take an object that is there already for ours if it holds the same bytes."""
        try:
            found = self._client.get(key, limit_bytes=max(len(data), 1 << 30))
        except NotFound:
            # Refused, and nothing there: another create is on its way, or somebody has just removed the object.
            raise StorageError(
                f"{self._client.where(key)}: another create of it is under way", retryable=True, key=key
            ) from None
        if found != data:
            raise AlreadyExists(
                f"{self._client.where(key)} exists with other bytes ({len(found)}, ours are {len(data)})",
                key=key,
                advice="another process got there first: read what it wrote before going on",
            )

    def _is_conditional(self) -> bool:
        """Say whether the service refuses to create what exists; where nobody knows, try it once, out of sight."""
        with self._lock:
            if self._client.conditional is None:
                # The name is no key, so no list shows it. A service that ignores the condition answers 200 and
                # overwrites: two starts of a run would both own a generation.
                probe = f".probe/{secrets.token_hex(16)}"
                self._client.put(probe, b"first", create=True)
                try:
                    self._client.put(probe, b"second", create=True)
                    self._client.conditional = False
                except AlreadyExists:
                    self._client.conditional = True
                finally:
                    self._client.delete(probe)
            return self._client.conditional
