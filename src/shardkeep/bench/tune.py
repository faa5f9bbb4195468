"""`shardkeep bench --tune`: saves and loads with each setting of the knobs, and which is best on this storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardkeep.bench.options import BenchOptions
from shardkeep.bench.rounds import order_round
from shardkeep.bench.session import Session, open_session
from shardkeep.bench.stats import find_spread
from shardkeep.knobs import KNOBS

THREADS: Final = (1, 2, 3, 4, 6, 8)
_GAIN: Final = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Seconds of a save and a cold load for each number of threads, and the number to set."""

    seconds: dict[int, tuple[float, float]]
    best: int

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [
            (f"IO_THREADS={count}" + (" (best)" if count == self.best else ""), f"{save:.3f}", f"{load:.3f}")
            for count, (save, load) in self.seconds.items()
        ]

    @property
    def lines(self) -> list[str]:
        """What to set; nothing where the default is best."""
        if self.best == KNOBS["IO_THREADS"].default:
            return ["the defaults are the best here: nothing to set"]
        return [f"export SHARDKEEP_IO_THREADS={self.best}"]

    def as_json(self) -> dict[str, Any]:
        return {
            "io_threads": {str(n): {"save_s": save, "load_s": load} for n, (save, load) in self.seconds.items()},
            "best": {"SHARDKEEP_IO_THREADS": self.best},
            "environment": [line for line in self.lines if line.startswith("export ")],
        }


def choose(seconds: Mapping[int, tuple[float, float]], *, default: int) -> int:
    """Return the setting with the least sum of save and load; the default, unless another is clearly better."""
    best = min(seconds, key=lambda count: (sum(seconds[count]), count))
    if default in seconds and sum(seconds[default]) <= sum(seconds[best]) * (1 + _GAIN):
        return default
    return best


def tune(options: BenchOptions, *, say: Callable[[str], None]) -> Tuned:
    """Measure every setting in turns, and choose."""
    with open_session(options, say) as session:
        if session.warmer.needed:
            say("filling free memory first")
            session.warmer.refill()
        found: dict[int, list[list[float]]] = {count: [[], []] for count in THREADS}
        worker = session.start("shardkeep")
        worker.call("fill")
        for number in range(options.rounds + 1):
            for name in order_round([str(count) for count in THREADS], number):
                times = _measure_one(session, worker, int(name))
                if number:
                    for kept, value in zip(found[int(name)], times, strict=True):
                        kept.append(value)
            say(f"tune, {f'round {number} of {options.rounds}' if number else 'warm-up'} done")
    seconds = {count: (_median(saves), _median(loads)) for count, (saves, loads) in found.items()}
    return Tuned(seconds=seconds, best=choose(seconds, default=int(KNOBS["IO_THREADS"].default)))


def _measure_one(session: Session, worker: Any, count: int) -> tuple[float, float]:
    place = session.place("tune")
    worker.call("set_knobs", IO_THREADS=count)
    saved = worker.call("save", folder=str(place))["took_s"]
    loaded = worker.call("load", folder=str(place))["took_s"]
    session.remove(place)
    return saved, loaded


def _median(values: list[float]) -> float:
    spread = find_spread(values)
    assert spread is not None
    return spread.median
