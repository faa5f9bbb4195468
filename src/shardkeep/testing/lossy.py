"""`LossyStore`: a machine whose power can be cut, to test the order in which things are made durable.

The model (after LevelDB's `fault_injection_test`, simplified): `put` and `delete` are durable and atomic on return;
what a writer wrote is visible at once but durable only after `finish`. A power cut leaves of each unfinished object
nothing, or its full size with any of its 4 KiB pages lost.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from shardkeep.errors import AlreadyExists, StorageError
from shardkeep.storage.base import Capabilities, ObjectInfo, ObjectWriter
from shardkeep.storage.keys import check_key
from shardkeep.storage.memory import MemoryStore

PAGE_BYTES: Final = 4096


class LossyStore:
    """Objects in memory, some of them not durable yet. Implements `Store`; safe for threads.

    Args:
        survived: what an earlier power cut left; None: an empty machine.
        seed: decides what a power cut takes.
    """

    def __init__(self, survived: MemoryStore | None = None, *, seed: int = 0) -> None:
        self._durable = MemoryStore(name="durable") if survived is None else survived
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._unfinished: dict[str, bytearray] = {}
        self._on = True

    @property
    def url(self) -> str:
        return "memory:lossy"

    @property
    def capabilities(self) -> Capabilities:
        return self._durable.capabilities

    def power_cut(self) -> MemoryStore:
        """Switch the machine off; return what its disk holds. Every later call on this store or its writers fails."""
        with self._lock:
            self._on = False
            for key in sorted(self._unfinished):
                if self._random.random() < 0.5:
                    self._durable.put(key, self._torn(self._unfinished[key]))
            self._unfinished.clear()
            return self._durable

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        with self._powered(key):
            self._durable.put(key, data, if_absent=if_absent)

    def writer(self, key: str, size_bytes: int) -> ObjectWriter:
        with self._powered(key):
            if key in self._unfinished:
                raise StorageError(f"{key}: another writer is at it", retryable=False, key=key)
            inner = self._durable.writer(key, size_bytes)
            self._unfinished[key] = bytearray(size_bytes)
            return _LossyWriter(self, inner, key)

    def clone(self, source: str, target: str) -> None:
        with self._powered(target):
            if target in self._unfinished:
                raise AlreadyExists(f"{target}: another writer is at it", key=target)
            self._durable.clone(source, target)

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        with self._powered(key):
            return self._visible(key).get(key, limit_bytes=limit_bytes)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with self._powered(key):
            self._visible(key).read_into(key, offset, buffer)

    def head(self, key: str) -> ObjectInfo:
        with self._powered(key):
            return self._visible(key).head(key)

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        with self._powered(prefix):
            unfinished = [
                ObjectInfo(key=key, size_bytes=len(data))
                for key, data in self._unfinished.items()
                if key.startswith(prefix)
            ]
            return sorted(self._durable.list_objects(prefix) + unfinished, key=lambda info: info.key)

    def list_folders(self, prefix: str) -> list[str]:
        with self._powered(prefix):
            inside = [key[len(prefix) :] for key in self._unfinished if key.startswith(prefix)]
            below = {rest.partition("/")[0] for rest in inside if "/" in rest}
            return sorted(below | set(self._durable.list_folders(prefix)))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        for key in wanted:
            check_key(key)
        for key in wanted:
            with self._powered(key):
                self._unfinished.pop(key, None)
                self._durable.delete([key])

    def write_through(self, inner: ObjectWriter, key: str, offset: int, view: memoryview) -> None:
        """Take a block of an unfinished object; for its writer."""
        with self._powered(key):
            inner.write_at(offset, view)
            if key in self._unfinished:  # not deleted meanwhile
                self._unfinished[key][offset : offset + len(view)] = view

    def end(self, key: str, last_call: Callable[[], None]) -> None:
        """Make an object durable, or drop it; for its writer."""
        with self._powered(key):
            self._unfinished.pop(key, None)
            last_call()

    def _visible(self, key: str) -> MemoryStore:
        if key not in self._unfinished:
            return self._durable
        view = MemoryStore()
        view.put(key, bytes(self._unfinished[key]))
        return view

    def _torn(self, data: bytearray) -> bytes:
        for offset in range(0, len(data), PAGE_BYTES):
            if self._random.random() < 0.5:
                end = min(offset + PAGE_BYTES, len(data))
                data[offset:end] = bytes(end - offset)
        return bytes(data)

    @contextlib.contextmanager
    def _powered(self, key: str) -> Iterator[None]:
        with self._lock:
            if not self._on:
                raise StorageError(f"{self.url}/{key}: the machine is off", retryable=False, key=key)
            yield


class _LossyWriter:
    """Writes through to what is visible, and at `finish` to what is durable."""

    def __init__(self, store: LossyStore, inner: ObjectWriter, key: str) -> None:
        self._store = store
        self._inner = inner
        self._key = key
        self._ended = False

    def write_at(self, offset: int, block: memoryview) -> None:
        self._store.write_through(self._inner, self._key, offset, block.cast("B"))

    def finish(self) -> None:
        self._ended = True
        self._store.end(self._key, self._inner.finish)

    def abort(self) -> None:
        if not self._ended:
            self._ended = True
            with contextlib.suppress(StorageError):
                self._store.end(self._key, self._inner.abort)
