"""A checkpoint that is staged and on its way to storage, while training goes on."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from shardkeep.errors import UsageError
from shardkeep.format.names import StepRef

T = TypeVar("T")


class Flight(Generic[T]):
    """One save in the background. Its thread is none of the daemons: a process that ends waits for it.

    Attributes:
        ref: the checkpoint that it will be.
    """

    def __init__(self, ref: StepRef, work: Callable[[Flight[T]], T]) -> None:
        """Take the work, `work(flight)`; nothing happens before `start`."""
        self.ref = ref
        self._staged = threading.Event()
        self._ended = threading.Event()
        self._urgent = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._work: Callable[[Flight[T]], T] | None = work
        self._runner: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=f"shardkeep-save-{ref.step}")

    def start(self) -> None:
        """Do the work in a thread of its own; here and now where the system has no more threads."""
        try:
            self._thread.start()
        except RuntimeError:
            # The other ranks have begun the same save and wait for this one: late is better than never.
            self._urgent = True  # the caller waits, and must not be left with an idle I/O priority
            self._run()

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        self._runner = threading.current_thread()
        try:
            self._result = work(self)
        except BaseException as error:  # noqa: BLE001  # raised by `wait`, in the thread that asks
            self._error = error
        finally:
            self._runner = None
            self._staged.set()
            self._ended.set()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for the end, so that it need not give way to others any more."""
        return self._urgent

    @property
    def is_staged(self) -> bool:
        """Whether the live state may change: its bytes are copied, or the save has failed."""
        return self._staged.is_set()

    def mark_staged(self) -> None:
        """Say that no byte of the live state will be copied any more."""
        self._staged.set()

    def wait_staged(self) -> None:
        """Wait until the live state may change. An interrupt leaves the save as it is."""
        self._staged.wait()

    def wait_ended(self) -> None:
        """Wait for the end, good or bad. An interrupt leaves the save as it is: it goes on.

        Raises:
            UsageError: called by the save itself, from a sink of events; it would wait for ever.
        """
        if threading.current_thread() is self._runner:
            raise UsageError(
                f"{self.ref}: the save in the background was asked to wait for itself",
                advice="call wait(), save() and close() from the training loop, not from where events arrive",
            )
        self._urgent = True
        # ORDER: the event first: a `join` that is interrupted makes Python (3.11) take the thread for ended, and a
        # process that ends would not wait for it.
        self._ended.wait()
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self) -> T:
        """Wait for the end and return the result, or raise what went wrong; each call does so."""
        self.wait_ended()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def forget_frames(error: BaseException) -> None:
    """Drop what the calls that failed held, so that an exception that is kept keeps no images and no tensors."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        if (found := waiting.pop()) is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            waiting += [found.__cause__, found.__context__]
