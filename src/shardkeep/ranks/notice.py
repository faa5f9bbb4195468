"""`NoticeBoard`: how the ranks of a job agree on one point of the program ahead of all of them, without a collective.

The program is counted in *ticks*: calls that every rank makes, in the same order. A rank that wants something done at
the same tick everywhere opens a round. Keys of round `k`, below `shardkeep/<nonce>/notice-<i>/`:

- `<k>/call`: the round is open; set by whoever comes first.
- `<k>/at/<rank>`: the rank's answer: how many ticks it has passed, and what it wants done itself. From its answer
  on the rank passes no further tick until it knows the outcome.
- `<k>/point`: the outcome, set by rank 0 once all have answered: the tick after the last one that any rank has
  passed, and what all ranks want done there. Or the ranks that did not answer.
- `left/<rank>`: the rank will pass no more ticks; stands for its answers from now on. Rank 0's closes the board.

Why it cannot deadlock: an answer is given by a thread of its own, at any moment, also while the rank's program waits
in a collective for another rank. Hence all answers come in, however far ahead one rank is of another, and a rank
that is held is let go before anyone can miss it. To hold ranks at their own next tick and ask them from there
would not do: one may have passed the tick already that another stands at, and wait for it in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeVar

import msgspec

from shardkeep.errors import PeerFailure
from shardkeep.ranks.base import Group
from shardkeep.ranks.channel import Channel
from shardkeep.ranks.store_group import StoreGroup

Kind = Literal["stop", "save"]
"""`stop`: save and end. `save`: save and go on."""

_REASON_CHARS: Final = 500


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank wants done at a tick that all ranks agree on.

    Attributes:
        left_s: seconds until it is too late, at the moment this was sent; None: not known.
        place: of a save by the clock, whose time has come (`manager.clocks`).
    """

    kind: Kind
    rank: int
    reason: str
    left_s: float | None = None
    place: int | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part in a round."""

    ticks_count: int
    wishes: tuple[Wish, ...] = ()


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a round. With `missing` ranks nothing is done at any tick."""

    tick: int
    wishes: tuple[Wish, ...]
    missing: tuple[int, ...] = ()


class Board(Protocol):
    """What an agreement asks of a notice board. For one thread; raises PeerFailure when the store is gone."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def call(self, number: int) -> None:
        """Open round `number`, unless it is open."""

    def is_called(self, number: int) -> bool: ...

    def answer(self, number: int, answer: Answer) -> None: ...

    def find_missing(self, number: int) -> list[int]:
        """Return the ranks that have neither answered nor left. Rank 0's."""

    def settle(self, number: int, missing: Sequence[int]) -> Point:
        """Publish the outcome of all answers but those of `missing` ranks; forget the round before. Rank 0's."""

    def find_point(self, number: int) -> Point | None: ...

    def is_closed(self) -> bool:
        """Return whether rank 0 has left: there will be no more outcomes than those that are there now."""

    def leave(self, ticks_count: int) -> None:
        """Say that this rank passes no more ticks."""


class StoreBoard:
    """A board in the store of a group."""

    def __init__(self, channel: Channel, *, rank: int, world_size: int) -> None:
        self._channel = channel
        self._rank = rank
        self._world_size = world_size
        self._waiting: tuple[int, list[int]] = (-1, [])

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def call(self, number: int) -> None:
        self._channel.put_first(f"{number}/call", b"1")

    def is_called(self, number: int) -> bool:
        return self._channel.has_all([f"{number}/call"])

    def answer(self, number: int, answer: Answer) -> None:
        clipped = tuple(msgspec.structs.replace(wish, reason=_readable(wish.reason)) for wish in answer.wishes)
        answer = msgspec.structs.replace(answer, wishes=clipped)
        self._channel.put(f"{number}/at/{self._rank}", msgspec.json.encode(answer))

    def find_missing(self, number: int) -> list[int]:
        waiting = self._waiting[1] if self._waiting[0] == number else list(range(self._world_size))
        if self._channel.has_all([f"{number}/at/{rank}" for rank in waiting]):
            waiting = []
        waiting = [rank for rank in waiting if not self._channel.has_all([f"{number}/at/{rank}"])]
        waiting = [rank for rank in waiting if not self._channel.has_all([f"left/{rank}"])]
        self._waiting = (number, waiting)
        return waiting

    def settle(self, number: int, missing: Sequence[int]) -> Point:
        lost = set(missing)
        ranks = [rank for rank in range(self._world_size) if rank not in lost]
        keys = {rank: f"{number}/at/{rank}" for rank in ranks}
        if not self._channel.has_all(list(keys.values())):
            # ORDER: an answer counts for more than a farewell, which holds no wishes.
            keys = {rank: key if self._channel.has_all([key]) else f"left/{rank}" for rank, key in keys.items()}
        frames = self._channel.get_each(list(keys.values()))
        answers = [_decode(frame, Answer, rank=rank) for rank, frame in zip(ranks, frames, strict=True)]
        point = Point(
            tick=1 + max((answer.ticks_count for answer in answers), default=0),
            wishes=tuple(wish for answer in answers for wish in answer.wishes),
            missing=tuple(missing),
        )
        self._channel.put(f"{number}/point", msgspec.json.encode(point))
        if not missing:  # one that is only slow goes through the rounds it missed, in order
            self._forget(number - 1)
        return point

    def _forget(self, number: int) -> None:
        # Who answered the next round has read the outcome of this one, and who has left needs it no more.
        if number >= 0:
            answers = [f"{number}/at/{rank}" for rank in range(self._world_size)]
            self._channel.remove([f"{number}/call", f"{number}/point", *answers])

    def find_point(self, number: int) -> Point | None:
        key = f"{number}/point"
        return _decode(self._channel.get(key), Point, rank=0) if self._channel.has_all([key]) else None

    def is_closed(self) -> bool:
        return self._channel.has_all(["left/0"])

    def leave(self, ticks_count: int) -> None:
        self._channel.put(f"left/{self._rank}", msgspec.json.encode(Answer(ticks_count=ticks_count)))


def open_board(group: Group) -> Board | None:
    """Return a board over the ranks of a group, or None when the group has no store. All ranks call it, in order.

    Nothing is waited for: a rank that is late finds what was written for it.
    """
    if not isinstance(group, StoreGroup):
        return None
    return StoreBoard(group.open_channel("notice"), rank=group.rank, world_size=group.world_size)


T = TypeVar("T", Answer, Point)


def _decode(frame: bytes, kind: type[T], *, rank: int) -> T:
    try:
        return msgspec.json.decode(frame, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerFailure(
            f"rank {rank} sent a notice that this version cannot read: expected {kind.__name__}, {error}",
            causes={rank: f"unreadable notice of {len(frame)} bytes"},
            advice="run the same version of shardkeep on every rank",
        ) from error


def _readable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")[:_REASON_CHARS]
