"""Signals as requests: the handler notes them, and nothing else happens in it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

from shardkeep.errors import UsageError

_UNCATCHABLE: Final = ("SIGKILL", "SIGSTOP")


def check_signals(names: Sequence[str]) -> None:
    """Refuse names of signals that cannot be handled. Raises UsageError."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"signals={names!r}: expected names", advice='signals=("SIGTERM", "SIGUSR1")')
    for name in names:
        if name in _UNCATCHABLE or not name.startswith("SIG") or not hasattr(signal, name):
            raise UsageError(
                f"signals={tuple(names)!r}: {name!r} is no signal that a program can handle",
                advice='name signals as in signals=("SIGTERM", "SIGUSR1", "SIGINT")',
            )


class SignalHandlers:
    """Handlers for some signals of this process, from `install` to `restore`; both in the main thread.

    A handler that was installed before, in Python, is called as well, after the note was taken. The first SIGINT is
    noted, and every later one raises KeyboardInterrupt. In a forked child the signals do what they did before.
    """

    def __init__(self, names: Sequence[str], note: Callable[[str], None]) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._note = note
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._active = False
        self._interrupts_count = 0

    def install(self) -> list[str]:
        """Handle the signals; return what is not handled and why, one text each."""
        self._active = True
        problems = []
        for name in self._names:
            number = int(getattr(signal, name))
            if signal.getsignal(number) is None:  # could be neither called nor put back
                problems.append(f"{name} has a handler that was not installed from Python; it stays as it is")
                continue
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:
                problems.append(f"{name} is not handled: Python installs handlers in the main thread only")
        return problems

    def restore(self) -> None:
        """Put back what was there before, where nobody has installed another handler since. Harmless twice."""
        self._active = False  # whoever still calls this handler is passed on
        for number, before in sorted(self._before.items()):
            try:
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, _find_live(number, before))
                    del self._before[number]
            except ValueError:  # another thread; the handler passes on
                return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Runs between any two instructions of the main thread: no lock, no I/O, no logging.
        before = _find_live(number, self._before.get(number, signal.SIG_DFL))
        if not self._active or os.getpid() != self._pid:
            _pass_on(number, frame, before)
            return
        if number == signal.SIGINT:
            self._interrupts_count += 1
            if self._interrupts_count > 1:
                raise KeyboardInterrupt
        self._note(signal.Signals(number).name)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def _find_live(number: int, handler: Any) -> Any:
    """Return the handler, or what was there before it, and so on, as long as it is one of ours that is over."""
    while isinstance(owner := getattr(handler, "__self__", None), SignalHandlers) and not owner._active:
        handler = owner._before.get(number, signal.SIG_DFL)
    return handler


def _pass_on(number: int, frame: FrameType | None, before: Any) -> None:
    """Do what the signal did before."""
    if callable(before):
        before(number, frame)
    elif before == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
