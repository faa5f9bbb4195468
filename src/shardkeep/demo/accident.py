"""`KillingStore`: the accident of the demo. A rank dies by SIGKILL in the middle of a block of a save, once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from shardkeep.demo.records import Kill
from shardkeep.format.names import find_generation, find_step
from shardkeep.storage.base import Capabilities, ObjectInfo, ObjectWriter, Store

AT_BLOCK: Final = 2
"""Which of the rank's blocks of that save stays half written; the first is whole by then."""


class KillingStore:
    """A store in front of another that ends this process within a save. Implements `Store`.

    The process first creates `kill.marker`, so that the same command lives when it is started again.
    """

    def __init__(self, inner: Store, kill: Kill) -> None:
        self._inner = inner
        self._kill = kill
        self._lock = threading.Lock()
        self._blocks_count = 0

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._inner.put(key, data, if_absent=if_absent)

    def writer(self, key: str, size_bytes: int) -> ObjectWriter:
        writer = self._inner.writer(key, size_bytes)
        return _KillingWriter(self, writer) if self._is_due(key) else writer

    def clone(self, source: str, target: str) -> None:
        self._inner.clone(source, target)

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        return self._inner.get(key, limit_bytes=limit_bytes)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(key, offset, buffer)

    def head(self, key: str) -> ObjectInfo:
        return self._inner.head(key)

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        return self._inner.list_objects(prefix)

    def list_folders(self, prefix: str) -> list[str]:
        return self._inner.list_folders(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._inner.delete(keys)

    def _is_due(self, key: str) -> bool:
        generation, _, rest = key.partition("/")
        number = find_generation(generation)
        ref = find_step(number, rest.partition("/")[0]) if number is not None else None
        return ref is not None and ref.step == self._kill.step and not Path(self._kill.marker).exists()

    def write_block(self, writer: ObjectWriter, offset: int, block: memoryview) -> None:
        """Write a block, or half of it and die. For the writers of this store."""
        with self._lock:
            self._blocks_count += 1
            if self._blocks_count == AT_BLOCK:
                writer.write_at(offset, block[: len(block) // 2])
                Path(self._kill.marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        writer.write_at(offset, block)


class _KillingWriter:
    def __init__(self, store: KillingStore, inner: ObjectWriter) -> None:
        self._store = store
        self._inner = inner

    def write_at(self, offset: int, block: memoryview) -> None:
        self._store.write_block(self._inner, offset, block)

    def finish(self) -> None:
        self._inner.finish()

    def abort(self) -> None:
        self._inner.abort()
