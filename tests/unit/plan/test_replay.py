"""Which generations' records count, what is compared, and what a difference is said to mean."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.format.names import StepRef
from shardkeep.plan.replay import (
    Divergence,
    Recorded,
    ReplayReport,
    compare_values,
    explain,
    find_divergence,
    plan_sources,
)

AT_100 = StepRef(100, 1)


def test_generations_count_that_grew_out_of_the_checkpoint() -> None:
    parents = {
        2: AT_100,  # resumed the same checkpoint
        3: StepRef(50, 1),  # an older one: its steps beyond 100 have another past
        4: StepRef(120, 2),  # a later one of a run that went through it
        5: StepRef(130, 3),
        6: None,
        7: StepRef(110, 1),
        8: AT_100,
    }
    assert plan_sources(parents, AT_100, 8) == (1, 2, 4, 7)
    assert plan_sources({}, AT_100, 2) == (1,)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_sources_are_those_whose_chain_of_parents_passes_through(data: st.DataObject) -> None:
    parents: dict[int, StepRef | None] = {1: None}
    for number in range(2, 9):
        older = data.draw(st.integers(1, number - 1))
        parents[number] = data.draw(st.sampled_from([None, StepRef(data.draw(st.integers(0, 5)), older)]))
    target = StepRef(data.draw(st.integers(0, 5)), data.draw(st.integers(1, 7)))

    def passes(number: int) -> bool:
        if number == target.generation:
            return True
        parent = parents[number]
        return parent is not None and parent.step >= target.step and passes(parent.generation)

    expected = tuple(n for n in range(target.generation, 9) if passes(n))
    assert plan_sources(parents, target, 9) == expected


BEFORE = {"metric/loss": "0x1.8p+0", "lr/optimizer": "0x1.0p-3", "samples/loader": "epoch 0, 4 of 9"}


def test_causes_come_before_effects() -> None:
    now = dict.fromkeys(BEFORE, "0x0.0p+0")
    compared, differing = compare_values(BEFORE, now, same_world=True)
    assert compared == differing == ("samples/loader", "lr/optimizer", "metric/loss")
    assert compare_values(BEFORE, BEFORE, same_world=True)[1] == ()
    assert compare_values(BEFORE, now, same_world=False)[0] == ("samples/loader", "lr/optimizer")
    assert compare_values(BEFORE, {"metric/other": "1"}, same_world=True) == ((), ())


def test_a_divergence_says_step_quantity_numbers_and_where_to_look() -> None:
    recorded = Recorded(generation=3, world_size=2, values=BEFORE)
    now = {**BEFORE, "metric/loss": "0x1.8000000000001p+0"}
    found = find_divergence(7, recorded, now, world_size=2, alike_count=0, suspects=["torch was 2.5 and is 2.6"])
    assert isinstance(found, Divergence)
    assert (found.step, found.quantity, found.generation, found.others) == (7, "metric/loss", 3, ())
    assert "loss was 1.5 (0x1.8p+0) and is 1.5000000000000002" in str(found)
    assert "torch was 2.5 and is 2.6" in found.cause
    assert find_divergence(7, recorded, now, world_size=4, alike_count=0, suspects=()) is None
    assert "moments" in explain("metric/loss", alike_count=2)
    assert "moments" not in explain("metric/loss", alike_count=0)
    assert "nan" in str(
        find_divergence(7, recorded, {"metric/loss": "nan"}, world_size=2, alike_count=0, suspects=())
    )


def test_a_report_claims_no_more_than_it_has() -> None:
    nothing = ReplayReport(start=5, last=5, expected_count=0)
    assert nothing.status == "nothing recorded"
    running = ReplayReport(
        start=5, last=9, expected_count=4, compared_count=2, quantities=("lr/o",), generations=(1,)
    )
    assert running.status == "running"
    assert "2 steps of 4 recorded ones" in str(running)
    unmet = ReplayReport(start=5, last=9, expected_count=4, is_over=True)
    assert unmet.status == "not compared"
    for report in (nothing, unmet):
        assert "identical" not in str(report)
    saved = ReplayReport(start=5, last=9, expected_count=0, saved=("step 8 ...",), saved_differ=True)
    assert saved.status == "differs"
