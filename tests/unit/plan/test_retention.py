"""Retention on the cases that went wrong for others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardkeep.errors import UsageError
from shardkeep.format.names import StepRef
from shardkeep.plan.retention import Best, Candidate, Keep, plan_removal


def candidate(step: int, *, generation: int = 1, loss: float | None = None, healthy: bool = True) -> Candidate:
    metrics = {} if loss is None else {"loss": loss}
    return Candidate(ref=StepRef(step=step, generation=generation), metrics=metrics, healthy=healthy, held=False)


def left(timeline: list[Candidate], keep: Keep, parent: StepRef | None = None) -> list[int]:
    removed = plan_removal(timeline, keep, parent=parent)
    return [c.ref.step for c in timeline if c.ref not in removed]


@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("best", [None, Best(metric="loss")])
def test_small_limits_never_remove_the_newest(last: int, best: Best | None) -> None:
    """huggingface/transformers#25129: a limit of 1 removed everything."""
    timeline = [candidate(step, loss=float(step)) for step in range(1, 7)]
    kept = left(timeline, Keep(last=last, best=best))
    assert kept == sorted(({1} if best else set()) | set(range(7 - max(last, 1), 7)))


def test_steps_are_ordered_as_numbers() -> None:
    """huggingface/accelerate#1163: `checkpoint_9` came after `checkpoint_10`."""
    steps = [99, 8, 100, 9, 101, 10, 12, 11]
    assert left([candidate(step) for step in steps], Keep(last=3)) == [99, 100, 101]
    assert left([candidate(step) for step in (8, 9, 10, 11, 12)], Keep(last=2)) == [11, 12]


def test_without_a_rule_all_stay() -> None:
    assert left([candidate(1), candidate(2)], Keep()) == [1, 2]
    assert plan_removal([], Keep(last=1), parent=None) == ()


def test_rules_add_up() -> None:
    timeline = [candidate(step, loss=abs(step - 35)) for step in range(10, 101, 10)]
    assert left(timeline, Keep(last=2, every=50, best=Best(metric="loss", count=2))) == [30, 40, 50, 90, 100]


def test_nan_is_never_the_best() -> None:
    timeline = [candidate(1, loss=math.nan), candidate(2, loss=3.0), candidate(3, loss=math.inf), candidate(4)]
    assert left(timeline, Keep(best=Best(metric="loss", mode="max"))) == [3, 4]
    assert left(timeline, Keep(best=Best(metric="loss"))) == [2, 4]
    assert left([candidate(1, loss=math.nan), candidate(2, loss=math.nan)], Keep(best=Best(metric="loss"))) == [2]


def test_of_equal_ones_the_newest_is_the_best() -> None:
    timeline = [candidate(step, loss=1.0) for step in (1, 2, 3)] + [candidate(4)]
    assert left(timeline, Keep(best=Best(metric="loss"))) == [3, 4]


def test_unhealthy_ones_do_not_count_as_good() -> None:
    timeline = [
        candidate(1, loss=2.0),
        candidate(2, loss=1.0, healthy=False),
        candidate(3, healthy=False),
        candidate(4, healthy=False),
    ]
    assert left(timeline, Keep(last=1)) == [1, 4]
    assert left([candidate(0), *timeline], Keep(best=Best(metric="loss"))) == [1, 4]


def test_the_parent_of_the_live_generation_stays() -> None:
    timeline = [candidate(step) for step in (10, 20, 30, 40)]
    assert left(timeline, Keep(last=1), StepRef(step=20, generation=1)) == [20, 40]
    assert left(timeline, Keep(last=1), StepRef(step=20, generation=2)) == [40]


@pytest.mark.parametrize(
    "fields",
    [{"last": -1}, {"last": True}, {"last": 2.0}, {"every": 0}, {"every": -5}, {"every": 0.5}, {"best": "loss"}],
)
def test_rules_that_cannot_be(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(UsageError, match=rf"Keep\({name}="):
        Keep(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"metric": ""},
        {"metric": 3},
        {"metric": "x", "count": 0},
        {"metric": "x", "count": True},
        {"metric": "x", "mode": "low"},
    ],
)
def test_best_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"Best\(metric="):
        Best(**fields)


def test_damaged_steps_neither_count_nor_go() -> None:
    """Two damaged steps after a good one: the last two to keep are the last two good ones."""
    steps = [
        Candidate(ref=StepRef(at, 1), metrics={}, healthy=True, held=False, damaged=at in (3, 4))
        for at in (1, 2, 3, 4)
    ]
    assert plan_removal(steps, Keep(last=2), parent=None) == ()
    assert plan_removal(steps, Keep(last=1), parent=None) == (StepRef(1, 1),)
