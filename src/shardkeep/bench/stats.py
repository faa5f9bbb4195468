"""From seconds to figures: medians, spreads and ratios of what was measured in the same round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Timings = Mapping[str, Sequence[float | None]]
"""Who -> seconds by round; None where it did not take part in a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    least: float
    greatest: float
    count: int

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "least": self.least, "greatest": self.greatest, "count": self.count}


def find_spread(values: Iterable[float | None]) -> Spread | None:
    """Return the spread of those values that are there, or None without any."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return Spread(median=statistics.median(there), least=min(there), greatest=max(there), count=len(there))


def find_ratio(above: Sequence[float | None], below: Sequence[float | None]) -> float | None:
    """Return the median of the ratios within rounds, over rounds that have both; None without any.

    The disk and the neighbours of a shared machine drift by a factor of two within minutes. Two medians over the
    whole run then say less than what two contenders took in the same minute.
    """
    ratios = [a / b for a, b in zip(above, below, strict=False) if a is not None and b is not None and b > 0]
    return statistics.median(ratios) if ratios else None


def find_best(peers: Timings, ours: Sequence[float | None]) -> tuple[str, float] | None:
    """Return the peer whose median ratio to ours is the least, which is the one hardest to beat, and the ratio."""
    ratios = {name: find_ratio(times, ours) for name, times in peers.items()}
    found = [(ratio, name) for name, ratio in ratios.items() if ratio is not None]
    if not found:
        return None
    ratio, name = min(found)
    return name, ratio


def find_slow(times: Mapping[str, float], *, factor: float) -> set[str]:
    """Return who took more than `factor` times as long as the fastest."""
    if not times:
        return set()
    best = min(times.values())
    return {name for name, value in times.items() if value > factor * best}
