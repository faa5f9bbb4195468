"""What to measure, checked. Pure but for names of files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardkeep.bench.bars import GROUPS, Group
from shardkeep.bench.registry import PEERS
from shardkeep.errors import UsageError

PLAIN_BYTES: Final = 512 << 20
LEAST_BYTES: Final = 1 << 20
MOST_BYTES: Final = 1 << 50
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(?:i?b)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One run of the benchmark.

    Attributes:
        folder: where its files go; a folder of its own is made below it and removed at the end.
        size_bytes: of the state, about.
        rounds: how often everything is measured after a warm-up.
        peers: names of `registry.PEERS`.
        fill_memory: let free memory be filled with page cache where first writes are slow; see `memory.PageWarmer`.
    """

    folder: Path
    size_bytes: int = PLAIN_BYTES
    rounds: int = 3
    groups: tuple[Group, ...] = GROUPS
    peers: tuple[str, ...] = tuple(PEERS)
    fill_memory: bool = True

    def __post_init__(self) -> None:
        if self.size_bytes < LEAST_BYTES:
            raise UsageError(f"size {self.size_bytes} bytes: expected at least {LEAST_BYTES} (1 MiB)")
        if self.rounds < 1:
            raise UsageError(f"rounds {self.rounds}: expected at least 1")


def parse_size(text: str) -> int:
    """Return the bytes of `512MiB`, `3 GiB`, `3g`; units are powers of 1024. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"size {text!r}: expected a number with a unit", advice="write it as in 512MiB or 3GiB")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size > MOST_BYTES:
        raise UsageError(f"size {text[:40]!r}: expected at most {MOST_BYTES >> 40} TiB")
    return int(size)


def parse_groups(names: tuple[str, ...]) -> tuple[Group, ...]:
    """Return the groups named, in their usual order; all without any. Raises UsageError."""
    wanted = {word.strip() for name in names for word in name.split(",") if word.strip()}
    unknown = sorted(wanted - set(GROUPS))
    if unknown or (names and not wanted):
        raise UsageError(f"--only {', '.join(unknown) or repr(names[0])}: expected {', '.join(GROUPS)}")
    return tuple(group for group in GROUPS if not wanted or group in wanted)


def parse_peers(text: str) -> tuple[str, ...]:
    """Return the peers of `all`, `none` or names with commas between them. Raises UsageError."""
    if text == "all":
        return tuple(PEERS)
    words = [] if text == "none" else [word.strip() for word in text.split(",") if word.strip()]
    unknown = sorted(set(words) - set(PEERS))
    if unknown or (not words and text != "none"):
        raise UsageError(
            f"--peers {', '.join(unknown) or repr(text)}: expected all, none or some of {', '.join(PEERS)}"
        )
    return tuple(name for name in PEERS if name in words)
