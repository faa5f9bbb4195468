"""From what was measured to the figures of the table. Pure: seconds in, ratios out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardkeep.bench.bars import Group, list_keys
from shardkeep.bench.registry import PEERS, Kind
from shardkeep.bench.stats import Timings, find_best, find_ratio, find_spread

_RAW = "raw"
_OURS = "shardkeep"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A value of the table; `against` is the peer that it is held against."""

    value: float | None
    against: str | None = None


_NONE = Figure(value=None)


def find_figures(
    seconds: Mapping[str, Timings], facts: Mapping[str, Any], groups: tuple[Group, ...]
) -> dict[str, Figure]:
    """Return key -> figure for the groups that were measured; a value is None where something was missing.

    Args:
        seconds: what -> who -> by round, with None where someone did not take part: `save`, `load.cold`, `load.warm`,
            `memcpy`, `async.stall`, `async.first_stall`, `async.lost`, `overlap.stall`, `ranks4.save`,
            `ranks4.reshard_load`, `tiers.restart` (`raw`: memcpy).
        facts: `memory` (what -> who -> bytes), `partial` (what -> bytes read per byte asked), `scale`, `ls_ms`,
            `state_bytes`.
    """
    found = {
        "save.durable.limit_ratio": _against_raw(seconds, "save"),
        "save.durable.best_checkpointer_ratio": _against_best(seconds, "save", ("checkpointer",)),
        "save.durable.best_writer_ratio": _against_best(seconds, "save", ("writer",)),
        "async.stall.memcpy_ratio": _against_copy(seconds, "async.stall"),
        "async.first_stall.best_peer_ratio": _against_best(seconds, "async.first_stall"),
        "async.lost_steps.best_peer_ratio": _against_best(seconds, "async.lost"),
        "overlap.stall.memcpy_ratio": _against_copy(seconds, "overlap.stall"),
        "load.cold.limit_ratio": _against_raw(seconds, "load.cold"),
        "load.cold.best_peer_ratio": _against_best(seconds, "load.cold"),
        "load.warm.best_peer_ratio": _against_best(seconds, "load.warm"),
        "tiers.restart.memcpy_ratio": _against_raw(seconds, "tiers.restart"),
        "ranks4.save.best_peer_ratio": _against_best(seconds, "ranks4.save"),
        "ranks4.reshard_load.best_peer_ratio": _against_best(seconds, "ranks4.reshard_load"),
    }
    return {key: found.get(key, _NONE) for key in list_keys(groups)} | {
        key: Figure(value=value) for key, value in _find_plain(facts).items() if key in list_keys(groups)
    }


def _find_plain(facts: Mapping[str, Any]) -> dict[str, float | None]:
    memory: Mapping[str, Mapping[str, float]] = facts.get("memory", {})
    partial: Mapping[str, float] = facts.get("partial", {}).get(_OURS, {})
    found: dict[str, float | None] = {
        "memory.save_blocking_extra_mib": _scaled(memory.get("save", {}).get(_OURS), _MIB),
        "memory.load_extra_mib": _scaled(memory.get("load", {}).get(_OURS), _MIB),
        "memory.async_extra_ratio": _scaled(memory.get("async", {}).get(_OURS), facts.get("state_bytes", 0)),
        "load.partial.amplification": max(partial.values()) if partial else None,
        "cli.ls_ms": facts.get("ls_ms"),
    }
    for name, value in facts.get("scale", {}).items():
        found[name if name.startswith("scale.") else f"scale.{name}"] = value
    return found


def _scaled(value: float | None, unit: float) -> float | None:
    return value / unit if value is not None and unit else None


def _ours(seconds: Mapping[str, Timings], what: str) -> Sequence[float | None]:
    return seconds.get(what, {}).get(_OURS, ())


def _against_raw(seconds: Mapping[str, Timings], what: str) -> Figure:
    return Figure(value=find_ratio(seconds.get(what, {}).get(_RAW, ()), _ours(seconds, what)), against=_RAW)


def _against_copy(seconds: Mapping[str, Timings], what: str) -> Figure:
    return Figure(value=find_ratio(seconds.get("memcpy", {}).get(_RAW, ()), _ours(seconds, what)), against="memcpy")


def _against_best(
    seconds: Mapping[str, Timings], what: str, kinds: tuple[Kind, ...] = ("checkpointer", "writer")
) -> Figure:
    peers = {
        name: times for name, times in seconds.get(what, {}).items() if name in PEERS and PEERS[name].kind in kinds
    }
    best = find_best(peers, _ours(seconds, what))
    return _NONE if best is None else Figure(value=best[1], against=best[0])


def describe_seconds(seconds: Mapping[str, Timings]) -> dict[str, dict[str, Any]]:
    """Return what -> who -> median, least, greatest, count, rounds and the ratio to shardkeep's, for `details`."""
    found: dict[str, dict[str, Any]] = {}
    for what, times in seconds.items():
        for who, values in times.items():
            spread = find_spread(values)
            if spread is None:
                continue
            found.setdefault(what, {})[who] = {
                **spread.as_json(),
                "by_round": list(values),
                "ratio_to_ours": find_ratio(values, times.get(_OURS, ())),
            }
    return found
