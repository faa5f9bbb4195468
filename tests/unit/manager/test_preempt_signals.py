"""Signal handlers: what they note, what they leave alone, and that they put back what was there."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from shardkeep.errors import UsageError
from shardkeep.events import Event
from shardkeep.manager.policies import Minutes, Tier
from shardkeep.manager.preempt import Lookout, Preemption
from shardkeep.manager.signals import SignalHandlers
from shardkeep.ranks.single import SingleGroup


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_is_noted_and_nothing_else_happens() -> None:
    noted: list[str] = []
    handlers = SignalHandlers(("SIGTERM", "SIGUSR1"), noted.append)
    assert handlers.install() == []
    send(signal.SIGTERM)
    send(signal.SIGUSR1)
    send(signal.SIGTERM)
    handlers.restore()
    handlers.restore()
    assert noted == ["SIGTERM", "SIGUSR1", "SIGTERM"]


def test_a_handler_from_before_is_called_too() -> None:
    called: list[int] = []

    def before(number: int, frame: FrameType | None) -> None:
        called.append(number)

    was = signal.signal(signal.SIGTERM, before)
    noted: list[str] = []
    handlers = SignalHandlers(("SIGTERM",), noted.append)
    handlers.install()
    send(signal.SIGTERM)
    handlers.restore()
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGTERM, was)
    assert (noted, called) == (["SIGTERM"], [signal.SIGTERM])


def test_a_handler_from_after_stays() -> None:
    handlers = SignalHandlers(("SIGTERM",), lambda name: None)
    was = signal.getsignal(signal.SIGTERM)
    handlers.install()

    def after(number: int, frame: FrameType | None) -> None: ...

    signal.signal(signal.SIGTERM, after)
    handlers.restore()
    assert signal.getsignal(signal.SIGTERM) is after
    signal.signal(signal.SIGTERM, was)


def test_two_managers_may_end_in_any_order() -> None:
    was = signal.getsignal(signal.SIGUSR1)
    first, second = [], []
    one = SignalHandlers(("SIGUSR1",), first.append)
    two = SignalHandlers(("SIGUSR1",), second.append)
    one.install()
    two.install()
    send(signal.SIGUSR1)
    one.restore()
    send(signal.SIGUSR1)
    two.restore()
    assert (first, second) == (["SIGUSR1"], ["SIGUSR1", "SIGUSR1"])
    signal.signal(signal.SIGUSR1, was)


def test_a_handler_that_is_over_swallows_nothing() -> None:
    """One was closed first and is called by whoever came after it: the process must end as it would have."""
    pid = os.fork()
    if pid == 0:
        one = SignalHandlers(("SIGTERM",), lambda name: None)
        two = SignalHandlers(("SIGTERM",), lambda name: None)
        one.install()
        two.install()
        one.restore()
        two.restore()  # puts back the handler of `one`
        send(signal.SIGTERM)
        os._exit(3)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_forked_child_can_be_ended() -> None:
    """A pool of worker processes ends them by SIGTERM and waits."""
    handlers = SignalHandlers(("SIGTERM",), lambda name: None)
    handlers.install()
    pid = os.fork()
    if pid == 0:
        send(signal.SIGTERM)
        os._exit(3)
    _, status = os.waitpid(pid, 0)
    handlers.restore()
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_fork_may_ask_and_disturbs_nobody() -> None:
    lookout = Lookout(Preemption(), None, Sink())
    lookout.tick(SingleGroup())
    pid = os.fork()
    if pid == 0:
        os._exit(7 if lookout.tick(SingleGroup()) else 0)
    _, status = os.waitpid(pid, 0)
    lookout.close()
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_second_interrupt_interrupts() -> None:
    noted: list[str] = []
    handlers = SignalHandlers(("SIGINT",), noted.append)
    handlers.install()
    try:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    finally:
        handlers.restore()
    assert noted == ["SIGINT"]


def test_outside_the_main_thread_it_says_that_nothing_is_handled() -> None:
    sink = Sink()
    lookout = Lookout(Preemption(), None, sink)
    thread = threading.Thread(target=lambda: lookout.begin(SingleGroup()))
    thread.start()
    thread.join()
    lookout.close()
    texts = [event.text for event in sink.named("preempt.no_signal")]
    assert len(texts) == 2
    assert all("main thread" in text for text in texts)


def test_nothing_is_handled_before_the_first_tick_or_after_close() -> None:
    was = signal.getsignal(signal.SIGTERM)
    lookout = Lookout(Preemption(), None, Sink())
    assert signal.getsignal(signal.SIGTERM) == was
    assert not lookout.tick(SingleGroup())
    assert signal.getsignal(signal.SIGTERM) != was
    lookout.close()
    assert signal.getsignal(signal.SIGTERM) == was


def test_none_leaves_signals_alone() -> None:
    was = signal.getsignal(signal.SIGTERM)
    lookout = Lookout(None, None, Sink())
    assert not lookout.tick(SingleGroup())
    assert signal.getsignal(signal.SIGTERM) == was


def test_a_signal_stops_and_says_by_when() -> None:
    sink = Sink()
    lookout = Lookout(Preemption(grace_s=30), None, sink)
    group = SingleGroup()
    assert not lookout.is_due(group, 1)
    send(signal.SIGTERM)
    assert lookout.is_due(group, 2)
    assert lookout.must_save
    assert not lookout.is_done
    assert lookout.is_due(group, 3)  # until a save went well
    lookout.saved(3)
    assert lookout.is_done
    assert not lookout.is_due(group, 4)
    assert lookout.exit_code == 75
    lookout.close()
    requested, agreed, saved = (sink.named(f"preempt.{name}") for name in ("requested", "agreed", "saved"))
    assert [len(requested), len(agreed), len(saved)] == [1, 1, 1]
    assert "SIGTERM on rank 0 asks to stop, with 30.0 s left" in requested[0].text
    assert agreed[0].fields["step"] == 2
    assert saved[0].fields["step"] == 3
    left_s = saved[0].fields["left_s"]
    assert isinstance(left_s, float)
    assert 28 < left_s <= 30


def test_a_save_after_the_deadline_is_told_as_such() -> None:
    sink = Sink()
    lookout = Lookout(Preemption(grace_s=1e-6), None, sink)
    lookout.tick(SingleGroup())
    send(signal.SIGTERM)
    assert lookout.is_due(SingleGroup(), 1)
    lookout.saved(1)
    lookout.close()
    assert "too late" in sink.named("preempt.saved")[0].text
    assert sink.named("preempt.saved")[0].level == "warning"


def test_minutes_are_due_by_the_clock() -> None:
    lookout = Lookout(None, Minutes(0.2 / 60), Sink())
    group = SingleGroup()
    due = []
    deadline = threading.Event()
    for step in range(1, 40):
        if lookout.is_due(group, step):
            due.append(step)
        deadline.wait(0.02)
    lookout.close()
    assert 2 <= len(due) <= 4
    assert min(after - before for before, after in itertools.pairwise(due)) >= 5


def test_a_slower_clock_takes_the_faster_tiers_along_and_they_start_again() -> None:
    tiers = [Tier("a", every=Minutes(0.1 / 60)), Tier("b", every=3), Tier("c", every=Minutes(100))]
    lookout, group = Lookout(None, Minutes(0.35 / 60), Sink(), tiers), SingleGroup()
    found: list[tuple[bool, frozenset[int]]] = []
    times_s: list[float] = []
    began_s = time.monotonic()
    while time.monotonic() - began_s < 0.9:
        found.append((lookout.is_due(group, len(found) + 1), lookout.clocked))
        times_s.append(time.monotonic())
        time.sleep(0.01)
    lookout.close()
    by_tier = [(at_s, is_due) for at_s, (is_due, clocked) in zip(times_s, found, strict=True) if clocked]
    assert len(by_tier) >= 3
    # The root's time: the fast tier's comes with it, and then not again before its own interval is over.
    assert {clocked for is_due, clocked in found if is_due} == {frozenset({0, 2})}
    assert {clocked for is_due, clocked in found if clocked and not is_due} == {frozenset({0})}
    assert any(is_due for _, is_due in by_tier)
    gaps_s = [after - before for (before, _), (after, is_due) in itertools.pairwise(by_tier) if not is_due]
    assert min(gaps_s) > 0.09


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"signals": ("SIGKILL",)}, "SIGKILL"),
        ({"signals": ("TERM",)}, "TERM"),
        ({"signals": "SIGTERM"}, "expected names"),
        ({"grace_s": 0}, "grace_s=0"),
        ({"watch": ("ibm",)}, "ibm"),
        ({"watch": "aws"}, "'aws'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Preemption(**options)


def test_wrong_preemption_and_minutes_are_refused() -> None:
    with pytest.raises(UsageError, match="preemption=True"):
        Lookout(True, None, Sink())  # type: ignore[arg-type]
    for bad in (0, -1, True, float("nan"), float("inf"), "10"):
        with pytest.raises(UsageError, match="Minutes"):
            Minutes(bad)  # type: ignore[arg-type]
