"""The coverage proof at its edges: pinwheels, empties, many dimensions, many chunks."""

from __future__ import annotations

import itertools
import time

import pytest

from shardkeep.plan.coverage import MAX_CUT_DIMS, find_coverage_problem, format_chunk
from shardkeep.spec.chunks import Chunk, whole

PINWHEEL = [
    Chunk((0, 0), (1, 2)),
    Chunk((0, 2), (2, 1)),
    Chunk((2, 1), (1, 2)),
    Chunk((1, 0), (2, 1)),
    Chunk((1, 1), (1, 1)),
]
"""No cut from edge to edge goes between these five."""


def test_pinwheel() -> None:
    assert find_coverage_problem((3, 3), PINWHEEL) is None


@pytest.mark.parametrize("at", range(5))
def test_pinwheel_with_a_gap_or_an_overlap(at: int) -> None:
    others = PINWHEEL[:at] + PINWHEEL[at + 1 :]
    first = [PINWHEEL[at].offsets[0], PINWHEEL[at].offsets[1]]
    size = PINWHEEL[at].numel
    assert find_coverage_problem((3, 3), others) == f"{size} of 9 elements are in no chunk, the first at {first}"
    box = format_chunk(PINWHEEL[at])
    assert find_coverage_problem((3, 3), [*PINWHEEL, PINWHEEL[at]]) == f"chunks {box} and {box} overlap"


@pytest.mark.parametrize("at", range(4))
def test_pinwheel_turned_the_wrong_way_has_the_right_volume(at: int) -> None:
    arms = [Chunk((0, 0), (2, 1)), Chunk((0, 1), (1, 2)), Chunk((1, 2), (2, 1)), Chunk((2, 0), (1, 2))]
    mixed = [*PINWHEEL[:at], arms[at], *PINWHEEL[at + 1 :]]
    assert sum(chunk.numel for chunk in mixed) == 9
    problem = find_coverage_problem((3, 3), mixed)
    assert problem is not None


def test_a_gap_and_an_overlap_that_cancel() -> None:
    assert find_coverage_problem((4,), [Chunk((0,), (2,)), Chunk((1,), (2,))]) == "chunks [0:2] and [1:3] overlap"
    assert find_coverage_problem((4,), [Chunk((1,), (2,)), Chunk((1,), (2,))]) == (
        "1 of 4 elements are in no chunk, the first at [0]"
    )


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3, 4)])
def test_without_elements_one_chunk_is_wanted(shape: tuple[int, ...]) -> None:
    assert find_coverage_problem(shape, []) == "no rank stores it"
    assert find_coverage_problem(shape, [whole(shape)]) is None


def test_single_element() -> None:
    assert find_coverage_problem((), [Chunk((), ())]) is None
    assert find_coverage_problem((), []) == "1 of 1 elements are in no chunk, the first at []"
    assert find_coverage_problem((), [Chunk((), ())] * 2) == "chunks [] and [] overlap"


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk((0,), (4,)),
        Chunk((0, 0), (4,)),
        Chunk((0, 0), (2, 9)),
        Chunk((-1, 0), (2, 2)),
        Chunk((0, 0), (-1, 2)),
        Chunk((1 << 70, 0), (1, 1)),
    ],
)
def test_chunks_that_cannot_be(chunk: Chunk) -> None:
    problem = find_coverage_problem((4, 2), [whole((4, 2)), chunk])
    assert problem == f"chunk {format_chunk(chunk)} does not lie within [4, 2]"


def test_many_dimensions() -> None:
    shape = (2,) * MAX_CUT_DIMS
    units = [Chunk(at, (1,) * MAX_CUT_DIMS) for at in itertools.product((0, 1), repeat=MAX_CUT_DIMS)]
    assert find_coverage_problem(shape, units) is None
    assert find_coverage_problem(shape, units[:-1]) == (
        f"1 of 256 elements are in no chunk, the first at {[1] * MAX_CUT_DIMS}"
    )
    # Dimensions that nobody cuts cost nothing.
    deep = [Chunk((0,) * 40 + (at,), (2,) * 40 + (1,)) for at in (0, 1)]
    assert find_coverage_problem((2,) * 41, deep) is None
    hostile = [whole((2,) * 60), *(Chunk((0,) * dim + (1,) + (0,) * (59 - dim), (1,) * 60) for dim in range(60))]
    assert find_coverage_problem((2,) * 60, hostile) == ("its chunks are cut in 60 dimensions; up to 8 are supported")


def test_twenty_thousand_chunks_that_no_plane_cuts_take_linear_time() -> None:
    """Pinwheels side by side, shifted so that no cut goes through: pairs would be 10^8 comparisons."""
    side = 64
    chunks = [
        Chunk((3 * i + chunk.offsets[0], 3 * j + chunk.offsets[1]), chunk.sizes)
        for i in range(side)
        for j in range(side)
        for chunk in PINWHEEL
    ]
    start = time.process_time()
    assert find_coverage_problem((3 * side, 3 * side), chunks) is None
    assert "overlap" in str(find_coverage_problem((3 * side, 3 * side), [*chunks, Chunk((5, 5), (1, 1))]))
    assert "no chunk" in str(find_coverage_problem((3 * side, 3 * side), chunks[:-1]))
    assert time.process_time() - start < 10
