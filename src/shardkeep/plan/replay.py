"""Do steps that are taken again repeat what was recorded of them? Which records count, and what a difference means.

Quantities are named by kind: `samples/<loader>`, `lr/<optimizer>`, `metric/<name>`. They are compared as text; floats
are recorded by `float.hex()`, so that equal text is equal bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from shardkeep.format.names import StepRef

SAMPLES: Final = "samples/"
LR: Final = "lr/"
METRIC: Final = "metric/"
_KINDS: Final = (SAMPLES, LR, METRIC)
_ANY_WORLD: Final = (SAMPLES, LR)

Status = Literal["nothing recorded", "not compared", "running", "identical", "differs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a generation of `world_size` ranks recorded of a step."""

    generation: int
    world_size: int
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first step that is not what it was.

    Attributes:
        quantity: the first of what differs, by cause; `others` are the rest.
        before, now: its texts.
        generation: who recorded it.
        cause: where to look, one sentence.
    """

    step: int
    quantity: str
    before: str
    now: str
    generation: int
    cause: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        also = f" (and {', '.join(_name(other) for other in self.others)})" if self.others else ""
        return (
            f"step {self.step} is not what generation {self.generation} recorded: {_name(self.quantity)} was "
            f"{_show(self.before)} and is {_show(self.now)}{also}; {self.cause}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """How far the steps taken again since a resume are proved to be the steps they were.

    Attributes:
        start: the step that was resumed.
        last: the last recorded step, `start` when there is none.
        expected_count: recorded steps beyond `start`; `compared_count` of them came again so far.
        quantities: what all compared steps were compared in.
        generations: whose records those are.
        divergence: the first step that differs; none is compared after it.
        left_out: why steps or quantities were not compared, one sentence each.
        saved: what came of comparing checkpoints that an earlier generation saved at the same steps, one line each.
        saved_differ: one of them differs.
    """

    start: int
    last: int
    expected_count: int
    compared_count: int = 0
    quantities: tuple[str, ...] = ()
    generations: tuple[int, ...] = ()
    divergence: Divergence | None = None
    left_out: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    saved_differ: bool = False
    is_over: bool = False

    @property
    def status(self) -> Status:
        if self.divergence is not None or self.saved_differ:
            return "differs"
        if not self.expected_count:
            return "nothing recorded"
        if not self.is_over:
            return "running"
        return "identical" if self.compared_count else "not compared"

    def __str__(self) -> str:
        lines = [self._headline(), *self.left_out, *self.saved]
        return "\n".join(lines)

    def _headline(self) -> str:
        if self.divergence is not None:
            return f"{self.compared_count} steps replayed alike, then {self.divergence}"
        if not self.expected_count:
            return f"nothing recorded: there is no record of steps after {self.start} to compare with"
        if not self.compared_count:
            return f"none of the {self.expected_count} recorded steps was compared"
        names = ", ".join(_name(quantity) for quantity in self.quantities)
        whose = ", ".join(map(str, self.generations))
        missing = self.expected_count - self.compared_count
        rest = f" of {self.expected_count} recorded ones" if missing else ""
        return (
            f"replayed {self.compared_count} steps{rest}, identical "
            f"({names}; from step {self.start + 1}, recorded by generation {whose})"
        )


def plan_sources(parents: Mapping[int, StepRef | None], parent: StepRef, generation: int) -> tuple[int, ...]:
    """Return the earlier generations whose steps beyond `parent` grew out of it, ascending.

    Args:
        parents: generation -> the checkpoint it resumed from; one that is not known is left out.
        parent: what `generation` resumed from.
    """
    found: set[int] = {parent.generation}
    for number in sorted(parents):
        origin = parents[number]
        if (
            parent.generation < number < generation
            and origin is not None
            and origin.step >= parent.step
            and origin.generation in found
        ):
            found.add(number)
    return tuple(sorted(found))


def compare_values(
    before: Mapping[str, str], now: Mapping[str, str], *, same_world: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the quantities that both have, and those of them that differ: samples first, then rates, then metrics.

    Sums over another number of ranks round differently: metrics are compared between equal world sizes only.
    """
    kinds = _KINDS if same_world else _ANY_WORLD
    compared = sorted(
        (name for name in before.keys() & now.keys() if name.startswith(kinds)),
        key=lambda name: (next(at for at, kind in enumerate(_KINDS) if name.startswith(kind)), name),
    )
    return tuple(compared), tuple(name for name in compared if before[name] != now[name])


def find_divergence(
    step: int,
    recorded: Recorded,
    now: Mapping[str, str],
    *,
    world_size: int,
    alike_count: int,
    suspects: Sequence[str],
) -> Divergence | None:
    """Return how a step differs from its record, or None.

    Args:
        alike_count: steps that were compared before and were identical.
        suspects: known differences of the surroundings that can change bits.
    """
    same_world = recorded.world_size == world_size
    _, differing = compare_values(recorded.values, now, same_world=same_world)
    if not differing:
        return None
    return Divergence(
        step=step,
        quantity=differing[0],
        before=recorded.values[differing[0]],
        now=now[differing[0]],
        generation=recorded.generation,
        cause=explain(differing[0], alike_count=alike_count, suspects=suspects),
        others=differing[1:],
    )


def explain(quantity: str, *, alike_count: int, suspects: Sequence[str] = ()) -> str:
    """Return where to look for the cause of a difference, one sentence."""
    if quantity.startswith(SAMPLES):
        return (
            "the loop got other samples: look for batches taken before the loop or skipped in it, another batch "
            "size, or a loader that is not in the state"
        )
    if quantity.startswith(LR):
        return "the schedule is elsewhere: look for a scheduler that is not in the state, or one made after resume()"
    known = f"; known to differ: {'; '.join(suspects)}" if suspects else ""
    if alike_count == 0:
        return (
            "the same samples gave another result at once: look at weights and buffers that are not in the state, at "
            f"random draws (dropout, reseeding after resume()) and at non-deterministic kernels{known}"
        )
    return (
        f"{alike_count} steps were identical before it, so the forward pass is: look at what the update uses "
        "(optimizer moments, loss scaler, accumulated gradients), at random draws and at non-deterministic "
        f"kernels{known}"
    )


def _name(quantity: str) -> str:
    kind, _, name = quantity.partition("/")
    return name if quantity.startswith(METRIC) else f"{kind} of {name}"


def _show(text: str) -> str:
    try:
        return f"{float.fromhex(text)!r} ({text})" if text.lstrip("-").startswith("0x") else text
    except ValueError:
        return text
