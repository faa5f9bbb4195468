"""Which of the places that save by the clock are due. Rank 0's clock counts; `preempt.Lookout` asks the ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from shardkeep.manager.policies import Minutes

_ASK_AGAIN_S: Final = 60.0


class Clocks:
    """One clock for each place with `Minutes`, by the place's number: the fastest tier is 0, the root comes last.

    When a slower place's time has come, the faster ones here take the checkpoint as well, and all their clocks start
    again: intervals that are multiples of each other stay in step, and what goes to a slow place goes through a fast.
    """

    def __init__(self, rules: Mapping[int, Minutes]) -> None:
        self._intervals_s = {number: rule.seconds for number, rule in sorted(rules.items())}
        self._counted_from_s: dict[int, float] = {}
        self._asked_at_s: float | None = None

    def __bool__(self) -> bool:
        return bool(self._intervals_s)

    def start(self) -> None:
        """Count from now on."""
        self._counted_from_s = dict.fromkeys(self._intervals_s, time.monotonic())

    def find_due(self) -> int | None:
        """Return the slowest place whose time has come, once; again only when that came to nothing."""
        now_s = time.monotonic()
        due = [n for n, from_s in self._counted_from_s.items() if now_s - from_s >= self._intervals_s[n]]
        if not due:
            return None
        patience_s = max(_ASK_AGAIN_S, self._intervals_s[due[-1]])
        if self._asked_at_s is not None and now_s - self._asked_at_s <= patience_s:
            return None
        self._asked_at_s = now_s
        return due[-1]

    def take(self, number: int) -> frozenset[int]:
        """Start the clocks of a place and of the faster ones again; return these places."""
        taken = frozenset(n for n in self._intervals_s if n <= number)
        self._counted_from_s.update(dict.fromkeys(taken, time.monotonic()))
        self._asked_at_s = None
        return taken

    def restart(self, number: int) -> None:
        """Start one place's clock again, where it has one: it gets a checkpoint for another reason."""
        if number in self._intervals_s:
            self._counted_from_s[number] = time.monotonic()
            self._asked_at_s = None
