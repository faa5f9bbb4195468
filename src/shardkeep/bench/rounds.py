"""Rounds of measurements: who takes part, in which order, and who sits out because it cannot be the fastest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardkeep.bench.registry import PEERS
from shardkeep.bench.stats import Timings, find_best, find_slow

WARM_UP_FACTOR = 2.5
FACTOR = 1.6


def order_round(names: list[str], number: int) -> list[str]:
    """Return the names in the order of round `number`: everyone is after everyone else equally often.

    Rounds go forwards and backwards in turn, each from another start, so that what one leaves behind for the next (a
    busy disk, free memory) does not always meet the same one.
    """
    start = number // 2 % len(names) if names else 0
    turned = names[start:] + names[:start]
    return turned if number % 2 == 0 else turned[::-1]


class Field:
    """The peers of one measurement that still take part.

    A slow peer cannot become the fastest by being measured more often; it would only lengthen the run. So whoever
    takes more than 2.5 times as long as the fastest of its kind in the warm-up, or 1.6 times in the first round,
    stays with the figures that it has. The fastest of a round always goes on, however slow the machine was in it.
    """

    def __init__(self, names: Iterable[str], *, by_kind: bool = False) -> None:
        self.names = list(names)
        self._by_kind = by_kind
        self._known: float | None = None

    def settle(self, number: int, ours: float, times: Mapping[str, float]) -> list[str]:
        """Take the times of round `number`; return who sits out from now on."""
        if number > 1:
            return []
        factor = WARM_UP_FACTOR if number == 0 else FACTOR
        gone: set[str] = set()
        for kind in {self._kind(name) for name in times}:
            gone |= find_slow({n: t for n, t in times.items() if self._kind(n) == kind}, factor=factor)
        if self._known is not None and ours > 0:
            gone |= {name for name, value in times.items() if value / ours > factor * self._known}
        self.names = [name for name in self.names if name not in gone]
        return sorted(gone)

    def drop(self, name: str) -> None:
        """Leave one out, because it failed."""
        self.names = [other for other in self.names if other != name]

    def know(self, times: Timings) -> None:
        """Take over what was measured of others before: who is far behind those sits out too."""
        best = find_best({n: v for n, v in times.items() if n in PEERS}, times.get("shardkeep", ()))
        self._known = None if best is None else best[1]

    def _kind(self, name: str) -> str:
        return PEERS[name].kind if self._by_kind and name in PEERS else ""
