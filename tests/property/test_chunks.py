"""Box algebra, with NumPy as the judge."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tables import count_cover, slices

from shardkeep.spec.chunks import Chunk, intersect, is_inside, iter_runs, split_rows, whole

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def chunks_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunk:
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    return Chunk(offsets, tuple(draw(st.integers(0, n - o)) for o, n in zip(offsets, shape, strict=True)))


@given(st.data(), SHAPES)
@settings(max_examples=150)
def test_the_intersection_is_what_both_hold(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(chunks_in(shape)), data.draw(chunks_in(shape))
    both = count_cover(shape, [a, b]) == 2
    common = intersect(a, b)
    assert intersect(b, a) == common
    if common is None:
        assert not both.any()
    else:
        assert (count_cover(shape, [common]).astype(bool) == both).all()
        assert common.numel == both.sum() > 0
        assert is_inside(common, shape)


@given(st.data(), SHAPES)
@settings(max_examples=200)
def test_runs_are_the_elements_in_order_and_as_long_as_can_be(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = data.draw(chunks_in(shape))
    inner = data.draw(chunks_in(outer.sizes))
    part = Chunk(tuple(o + i for o, i in zip(outer.offsets, inner.offsets, strict=True)), inner.sizes)
    if not part.numel:
        return
    numbers = np.arange(outer.numel).reshape(outer.sizes)
    wanted = numbers[slices(inner)].ravel().tolist()
    runs = list(iter_runs(part, outer))
    assert [start + i for start, count in runs for i in range(count)] == wanted
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs))


@given(st.data(), SHAPES, st.integers(1, 9))
def test_rows_are_split_evenly_and_none_is_lost(data: st.DataObject, shape: tuple[int, ...], count: int) -> None:
    chunk = data.draw(chunks_in(shape))
    pieces = split_rows(chunk, count)
    assert (count_cover(shape, pieces) == count_cover(shape, [chunk])).all()
    rows = chunk.sizes[0] if shape else 1
    assert len(pieces) == max(1, min(count, rows))
    sizes = [piece.sizes[:1] for piece in pieces]
    assert max(sizes) <= tuple(n + 1 for n in min(sizes))
    assert pieces == sorted(pieces)


@given(SHAPES)
def test_the_whole_is_inside_and_its_own_single_run(shape: tuple[int, ...]) -> None:
    chunk = whole(shape)
    assert is_inside(chunk, shape)
    assert chunk.numel == math.prod(shape)
    if chunk.numel:
        assert list(iter_runs(chunk, chunk)) == [(0, chunk.numel)]
        assert intersect(chunk, chunk) == chunk
