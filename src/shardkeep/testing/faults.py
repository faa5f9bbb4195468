"""`FaultStore`: any store with faults put in at chosen calls, and a record of every call.

For tests of what runs on a store: count the calls of one save, then repeat it with a kill, a full disk, an I/O error
or a torn write at each of them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar, get_args

from shardkeep.errors import OutOfSpace, StorageError, UsageError
from shardkeep.storage.base import Capabilities, ObjectInfo, ObjectWriter, Store
from shardkeep.storage.keys import check_key

Verb = Literal[
    "put",
    "writer",
    "write_at",
    "finish",
    "abort",
    "clone",
    "get",
    "read_into",
    "head",
    "list_objects",
    "list_folders",
    "delete",
]

FaultKind = Literal["kill", "torn", "no_space", "io_error", "lost_answer", "bit_flip", "delay"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a store: `number` counts all of them from 1, `offset` and `length` are 0 where there are none."""

    number: int
    verb: Verb
    key: str
    offset: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        kind: `kill` dies before the call; `torn` dies after half of a `write_at` block (elsewhere it is `kill`);
            `no_space` and `io_error` raise instead of the call (OutOfSpace, a retryable StorageError);
            `lost_answer` makes the call and raises then, retryable; `bit_flip` changes one bit of what `get` or
            `read_into` returns, silently; `delay` waits `delay_s` before the call.
        at_call: the number of the call, from 1; None: any.
        when: which calls; None: any. Both must agree.
        times: how often it happens; None: always.
        delay_s: for `delay`.
    """

    kind: FaultKind
    at_call: int | None = None
    when: Callable[[Call], bool] | None = None
    times: int | None = 1
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise UsageError(f"fault {self.kind!r}: expected one of {', '.join(get_args(FaultKind))}")
        if self.at_call is not None and self.at_call < 1:
            raise UsageError(f"at_call {self.at_call}: expected 1 or more")

    def matches(self, call: Call) -> bool:
        """Say whether this is a call to fail."""
        return (self.at_call is None or self.at_call == call.number) and (self.when is None or self.when(call))


def kill_process() -> None:
    """End this process as a power cut or the out-of-memory killer would: nothing runs after it."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultStore:
    """A store in front of another that fails by plan. Implements `Store`; safe for threads.

    Args:
        inner: the store that does the work.
        plan: of the faults that match a call and are not used up, each `delay` and the first other one happen.
        die: what `kill` and `torn` do; a test in one process may pass `LossyStore.power_cut`, and the call
            then raises a StorageError.
    """

    def __init__(self, inner: Store, plan: Sequence[Fault] = (), *, die: Callable[[], object] = kill_process) -> None:
        self._inner = inner
        self._plan = tuple(plan)
        self._die = die
        self._lock = threading.Lock()
        self._used_count = [0] * len(self._plan)
        self._log: list[Call] = []

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @property
    def log(self) -> list[Call]:
        """Every call so far, in the order of their numbers."""
        with self._lock:
            return list(self._log)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The verb and key (or prefix) of every call so far."""
        return [(call.verb, call.key) for call in self.log]

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self.run("put", key, lambda: self._inner.put(key, data, if_absent=if_absent), length=len(data))

    def writer(self, key: str, size_bytes: int) -> ObjectWriter:
        return self.run(
            "writer", key, lambda: _FaultWriter(self, self._inner.writer(key, size_bytes), key), length=size_bytes
        )

    def clone(self, source: str, target: str) -> None:
        self.run("clone", target, lambda: self._inner.clone(source, target))

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        return self.run("get", key, lambda: self._inner.get(key, limit_bytes=limit_bytes), spoil=_flip_copy)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        def read() -> memoryview:
            self._inner.read_into(key, offset, buffer)
            return buffer.cast("B")

        self.run("read_into", key, read, offset=offset, length=buffer.nbytes, spoil=_flip)

    def head(self, key: str) -> ObjectInfo:
        return self.run("head", key, lambda: self._inner.head(key))

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        return self.run("list_objects", prefix, lambda: self._inner.list_objects(prefix))

    def list_folders(self, prefix: str) -> list[str]:
        return self.run("list_folders", prefix, lambda: self._inner.list_folders(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete one key after another, each a call of its own, so that a fault can strike between them."""
        wanted = list(keys)
        for key in wanted:
            check_key(key)
        for key in wanted:
            self.run("delete", key, partial(self._inner.delete, [key]))

    def run(
        self,
        verb: Verb,
        key: str,
        work: Callable[[], _T],
        *,
        offset: int = 0,
        length: int = 0,
        tear: Callable[[], object] | None = None,
        spoil: Callable[[_T], _T] | None = None,
    ) -> _T:
        """Record a call, and make it with what the plan has for it. For `FaultStore` and its writers.

        Args:
            work: the call itself.
            tear: does half of it.
            spoil: changes one bit of its result.
        """
        call, faults = self._begin(verb, key, offset, length)
        for fault in faults:
            if fault.kind == "delay":
                time.sleep(fault.delay_s)
        kind = next((fault.kind for fault in faults if fault.kind != "delay"), None)
        what = f"injected at call {call.number}, {verb} {key}"
        if kind in ("kill", "torn"):
            if kind == "torn" and tear is not None:
                tear()
            self._die()
            raise StorageError(f"the machine is off ({what})", retryable=False, key=key)
        if kind == "no_space":
            raise OutOfSpace(f"no space left ({what})", key=key)
        if kind == "io_error":
            raise StorageError(f"I/O error ({what})", retryable=True, key=key)
        result = work()
        if kind == "lost_answer":
            raise StorageError(f"the answer was lost ({what})", retryable=True, key=key)
        return spoil(result) if kind == "bit_flip" and spoil is not None else result

    def _begin(self, verb: Verb, key: str, offset: int, length: int) -> tuple[Call, list[Fault]]:
        with self._lock:
            call = Call(number=len(self._log) + 1, verb=verb, key=key, offset=offset, length=length)
            self._log.append(call)
            chosen: list[Fault] = []
            for index, fault in enumerate(self._plan):
                used_up = fault.times is not None and self._used_count[index] >= fault.times
                second = fault.kind != "delay" and any(other.kind != "delay" for other in chosen)
                if not used_up and not second and fault.matches(call):
                    self._used_count[index] += 1
                    chosen.append(fault)
            return call, chosen


class _FaultWriter:
    """A writer whose calls count among those of its store."""

    def __init__(self, store: FaultStore, inner: ObjectWriter, key: str) -> None:
        self._store = store
        self._inner = inner
        self._key = key

    def write_at(self, offset: int, block: memoryview) -> None:
        view = block.cast("B")

        def tear() -> None:
            self._inner.write_at(offset, view[: len(view) // 2])

        work = partial(self._inner.write_at, offset, view)
        self._store.run("write_at", self._key, work, offset=offset, length=len(view), tear=tear)

    def finish(self) -> None:
        self._store.run("finish", self._key, self._inner.finish)

    def abort(self) -> None:
        try:
            self._store.run("abort", self._key, self._inner.abort)
        except StorageError:  # `abort` never raises, so an injected error can only keep it from working
            return


def _flip(view: memoryview) -> memoryview:
    if len(view):
        view[len(view) // 2] ^= 1
    return view


def _flip_copy(data: bytes) -> bytes:
    return bytes(_flip(memoryview(bytearray(data))))
