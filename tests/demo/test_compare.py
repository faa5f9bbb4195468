"""What the demo's comparison sees, and which difference it names first."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from shardkeep.demo.compare import (
    STATE_QUANTITIES,
    STEP_QUANTITIES,
    Row,
    Trace,
    compare_states,
    compare_steps,
    find_first,
    make_trace,
)
from shardkeep.demo.records import SMALL, Record, StartRecord, StateRecord, StepRecord
from shardkeep.demo.report import Result
from shardkeep.errors import Corrupt

RANKS = 2


def start(step: int, generation: int) -> StartRecord:
    return StartRecord(
        step=step,
        fresh=step == 0,
        generation=generation,
        report="",
        parameters_count=1,
        text_bytes=1,
        files_count=1,
    )


def step_of(step: int, rank: int, **changes: object) -> StepRecord:
    record = StepRecord(step=step, ids=(step * 10 + rank,), lr="0x1p-1", loss=f"{step}.{rank}", grad_norm="1")
    return msgspec.structs.replace(record, **changes)


def state_of(step: int, rank: int, **changes: object) -> StateRecord:
    names = [f"{quantity}/w" for quantity in ("weights", "exp_avg", "exp_avg_sq", "step")] if rank == 0 else []
    record = StateRecord(
        step=step,
        moment="trained",
        tensors={name: f"{name}{step}" for name in names},
        tensor_bytes=dict.fromkeys(names, 8),
        rng={"torch": f"{step}{rank}"},
        scheduler=f"s{step}",
        loader=f"l{step}",
    )
    return msgspec.structs.replace(record, **changes)


def logs(*, generation: int = 1, begin: int = 0, stop: int = 4) -> dict[int, dict[int, list[Record]]]:
    """Return the records of a start that saves every 2 steps."""
    ranks: dict[int, list[Record]] = {}
    for rank in range(RANKS):
        records: list[Record] = [start(begin, generation)]
        if begin:
            records.append(msgspec.structs.replace(state_of(begin, rank), moment="restored"))
        for step in range(begin + 1, stop + 1):
            records.append(step_of(step, rank))
            if step % 2 == 0:
                records.append(state_of(step, rank))
        ranks[rank] = records
    return {generation: ranks}


def compare(expected: Trace, found: Trace) -> list[Row]:
    rows = compare_steps("runs", expected.steps, found.steps, range(1, 5))
    rows += compare_states("runs", [(at, "trained", expected.states.get(at), found.states.get(at)) for at in (2, 4)])
    return rows + compare_states("restored", [(2, "restored", expected.states.get(2), found.restored.get(2))])


def interrupted() -> dict[int, dict[int, list[Record]]]:
    return logs(stop=3) | logs(generation=2, begin=2)


def change(found: dict[int, dict[int, list[Record]]], rank: int, kind: type, step: int, **changes: object) -> None:
    records = found[2][rank]
    at = next(n for n, record in enumerate(records) if isinstance(record, kind) and record.step == step)
    records[at] = msgspec.structs.replace(records[at], **changes)


def test_equal_runs_are_equal_whatever_was_done_twice() -> None:
    trace = make_trace(interrupted())
    rows = compare(make_trace(logs()), trace)
    assert all(row.identical for row in rows)
    assert [row.quantity for row in rows[:4]] == list(STEP_QUANTITIES)
    assert {row.quantity for row in rows} == {*STEP_QUANTITIES, *STATE_QUANTITIES}
    assert set(trace.redone) == {3}
    assert find_first(rows) is None
    weights = next(row for row in rows if row.quantity == "weights")
    assert (weights.count, weights.total_bytes) == (2, 16)


@pytest.mark.parametrize(
    ("rank", "kind", "step", "changes", "quantity", "where"),
    [
        (1, StepRecord, 3, {"ids": (99,)}, "sample ids", "global batch"),
        (1, StepRecord, 4, {"loss": "4.10"}, "loss", "rank 1"),
        (0, StepRecord, 3, {"lr": "0x1p-2"}, "learning rate", "rank 0"),
        (0, StepRecord, 4, {"grad_norm": "2"}, "gradient norm", "rank 0"),
        (1, StateRecord, 4, {"rng": {"torch": "?"}}, "random streams", "torch of rank 1"),
        (1, StateRecord, 4, {"scheduler": "?"}, "scheduler", "rank 1"),
        (1, StateRecord, 2, {"loader": "?"}, "loader", "rank 1"),
        (0, StateRecord, 4, {"tensors": {}}, "weights", "w"),
    ],
)
def test_one_change_is_seen_and_named(
    rank: int, kind: type, step: int, changes: dict[str, object], quantity: str, where: str
) -> None:
    found = interrupted()
    change(found, rank, kind, step, **changes)
    first = find_first(compare(make_trace(logs()), make_trace(found)))
    assert first is not None
    assert (first.quantity, first.step, first.where) == (quantity, step, where)
    assert quantity in str(first)


def test_the_difference_that_shows_first_is_named() -> None:
    found = interrupted()
    change(found, 0, StepRecord, 3, loss="9", grad_norm="9")
    change(found, 0, StepRecord, 4, ids=(0,))
    first = find_first(compare(make_trace(logs()), make_trace(found)))
    assert first is not None
    assert (first.step, first.quantity) == (3, "loss")
    change(found, 1, StateRecord, 2, rng={"torch": "?"})
    first = find_first(compare(make_trace(logs()), make_trace(found)))
    assert first is not None
    assert (first.step, first.moment, first.quantity) == (2, "restored", "random streams")


def test_a_missing_step_or_state_is_a_difference() -> None:
    short = logs(stop=3) | logs(generation=2, begin=2, stop=3)
    rows = compare(make_trace(logs()), make_trace(short))
    assert not any(row.identical for row in rows if row.group == "runs")


def test_a_rank_that_wrote_less_does_not_count_as_done() -> None:
    found = logs(stop=3)
    found[1][1].pop()
    assert set(make_trace(found).steps) == {1, 2}


def test_nothing_compared_is_not_identical() -> None:
    assert not Row(group="g", quantity="loss", count=0, unit="values").identical
    with pytest.raises(Corrupt):
        make_trace({1: {0: [start(0, 1)]}})


def test_the_verdict_needs_every_row() -> None:
    rows = tuple(compare(make_trace(logs()), make_trace(interrupted())))
    result = Result(shape=SMALL, facts={}, rows=rows, first=None, phases=(), elapsed_s=0.0)
    assert result.bit_identical
    assert not replace(result, rows=()).bit_identical
    assert not replace(result, rows=(*rows, Row(group="g", quantity="loss", count=0, unit="values"))).bit_identical
