"""Keys and values in the job's key-value store: a prefix, large values, errors mapped.

The store is a `torch.distributed.Store`, taken as it comes: nothing here imports torch. No call here waits for
a key to appear. A store's own `wait` cannot be used for that: each of its timeouts writes warnings to the
job's log, and a waiting client is closed to other threads. Waiting is `Patience`: look, sleep, look again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from shardkeep.errors import PeerFailure

CHUNK_BYTES: Final = 4 << 20
"""Largest value set under one key; torch's TCP store drops a client that sends more than 8 MiB."""

BATCH_KEYS: Final = 256
"""Keys of one multi-key read, so that one answer stays small in the store's memory."""

_FIRST_PAUSE_S: Final = 0.001
_LAST_PAUSE_S: Final = 0.5

T = TypeVar("T")


class KeyValueStore(Protocol):
    """What is asked of a `torch.distributed.Store`; `clone`, `multi_get` and `has_extended_api` are optional."""

    def set(self, key: str, value: bytes, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


class Channel:
    """A client of the store, for one thread, with every key under `prefix`.

    A PeerFailure of any method means that the store is gone: the process that hosts it (rank 0 or the launcher's
    agent) ended or cannot be reached.
    """

    def __init__(self, store: KeyValueStore, *, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._many = _has_multi_get(store)

    @property
    def store(self) -> KeyValueStore:
        return self._store

    @property
    def prefix(self) -> str:
        return self._prefix

    def put(self, key: str, value: bytes) -> None:
        """Set a key, whatever it held. At most CHUNK_BYTES."""
        self._ask(lambda: self._store.set(self._prefix + key, value))

    def put_first(self, key: str, value: bytes) -> bytes:
        """Set a key unless it has a value; return the value it has now. One atomic step."""
        return bytes(self._ask(lambda: self._store.compare_set(self._prefix + key, b"", value)))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is known to exist and to stay."""
        return bytes(self._ask(lambda: self._store.get(self._prefix + key)))

    def get_each(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are known to exist and to stay, in order."""
        if not self._many:
            return [self.get(key) for key in keys]
        found: list[bytes] = []
        for start in range(0, len(keys), BATCH_KEYS):
            names = [self._prefix + key for key in keys[start : start + BATCH_KEYS]]
            multi_get: Callable[[list[str]], list[bytes]] = self._store.multi_get  # type: ignore[attr-defined]  # asked before
            found.extend(bytes(value) for value in self._ask(lambda get=multi_get, of=names: get(of)))  # type: ignore[misc]  # bound early
        return found

    def has_all(self, keys: Sequence[str]) -> bool:
        """Return whether every one of the keys exists now."""
        if not keys:
            return True
        return bool(self._ask(lambda: self._store.check([self._prefix + key for key in keys])))

    def count_up(self, key: str) -> int:
        """Add one to a counter; return its new value, 1 at first."""
        return int(self._ask(lambda: self._store.add(self._prefix + key, 1)))

    def remove(self, keys: Sequence[str]) -> None:
        """Forget keys; missing ones are no error."""
        for key in keys:
            self._ask(lambda name=self._prefix + key: self._store.delete_key(name))  # type: ignore[misc]  # bound early

    def put_chunks(self, key: str, payload: bytes) -> int:
        """Set `key/0`, `key/1`, ... to pieces of the payload; return how many."""
        count = -(-len(payload) // CHUNK_BYTES)
        for index in range(count):
            self.put(f"{key}/{index}", payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
        return count

    def get_chunks(self, key: str, count: int) -> bytes:
        """Return what `put_chunks` set."""
        return b"".join(self.get(name) for name in chunk_keys(key, count))

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (RuntimeError, OSError) as error:  # torch's Dist*Error are RuntimeErrors
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise PeerFailure(
                f"the job's key-value store does not answer: {reason}",
                advice="look at the log of rank 0 and of the launcher on its node: one of them hosts the store",
            ) from error


class Patience:
    """A wait with a deadline: pauses grow with the time waited, so that a long wait costs next to nothing.

    A pause is an eighth of the time waited so far, between 1 ms and 0.5 s: what is waited for is seen at most
    an eighth late.
    """

    def __init__(self, timeout_s: float, *, longest_pause_s: float = _LAST_PAUSE_S) -> None:
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + timeout_s
        self._longest_pause_s = min(longest_pause_s, _LAST_PAUSE_S)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def pause(self) -> None:
        """Sleep a little, never beyond the deadline."""
        now_s = time.monotonic()
        pause_s = max(_FIRST_PAUSE_S, min((now_s - self._began_s) / 8, self._longest_pause_s))
        time.sleep(max(0.0, min(pause_s, self._deadline_s - now_s)))


def chunk_keys(key: str, count: int) -> list[str]:
    """Return the keys that `put_chunks` set."""
    return [f"{key}/{index}" for index in range(count)]


def clone_client(store: KeyValueStore) -> KeyValueStore:
    """Return a client of the same store for another thread: a connection of its own where torch offers one.

    Torch before `Store.clone` serves threads in turn on one connection, which is as right, since no call waits.
    """
    clone: Callable[[], KeyValueStore] | None = getattr(store, "clone", None)
    if clone is None:
        return store
    try:
        return clone()
    except (
        RuntimeError,
        NotImplementedError,
    ):  # a store of a third party without it; a dead one shows at the next call
        return store


def _has_multi_get(store: KeyValueStore) -> bool:
    extended: Callable[[], bool] | None = getattr(store, "has_extended_api", None)
    return extended is not None and hasattr(store, "multi_get") and bool(extended())
