"""What is promised of shardkeep's speed: every figure that `shardkeep bench` reports, with its bar. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Group = Literal["save", "load", "partial", "tiers", "async", "ranks", "scale", "cli"]
GROUPS: Final[tuple[Group, ...]] = ("save", "load", "partial", "tiers", "async", "ranks", "scale", "cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A figure and what it has to be.

    Attributes:
        key: its name in `--json`; never changes.
        group: what has to be measured for it (`--only`).
        at_least, at_most: the bar; exactly one is given.
        what: one line for the table.
    """

    key: str
    group: Group
    what: str
    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, value: float | None) -> bool | None:
        """Return whether the bar is met; None where there is no figure."""
        if value is None or value != value:
            return None
        if self.at_least is not None:
            return value >= self.at_least
        assert self.at_most is not None
        return value <= self.at_most

    @property
    def text(self) -> str:
        """The bar for a person: `>= 0.9`."""
        return f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"


def _least(key: str, group: Group, bar: float, what: str) -> Bar:
    return Bar(key=key, group=group, at_least=bar, what=what)


def _most(key: str, group: Group, bar: float, what: str) -> Bar:
    return Bar(key=key, group=group, at_most=bar, what=what)


BARS: Final = {
    bar.key: bar
    for bar in (
        _least("save.durable.limit_ratio", "save", 0.90, "raw O_DIRECT write / blocking save"),
        _least("save.durable.best_checkpointer_ratio", "save", 1.5, "fastest checkpoint system / blocking save"),
        _least("save.durable.best_writer_ratio", "save", 1.05, "fastest plain file writer / blocking save"),
        _least("async.stall.memcpy_ratio", "async", 0.90, "one-thread memcpy / stall of a later save"),
        _least("async.first_stall.best_peer_ratio", "async", 3.0, "shortest first stall of a peer / ours"),
        _least("async.lost_steps.best_peer_ratio", "async", 2.0, "least training time a peer costs / ours"),
        _least("overlap.stall.memcpy_ratio", "async", 5.0, "one-thread memcpy / wait of the loop, overlapped"),
        _least("load.cold.limit_ratio", "load", 0.85, "raw O_DIRECT read / cold load"),
        _least("load.cold.best_peer_ratio", "load", 1.05, "fastest peer / cold load"),
        _least("load.warm.best_peer_ratio", "load", 0.9, "fastest peer / load from the page cache"),
        _most("load.partial.amplification", "partial", 1.05, "bytes read / bytes asked for"),
        _least("tiers.restart.memcpy_ratio", "tiers", 0.8, "one-thread memcpy / restart from a tier in memory"),
        _least("ranks4.save.best_peer_ratio", "ranks", 2.0, "fastest peer / save of 4 ranks"),
        _least("ranks4.reshard_load.best_peer_ratio", "ranks", 1.8, "fastest peer / load on 2 ranks"),
        _most("memory.save_blocking_extra_mib", "save", 128.0, "memory of a blocking save above the state, MiB"),
        _most("memory.load_extra_mib", "load", 128.0, "memory of a load above the state, MiB"),
        _most("memory.async_extra_ratio", "async", 1.05, "memory of an asynchronous save / state"),
        _most("scale.commit_s", "scale", 5.0, "commit by the coordinator of 16,384 ranks, s"),
        _most("scale.restart_plan_s", "scale", 0.5, "one rank's plan of a restart in the same layout, s"),
        _most("scale.reshard_plan_s", "scale", 10.0, "one rank's plan of a load in another layout, s"),
        _most("scale.proof_s", "scale", 10.0, "one rank's share of the coverage proof, s"),
        _most("cli.ls_ms", "cli", 200.0, "shardkeep ls over 1,000 checkpoints, ms"),
    )
}


def list_keys(groups: tuple[Group, ...]) -> list[str]:
    """Return the keys that belong to groups, in the table's order."""
    return [bar.key for bar in BARS.values() if bar.group in groups]
