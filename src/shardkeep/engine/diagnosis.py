"""What a look at places and machine found before a run: one `Check` for each thing looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardkeep.errors import CheckpointError

Status = Literal["ok", "warn", "fail"]
"""`warn`: a run works, but less well or for less long than it looks; `fail`: it would not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        place: `machine`, `root`, or `tier 0` and so on, the fastest first.
        what: the thing, in a word or two; stable.
        found: one sentence.
        advice: what to type next; None: nothing.
    """

    place: str
    what: str
    status: Status
    found: str
    advice: str | None = None


def failed(place: str, what: str, error: CheckpointError) -> Check:
    """Return the check that an error ended."""
    advice = error.advice or "make the place reachable and writable for this user, then ask shardkeep doctor again"
    return Check(place=place, what=what, status="fail", found=error.message, advice=advice)
