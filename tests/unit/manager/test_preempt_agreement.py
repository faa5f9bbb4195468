"""Agreement on one tick: ranks as threads on a real store, at any distance from each other."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from shardkeep import knobs
from shardkeep.errors import BarrierTimeout, PeerFailure
from shardkeep.events import Event
from shardkeep.manager.agreement import Agreement, Asked
from shardkeep.ranks.channel import Channel
from shardkeep.ranks.notice import StoreBoard, open_board
from shardkeep.ranks.single import SingleGroup
from tests.unit.ranks.worlds import CountingStore, run_group, run_threads


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with knobs.override(NOTICE_POLL_S=0.02, PEER_SILENCE_S=5.0):
        yield


def make(store: Any, rank: int, world_size: int, sink: Sink | None = None) -> Agreement:
    board = StoreBoard(Channel(store, prefix="t/"), rank=rank, world_size=world_size)
    return Agreement(board, on_asked=lambda asked: None, events=sink or Sink())


def stop(rank: int, reason: str = "SIGTERM", left_s: float | None = None) -> Asked:
    deadline_s = None if left_s is None else time.monotonic() + left_s
    return Asked(kind="stop", rank=rank, reason=reason, deadline_s=deadline_s)


def run(
    world_size: int,
    program: Callable[[Agreement, int], Any],
    *,
    sinks: list[Sink] | None = None,
) -> list[Any]:
    store = HashStore()
    all_sinks = sinks or [Sink() for _ in range(world_size)]

    def body(rank: int) -> Any:
        agreement = make(store, rank, world_size, all_sinks[rank])
        try:
            return program(agreement, rank)
        finally:
            agreement.close()

    return run_threads(body, world_size)


def test_a_world_of_one_acts_at_the_next_tick() -> None:
    told: list[Asked] = []
    agreement = Agreement(None, on_asked=told.append, events=Sink())
    assert agreement.tick() == ()
    asked = stop(0)
    agreement.ask(asked)
    assert told == []
    assert agreement.tick() == (asked,)
    assert told == [asked]
    assert agreement.tick() == ()
    agreement.close()
    agreement.close()


def test_all_ranks_act_at_the_same_tick_however_far_apart_they_are() -> None:
    """Rank 0 may be many ticks ahead of the last."""

    def program(agreement: Agreement, rank: int) -> tuple[int, str, float | None]:
        if rank == 2:
            agreement.ask(stop(rank, left_s=30.0))
        for tick in range(1, 100_000):
            for asked in agreement.tick():
                return tick, asked.reason, asked.left_s
            time.sleep(0.0005 * (rank + 1))
        raise AssertionError("never")

    found = run(4, program)
    assert len({(tick, reason) for tick, reason, _ in found}) == 1, found
    assert all(29.0 < left_s <= 30.0 for _, _, left_s in found)


def test_a_rank_that_is_ahead_never_waits_for_one_that_waits_for_it() -> None:
    """A collective in every step, and a request at any moment of it: the ranks part at most by one step.

    With ranks that answer only at their ticks this hangs as soon as one tick lies between two ranks.
    """
    barrier = threading.Barrier(3)
    rng = random.Random(1)
    pauses = [[rng.choice((0.0, 0.0, 0.002)) for _ in range(4000)] for _ in range(3)]
    wishes = {rank: {rng.randrange(20, 3000) for _ in range(12)} for rank in range(3)}

    def program(agreement: Agreement, rank: int) -> list[int]:
        acted = []
        for tick in range(1, 1500):
            if tick in wishes[rank]:
                agreement.ask(Asked(kind="save", rank=rank, reason=f"wish {tick}"))
            barrier.wait(20)
            time.sleep(pauses[rank][tick])
            acted.extend([tick] * len(agreement.tick()))
        return acted

    first, *others = run(3, program)
    assert len(first) >= 5
    assert others == [first, first]


def test_what_several_ranks_ask_at_once_is_done_at_one_tick() -> None:
    def program(agreement: Agreement, rank: int) -> list[tuple[int, list[str]]]:
        if rank < 3:
            agreement.ask(stop(rank, f"signal of {rank}"))
        found = []
        until_s = time.monotonic() + 1.0
        tick = 0
        while time.monotonic() < until_s or not found:
            tick += 1
            asked = agreement.tick()
            if asked:
                found.append((tick, [one.reason for one in asked]))
            time.sleep(0.001)
        return found

    first, *others = run(4, program)
    assert others == [first] * 3
    assert sorted(reason for _, reasons in first for reason in reasons)[:1] == ["signal of 0"]


def test_a_second_request_to_stop_adds_nothing() -> None:
    def program(agreement: Agreement, rank: int) -> list[str]:
        found: list[str] = []
        until_s = time.monotonic() + 0.6
        while time.monotonic() < until_s:
            if rank == 1:
                agreement.ask(stop(1, f"SIGTERM {len(found)}"))
            found.extend(asked.reason for asked in agreement.tick())
            time.sleep(0.01)
        return found

    assert run(2, program) == [["SIGTERM 0"], ["SIGTERM 0"]]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    """It passed as many ticks as the others will: whatever is asked for after that comes to nothing, at once."""
    gone = threading.Event()

    def program(agreement: Agreement, rank: int) -> list[tuple[Asked, ...]]:
        found = [agreement.tick() for _ in range(10)]
        if rank == 1:
            agreement.close()
            gone.set()
            return found
        gone.wait(5)
        if rank == 2:
            agreement.ask(stop(2))
        time.sleep(0.2)
        return found

    began_s = time.monotonic()
    assert run(3, program) == [[()] * 10] * 3
    assert time.monotonic() - began_s < 3


def test_a_rank_that_is_held_is_let_go_when_rank_0_has_ended() -> None:
    gone = threading.Event()

    def program(agreement: Agreement, rank: int) -> int:
        for _ in range(5):
            agreement.tick()
        if rank == 0:
            agreement.close()
            gone.set()
            return 5
        gone.wait(5)
        agreement.ask(stop(1))
        time.sleep(0.2)
        assert agreement.tick() == ()
        return 6

    began_s = time.monotonic()
    assert run(2, program) == [5, 6]
    assert time.monotonic() - began_s < 3


def ticks_until_an_error(agreement: Agreement) -> BarrierTimeout:
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        try:
            agreement.tick()
        except BarrierTimeout as error:
            return error
        time.sleep(0.005)
    raise AssertionError("no error")


def test_ranks_that_do_not_answer_are_named_in_bounded_time() -> None:
    store = HashStore()
    with knobs.override(NOTICE_POLL_S=0.02, PEER_SILENCE_S=0.5):
        sinks = [Sink(), Sink()]
        agreements = [make(store, rank, 4, sinks[rank]) for rank in (0, 1)]  # 2 and 3 never come
        agreements[1].ask(stop(1))
        began_s = time.monotonic()
        errors = run_threads(lambda rank: ticks_until_an_error(agreements[rank]), 2)
        assert time.monotonic() - began_s < 2
        for agreement in agreements:
            agreement.close()
    for error in errors:
        assert error.missing == (2, 3)
        assert "ranks 2, 3 did not answer within 0.5 s" in str(error)
        assert "SIGTERM" in str(error)
    assert [event.name for event in sinks[0].events] == ["preempt.not_agreed"]


def test_a_rank_0_that_does_not_answer_is_named() -> None:
    with knobs.override(NOTICE_POLL_S=0.02, PEER_SILENCE_S=0.2):
        agreement = make(HashStore(), 1, 2)
        agreement.ask(stop(1))
        error = ticks_until_an_error(agreement)
        agreement.close()
    assert error.missing == (0,)


def test_a_save_that_cannot_be_agreed_on_does_not_end_the_run() -> None:
    sink = Sink()
    with knobs.override(NOTICE_POLL_S=0.02, PEER_SILENCE_S=0.2):
        agreement = make(HashStore(), 0, 2, sink)
        agreement.ask(Asked(kind="save", rank=0, reason="the clock"))
        until_s = time.monotonic() + 1
        while time.monotonic() < until_s:
            assert agreement.tick() == ()
            time.sleep(0.005)
        agreement.close()
    assert [(event.name, event.level) for event in sink.events] == [("preempt.not_agreed", "warning")]
    assert "rank 1" in sink.events[0].text


class BrokenStore:
    """A store whose process ends at some moment."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.store, name)

        def ask(*args: Any) -> Any:
            if self.broken:
                raise RuntimeError("Broken pipe")
            return call(*args)

        return ask


def test_a_request_after_the_store_is_gone_is_an_error_and_no_silence() -> None:
    store = BrokenStore(HashStore())
    board = StoreBoard(Channel(store, prefix="t/"), rank=1, world_size=2)  # type: ignore[arg-type]  # all it asks for
    agreement = Agreement(board, on_asked=lambda asked: None, events=Sink())
    store.broken = True
    time.sleep(0.2)
    for _ in range(3):
        assert agreement.tick() == ()  # nobody asked for anything
    agreement.ask(stop(1))
    with pytest.raises(PeerFailure, match=r"SIGTERM.*Broken pipe"):
        agreement.tick()
    agreement.close()


def test_whatever_ends_the_thread_that_talks_is_told_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    board = StoreBoard(Channel(HashStore(), prefix="t/"), rank=1, world_size=2)
    monkeypatch.setattr(board, "is_called", lambda number: 1 // 0)
    agreement = Agreement(board, on_asked=lambda asked: None, events=Sink())
    time.sleep(0.2)
    assert agreement.tick() == ()
    agreement.ask(stop(1))
    with pytest.raises(PeerFailure, match=r"SIGTERM.*ZeroDivisionError"):
        agreement.tick()
    agreement.close()


def test_rounds_are_forgotten_and_looking_costs_one_question() -> None:
    counts: collections.Counter[str] = collections.Counter()
    shared = HashStore()
    done: list[int] = []

    def program(rank: int) -> int:
        board = StoreBoard(
            Channel(CountingStore(shared, counts, threading.Lock()), prefix="t/"), rank=rank, world_size=2
        )
        agreement = Agreement(board, on_asked=lambda asked: None, events=Sink())
        for _ in range(5):
            if rank == 0:
                agreement.ask(Asked(kind="save", rank=0, reason="the clock"))
            while not agreement.tick():
                time.sleep(0.001)
        done.append(rank)
        while len(done) < 2:
            time.sleep(0.001)
        if rank == 0:
            time.sleep(0.1)
            counts.clear()
            time.sleep(0.5)
            asked = sum(counts.values())
            assert counts.keys() <= {"check"}
            assert asked <= 2 * 0.5 / 0.02 + 4  # two ranks, once per NOTICE_POLL_S each
            done.append(rank)
        while len(done) < 3:
            time.sleep(0.001)
        agreement.close()
        return 0

    run_threads(program, 2)
    kept = [number for number in range(6) if shared.check([f"t/{number}/point"])]
    assert kept == [4]


def test_asking_costs_next_to_nothing() -> None:
    """A tick with nobody asking: no call of the store, some microseconds."""
    counts: collections.Counter[str] = collections.Counter()
    with knobs.override(NOTICE_POLL_S=60.0):
        channel = Channel(CountingStore(HashStore(), counts, threading.Lock()), prefix="t/")
        agreement = Agreement(StoreBoard(channel, rank=1, world_size=2), on_asked=lambda asked: None, events=Sink())
        counts.clear()
        began_s = time.monotonic()
        for _ in range(20_000):
            agreement.tick()
        assert (time.monotonic() - began_s) / 20_000 < 50e-6
        assert not counts
        agreement.close()


def test_many_ranks_look_less_often() -> None:
    agreement = make(HashStore(), 1, 4000)
    assert agreement._talk is not None
    assert agreement._talk._poll_s == 2.0
    agreement.close()


def test_boards_of_one_group_do_not_meet() -> None:
    """A manager after another, or beside it, on the same group."""

    def program(group: Any) -> list[bool]:
        one, two = open_board(group), open_board(group)
        assert one is not None
        assert two is not None
        if group.rank == 0:
            one.call(0)
        group.agree("called", lambda: b"", lambda results: b"")
        return [one.is_called(0), two.is_called(0)]

    assert run_group(program, 2) == [[True, False]] * 2
    assert open_board(SingleGroup()) is None


def test_a_request_from_inside_a_tick_is_taken() -> None:
    """What a signal handler does, in the thread that it interrupts: no lock may be in its way."""
    agreement = make(HashStore(), 0, 1)
    talk = agreement._talk
    assert talk is not None
    with talk.ticks._changed:  # as if the signal came in the middle of a tick
        agreement.ask(stop(0))
    until_s = time.monotonic() + 5
    while not agreement.tick():
        assert time.monotonic() < until_s
        time.sleep(0.001)
    agreement.close()
