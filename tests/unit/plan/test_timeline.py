"""The timeline: rollbacks, stale writers, second tries, and records that cannot be."""

from __future__ import annotations

import pytest

from shardkeep.errors import Corrupt
from shardkeep.format.names import StepRef
from shardkeep.plan.timeline import plan_timeline


def ref(step: int, generation: int, attempt: int = 1) -> StepRef:
    return StepRef(step=step, generation=generation, attempt=attempt)


def test_nothing() -> None:
    assert plan_timeline({}, []) == ()
    assert plan_timeline({}, [ref(1, 1)]) == ()
    assert plan_timeline({1: None}, []) == ()


def test_a_rollback_hides_what_came_after_it_and_another_brings_it_back() -> None:
    commits = [ref(10, 1), ref(20, 1), ref(30, 1), ref(15, 2)]
    assert plan_timeline({1: None}, commits) == (ref(10, 1), ref(20, 1), ref(30, 1))
    rolled = {1: None, 2: ref(10, 1)}
    assert plan_timeline(rolled, commits) == (ref(10, 1), ref(15, 2))
    undone = {**rolled, 3: ref(30, 1)}
    assert plan_timeline(undone, commits) == (ref(10, 1), ref(20, 1), ref(30, 1))
    assert plan_timeline(undone, commits, head=2) == (ref(10, 1), ref(15, 2))


def test_a_stale_writer_is_read_by_nobody() -> None:
    parents = {1: None, 2: ref(10, 1)}
    assert plan_timeline(parents, [ref(10, 1), ref(20, 1), ref(10**9, 1)]) == (ref(10, 1),)


def test_a_fresh_start_forgets() -> None:
    assert plan_timeline({1: None, 2: None}, [ref(10, 1)]) == ()
    assert plan_timeline({1: None, 2: None}, [ref(10, 1), ref(5, 2)]) == (ref(5, 2),)


def test_of_several_tries_the_last_counts_and_the_parent_is_the_one_named() -> None:
    commits = [ref(10, 1, 2), ref(10, 1, 1), ref(20, 1, 1), ref(20, 1, 3)]
    assert plan_timeline({1: None}, commits) == (ref(10, 1, 2), ref(20, 1, 3))
    assert plan_timeline({1: None, 2: ref(20, 1, 1)}, commits) == (ref(10, 1, 2), ref(20, 1, 1))


def test_a_step_saved_again_after_a_rollback_replaces_the_old_one() -> None:
    commits = [ref(10, 1), ref(20, 1), ref(30, 1), ref(20, 2)]
    parents = {1: None, 2: ref(10, 1), 3: ref(20, 2)}
    assert plan_timeline(parents, commits) == (ref(10, 1), ref(20, 2))


def test_a_removed_parent_leaves_what_was_before_it() -> None:
    assert plan_timeline({1: None, 2: ref(20, 1)}, [ref(10, 1), ref(30, 1)]) == (ref(10, 1),)


def test_a_child_that_saved_below_its_start_bounds_its_ancestors() -> None:
    """Going back to what generation 2 saved at step 3 must not bring back step 8 of its parent."""
    commits = [ref(2, 1), ref(5, 1), ref(8, 1), ref(3, 2)]
    assert plan_timeline({1: None, 2: ref(8, 1), 3: ref(3, 2)}, commits) == (ref(2, 1), ref(3, 2))


@pytest.mark.parametrize(
    ("parents", "text"),
    [
        ({2: ref(10, 1)}, "generation 1 is a parent but its record is missing"),
        ({1: ref(10, 1)}, "not older"),
        ({1: ref(10, 2), 2: ref(10, 1)}, "not older"),
        ({1: None, 3: ref(10, 2)}, "generation 2 is a parent"),
    ],
)
def test_chains_that_cannot_be(parents: dict[int, StepRef | None], text: str) -> None:
    with pytest.raises(Corrupt, match=text):
        plan_timeline(parents, [ref(10, 1)])


def test_a_head_that_nobody_claimed() -> None:
    with pytest.raises(Corrupt, match="generation 7 was asked for"):
        plan_timeline({1: None}, [], head=7)
