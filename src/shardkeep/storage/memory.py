"""`MemoryStore`: an object store in this process: no folders, no rename, nothing visible before it is whole.

It is what the core is tested against to show that it assumes no file system. Lost when the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from shardkeep.errors import AlreadyExists, Corrupt, NotFound, OutOfSpace, StorageError
from shardkeep.storage.base import Capabilities, ObjectInfo
from shardkeep.storage.coverage import Coverage
from shardkeep.storage.keys import check_folder, check_key, check_prefix


class MemoryStore:
    """Objects in a dict, shared by the threads of one process. Implements `Store`.

    Args:
        name: shown in `url`.
        write_offsets_multiple_bytes: refuse other offsets, as stores that upload equal parts do.
        capacity_bytes: OutOfSpace beyond this; unfinished writers count.
    """

    def __init__(
        self, *, name: str = "", write_offsets_multiple_bytes: int = 1, capacity_bytes: int | None = None
    ) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._capacity_bytes = capacity_bytes
        self._reserved_bytes = 0
        self._capabilities = Capabilities(
            exclusive_create=True, write_offsets_multiple_bytes=write_offsets_multiple_bytes, shared=True
        )

    @property
    def url(self) -> str:
        """A name for messages; no other process can open it."""
        return f"memory:{self._name}"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Store an object as a whole; see `Store.put`."""
        check_key(key)
        with self._lock:
            there = self._objects.get(key)
            if if_absent and there is not None:
                if there != data:
                    raise AlreadyExists(
                        f"{self.url}/{key} exists with other bytes ({len(there)}, ours are {len(data)})", key=key
                    )
                return
            self._check_room(key, len(data) - len(there or b""))
            self._objects[key] = bytes(data)

    def writer(self, key: str, size_bytes: int) -> MemoryWriter:
        """Begin an object that appears at `finish`. Raises AlreadyExists here, or there after a race."""
        check_key(key)
        if size_bytes < 0:
            raise StorageError(f"{key}: size {size_bytes}: expected 0 or more", retryable=False, key=key)
        with self._lock:
            self._check_free(key)
            self._check_room(key, size_bytes)
            self._reserved_bytes += size_bytes
        return MemoryWriter(self, key, size_bytes)

    def clone(self, source: str, target: str) -> None:
        """Make a second object of the same bytes; see `Store.clone`. It counts in full."""
        check_key(target)
        data = self._find(source)
        with self._lock:
            self._check_free(target)
            self._check_room(target, len(data))
            self._objects[target] = data

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """Return a whole object. Raises NotFound; Corrupt when it is larger than the limit."""
        data = self._find(key)
        if len(data) > limit_bytes:
            raise Corrupt(f"{self.url}/{key}: expected at most {limit_bytes} bytes, found {len(data)}", key=key)
        return data

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes `offset ..`; a short object is Corrupt."""
        view = buffer.cast("B")
        if offset < 0:
            raise StorageError(f"{key}: offset {offset}: expected 0 or more", retryable=False, key=key)
        data = self._find(key)
        end = offset + len(view)
        if end > len(data):
            raise Corrupt(f"{self.url}/{key}: expected at least {end} bytes, found {len(data)}", key=key)
        view[:] = memoryview(data)[offset:end]

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size. Raises NotFound."""
        return ObjectInfo(key=key, size_bytes=len(self._find(key)))

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """Return every object whose key starts with `prefix`, ascending by key."""
        check_prefix(prefix)
        with self._lock:
            return [
                ObjectInfo(key=key, size_bytes=len(data))
                for key, data in sorted(self._objects.items())
                if key.startswith(prefix)
            ]

    def list_folders(self, prefix: str) -> list[str]:
        """Return the first parts below `prefix` that have something below them, ascending."""
        check_folder(prefix)
        with self._lock:
            below = [key[len(prefix) :] for key in self._objects if key.startswith(prefix)]
        return sorted({rest.partition("/")[0] for rest in below if "/" in rest})

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects in the order given; missing ones are no error."""
        wanted = list(keys)
        for key in wanted:
            check_key(key)
        for key in wanted:
            with self._lock:
                self._objects.pop(key, None)

    def publish(self, key: str, data: bytes) -> None:
        """Make a writer's object visible; for `MemoryWriter`. Raises AlreadyExists if another one came first."""
        with self._lock:
            self._check_free(key)
            self._reserved_bytes -= len(data)
            self._objects[key] = data

    def give_back(self, size_bytes: int) -> None:
        """Drop the room that an aborted writer had reserved; for `MemoryWriter`."""
        with self._lock:
            self._reserved_bytes -= size_bytes

    def _find(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            data = self._objects.get(key)
        if data is None:
            raise NotFound(f"no object {self.url}/{key}", key=key)
        return data

    def _check_free(self, key: str) -> None:
        if key in self._objects:
            raise AlreadyExists(
                f"{self.url}/{key} exists; an object is never changed in place",
                key=key,
                advice="write under another key, or delete the object first",
            )

    def _check_room(self, key: str, more_bytes: int) -> None:
        if self._capacity_bytes is None:
            return
        used_bytes = self._reserved_bytes + sum(len(data) for data in self._objects.values())
        if used_bytes + more_bytes > self._capacity_bytes:
            raise OutOfSpace(
                f"{self.url}/{key}: {more_bytes} more bytes do not fit beside {used_bytes} of {self._capacity_bytes}",
                key=key,
                advice="delete objects, then save again",
            )


class MemoryWriter:
    """Gathers one object and publishes it at `finish`. Implements `ObjectWriter`."""

    def __init__(self, store: MemoryStore, key: str, size_bytes: int) -> None:
        self._store = store
        self._key = key
        self._size_bytes = size_bytes
        self._data = bytearray(size_bytes)
        self._lock = threading.Lock()
        self._coverage = Coverage(size_bytes, key=key)
        self._open = True

    def write_at(self, offset: int, block: memoryview) -> None:
        """Keep a block; see `ObjectWriter.write_at`."""
        view = block.cast("B")
        multiple_bytes = self._store.capabilities.write_offsets_multiple_bytes
        try:
            with self._lock:
                self._check_open()
                if offset % multiple_bytes:
                    raise StorageError(
                        f"{self._key}: offset {offset}: expected a multiple of {multiple_bytes}",
                        retryable=False,
                        key=self._key,
                    )
                self._coverage.claim(offset, len(view))
                self._data[offset : offset + len(view)] = view
        except StorageError:
            self.abort()
            raise

    def finish(self) -> None:
        """Publish the object; see `ObjectWriter.finish`."""
        try:
            with self._lock:
                self._check_open()
                self._coverage.check_whole()
                self._store.publish(self._key, bytes(self._data))
                self._open = False
        except StorageError:
            self.abort()
            raise

    def abort(self) -> None:
        """Give up. Never raises; harmless after `finish`."""
        with self._lock:
            if self._open:
                self._open = False
                self._data = bytearray()
                self._store.give_back(self._size_bytes)

    def _check_open(self) -> None:
        if not self._open:
            raise StorageError(
                f"{self._key}: the writer has ended or failed before",
                retryable=False,
                key=self._key,
                advice="begin the object again under another key",
            )
