"""`Agreement`: what one rank asks for happens on all ranks at the same call of the program.

A *tick* is a call that every rank makes, in the same order. A tick costs a lock and an addition; talking is done by a
thread of its own, which looks now and then whether a rank has asked for something. Only between the question and
the outcome, for about as long as one such look, may a tick wait. `ranks.notice` says why no rank can wait for ever.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shardkeep.errors import BarrierTimeout, CheckpointError, PeerFailure
from shardkeep.events import Event, EventSink
from shardkeep.knobs import get_knob
from shardkeep.ranks.channel import Patience
from shardkeep.ranks.messages import format_ranks
from shardkeep.ranks.notice import Answer, Board, Kind, Point, Wish

_ASKS_PER_S: Final = 2000
"""How often all ranks together look at the store in a second: it serves many times that."""

_STOP_WAIT_S: Final = 2.0
_LOOK_S: Final = 1.0
_ADVICE: Final = "look at the logs of these ranks: their process or node died, or is stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Something that a rank wants done. `deadline_s` is by this process's monotonic clock; `place` as in `Wish`."""

    kind: Kind
    rank: int
    reason: str
    deadline_s: float | None = None
    place: int | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds until it is too late; negative after that."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()


class Agreement:
    """Agrees with the other ranks. Without a `board`, in a world of one, it is the next tick where things happen.

    Args:
        on_asked: told what this rank asks for, soon after; in the thread that talks, or at a tick.
        events: told of rounds that came to nothing.
    """

    def __init__(self, board: Board | None, *, on_asked: Callable[[Asked], None], events: EventSink) -> None:
        # A SimpleQueue: the only one that a signal handler may put into while the same thread is inside `put`.
        self._inbox: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._on_asked = on_asked
        self._talk: _Talk | None = None
        self._closer: weakref.finalize[[], Agreement] | None = None
        if board is not None:
            self._talk = _Talk(board, self._inbox, on_asked=on_asked, events=events)
            # Not `__del__`: this also runs before the interpreter tears down, when no thread may be left in a C call.
            self._closer = weakref.finalize(self, self._talk.stop)

    def ask(self, asked: Asked) -> None:
        """Have something done at the same tick on all ranks, soon. Safe in a signal handler and in any thread."""
        self._inbox.put(asked)

    def tick(self) -> tuple[Asked, ...]:
        """Pass one tick; return what all ranks are to do at this very one, the same on all of them.

        Raises:
            BarrierTimeout: ranks did not answer a request to stop within the knob PEER_SILENCE_S; names them.
            PeerFailure: the store is gone, and with it the chance to agree on a request.
        """
        if self._talk is not None:
            if self._talk.broken is not None and not self._inbox.empty():
                self._refuse(self._talk.broken)
            return self._talk.ticks.take()
        found = []
        while not self._inbox.empty():
            asked = self._inbox.get()
            assert asked is not None
            self._on_asked(asked)
            found.append(asked)
        return tuple(found)

    def _refuse(self, broken: CheckpointError) -> None:
        asked = self._inbox.get()
        if asked is not None:
            self._on_asked(asked)
            raise PeerFailure(
                f"the ranks cannot agree on a step for {asked.reason}: {broken.message}", advice=_ADVICE
            )

    def close(self) -> None:
        """Pass no more ticks; the others agree without this rank from now on. Harmless twice."""
        if self._closer is not None:
            self._closer()


class _Ticks:
    """How many ticks are passed, and whether the next may be: shared by the program and the thread that talks."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._count = 0
        self._held = False
        self._due: dict[int, tuple[Asked, ...]] = {}
        self._failure: CheckpointError | None = None
        self._over = False

    def take(self) -> tuple[Asked, ...]:
        with self._changed:
            while self._held and not self._over:
                self._changed.wait(_LOOK_S)
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            self._count += 1
            return self._due.pop(self._count, ())

    def hold(self) -> int:
        """Let no further tick pass; return how many have."""
        with self._changed:
            self._held = True
            return self._count

    def release(self, tick: int | None = None, asked: tuple[Asked, ...] = ()) -> None:
        with self._changed:
            self._held = False
            if tick is not None and asked:
                self._due[tick] = self._due.get(tick, ()) + asked
            self._changed.notify_all()

    def fail(self, failure: CheckpointError) -> None:
        """Let the next tick raise."""
        with self._changed:
            self._held = False
            self._failure = failure
            self._changed.notify_all()

    def end(self) -> int:
        """Hold nobody any more; return how many ticks have passed."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            return self._count


class _Talk:
    """The thread that talks for one rank. It knows nothing of the `Agreement`, which ends it."""

    def __init__(
        self,
        board: Board,
        inbox: queue.SimpleQueue[Asked | None],
        *,
        on_asked: Callable[[Asked], None],
        events: EventSink,
    ) -> None:
        self.ticks = _Ticks()
        self.broken: CheckpointError | None = None
        self._board = board
        self._inbox = inbox
        self._on_asked = on_asked
        self._events = events
        self._poll_s = max(get_knob("NOTICE_POLL_S"), board.world_size / _ASKS_PER_S)
        self._silence_s = get_knob("PEER_SILENCE_S")
        self._wishes: list[Asked] = []
        self._stops = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardkeep-notice", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._closing.set()
        self._inbox.put(None)
        self._thread.join(_STOP_WAIT_S)

    def _run(self) -> None:
        number = 0
        try:
            while not self._closing.is_set():
                self._receive()
                if self._wishes:
                    self._board.call(number)
                elif not self._board.is_called(number):
                    continue
                self._settle(number)
                number += 1
            self._board.leave(self.ticks.end())
        except CheckpointError as error:
            self.broken = error
            self._give_up(error)
        except Exception as error:  # noqa: BLE001  # a thread that died in silence would swallow the next signal
            self.broken = CheckpointError(f"the thread that agrees with other ranks failed: {error!r}")
            self._give_up(self.broken)
        finally:
            self.ticks.end()

    def _give_up(self, error: CheckpointError) -> None:
        # While nobody asks for anything, a store that is gone is the next phase's to report: it may be all over.
        if self._wishes and not self._closing.is_set():
            self.ticks.fail(error)
            reasons = ", ".join(asked.reason for asked in self._wishes)
            self._say("preempt.not_agreed", f"the ranks could not agree on a step ({reasons}): {error}", "error")

    def _receive(self) -> None:
        """Take what this rank asks for; wait for it for as long as the store is left alone."""
        try:
            asked = self._inbox.get(timeout=self._poll_s)
        except queue.Empty:
            return
        while asked is not None:
            self._on_asked(asked)
            if asked.kind != "stop" or not self._stops:  # a second signal adds nothing
                self._stops = self._stops or asked.kind == "stop"
                self._wishes.append(asked)
            if self._inbox.empty():
                return
            asked = self._inbox.get()

    def _settle(self, number: int) -> None:
        wishes = tuple(
            Wish(kind=asked.kind, rank=asked.rank, reason=asked.reason, left_s=asked.left_s, place=asked.place)
            for asked in self._wishes
        )
        # ORDER: hold before answering: the outcome lies beyond the ticks that are in the answers.
        answer = Answer(ticks_count=self.ticks.hold(), wishes=wishes)
        try:
            self._board.answer(number, answer)
            point = self._lead(number) if self._board.rank == 0 else self._follow(number)
        except CheckpointError as error:
            self.ticks.fail(error)
            raise
        self._wishes.clear()
        if point is None:
            self.ticks.release()
        elif point.missing:
            self._miss(point)
        else:
            asked = tuple(_asked_of(wish) for wish in point.wishes)
            self._stops = self._stops or any(one.kind == "stop" for one in asked)
            self.ticks.release(point.tick, asked)

    def _lead(self, number: int) -> Point | None:
        patience = Patience(self._silence_s + 2 * self._poll_s)
        while missing := self._board.find_missing(number):
            if self._closing.is_set():
                return None
            if patience.is_over:
                break
            patience.pause()
        return self._board.settle(number, missing)

    def _follow(self, number: int) -> Point | None:
        limit_s = 2 * self._silence_s + 4 * self._poll_s
        patience = Patience(limit_s, longest_pause_s=self._poll_s)
        while not self._closing.is_set():
            # ORDER: a board that was closed before the outcome was looked for will never have one.
            closed = self._board.is_closed()
            point = self._board.find_point(number)
            if point is not None or closed:
                return point
            if patience.is_over:
                raise BarrierTimeout(
                    f"rank 0 did not tell at which step to act within {limit_s:g} s", missing=(0,), advice=_ADVICE
                )
            patience.pause()
        return None

    def _miss(self, point: Point) -> None:
        """A round without answers of some ranks, on all others alike: whoever was to stop must learn of it."""
        stops = self._stops or any(wish.kind == "stop" for wish in point.wishes)
        reasons = ", ".join(sorted({wish.reason for wish in point.wishes})) or "a request of a missing rank"
        text = f"{format_ranks(point.missing)} did not answer within {self._silence_s:g} s; not done: {reasons}"
        self._say("preempt.not_agreed", text, "error" if stops else "warning")
        self._stops = False  # another signal asks again
        if stops:
            self.ticks.fail(BarrierTimeout(text, missing=point.missing, advice=_ADVICE))
        else:
            self.ticks.release()

    def _say(self, name: str, text: str, level: str) -> None:
        self._events.emit(Event(name=name, level=level, text=text, fields={"rank": self._board.rank}))


def _asked_of(wish: Wish) -> Asked:
    deadline_s = None if wish.left_s is None else time.monotonic() + wish.left_s
    return Asked(kind=wish.kind, rank=wish.rank, reason=wish.reason, deadline_s=deadline_s, place=wish.place)
