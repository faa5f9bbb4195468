"""`RetryingStore`: repeats calls that may succeed later. Never a writer's blocks: a failed writer is abandoned."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from shardkeep.errors import StorageError
from shardkeep.events import Event, EventSink
from shardkeep.knobs import get_int, get_knob
from shardkeep.storage.base import Capabilities, ObjectInfo, ObjectWriter, Store

_T = TypeVar("_T")

MAX_PAUSE_S: Final = 30.0


class RetryingStore:
    """A store in front of another that waits out transient trouble. Implements `Store`.

    A call is repeated when it raised a StorageError that is `retryable`, at most RETRIES times, after pauses of
    RETRY_BASE_S that double each time up to 30 s, each cut by a random half so that a thousand ranks do not
    come back in step ("Exponential Backoff and Jitter", AWS Architecture Blog, 2015). NotFound, Corrupt, OutOfSpace,
    AlreadyExists and Denied pass at once. Repeating is safe as every call has the same effect twice:
    `put(if_absent=True)` takes its own bytes for success.

    Args:
        inner: the store that does the work.
        events: told of every repeat (`storage.retried`).
        sleep: how to wait; tests pass their own.
    """

    def __init__(
        self, inner: Store, *, events: EventSink | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._inner = inner
        self._events = events
        self._sleep = sleep
        self._random = random.Random(secrets.randbits(64))  # our own: the trainer's generator must not move

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._repeat("put", key, lambda: self._inner.put(key, data, if_absent=if_absent))

    def writer(self, key: str, size_bytes: int) -> ObjectWriter:
        """Begin a large object; only the beginning is repeated, never a block or the finish."""
        return self._repeat("writer", key, lambda: self._inner.writer(key, size_bytes))

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        return self._repeat("get", key, lambda: self._inner.get(key, limit_bytes=limit_bytes))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._repeat("read_into", key, lambda: self._inner.read_into(key, offset, buffer))

    def head(self, key: str) -> ObjectInfo:
        return self._repeat("head", key, lambda: self._inner.head(key))

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        return self._repeat("list_objects", prefix, lambda: self._inner.list_objects(prefix))

    def list_folders(self, prefix: str) -> list[str]:
        return self._repeat("list_folders", prefix, lambda: self._inner.list_folders(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)  # an iterator would be used up by the first try
        self._repeat("delete", wanted[0] if wanted else "", lambda: self._inner.delete(wanted))

    def _repeat(self, verb: str, key: str, call: Callable[[], _T]) -> _T:
        retries = get_int("RETRIES")
        for attempt in range(retries):
            try:
                return call()
            except StorageError as error:
                if not error.retryable:
                    raise
                pause_s = min(get_knob("RETRY_BASE_S") * 2**attempt, MAX_PAUSE_S) * self._random.uniform(0.5, 1.0)
                self._tell(verb, key, error, attempt + 1, retries, pause_s)
                self._sleep(pause_s)
        return call()

    def _tell(self, verb: str, key: str, error: StorageError, attempt: int, retries: int, pause_s: float) -> None:
        if self._events is None:
            return
        self._events.emit(
            Event(
                name="storage.retried",
                level="warning",
                text=f"{verb} {key}: {error.message}; try {attempt} of {retries} more in {pause_s:.1f} s",
                fields={"verb": verb, "key": key, "attempt_count": attempt, "pause_s": pause_s},
            )
        )
