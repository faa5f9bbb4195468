"""Hostile layout tables: each defect is Corrupt and named, in bounded time, before anything is computed from it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkeep.errors import Corrupt, IncompatibleFormat
from shardkeep.format.names import StepRef
from shardkeep.format.records import (
    CommitRecord,
    Facts,
    FileRecord,
    LayoutTable,
    PartSummary,
    TensorRecord,
    ValueHolder,
    ViewRecord,
)
from shardkeep.plan.checks import check_commit, check_facts, check_table
from shardkeep.plan.coverage import find_coverage_problem
from shardkeep.plan.owners import assign_owners, iter_own_pieces, iter_pieces
from shardkeep.plan.shards import plan_all_outgoing
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Layout, Mesh, RankChunk
from tests.support.tables import line, make_record, make_table

WHOLE = Layout(meshes=(0,), placements=("R",))
ROWS = Layout(meshes=(0,), placements=("S0",))
PAIR = line(0, 1)
BIG = 1 << 62


def view(**fields: Any) -> ViewRecord:
    words = {"base": "b", "offset_bytes": 0, "dtype": "float32", "shape": (2,), "strides": (1,), "role": "state"}
    return ViewRecord(**(words | fields))


def boxes(*found: tuple[int, tuple[int, ...], tuple[int, ...]]) -> Layout:
    return Layout(boxes=tuple(RankChunk(rank, Chunk(offsets, sizes)) for rank, offsets, sizes in found))


def one(shape: tuple[int, ...], layout: Layout, mesh: Mesh = PAIR, **fields: Any) -> LayoutTable:
    return make_table([mesh], w=make_record(shape, layout, **fields))


def base_with(**fields: Any) -> LayoutTable:
    table = make_table([PAIR], b=make_record((4,), WHOLE, name="b"))
    return msgspec.structs.replace(table, **fields)


SOUND = {
    "empty": make_table([]),
    "replicated": one((4,), WHOLE),
    "sharded": one((5, 2), ROWS),
    "no dimensions": one((), WHOLE),
    "no elements": one((0, 3), ROWS),
    "strided": one((9,), Layout(meshes=(0,), placements=("SS0:2", "S0")), Mesh(shape=(2, 2), ranks=(3, 1, 2, 0))),
    "split": one((8,), WHOLE, split=2),
    "owned": one((8,), WHOLE, owner=1),
    "boxes": one((4,), boxes((0, (0,), (3,)), (1, (3,), (1,)), (0, (3,), (1,)))),
    "two orders": make_table([PAIR, line(1, 0)], w=make_record((4,), Layout(meshes=(0, 1), placements=("S0",)))),
    "view": base_with(views={"v": view(offset_bytes=8)}),
    "expanded view": base_with(views={"v": view(shape=(4, 3), strides=(1, 0))}),
    "view of nothing": base_with(views={"v": view(shape=(0, 9), strides=(5, 5), offset_bytes=16)}),
    "tie": base_with(aliases={"a": "b"}),
    "per rank": base_with(per_rank=("b", "other")),
}

HOSTILE: dict[str, tuple[LayoutTable, str]] = {
    "mesh rank beyond": (one((4,), WHOLE, line(0, 9)), "ranks 0 to 9"),
    "mesh rank negative": (one((4,), WHOLE, line(-1, 0)), "ranks -1 to 0"),
    "mesh too few": (one((4,), WHOLE, Mesh(shape=(BIG, BIG), ranks=(0, 1))), "over 2 ranks"),
    "mesh zero": (one((4,), ROWS, Mesh(shape=(0,), ranks=())), "expected up to"),
    "mesh negative": (one((4,), ROWS, Mesh(shape=(-1, -2), ranks=(0, 1))), "expected up to"),
    "mesh repeats": (one((4,), WHOLE, line(1, 1)), "stands twice"),
    "mesh deep": (one((4,), WHOLE, Mesh(shape=(1,) * 500, ranks=(0,))), "expected up to"),
    "mesh number": (one((4,), Layout(meshes=(1,), placements=("R",))), "meshes [1] of 1"),
    "mesh number negative": (one((4,), Layout(meshes=(-1,), placements=("R",))), "meshes [-1] of 1"),
    "mesh repeated": (one((4,), Layout(meshes=(0, 0), placements=("R",))), "stands twice"),
    "no layout": (one((4,), Layout()), "either meshes or boxes"),
    "both": (one((4,), Layout(meshes=(0,), placements=("R",), boxes=boxes((0, (0,), (4,))).boxes)), "either"),
    "placements short": (one((4,), Layout(meshes=(0,))), "0 placements"),
    "placements long": (one((4,), Layout(meshes=(0,), placements=("R", "R"))), "2 placements"),
    "placement unknown": (one((4,), Layout(meshes=(0,), placements=("P",))), "'P'"),
    "placement dim": (one((4,), Layout(meshes=(0,), placements=("S1",))), "on 1 dimensions"),
    "placement of no dims": (one((), ROWS), "on 0 dimensions"),
    "placement factor": (one((4,), Layout(meshes=(0,), placements=("SS0:2",))), "product"),
    "placement huge": (one((4,), Layout(meshes=(0,), placements=("S" + "9" * 5000,))), "expected R"),
    "shape negative": (one((-4,), WHOLE), "0 or more"),
    "shape huge": (one((BIG, BIG), WHOLE), "overflow"),
    "shape huge with zero": (one((BIG, BIG, 0), WHOLE), "overflow"),
    "shape deep": (one((1,) * 500, WHOLE), "less than 64"),
    "owner": (one((4,), WHOLE, owner=2), "owner 2"),
    "owner negative": (one((4,), WHOLE, owner=-1), "owner -1"),
    "split zero": (one((4,), WHOLE, split=0), "split in 0"),
    "split huge": (one((BIG // 8,), WHOLE, split=BIG), "split in"),
    "split rows": (one((1, 8), WHOLE, split=2), "of 1 rows"),
    "split of no dims": (one((), WHOLE, split=2), "split in 2"),
    "split of shards": (one((8,), ROWS, split=2), "split in 2"),
    "box rank": (one((4,), boxes((2, (0,), (4,)))), "chunk of rank 2"),
    "box rank negative": (one((4,), boxes((-1, (0,), (4,)))), "chunk of rank -1"),
    "box ndim": (one((4,), boxes((0, (0, 0), (4, 1)))), "does not lie"),
    "box uneven": (one((4,), boxes((0, (0,), (4, 1)))), "does not lie"),
    "box outside": (one((4,), boxes((0, (1,), (4,)))), "does not lie"),
    "box negative": (one((4,), boxes((0, (-1,), (4,)))), "does not lie"),
    "box gap": (one((4,), boxes((0, (0,), (3,)))), "in no chunk"),
    "box overlap": (one((4,), boxes((0, (0,), (3,)), (1, (2,), (2,)))), "overlap"),
    "box huge": (one((1 << 40, 1 << 20), boxes((0, (0, 0), (1, 1)))), "in no chunk"),
    "section": (one((4,), WHOLE, section="../evil"), "section"),
    "section empty": (one((4,), WHOLE, section=""), "section"),
    "name empty": (one((4,), WHOLE, name=""), "name"),
    "name reserved": (one((4,), WHOLE, name="__metadata__"), "name"),
    "role": (one((4,), WHOLE, role="x"), "role"),
    "same name": (make_table([PAIR], a=make_record((4,), WHOLE), b=make_record((4,), WHOLE)), "the same name"),
    "piece name": (
        make_table([PAIR], a=make_record((4,), ROWS), b=make_record((4,), WHOLE, name="w[0:2]")),
        "that of a piece",
    ),
    "tie to nothing": (base_with(aliases={"a": "c"}), "not stored"),
    "tie to itself": (base_with(aliases={"b": "b"}), "stored too"),
    "ties in a circle": (base_with(aliases={"a": "c", "c": "a"}), "not stored"),
    "tie to a tie": (base_with(aliases={"a": "c", "c": "b"}), "not stored"),
    "tie to a view": (base_with(aliases={"a": "v"}, views={"v": view()}), "not stored"),
    "tie that is a view": (base_with(aliases={"v": "b"}, views={"v": view()}), "stored too"),
    "view of nothing": (base_with(views={"v": view(base="x")}), "not a stored tensor"),
    "view of itself": (base_with(views={"v": view(base="v")}), "not a stored tensor"),
    "view that is a tensor": (base_with(views={"b": view()}), "stored too"),
    "view beyond": (base_with(views={"v": view(offset_bytes=12)}), "to byte 20 of its base, which has 16"),
    "view stride": (base_with(views={"v": view(strides=(4,))}), "to byte 20"),
    "view negative stride": (base_with(views={"v": view(strides=(-1,), offset_bytes=8)}), "strides"),
    "view negative offset": (base_with(views={"v": view(offset_bytes=-4)}), "strides"),
    "view strides missing": (base_with(views={"v": view(strides=())}), "strides"),
    "view huge": (base_with(views={"v": view(shape=(BIG, BIG), strides=(0, 0))}), "overflow"),
    "view negative shape": (base_with(views={"v": view(shape=(-1,))}), "0 or more"),
    "view role": (base_with(views={"v": view(role="x")}), "role"),
    "per rank twice": (base_with(per_rank=("x", "x")), "stands twice"),
    "meshes that differ": (
        make_table([PAIR, line(0, 1, 2)], w=make_record((4,), Layout(meshes=(0, 1), placements=("S0",)))),
        "no replicas",
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_tables_pass_and_can_be_followed(name: str) -> None:
    table = SOUND[name]
    assert check_table(table, 4 if name == "strided" else 2, where="x") is table
    _follow(table)


def _follow(table: LayoutTable) -> None:
    for record in table.tensors.values():
        assert find_coverage_problem(record.shape, [chunk for chunk, _ in iter_pieces(record, table)]) is None
    everyone = plan_all_outgoing(table)
    for rank in range(4):
        assert [(p.key, p.chunk) for p in everyone.get(rank, [])] == [
            (key, chunk) for key, _, chunk in iter_own_pieces(table, rank)
        ]
    assign_owners(table)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tables_are_refused(name: str) -> None:
    table, text = HOSTILE[name]
    world = 3 if name == "meshes that differ" else 2
    start = time.process_time()
    with pytest.raises(Corrupt, match=r"^there: ") as caught:
        check_table(table, world, where="there")
    assert text in caught.value.message
    assert len(caught.value.message) < 1000
    assert time.process_time() - start < 1


@pytest.mark.parametrize("field", ["tensors", "views"])
def test_unknown_dtypes_are_for_a_newer_version(field: str) -> None:
    table = one((4,), WHOLE, dtype="float3") if field == "tensors" else base_with(views={"v": view(dtype="float3")})
    with pytest.raises(IncompatibleFormat, match="float3"):
        check_table(table, 2, where="there")


def test_more_chunks_than_anyone_has_are_refused_without_a_look_at_them() -> None:
    world = 1 << 16
    record = make_record((world,), ROWS)
    mesh = line(*range(world))
    tensors = {f"t{at:05}": msgspec.structs.replace(record, name=f"t{at:05}") for at in range(1 << 15)}
    start = time.process_time()
    with pytest.raises(Corrupt, match="into 2147581953 chunks"):
        check_table(make_table([mesh], **tensors, z=record), world, where="there")
    assert time.process_time() - start < 5


def test_facts_and_commits() -> None:
    facts = Facts(layout=SOUND["sharded"], holders=(ValueHolder(0, ("a",)), ValueHolder(1, ())))
    assert check_facts(facts, 2, where="x") is facts
    part = PartSummary(size_bytes=1, sha256="0" * 64, shard_bytes=0, shard_count=0)
    commit = CommitRecord(
        run_id="r", ref=StepRef(step=1, generation=1), world_size=2, plan="p", parts=(part, part), facts=facts
    )
    assert check_commit(commit, where="x") is commit

    def replaced(**fields: Any) -> Facts:
        return msgspec.structs.replace(facts, **fields)

    file = FileRecord(1, "0" * 64)
    for broken, text in [
        (replaced(holders=()), "first holder"),
        (replaced(holders=(ValueHolder(1, ()),)), "first holder"),
        (replaced(holders=(ValueHolder(0, ()), ValueHolder(2, ()))), "rank 2 of 2"),
        (replaced(assets={"../x": file}), "'../x'"),
        (replaced(assets={"commit.json": file}), "commit.json"),
        (replaced(layout=HOSTILE["tie to nothing"][0]), "not stored"),
    ]:
        with pytest.raises(Corrupt, match=r"^x: ") as caught:
            check_commit(msgspec.structs.replace(commit, facts=broken), where="x")
        assert text in caught.value.message
    for count in (1, 3):
        with pytest.raises(Corrupt, match=f"world size {count}, but 2 parts"):
            check_commit(msgspec.structs.replace(commit, world_size=count), where="x")


NUMBERS = st.sampled_from([-(1 << 70), -1, 0, 1, 2, 3, 4, 7, 1 << 40, 1 << 63, 1 << 70])
TEXTS = st.sampled_from(
    ["", "R", "S0", "S1", "SS0:2", "SS0:1", "S0:", "P", "w", "b", "model", "state", "float32", "\ud800"]
)


def _mutate(value: Any, data: st.DataObject) -> Any:
    if isinstance(value, dict) and value:
        key = data.draw(st.sampled_from(sorted(value)))
        return value | {key: _mutate(value[key], data)}
    if isinstance(value, list | tuple):
        how = data.draw(st.sampled_from(["item", "item", "item", "drop", "repeat"])) if value else "none"
        at = data.draw(st.integers(0, len(value) - 1)) if value else 0
        if how == "item":
            return [*value[:at], _mutate(value[at], data), *value[at + 1 :]]
        return {"drop": [*value[:at], *value[at + 1 :]], "repeat": [*value, value[at]] if value else [], "none": []}[
            how
        ]
    if isinstance(value, int) and not isinstance(value, bool):
        return data.draw(NUMBERS)
    return data.draw(TEXTS) if isinstance(value, str) else value


@given(st.sampled_from(sorted(SOUND)), st.data(), st.integers(1, 3))
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_passes_can_be_followed(name: str, data: st.DataObject, times: int) -> None:
    table: Any = msgspec.to_builtins(SOUND[name])
    for _ in range(times):
        table = _mutate(table, data)
    try:
        broken = msgspec.convert(table, LayoutTable)
        check_table(broken, 4, where="x")
    except (msgspec.ValidationError, Corrupt, IncompatibleFormat):
        return
    _follow(broken)


def test_record_fields_that_the_check_does_not_know_of_stay_few() -> None:
    """Whoever adds a field to a tensor's record decides here what a hostile one can do."""
    assert set(TensorRecord.__struct_fields__) == {
        "dtype", "shape", "section", "name", "role", "layout", "owner", "split", "trainable", "device"
    }  # fmt: skip
