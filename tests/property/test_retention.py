"""Retention: whatever the rules, what must stay stays, and what any rule keeps stays."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shardkeep.format.names import StepRef
from shardkeep.plan.retention import Best, Candidate, Keep, plan_removal

VALUES = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf]))


@st.composite
def timelines(draw: st.DrawFn) -> list[Candidate]:
    steps = draw(st.lists(st.integers(0, 1500), unique=True, max_size=14))
    return [
        Candidate(
            ref=StepRef(step=step, generation=draw(st.integers(1, 3)), attempt=draw(st.integers(1, 2))),
            metrics={} if (value := draw(VALUES)) is None else {"loss": value},
            healthy=draw(st.booleans()),
            held=draw(st.integers(0, 5)) == 0,
        )
        for step in steps
    ]


@st.composite
def policies(draw: st.DrawFn) -> Keep:
    best = Best(metric="loss", count=draw(st.integers(1, 4)), mode=draw(st.sampled_from(["min", "max"])))
    return Keep(
        last=draw(st.none() | st.integers(0, 6)),
        every=draw(st.none() | st.sampled_from([1, 2, 10, 1000])),
        best=draw(st.none() | st.just(best)),
    )


@given(timelines(), policies(), st.data())
def test_removal_is_what_no_rule_keeps(timeline: list[Candidate], keep: Keep, data: st.DataObject) -> None:
    parent = data.draw(st.none() | st.sampled_from([c.ref for c in timeline])) if timeline else None
    removed = plan_removal(timeline, keep, parent=parent)
    assert list(removed) == sorted(removed, key=lambda ref: ref.step)
    assert plan_removal(timeline[::-1], keep, parent=parent) == removed
    if keep == Keep():
        assert not removed
        return
    rank = {c.ref: position for position, c in enumerate(sorted(timeline, key=lambda c: -c.ref.step))}
    newest_healthy = max((c.ref.step for c in timeline if c.healthy), default=None)
    for candidate in timeline:
        ref = candidate.ref
        must = (
            rank[ref] == 0
            or ref == parent
            or ref.step == newest_healthy
            or candidate.held
            or (keep.last is not None and rank[ref] < keep.last)
            or (keep.every is not None and ref.step % keep.every == 0)
            or (keep.best is not None and _is_best(candidate, timeline, keep.best))
        )
        assert (ref in removed) != must


def _is_best(candidate: Candidate, timeline: list[Candidate], rule: Best) -> bool:
    value = candidate.metrics.get(rule.metric, math.nan)
    if math.isnan(value) or not candidate.healthy:
        return False

    def beats(other: Candidate) -> bool:
        theirs = other.metrics.get(rule.metric, math.nan)
        if math.isnan(theirs) or not other.healthy or other is candidate:
            return False
        if theirs == value:
            return other.ref.step > candidate.ref.step
        return theirs < value if rule.mode == "min" else theirs > value

    return sum(beats(other) for other in timeline) < rule.count
