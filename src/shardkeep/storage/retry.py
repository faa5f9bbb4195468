"""`RetryingStore`: repeats calls that may succeed later. Never a writer's blocks: a failed writer is abandoned."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeVar

from shardkeep.errors import StorageError
from shardkeep.events import Event, EventSink, LogSink
from shardkeep.knobs import get_int, get_knob
from shardkeep.storage.base import CachingStore, Capabilities, MeasuredStore, ObjectInfo, ObjectWriter, Store
from shardkeep.storage.keys import check_key

_T = TypeVar("_T")

MAX_PAUSE_S: Final = 30.0
MAX_REMOTE_PAUSE_S: Final = 10.0
"""Short enough to notice soon that a service is back."""


class RetryingStore:
    """A store in front of another that waits out transient trouble. Implements `Store`.

    A call is repeated when it raised a StorageError that is `retryable`. On a file system at most RETRIES times,
    after pauses of RETRY_BASE_S that double each time, each cut by a random half. On a service
    (`capabilities.remote`) for RETRY_BUDGET_S, so that an outage of a minute is survived, with "full jitter": any
    pause up to the doubled one, so that a thousand ranks do not come back in step ("Exponential Backoff and Jitter",
    AWS Architecture Blog, 2015). NotFound, Corrupt, OutOfSpace, AlreadyExists and Denied pass at once. Repeating is
    safe as every call has the same effect twice: `put(if_absent=True)` takes its own bytes for success, and a `clone`
    whose answer was lost ends in AlreadyExists.

    Args:
        inner: the store that does the work.
        events: told of every repeat (`storage.retried`); the logger `shardkeep` by default.
        sleep, clock: how to wait and to tell how long; tests pass their own.
    """

    def __init__(
        self,
        inner: Store,
        *,
        events: EventSink | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._events = events or LogSink()
        self._sleep = sleep
        self._clock = clock
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

    def clone(self, source: str, target: str) -> None:
        self._repeat("clone", target, lambda: self._inner.clone(source, target))

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        return self._repeat("get", key, lambda: self._inner.get(key, limit_bytes=limit_bytes))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._repeat("read_into", key, lambda: self._inner.read_into(key, offset, buffer))

    def read_cached_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> bool:
        return isinstance(self._inner, CachingStore) and self._inner.read_cached_into(key, offset, buffers)

    def find_free_bytes(self) -> int | None:
        return self._inner.find_free_bytes() if isinstance(self._inner, MeasuredStore) else None

    def head(self, key: str) -> ObjectInfo:
        return self._repeat("head", key, lambda: self._inner.head(key))

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        return self._repeat("list_objects", prefix, lambda: self._inner.list_objects(prefix))

    def list_folders(self, prefix: str) -> list[str]:
        return self._repeat("list_folders", prefix, lambda: self._inner.list_folders(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)  # an iterator would be used up by the first try
        if not self._inner.capabilities.remote:
            self._repeat("delete", wanted[0] if wanted else "", lambda: self._inner.delete(wanted))
            return
        for key in wanted:
            check_key(key)
        for key in wanted:
            # Each by itself: with one request in a hundred throttled, a thousand deletes in one go never get through.
            self._repeat("delete", key, partial(self._inner.delete, [key]))

    def _repeat(self, verb: str, key: str, call: Callable[[], _T]) -> _T:
        remote = self._inner.capabilities.remote
        began_s = self._clock()
        attempt = 0
        while True:
            try:
                return call()
            except StorageError as error:
                pause_s = self._plan_pause(attempt, remote)
                left_s = get_knob("RETRY_BUDGET_S") - (self._clock() - began_s)
                over = pause_s > left_s if remote else attempt >= get_int("RETRIES")
                if not error.retryable or over:
                    raise
                attempt += 1
                more = f"for {left_s:.0f} s more" if remote else f"of {get_int('RETRIES')} more"
                self._tell(verb, key, error, attempt, more, pause_s)
            self._sleep(pause_s)

    def _plan_pause(self, attempt: int, remote: bool) -> float:
        longest_s = min(
            get_knob("RETRY_BASE_S") * 2 ** min(attempt, 30), MAX_REMOTE_PAUSE_S if remote else MAX_PAUSE_S
        )
        return float(longest_s * self._random.uniform(0.0 if remote else 0.5, 1.0))

    def _tell(self, verb: str, key: str, error: StorageError, attempt: int, more: str, pause_s: float) -> None:
        self._events.emit(
            Event(
                name="storage.retried",
                level="warning",
                text=f"{verb} {key}: {error.message}; try {attempt} {more} in {pause_s:.1f} s",
                fields={"verb": verb, "key": key, "attempt_count": attempt, "pause_s": pause_s},
            )
        )
