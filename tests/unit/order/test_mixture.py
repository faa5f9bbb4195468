"""The order of a mixture: exact shares, every sample in its turn, the same from any position."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import UsageError
from shardkeep.order.mixture import MixturePlan, plan_mixture


def sources_of(plan: MixturePlan, ids: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.array(plan.offsets), ids, side="right") - 1


@settings(deadline=None, max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    data=st.data(),
)
def test_every_source_has_its_share_and_every_sample_its_turn(sizes: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(1e-6, 1e3), min_size=len(sizes), max_size=len(sizes)))
    plan = plan_mixture(sizes, weights)
    blocks = 3
    stop = plan._block_start(blocks)
    ids = plan.ids_between(3, 0, stop)
    assert len(ids) == stop
    came = sources_of(plan, ids)
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        own = ids[came == source] - plan.offsets[source]
        assert abs(len(own) - blocks * plan.block * weight / sum(weights)) < 1.0001
        for begin in range(0, len(own), size):
            turn = own[begin : begin + size]
            assert len(set(turn.tolist())) == len(turn)  # no sample again before all others
    at, cuts = 0, data.draw(st.lists(st.integers(0, stop), max_size=4))
    parts = []
    for cut in [*sorted(cuts), stop]:
        parts.append(plan.ids_between(3, at, cut))
        at = cut
    assert np.array_equal(np.concatenate(parts), ids)


def test_positions_beside_a_block_s_start_are_found() -> None:
    """Blocks begin up to a sample per source early."""
    plan = plan_mixture([100, 200, 50], [1, 2, 4])
    whole = plan.ids_between(0, 0, 4 * plan.block)
    begins = [plan._block_start(number) for number in range(1, 4)]
    assert any(begin < number * plan.block for number, begin in enumerate(begins, 1))
    for begin in begins:
        for at in range(begin - 3, begin + 4):
            assert plan.ids_between(0, at, at + 2).tolist() == whole[at : at + 2].tolist()


def test_within_a_block_sources_mix() -> None:
    plan = plan_mixture([1000, 1000], [1, 1])
    came = sources_of(plan, plan.ids_between(0, 0, 256))
    assert 90 < came.sum() < 166
    assert 80 < np.count_nonzero(np.diff(came)) < 180


def test_seeds_differ_and_passes_of_a_source_differ() -> None:
    plan = plan_mixture([50], [1])
    first, second = plan.ids_between(0, 0, 50), plan.ids_between(0, 50, 100)
    assert sorted(first) == sorted(second) == list(range(50))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, plan.ids_between(1, 0, 50))


def test_the_order_is_pinned() -> None:
    """Checkpoints depend on it: what mixture-1 computes never changes."""
    plan = plan_mixture([5, 7], [1, 0.5])
    assert plan.ids_between(0, 0, 12).tolist() == PINNED
    assert plan.ids_between(0, 10**15, 10**15 + 6).tolist() == PINNED_FAR
    assert plan.algorithm == PINNED_NAME


PINNED = [0, 5, 6, 11, 1, 10, 4, 2, 9, 3, 8, 4]
PINNED_FAR = [3, 1, 2, 1, 2, 9]
PINNED_NAME = "mixture-1/07fd8297fc161cb8"


def test_names_tell_sizes_and_weights_apart() -> None:
    same = {plan_mixture([5, 7], weights).algorithm for weights in ([1, 2], [0.5, 1.0], [3, 6])}
    assert len(same) == 1
    others = [([5, 7], [2, 1]), ([7, 5], [1, 2]), ([5, 8], [1, 2]), ([5, 7, 1], [1, 2, 1])]
    assert len({plan_mixture(*other).algorithm for other in others} | same) == 5


def test_any_position_costs_the_same() -> None:
    """10^12 samples: seek under a millisecond, an id under a microsecond in batches."""
    plan = plan_mixture([10**12, 3 * 10**11, 77], [5, 3, 0.1])

    def best(start: int, count: int) -> float:
        times = []
        for turn in range(20):
            fresh = plan_mixture(plan.sizes, plan.shares)
            begin = time.perf_counter()
            fresh.ids_between(0, start + turn * 5000, start + turn * 5000 + count)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert best(0, 1) < 1e-3
    assert best(10**12 - 999, 1) < 1e-3
    assert best(10**12 - 999, 100_000) / 100_000 < 1e-6


@pytest.mark.parametrize(
    ("sizes", "weights", "what"),
    [
        ([], [], "0 sources"),
        ([1, 2], [1], "one weight each"),
        ([3, 0], [1, 1], "source 1 of the mixture has 0 samples"),
        ([3], [0], "source 0 of the mixture has the weight 0"),
        ([3], [-1.0], "finite number above 0"),
        ([3], [float("inf")], "finite number above 0"),
        ([3], [float("nan")], "finite number above 0"),
        ([3], [True], "finite number above 0"),
        ([1 << 62, 1], [1, 1], "expected up to 2"),
    ],
)
def test_nonsense_is_refused(sizes: list[int], weights: list[float], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        plan_mixture(sizes, weights)
