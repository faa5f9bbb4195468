"""Worlds of threads on one store: many ranks in milliseconds, for what needs no processes."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import HashStore, TCPStore

from shardkeep.ranks.store_group import StoreGroup


class CountingStore:
    """A store that counts the calls of all its clones by name; everything is done by the real one."""

    def __init__(self, store: Any, counts: collections.Counter[str], lock: threading.Lock) -> None:
        self._store, self._counts, self._lock = store, counts, lock

    def clone(self) -> CountingStore:
        return CountingStore(self._store.clone(), self._counts, self._lock)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            with self._lock:
                self._counts[name] += 1
            return call(*args)

        return counted


class OldStore:
    """A store of a torch that can neither clone nor read many keys at once."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name in {"clone", "multi_get", "multi_set", "has_extended_api", "wait"}:
            raise AttributeError(name)
        return getattr(self._store, name)


def make_tcp_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_threads(body: Callable[[int], Any], world_size: int, *, timeout_s: float = 30.0) -> list[Any]:
    """Run `body(rank)` in a thread per rank; return by rank what it returned, or its exception."""
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(body, rank) for rank in range(world_size)]
        return [future.exception(timeout_s) or future.result() for future in futures]


def run_group(
    body: Callable[[StoreGroup], Any], world_size: int, *, store: Any = None, nonce: str = "n1"
) -> list[Any]:
    """Run `body(group)` on every rank of a fresh group; see `run_threads`."""
    shared = HashStore() if store is None else store
    groups = [StoreGroup(shared, rank, world_size, nonce) for rank in range(world_size)]

    def in_group(rank: int) -> Any:
        try:
            return body(groups[rank])
        finally:
            groups[rank].close()

    return run_threads(in_group, world_size)
