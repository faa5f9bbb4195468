"""Many small pieces of work over a few threads, the caller being one of them.

Plain threads, no executor: those take no work once the interpreter has begun to shut down, and a save that is under
way then is still to be finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

_START_S: Final = 1.0
"""A thread that has been started runs within this time, if it ever will."""


def run_parallel(tasks: Iterable[T], work: Callable[[T], None], *, thread_count: int, name: str) -> None:
    """Run `work(task)` for every task, in order of starting, and return when all are done.

    The first exception stops the rest (tasks already begun are finished) and is raised. No work goes on when this
    returns or raises, an interrupt of the caller included. Where the system has no more threads, fewer do the work.
    """
    pending = iter(tasks)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def drain() -> None:
        try:
            while not errors:
                with lock:
                    task = next(pending, None)
                if task is None:
                    return
                work(task)
        except BaseException as error:  # noqa: BLE001  # raised below, in the thread that asked
            errors.append(error)

    helpers: list[_Helper] = []
    try:
        for at in range(1, thread_count):
            helper = _Helper(drain, f"{name}-{at}")
            helpers.append(helper)  # before the start, which an interrupt may leave with the thread running
            if not helper.start():
                helpers.pop()
                break
        drain()
    except BaseException as error:
        errors.append(error)  # the others stop at their next task
        raise
    finally:
        _wait_for_all(helpers, errors)
    if errors:
        first = errors[0]
        errors.clear()  # else each keeps all others, their frames and the memory that those worked on
        try:
            raise first
        finally:
            del first


class _Helper:
    """A thread that does one thing, and whose end is known for sure."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> bool:
        """Return whether the system had a thread."""
        try:
            self._thread.start()
        except RuntimeError:  # "can't start new thread": a limit of the process or of its container
            return False
        return True

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()

    def wait(self) -> None:
        # Not `join` alone: one that is interrupted makes Python (3.11) take the thread for ended.
        while not self._ended.wait(_START_S):
            if self._thread.ident is None:  # an interrupt came before it began
                return
        self._thread.join()


def _wait_for_all(helpers: list[_Helper], errors: list[BaseException]) -> None:
    """Wait for every helper, whatever interrupts the waiting; the last interrupt is raised when all have ended."""
    interrupted: BaseException | None = None
    waiting = list(helpers)
    while waiting:
        try:
            waiting[-1].wait()
            waiting.pop()
        except BaseException as error:  # noqa: BLE001  # raised below: the threads write to the caller's memory
            errors.append(error)
            interrupted = error
    if interrupted is not None:
        raise interrupted
