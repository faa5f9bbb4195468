"""The timeline of any set of records, against its definition told recursively."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardkeep.format.names import StepRef
from shardkeep.plan.timeline import plan_timeline


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[int, StepRef | None], list[StepRef]]:
    parents: dict[int, StepRef | None] = {}
    commits: set[StepRef] = set()
    for generation in range(1, draw(st.integers(1, 6)) + 1):
        older = sorted(commits)
        parents[generation] = draw(st.none() | st.sampled_from(older)) if older else None
        steps = draw(st.lists(st.integers(0, 12), max_size=5))
        commits |= {StepRef(step=s, generation=generation, attempt=draw(st.integers(1, 2))) for s in steps}
    removed = draw(st.sets(st.sampled_from(sorted(commits)), max_size=3)) if commits else set()
    return parents, draw(st.permutations(sorted(commits - removed)))


def seen_from(generation: int, parents: dict[int, StepRef | None], commits: list[StepRef]) -> dict[int, StepRef]:
    """Return step -> commit: the parent's timeline up to the parent, then the generation's own."""
    found: dict[int, StepRef] = {}
    parent = parents[generation]
    if parent is not None:
        before = seen_from(parent.generation, parents, commits)
        found = {step: ref for step, ref in before.items() if step < parent.step}
        if parent in commits:
            found[parent.step] = parent
    for ref in sorted(commits):
        if ref.generation == generation:
            found[ref.step] = ref
    return found


@given(runs())
def test_the_timeline_is_its_definition(run: tuple[dict[int, StepRef | None], list[StepRef]]) -> None:
    parents, commits = run
    for head in parents:
        expected = seen_from(head, parents, commits)
        assert plan_timeline(parents, commits, head=head) == tuple(expected[step] for step in sorted(expected))
    assert plan_timeline(parents, commits) == plan_timeline(parents, commits, head=max(parents))
