"""The proof by rule and the sweep over all pieces say the same of any layout, sound or not."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.tables import count_cover, line, make_record, make_table, rules, worlds

from shardkeep.format.records import LayoutTable, TensorRecord
from shardkeep.plan import coverage
from shardkeep.plan.coverage import CoverageProof, find_coverage_problem
from shardkeep.plan.owners import RankPieces, iter_own_pieces, iter_pieces
from shardkeep.plan.structure import Holding, plan_layout
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Layout, Mesh, RankChunk


def sweep(record: TensorRecord, table: LayoutTable) -> str | None:
    return find_coverage_problem(record.shape, [chunk for chunk, _ in iter_pieces(record, table)])


@given(worlds())
@settings(max_examples=150)
def test_both_find_planned_layouts_sound(drawn: tuple[int, list[Holding]]) -> None:
    world, holdings = drawn
    table = plan_layout(holdings)
    proof = CoverageProof(table)
    for record in table.tensors.values():
        assert sweep(record, table) is None
        assert proof.find_problem(record) is None
    pieces = RankPieces(table)
    for rank in range(world + 1):
        assert list(pieces.of(rank)) == list(iter_own_pieces(table, rank))


@given(st.data(), st.lists(st.integers(0, 9), max_size=3).map(tuple))
@settings(max_examples=300)
def test_both_agree_on_layouts_that_nobody_planned(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """One rule on several meshes of any shapes, and rows split in any number: mostly unsound."""
    mesh, placements = data.draw(rules(8, shape))
    meshes = [mesh]
    if data.draw(st.booleans()):
        sizes = tuple(data.draw(st.integers(1, 3)) for _ in mesh.shape)
        meshes.append(Mesh(shape=sizes, ranks=tuple(range(8, 8 + math.prod(sizes)))))
    split = data.draw(st.sampled_from([1, 1, 2, 3, 5])) if set(placements) == {"R"} else 1
    assume(all("SS" not in text for text in placements) or len(meshes) == 1)
    record = make_record(shape, Layout(meshes=tuple(range(len(meshes))), placements=placements), split=split)
    table = make_table(meshes, w=record)
    assert (CoverageProof(table).find_problem(record) is None) == (sweep(record, table) is None)


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple))
@settings(max_examples=150)
def test_both_agree_on_explicit_boxes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = []
    for rank in range(data.draw(st.integers(1, 5))):
        offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        sizes = tuple(data.draw(st.integers(1, n - o)) for o, n in zip(offsets, shape, strict=True))
        boxes.append(RankChunk(rank, Chunk(offsets, sizes)))
    record = make_record(shape, Layout(boxes=tuple(boxes)))
    table = make_table([], w=record)
    chunks = list({box.chunk for box in boxes})
    sound = bool((count_cover(shape, chunks) == 1).all())
    assert (CoverageProof(table).find_problem(record) is None) == sound == (sweep(record, table) is None)


FSDP = Layout(meshes=(0,), placements=("S0",))


@pytest.mark.parametrize(
    ("record", "meshes", "words"),
    [
        (make_record((8, 4), FSDP), [Mesh(shape=(4,), ranks=(0, 1, 2))], "over 3 ranks"),
        (make_record((8, 4), Layout(meshes=(0,), placements=("S0", "R"))), [line(0, 1)], "2 placements"),
        (make_record((8, 4), Layout(meshes=(0,), placements=("S2",))), [line(0, 1)], "no such dimension"),
        (make_record((8,), Layout(meshes=(0, 1), placements=("S0",))), [line(0, 1), line(2, 3, 4)], "not the same"),
        (make_record((8,), Layout(meshes=(3,), placements=("S0",))), [line(0, 1)], "of 1"),
        (make_record((8,), Layout()), [line(0, 1)], "no rank"),
        (msgspec.structs.replace(make_record((8,), FSDP), split=2), [line(0, 1)], "split by rows"),
    ],
    ids=["a lost rank", "placements", "dimension", "two grids", "mesh", "nothing", "split"],
)
def test_seeded_faults_are_found(record: TensorRecord, meshes: list[Mesh], words: str) -> None:
    assert words in str(CoverageProof(make_table(meshes, w=record)).find_problem(record))


@pytest.mark.parametrize("cuts", [[(0, 3), (4, 4)], [(0, 5), (4, 4)], [(0, 4), (4, 3)], [(0, 4), (4, 0), (4, 4)], []])
def test_cuts_that_do_not_tile_a_dimension_are_found(
    monkeypatch: pytest.MonkeyPatch, cuts: list[tuple[int, int]]
) -> None:
    """As if the function that makes the cuts were wrong: the proof looks at what it makes, not at the rule's name."""
    record = make_record((8, 4), FSDP)
    table = make_table([line(0, 1)], w=record)
    assert CoverageProof(table).find_problem(record) is None
    monkeypatch.setattr(coverage, "iter_dim_cuts", lambda shape, mesh, placements: iter([(0, cuts)]))
    assert "dimension 0 of [8, 4]" in str(CoverageProof(table).find_problem(record))
