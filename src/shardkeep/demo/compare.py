"""Decides whether runs are bit-identical, from what their ranks wrote down, and what differs first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shardkeep.demo.records import Record, StartRecord, StateRecord, StepRecord
from shardkeep.errors import Corrupt

STEP_QUANTITIES: Final = ("sample ids", "learning rate", "loss", "gradient norm")
TENSOR_QUANTITIES: Final = ("weights", "exp_avg", "exp_avg_sq", "step")
PLAIN_QUANTITIES: Final = ("random streams", "loader", "scheduler")
STATE_QUANTITIES: Final = (*TENSOR_QUANTITIES, *PLAIN_QUANTITIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Digests of a whole job's state: quantity -> name -> SHA-256; `sizes` of tensors, by `quantity/name`."""

    digests: dict[str, dict[str, str]]
    sizes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One run as it counts: a step that was done twice is that of the later start.

    Attributes:
        steps: step -> quantity -> where (a rank, or all) -> value.
        states: step -> the state after it. restored: step -> the state right after a resume from it.
        redone: what an earlier start had done of steps that were done again.
        starts: rank 0's, by generation.
    """

    steps: dict[int, dict[str, dict[str, str]]]
    states: dict[int, State]
    restored: dict[int, State]
    redone: dict[int, dict[str, dict[str, str]]]
    starts: dict[int, StartRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference of one quantity. `moment` is `restored` (before any step was done) or `trained`."""

    quantity: str
    step: int
    moment: str
    where: str
    expected: str
    found: str

    @property
    def order(self) -> tuple[int, bool, int]:
        """When it showed; within a step, causes before effects."""
        quantities = (*STEP_QUANTITIES, *STATE_QUANTITIES)
        rank = quantities.index(self.quantity) if self.quantity in quantities else len(quantities)
        return self.step, self.moment == "restored", rank

    def __str__(self) -> str:
        when = f"right after the resume at step {self.step}" if self.moment == "restored" else f"at step {self.step}"
        return f"{self.quantity}, {when}, {self.where}: expected {_cut(self.expected)}, found {_cut(self.found)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result: how many things of a quantity were compared, and the first that differs."""

    group: str
    quantity: str
    count: int
    unit: str
    total_bytes: int | None = None
    first: Difference | None = None

    @property
    def identical(self) -> bool:
        """An empty comparison proves nothing."""
        return self.first is None and self.count > 0


def make_trace(logs: Mapping[int, Mapping[int, Iterable[Record]]]) -> Trace:
    """Join the ranks' records of all starts of one run. Raises Corrupt when a rank's are missing."""
    trace = Trace(steps={}, states={}, restored={}, redone={}, starts={})
    for generation, ranks in sorted(logs.items()):
        steps: dict[int, dict[int, StepRecord]] = {}
        states: dict[tuple[int, str], dict[int, StateRecord]] = {}
        for rank, records in sorted(ranks.items()):
            for record in records:
                if isinstance(record, StepRecord):
                    steps.setdefault(record.step, {})[rank] = record
                elif isinstance(record, StateRecord):
                    states.setdefault((record.step, record.moment), {})[rank] = record
                elif rank == 0:
                    trace.starts[generation] = record
        whole = {step: join_step(found) for step, found in sorted(steps.items()) if len(found) == len(ranks)}
        trace.redone.update({step: trace.steps[step] for step in whole if step in trace.steps})
        trace.steps.update(whole)
        for (step, moment), by_rank in sorted(states.items()):
            if len(by_rank) == len(ranks):
                (trace.restored if moment == "restored" else trace.states)[step] = join_state(by_rank)
    if not trace.steps:
        raise Corrupt("the ranks of the demo wrote down no step")
    return trace


def join_step(ranks: Mapping[int, StepRecord]) -> dict[str, dict[str, str]]:
    """Return one step over all ranks; the sample ids in the order of the global batch."""
    ids = [str(number) for _, record in sorted(ranks.items()) for number in record.ids]
    return {
        "sample ids": {"global batch": " ".join(ids)},
        "learning rate": {f"rank {rank}": record.lr for rank, record in sorted(ranks.items())},
        "loss": {f"rank {rank}": record.loss for rank, record in sorted(ranks.items())},
        "gradient norm": {f"rank {rank}": record.grad_norm for rank, record in sorted(ranks.items())},
    }


def join_state(ranks: Mapping[int, StateRecord]) -> State:
    """Return a state over all ranks."""
    digests: dict[str, dict[str, str]] = {quantity: {} for quantity in STATE_QUANTITIES}
    for name, digest in sorted(ranks[0].tensors.items()):
        quantity, _, tensor = name.partition("/")
        digests[quantity][tensor] = digest
    for rank, record in sorted(ranks.items()):
        digests["random streams"].update({f"{name} of rank {rank}": value for name, value in record.rng.items()})
        digests["loader"][f"rank {rank}"] = record.loader
        digests["scheduler"][f"rank {rank}"] = record.scheduler
    return State(digests=digests, sizes=dict(ranks[0].tensor_bytes))


def compare_steps(
    group: str,
    expected: Mapping[int, dict[str, dict[str, str]]],
    found: Mapping[int, dict[str, dict[str, str]]],
    steps: Iterable[int],
    *,
    quantities: Iterable[str] = STEP_QUANTITIES,
) -> list[Row]:
    """Return a row per quantity over `steps`; a step that one side lacks is a difference."""
    rows = []
    numbers = sorted(steps)
    for quantity in quantities:
        pairs = [
            (step, expected.get(step, {}).get(quantity, {}), found.get(step, {}).get(quantity, {}))
            for step in numbers
        ]
        first = next((d for step, a, b in pairs if (d := find_difference(quantity, step, "trained", a, b))), None)
        count = sum(len(a) for _, a, _ in pairs)
        if quantity == "sample ids":
            count = sum(len(text.split()) for _, a, _ in pairs for text in a.values())
        rows.append(
            Row(group=group, quantity=quantity, count=count, unit=_UNITS.get(quantity, "values"), first=first)
        )
    return rows


def compare_states(
    group: str,
    pairs: Iterable[tuple[int, str, State | None, State | None]],
    *,
    quantities: Iterable[str] = STATE_QUANTITIES,
) -> list[Row]:
    """Return a row per quantity over pairs `(step, moment, expected, found)`; a missing state is a difference."""
    rows = []
    listed = list(pairs)
    for quantity in quantities:
        firsts: list[Difference] = []
        count = total_bytes = 0
        for step, moment, expected, found in listed:
            a = expected.digests[quantity] if expected else {}
            b = found.digests[quantity] if found else {}
            count += len(a)
            total_bytes += sum(expected.sizes.get(f"{quantity}/{name}", 0) for name in a) if expected else 0
            if expected is None or found is None:
                a, b = a or {"all": "a state"}, b or {"all": "none"}
            difference = find_difference(quantity, step, moment, a, b)
            firsts += [difference] if difference else []
        is_tensor = quantity in TENSOR_QUANTITIES
        rows.append(
            Row(
                group=group,
                quantity=quantity,
                count=count,
                unit="tensors" if is_tensor else _UNITS.get(quantity, "states"),
                total_bytes=total_bytes if is_tensor else None,
                first=min(firsts, key=lambda difference: difference.order, default=None),
            )
        )
    return rows


def find_difference(
    quantity: str, step: int, moment: str, expected: Mapping[str, str], found: Mapping[str, str]
) -> Difference | None:
    """Return the first difference of two tables, by name, or None."""
    for where in sorted({*expected, *found}):
        a, b = expected.get(where, "nothing"), found.get(where, "nothing")
        if a != b:
            return Difference(quantity=quantity, step=step, moment=moment, where=where, expected=a, found=b)
    return None


def find_first(rows: Iterable[Row]) -> Difference | None:
    """Return the difference that showed first in the run, or None."""
    found = [row.first for row in rows if row.first is not None]
    return min(found, key=lambda difference: difference.order, default=None)


_UNITS: Final = {"sample ids": "samples", "random streams": "streams"}


def _cut(value: str) -> str:
    return value if len(value) <= 40 else value[:37] + "..."
