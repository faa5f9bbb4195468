"""What counts as lost, and what does not, from records alone."""

from __future__ import annotations

import itertools
from typing import Any

from shardkeep.audit.compare import Start, find_length_loss, find_losses, make_start
from shardkeep.manager.watch import Began, Moment, Said, Stepped

CLOCK = itertools.count()


def moment(loss: float, *, seed: str = "s", **variables: str) -> Moment:
    return Moment(
        values={"metric/loss": loss.hex(), "lr/optimizer": "0x1p-1"},
        streams={"rng/torch": seed},
        variables=variables,
        unsaved={"ema": "AveragedModel"} if "ema" in variables else {},
    )


def start(resumed: int, stop: int, *, world_size: int = 1, began: dict[str, str] | None = None, **bad: Any) -> Start:
    """A start that counts in `count`, reads a clock into `clock`, and knows where it `first` began."""
    lines: list[Any] = [
        Began(
            step=resumed,
            world_size=world_size,
            moment=moment(
                0.0, **{"count": f"{resumed}", "clock": f"{next(CLOCK)}", "first": f"{resumed}", **(began or {})}
            ),
        )
    ]
    for step in range(resumed + 1, stop + 1):
        count = bad.get("count", {}).get(step, step)
        lines.append(
            Stepped(
                step=step,
                moment=moment(
                    bad.get("loss", {}).get(step, float(step)),
                    count=f"{count}",
                    clock=f"{next(CLOCK)}",
                    first=f"{resumed}",
                ),
            )
        )
    return make_start([*lines, Said(name="guard.x", text="t"), Said(name="guard.x", text="t")])


UNBROKEN = {0: start(0, 9)}


def test_equal_runs_lose_nothing() -> None:
    assert find_losses(UNBROKEN, [{0: start(0, 5)}, {0: start(3, 9)}]) == []
    assert UNBROKEN[0].said == (("guard.x", "t"),)


def test_a_counter_that_begins_anew_is_lost_once() -> None:
    counts = {step: step - 3 for step in range(4, 10)}
    broken = start(3, 9, began={"count": "0"}, count=counts)
    (loss,) = find_losses(UNBROKEN, [{0: start(0, 5)}, {0: broken}])
    assert (loss.kind, loss.quantity, loss.step, loss.expected, loss.found) == ("variable", "count", 3, "3", "0")
    assert find_losses(UNBROKEN, [{0: start(0, 5)}, {0: broken}], ignore=frozenset({"count"})) == []


def test_a_variable_that_is_set_in_the_loop_is_not_lost() -> None:
    """It began with another value and is the right one after the next step."""
    assert find_losses(UNBROKEN, [{0: start(0, 5)}, {0: start(3, 9, began={"count": "0"})}]) == []


def test_the_cause_comes_before_what_follows() -> None:
    broken = start(3, 9, began={"seed": "other"}, loss={4: 9.5, 5: 1.0})
    losses = find_losses(UNBROKEN, [{0: start(0, 5)}, {0: broken}])
    assert [(loss.kind, loss.step) for loss in losses] == [("stream", 3), ("step", 4)]
    assert "expected 4.0 (0x1" in str(losses[1])
    assert "at once" in losses[1].cause
    later = find_losses(UNBROKEN, [{0: start(0, 5)}, {0: start(3, 9, loss={6: 0.5})}])
    assert [(loss.kind, loss.step) for loss in later] == [("step", 6)]
    assert "2 steps were identical" in later[0].cause


def test_what_differs_before_any_kill_is_the_commands_own_doing() -> None:
    losses = find_losses(UNBROKEN, [{0: start(0, 5, loss={2: 7.0})}, {0: start(3, 9)}])
    assert [(loss.kind, loss.step, loss.start) for loss in losses] == [("unrepeatable", 2, 1)]


def test_other_ranks_are_compared_too_and_worlds_of_another_size_by_samples_and_rates() -> None:
    whole = {0: start(0, 9, world_size=2), 1: start(0, 9, world_size=2)}
    first = {rank: start(0, 5, world_size=2) for rank in (0, 1)}
    then = {0: start(3, 9, world_size=2), 1: start(3, 9, world_size=2, began={"seed": "other"})}
    assert [(loss.kind, loss.rank) for loss in find_losses(whole, [first, then])] == [("stream", 1)]
    fewer = {0: start(3, 9, began={"seed": "other"}, loss={5: 0.5})}
    assert find_losses(whole, [first, fewer]) == []


def test_a_run_that_ends_elsewhere_lost_its_patience() -> None:
    assert find_length_loss(UNBROKEN, [{0: start(0, 5)}, {0: start(3, 9)}]) is None
    loss = find_length_loss(UNBROKEN, [{0: start(0, 5)}, {0: start(3, 7)}])
    assert loss is not None
    assert (loss.kind, loss.expected, loss.found) == ("length", "9", "7")
