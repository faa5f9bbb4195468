"""Reads at their edges: as few pieces as can be, and nothing read for nothing."""

from __future__ import annotations

from shardkeep.plan.reads import Segment, iter_segments, plan_ranges
from shardkeep.spec.chunks import Chunk, whole


def test_a_single_element() -> None:
    assert list(iter_segments(Chunk((), ()), 100, Chunk((), ()), 8)) == [Segment(100, 0, 8)]


def test_equal_chunks_are_one_copy() -> None:
    chunk = Chunk((4, 0, 2), (3, 5, 7))
    assert list(iter_segments(chunk, 64, chunk, 2)) == [Segment(64, 0, 210)]


def test_rows_are_one_copy() -> None:
    assert list(iter_segments(whole((8, 3)), 0, Chunk((2, 0), (4, 3)), 4)) == [Segment(24, 0, 48)]


def test_chunks_that_share_nothing() -> None:
    assert list(iter_segments(Chunk((0,), (2,)), 0, Chunk((2,), (2,)), 4)) == []
    assert list(iter_segments(Chunk((0,), (2,)), 0, Chunk((1,), (0,)), 4)) == []


def test_no_segments_no_ranges() -> None:
    assert plan_ranges([], 100, 4, 8) == []
    assert plan_ranges([Segment(5, 0, 0), Segment(100, 0, 0)], 100, 4, 8) == []


def test_the_last_leaf_may_be_short() -> None:
    assert plan_ranges([Segment(8, 0, 2)], 10, 4, 8) == [(8, 10)]
    assert plan_ranges([Segment(1, 0, 9)], 10, 4, 8) == [(0, 8), (8, 10)]


def test_neighbours_are_read_together_and_cut_at_blocks() -> None:
    segments = [Segment(24, 0, 4), Segment(0, 0, 4), Segment(4, 0, 8)]
    assert plan_ranges(segments, 100, 4, 8) == [(0, 8), (8, 12), (24, 28)]
