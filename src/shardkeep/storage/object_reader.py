"""`ObjectReader`: what all stores behind obstore read alike."""

from __future__ import annotations

from shardkeep.errors import StorageError
from shardkeep.storage.base import ObjectInfo
from shardkeep.storage.keys import check_key
from shardkeep.storage.object_client import Connection, ObjectClient


class ObjectReader:
    """The reading half of a `Store` over one connection; safe for threads."""

    def __init__(self, connection: Connection) -> None:
        self._client = ObjectClient(connection)

    @property
    def url(self) -> str:
        """The URL without secrets; `open_store` takes it back."""
        return self._client.url

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """Return a whole object. Raises NotFound; Corrupt when it is larger than the limit."""
        check_key(key)
        return self._client.get(key, limit_bytes=limit_bytes)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes `offset ..`, by one ranged request; a short object is Corrupt."""
        check_key(key)
        view = buffer.cast("B")
        if offset < 0:
            raise StorageError(f"{key}: offset {offset}: expected 0 or more", retryable=False, key=key)
        if len(view):
            self._client.read_into(key, offset, view)
        else:
            self._client.check_reaches(key, offset)

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size. Raises NotFound."""
        check_key(key)
        return ObjectInfo(key=key, size_bytes=self._client.head(key))
