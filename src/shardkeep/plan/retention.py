"""What to keep: a union of rules over the timeline, and what no rule may remove."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardkeep.errors import UsageError
from shardkeep.format.names import StepRef

_MODES = ("min", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """Keep the `count` checkpoints with the best value of a metric that was given with the save.

    Of equal ones the newest. A checkpoint without the metric, or with nan, or unhealthy, is never among the best.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if (
            not isinstance(self.metric, str)
            or not self.metric
            or not _is_count(self.count, 1)
            or self.mode not in _MODES
        ):
            raise UsageError(
                f"Best(metric={self.metric!r}, count={self.count!r}, mode={self.mode!r}): "
                "expected a name, a count of 1 or more, and 'min' or 'max'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints to keep; one that any rule keeps stays. Without a rule all stay.

    Attributes:
        last: the newest so many, by step number. The newest committed one stays at 0 too.
        every: those whose step is a multiple of this.
        best: those with the best metric.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.last is not None and not _is_count(self.last, 0):
            raise UsageError(f"Keep(last={self.last!r}): expected an int of 0 or more, or None")
        if self.every is not None and not _is_count(self.every, 1):
            raise UsageError(f"Keep(every={self.every!r}): expected an int of 1 or more, or None")
        if self.best is not None and not isinstance(self.best, Best):
            raise UsageError(f"Keep(best={self.best!r}): expected Best('loss') or so, or None")


def _is_count(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A committed step on the timeline, with what the rules look at.

    Attributes:
        damaged: known not to be what was written; no rule counts on it, and none removes it.
    """

    ref: StepRef
    metrics: Mapping[str, float]
    healthy: bool
    held: bool
    damaged: bool = False


def plan_removal(timeline: Sequence[Candidate], keep: Keep, *, parent: StepRef | None) -> tuple[StepRef, ...]:
    """Return the steps to remove, ascending.

    Never among them: the newest one, the live generation's parent, the newest healthy one, a held one, a damaged
    one (which counts for no rule either: that is for a person to look at).
    """
    ordered = sorted((one for one in timeline if not one.damaged), key=lambda candidate: candidate.ref.step)
    if not ordered or (keep.last is None and keep.every is None and keep.best is None):
        return ()
    kept = {ordered[-1].ref}
    if keep.last:
        kept |= {candidate.ref for candidate in ordered[-keep.last :]}
    if parent is not None:
        kept.add(parent)
    if healthy := [candidate.ref for candidate in ordered if candidate.healthy]:
        kept.add(healthy[-1])
    kept |= {candidate.ref for candidate in ordered if candidate.held}
    if keep.every:
        kept |= {candidate.ref for candidate in ordered if candidate.ref.step % keep.every == 0}
    if keep.best:
        kept |= _best(ordered, keep.best)
    return tuple(candidate.ref for candidate in ordered if candidate.ref not in kept)


def _best(ordered: Sequence[Candidate], rule: Best) -> set[StepRef]:
    sign = 1 if rule.mode == "min" else -1
    rated = [
        (sign * candidate.metrics[rule.metric], -candidate.ref.step, candidate.ref)
        for candidate in ordered
        if candidate.healthy and not math.isnan(candidate.metrics.get(rule.metric, math.nan))
    ]
    return {ref for _, _, ref in sorted(rated)[: rule.count]}
