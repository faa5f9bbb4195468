"""One piece of work in the background: its end, its errors, interrupts, and a system without threads."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from shardkeep.engine.flight import Flight
from shardkeep.engine.parallel import run_parallel
from shardkeep.errors import StorageError, UsageError
from shardkeep.format.names import StepRef

REF = StepRef(step=7, generation=1, attempt=1)


def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_the_result_comes_to_whoever_waits_as_often_as_asked() -> None:
    go = threading.Event()

    def work(flight: Flight[str]) -> str:
        flight.mark_staged()
        go.wait(10)
        return "done"

    flight = Flight(REF, work)
    assert not flight.is_done
    flight.start()
    flight.wait_staged()
    assert (flight.is_staged, flight.is_done) == (True, False)
    go.set()
    assert (flight.wait(), flight.wait(), flight.is_done, flight.ref) == ("done", "done", True, REF)


@pytest.mark.parametrize("error", [StorageError("full"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_is_raised_where_the_result_is_asked_for_and_nobody_waits_in_vain(error: BaseException) -> None:
    def work(flight: Flight[str]) -> str:
        raise error

    flight = Flight(REF, work)
    flight.start()
    flight.wait_staged()
    flight.wait_ended()
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            flight.wait()
        assert caught.value is error


def test_without_threads_the_work_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    no_threads(monkeypatch)
    # Urgent: the thread that trains must not be left with an idle I/O priority.
    flight = Flight(REF, lambda flight: (threading.current_thread().name, flight.is_urgent))
    flight.start()
    assert flight.is_done
    assert flight.wait() == ("MainThread", True)


@pytest.mark.parametrize("threads", [True, False])
def test_work_that_waits_for_itself_is_refused(threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not threads:
        no_threads(monkeypatch)

    def work(flight: Flight[str]) -> str:
        with pytest.raises(UsageError, match="wait for itself"):
            flight.wait()
        return "done"

    flight = Flight(REF, work)
    flight.start()
    assert flight.wait() == "done"


def test_parallel_work_does_each_task_once_on_several_threads() -> None:
    done: list[int] = []
    names: set[str] = set()

    def work(task: int) -> None:
        names.add(threading.current_thread().name)
        time.sleep(0.002)
        done.append(task)

    run_parallel(range(50), work, thread_count=3, name="t")
    assert sorted(done) == list(range(50))
    assert len(names) > 1


def test_parallel_work_needs_no_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    no_threads(monkeypatch)
    done: list[int] = []
    run_parallel(range(5), done.append, thread_count=4, name="t")
    assert done == list(range(5))


@pytest.mark.parametrize("in_main", [True, False])
@pytest.mark.parametrize("error", [StorageError("full"), KeyboardInterrupt()])
def test_after_an_error_nothing_goes_on(error: BaseException, in_main: bool) -> None:
    running = 0
    done: list[int] = []
    main = threading.current_thread()

    def work(task: int) -> None:
        nonlocal running
        if len(done) > 4 and (threading.current_thread() is main) == in_main:
            raise error
        running += 1
        time.sleep(0.003)
        done.append(task)
        running -= 1

    with pytest.raises(type(error)):
        run_parallel(range(1000), work, thread_count=3, name="t")
    count = len(done)
    assert count < 30
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("t-")]
    time.sleep(0.02)
    assert len(done) == count


def test_an_interrupt_while_the_others_work_waits_for_them() -> None:
    main, begun, ended = threading.current_thread(), threading.Event(), threading.Event()

    def work(task: int) -> None:
        if threading.current_thread() is main:
            assert begun.wait(10)
            return
        begun.set()
        time.sleep(0.6)
        ended.set()

    assert main.ident is not None
    threading.Timer(0.3, signal.pthread_kill, [main.ident, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        run_parallel([1, 2], work, thread_count=2, name="t")
    assert ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("t-")]
