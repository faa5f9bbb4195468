"""One run of the benchmark: all groups that were asked for, and the document that comes of it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from shardkeep._version import __version__
from shardkeep.bench.bars import BARS
from shardkeep.bench.figures import Figure, describe_seconds, find_figures
from shardkeep.bench.group_async import measure_asynchronous
from shardkeep.bench.group_files import Pool, measure_limits, measure_load, measure_partial, measure_save
from shardkeep.bench.group_ranks import measure_ranks
from shardkeep.bench.group_tiers import measure_tiers
from shardkeep.bench.memory import read_meminfo
from shardkeep.bench.options import BenchOptions
from shardkeep.bench.session import Session, open_session
from shardkeep.bench.stats import find_spread

SCALE_RANKS: Final = 16_384
SCALE_PARAMS: Final = 10**12
LS_COUNT: Final = 1000
_WITH_STATE: Final = frozenset({"save", "load", "partial", "tiers", "async"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What a run found: a figure for each key of its groups, and everything behind them."""

    figures: dict[str, Figure]
    details: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the document of `--json`: the keys of the table, and `details`."""
        return {**{key: figure.value for key, figure in self.figures.items()}, "details": self.details}


def run_bench(options: BenchOptions, *, say: Callable[[str], None] = lambda text: None) -> BenchResult:
    """Measure; everything that it wrote is removed at the end, also after an error or a signal.

    Args:
        say: takes a line of progress.

    Raises:
        OutOfSpace: disk or memory is too small. CheckpointError: shardkeep itself failed.
    """
    begin = time.monotonic()
    with open_session(options, say) as session:
        for name, why in session.absent.items():
            say(f"{name}: {why}")
        _warm_memory(session)
        _measure(session)
        session.facts["state_bytes"] = session.shape.size_bytes
        figures = find_figures(session.seconds, session.facts, options.groups)
        return BenchResult(figures=figures, details=_describe(session, figures, time.monotonic() - begin))


def _warm_memory(session: Session) -> None:
    if session.warmer.needed:
        session.say(
            f"the first write to a page costs {session.warmer.page_s * 1e6:.0f} us here: filling free memory first"
        )
        session.warmer.refill()


def _measure(session: Session) -> None:
    groups = session.options.groups
    pool = Pool(session)
    if _WITH_STATE & set(groups):
        measure_limits(session, pool)
    if "save" in groups:
        measure_save(session, pool)
    if "load" in groups:
        measure_load(session, pool)
    if "partial" in groups:
        measure_partial(session, pool)
    if "tiers" in groups:
        measure_tiers(session, pool)
    pool.close()
    if "async" in groups:
        measure_asynchronous(session, pool)
        pool.close()
    if "ranks" in groups:
        measure_ranks(session)
    if {"scale", "cli"} & set(groups):
        pool.begin(["raw"])
        if "scale" in groups:
            session.say(f"scale: {SCALE_RANKS:,} ranks")
            found = pool.call("raw", "measure_scale", ranks=SCALE_RANKS, params=SCALE_PARAMS)
            session.facts["scale"] = found
        if "cli" in groups:
            session.facts["ls_ms"] = pool.call("raw", "measure_ls", count=LS_COUNT)
        pool.close()


def _describe(session: Session, figures: dict[str, Figure], took_s: float) -> dict[str, Any]:
    facts = {name: value for name, value in session.facts.items() if name != "scale"}
    return {
        "shardkeep": __version__,
        "versions": find_versions(),
        "machine": {
            "cpus": os.cpu_count(),
            "memory_bytes": read_meminfo("MemTotal"),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "direct_io": session.direct,
            "first_touch_page_s": session.warmer.page_s,
        },
        "rounds": session.options.rounds,
        "state_tensor_count": len(session.shape.pieces),
        "took_s": took_s,
        "against": {key: figure.against for key, figure in figures.items() if figure.against},
        "bars_met": {key: BARS[key].is_met(figure.value) for key, figure in figures.items()},
        "seconds": describe_seconds(session.seconds),
        "limits_bytes_per_s": _find_limits(session),
        "not_measured": dict(session.absent),
        "scale": session.facts.get("scale", {}),
        **facts,
    }


def _find_limits(session: Session) -> dict[str, float]:
    """Return what the machine moves in a second: raw writes and reads, one-thread copies and digests."""
    seconds: dict[str, list[float | None]] = {
        "write": session.seconds.get("save", {}).get("raw", []),
        "read": session.seconds.get("load.cold", {}).get("raw", []),
        **session.facts.get("limits_s", {}),
    }
    spreads = {name: find_spread(values) for name, values in seconds.items()}
    size = session.shape.size_bytes
    return {name: size / spread.median for name, spread in spreads.items() if spread is not None}


def find_versions() -> dict[str, str]:
    """Return the versions of everything that may be measured and is installed."""
    from importlib import metadata

    from shardkeep.bench.registry import PEERS

    found: dict[str, str] = {}
    for name in sorted({"torch", "numpy", *(entry.install for entry in PEERS.values())}):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
