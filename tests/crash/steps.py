"""Threads that share a store and move one store call at a time, in an order that the test gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from shardkeep.storage.base import Store
from shardkeep.testing.faults import Call, Fault, FaultStore


class Stepper:
    """Runs bodies, each in a thread with its own view of the store; every call waits for its turn.

    `step(at)` lets body `at` make its next call, if it has one left; `finish` lets the rest run, one body after the
    other, and returns what the bodies returned (or the exceptions they raised).
    """

    def __init__(self, store: Store, bodies: Sequence[Callable[[Store], Any]]) -> None:
        self._actors = [_Actor(store, body) for body in bodies]

    def step(self, at: int) -> None:
        self._actors[at].step()

    def finish(self) -> list[Any]:
        for actor in self._actors:
            while actor.step():
                continue
        return [actor.result for actor in self._actors]


class _Actor:
    """`go` is set to let one call happen, `waits` is set while the thread waits for that, or has ended."""

    def __init__(self, store: Store, body: Callable[[Store], Any]) -> None:
        self._go = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)
        self._ended = False
        self.result: Any = None
        # A plan that matches nothing, asked before each call: there the thread waits for its turn.
        gated = FaultStore(store, [Fault(kind="delay", when=self._gate)])
        self._thread = threading.Thread(target=self._run, args=(gated, body), daemon=True)
        self._thread.start()
        self._await()

    def _gate(self, call: Call) -> bool:
        self._waits.release()
        if not self._go.acquire(timeout=30):
            raise TimeoutError(f"{call.verb} {call.key} was never let through")
        return False

    def _run(self, store: Store, body: Callable[[Store], Any]) -> None:
        try:
            self.result = body(store)
        except Exception as error:  # noqa: BLE001  # for the test to look at
            self.result = error
        finally:
            self._ended = True
            self._waits.release()

    def step(self) -> bool:
        """Let the next call happen and wait for what comes after it; False when the body has ended."""
        if self._ended:
            return False
        self._go.release()
        self._await()
        return True

    def _await(self) -> None:
        if not self._waits.acquire(timeout=30):
            raise TimeoutError("a body neither called the store nor ended")
