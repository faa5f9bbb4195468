"""Merging what the ranks hold: refusals name both sides, and nothing that could not be restored is planned."""

from __future__ import annotations

from typing import Any

import pytest

from shardkeep.errors import Corrupt, StateMismatch, UnsupportedState
from shardkeep.format.records import ViewRecord
from shardkeep.plan.owners import iter_pieces
from shardkeep.plan.structure import Holding, decode_structure, encode_structure, plan_layout
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Layout, Mesh
from tests.support.tables import held, holding, line

PAIR = line(0, 1)


def view(base: str, **fields: Any) -> ViewRecord:
    words = {"offset_bytes": 0, "dtype": "float32", "shape": (2,), "strides": (1,), "role": "buffer"}
    return ViewRecord(base=base, **(words | fields))


def refuse(*holdings: Holding) -> tuple[str, ...]:
    with pytest.raises(StateMismatch, match="nothing was saved") as caught:
        plan_layout(holdings)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


DIFFERENCES = {
    "dtype": ({"dtype": "bfloat16"}, "m/w: float32[4] (whole) on rank 0, bfloat16[4] (whole) on rank 2"),
    "role": (
        {"role": "buffer"},
        "m/w: float32[4] (whole, role 'parameter') on rank 0, float32[4] (whole, role 'buffer') on rank 2",
    ),
    "trainable": (
        {"trainable": False},
        "m/w: float32[4] (whole, trainable True) on rank 0, float32[4] (whole, trainable False) on rank 2",
    ),
    "section": (
        {"section": "frozen"},
        "m/w: float32[4] (whole, section 'm') on rank 0, float32[4] (whole, section 'frozen') on rank 2",
    ),
    "name": (
        {"name": "x"},
        "m/w: float32[4] (whole, name 'w') on rank 0, float32[4] (whole, name 'x') on rank 2",
    ),
    "explicit": (
        {"explicit": True, "chunks": (Chunk((0,), (4,)),)},
        "m/w: float32[4] (whole) on rank 0, float32[4] (explicit chunks) on rank 2",
    ),
    "mesh": (
        {"mesh": line(2, 3), "placements": ("R",)},
        "m/w: float32[4] (whole) on rank 0, float32[4] (R on a mesh of [2]) on rank 2",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_key_that_means_two_things(what: str) -> None:
    """pytorch/torchtitan#291 and its kind: one name, two things, and no rank's is taken silently."""
    fields, problem = DIFFERENCES[what]
    mine = held("m/w", (4,), **({"trainable": True} if what == "trainable" else {}))
    theirs = held("m/w", (4,), **fields)
    assert refuse(holding((2, 3), theirs), holding((0, 1), mine)) == (problem,)


def test_shapes_that_differ() -> None:
    """Experts that every rank numbers from 0 may differ in shape."""
    problems = refuse(holding((0,), held("m/e.0", (4, 2))), holding((1,), held("m/e.0", (4, 3))))
    assert problems == ("m/e.0: float32[4, 2] (whole) on rank 0, float32[4, 3] (whole) on rank 1",)


def test_every_key_is_listed() -> None:
    ours = [held(f"m/t{at}", (4,)) for at in range(50)]
    theirs = [held(f"m/t{at}", (5,)) for at in range(50)]
    assert len(refuse(holding((0,), *ours), holding((1,), *theirs))) == 50


def test_the_device_of_a_state_may_differ() -> None:
    table = plan_layout([holding((0,), held("o/s", (), device="cpu")), holding((1,), held("o/s", ()))])
    assert table.tensors["o/s"].device == "cpu"


def test_placements_that_differ() -> None:
    ours = held("m/w", (4, 4), mesh=PAIR, placements=("S0",))
    theirs = held("m/w", (4, 4), mesh=PAIR, placements=("S1",))
    assert refuse(holding((0,), ours), holding((1,), theirs)) == (
        "m/w: float32[4, 4] (S0 on a mesh of [2]) on rank 0, float32[4, 4] (S1 on a mesh of [2]) on rank 1",
    )


def test_a_mesh_that_names_a_rank_without_the_tensor() -> None:
    tensor = held("m/w", (4,), mesh=line(0, 1, 2), placements=("S0",))
    assert refuse(holding((0, 1), tensor), holding((2,))) == (
        "m/w: rank 0 has it on ranks 0, 1, 2, but rank 2 does not have it",
    )
    far = held("m/w", (4,), mesh=line(*range(20)), placements=("S0",))
    assert "0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)" in refuse(holding((0, 1), far))[0]


def test_a_rank_outside_of_the_mesh_may_know_the_tensor() -> None:
    tensor = held("m/w", (4,), mesh=line(0, 1), placements=("S0",))
    table = plan_layout([holding((0, 1, 2), tensor)])
    assert [owner for _, owner in iter_pieces(table.tensors["m/w"], table)] == [0, 1]


def test_replicas_on_submeshes_of_another_size_are_refused() -> None:
    small = held("m/w", (12,), mesh=line(0, 1), placements=("S0",))
    large = held("m/w", (12,), mesh=line(2, 3, 4), placements=("S0",))
    assert refuse(holding((0, 1), small), holding((2, 3, 4), large)) == (
        "m/w: cut over a mesh of [2] on rank 0, of [3] on rank 2",
    )


def test_replicas_on_submeshes_share_the_work() -> None:
    parts = []
    for first in (0, 2):
        mesh = Mesh(shape=(2,), ranks=(first, first + 1), names=("dp",))
        tensors = [held(f"m/w{at}", (4,), mesh=mesh, placements=("S0",)) for at in range(2)]
        parts.append(holding((first, first + 1), *tensors))
    table = plan_layout(parts)
    assert table.meshes == (
        Mesh(shape=(2,), ranks=(0, 1), names=("dp",)),
        Mesh(shape=(2,), ranks=(2, 3), names=("dp",)),
    )
    owners = {key: [owner for _, owner in iter_pieces(record, table)] for key, record in table.tensors.items()}
    assert owners == {"m/w0": [0, 1], "m/w1": [2, 3]}


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": line(0, 0), "placements": ("S0",)},
        {"mesh": Mesh(shape=(3,), ranks=(0, 1)), "placements": ("S0",)},
        {"mesh": PAIR, "placements": ()},
        {"explicit": True, "chunks": (Chunk((0,), (5,)),)},
        {"explicit": True, "chunks": (Chunk((0, 0), (2, 2)),)},
    ],
)
def test_descriptions_that_cannot_be(fields: dict[str, Any]) -> None:
    (problem,) = refuse(holding((0, 1), held("m/w", (4,), **fields)))
    assert problem.startswith("m/w: ")
    assert problem.endswith("(rank 0)")


def test_strided_shards_that_no_cut_explains() -> None:
    tensor = held("m/w", (8,), mesh=PAIR, placements=("SS0:2",))
    with pytest.raises(UnsupportedState, match="factor"):
        plan_layout([holding((0, 1), tensor)])


def test_links() -> None:
    w, x = held("m/w", (4,)), held("m/x", (4,))
    own = held("m/p", (4,), per_rank=True)
    v = view("m/w")
    cases: list[tuple[list[Holding], str]] = [
        (
            [holding((0,), w, x, aliases={"m/a": "m/w"}), holding((1,), w, x, aliases={"m/a": "m/x"})],
            "m/a: tied to m/w on rank 0, m/x on rank 1",
        ),
        (
            [holding((0,), w, views={"m/v": v}), holding((1,), w, views={"m/v": view("m/w", offset_bytes=8)})],
            "m/v: a view of m/w (float32[2], strides [1], at byte 0) on rank 0, "
            "m/w (float32[2], strides [1], at byte 8) on rank 1",
        ),
        (
            [holding((0,), w, aliases={"m/x": "m/w"}), holding((1,), w, x)],
            "m/x: tied to m/w on some ranks, a tensor of its own on others",
        ),
        (
            [holding((0,), w, views={"m/x": v}), holding((1,), w, x)],
            "m/x: a view of m/w on some ranks, a tensor of its own on others",
        ),
        (
            [holding((0,), w, aliases={"m/v": "m/w"}), holding((1,), w, views={"m/v": v})],
            "m/v: tied on some ranks, a view on others",
        ),
        ([holding((0,), w, aliases={"m/a": "m/gone"})], "m/a: tied to m/gone, which no rank holds"),
        ([holding((0,), own, aliases={"m/a": "m/p"})], "m/a: tied to m/p, which is kept per rank"),
        ([holding((0,), views={"m/v": v})], "m/v: a view of m/w, which no rank holds"),
    ]
    for holdings, problem in cases:
        assert problem in refuse(*holdings)
    table = plan_layout([holding((0,), w, aliases={"m/b": "m/w"}), holding((1,), w, views={"m/v": v})])
    assert (table.aliases, table.views) == ({"m/b": "m/w"}, {"m/v": v})


def test_what_a_reader_would_refuse_is_not_saved() -> None:
    cases = [
        holding((0,), held("m/w", (4,)), views={"m/v": view("m/w", offset_bytes=12)}),
        holding((0,), held("m/w", (4,), section="a/b")),
        holding((0,), held("m/w", (1,) * 70)),
        holding((0,), held("m/w", (4,), explicit=True, chunks=(Chunk((0,), (3,)),))),
    ]
    for one in cases:
        assert refuse(one)[0].startswith("the plan: ")


def test_names_within_files() -> None:
    same = [held("m/a", (4,), name="n"), held("m/b", (4,), name="n")]
    assert refuse(holding((0,), *same)) == ("m/b: the same name 'n' in section 'm' as m/a",)
    elsewhere = [held("m/a", (4,), name="n"), held("x/b", (4,), name="n")]
    assert len(plan_layout([holding((0,), *elsewhere)]).tensors) == 2
    piece = held("m/b", (4,), name="w[0:2]")
    cut = held("m/a", (4,), name="w", mesh=PAIR, placements=("S0",))
    assert refuse(holding((0, 1), piece, cut)) == ("m/b: its name 'w[0:2]' could be that of a piece of m/a",)
    index = held("m/b", (4,), name="w[0]")
    assert len(plan_layout([holding((0, 1), index, cut)]).tensors) == 2
    mine = [held("a/b", (4,), per_rank=True), held("rank/a/b", (4,))]
    assert refuse(holding((0,), *mine)) == ("rank/a/b: the same name 'a/b' in section 'rank' as a/b, kept per rank",)


def test_what_differs_is_kept_per_rank_besides_a_canonical_copy() -> None:
    tensors = [held("m/w", (4,)), held("m/mean", (4,), role="buffer")]
    table = plan_layout([holding((0, 1, 2), *tensors)], per_rank=frozenset({"m/mean", "m/gone"}))
    assert table.per_rank == ("m/mean",)
    record = table.tensors["m/mean"]
    assert [table.meshes[number].ranks for number in record.layout.meshes] == [(0,)]
    sharded = held("m/d", (4,), mesh=PAIR, placements=("S0",))
    # A rank could not keep the whole of what it has a part of.
    assert plan_layout([holding((0, 1), sharded)], per_rank=frozenset({"m/d"})).per_rank == ()


def test_what_is_declared_per_rank() -> None:
    table = plan_layout(
        [holding((0,), held("m/c", (4,), per_rank=True)), holding((1,), held("m/c", (9,), dtype="int64"))]
    )
    assert table.per_rank == ("m/c",)
    assert not table.tensors
    mixed = held("m/c", (4,), mesh=line(1), placements=("S0",))
    assert refuse(holding((0,), held("m/c", (4,), per_rank=True)), holding((1,), mixed)) == (
        "m/c: kept per rank, but on rank 1 it is float32[4] (S0 on a mesh of [1])",
    )


def test_stages_of_a_pipeline_have_names_of_their_own() -> None:
    table = plan_layout([holding((at,), held(f"m/l{at}", (4,))) for at in range(4)])
    assert {key: iter_owner(table, key) for key in table.tensors} == {f"m/l{at}": [at] for at in range(4)}


def iter_owner(table: Any, key: str) -> list[int]:
    return [owner for _, owner in iter_pieces(table.tensors[key], table)]


def test_large_optimizer_state_is_cut_by_rows_and_parameters_are_not() -> None:
    shape = (10, 8 << 20)
    tensors = [
        held("optimizer/m", shape, role="state"),
        held("model/m", shape, role="state"),
        held("optimizer/p", shape, role="parameter"),
        held("optimizer/flat", (1, 80 << 20), role="state"),
    ]
    table = plan_layout([holding((0, 1, 2, 3), *tensors)])
    assert {key: record.split for key, record in table.tensors.items()} == {
        "model/m": 1, "optimizer/flat": 1, "optimizer/m": 4, "optimizer/p": 1
    }  # fmt: skip
    pieces = list(iter_pieces(table.tensors["optimizer/m"], table))
    assert [(chunk.sizes[0], owner) for chunk, owner in pieces] == [(2, 0), (3, 1), (2, 2), (3, 3)]
    within = Chunk((2, 0), (1, 1))
    assert list(iter_pieces(table.tensors["optimizer/m"], table, within=within)) == [pieces[1]]


def test_structures_survive_the_wire() -> None:
    structure = holding((0,), held("m/w", (4,), mesh=PAIR, placements=("S0",)), views={"m/v": view("m/w")}).structure
    data = encode_structure(structure)
    assert decode_structure(data) == structure
    assert encode_structure(decode_structure(data)) == data
    for broken in (b"", b"{}", b"[" * 100_000, data[:-1], b'{"tensors":[{"key":1}]}'):
        with pytest.raises(Corrupt, match="cannot read"):
            decode_structure(broken)


def test_nothing_at_all() -> None:
    table = plan_layout([holding((0, 1))])
    assert (table.tensors, table.meshes) == ({}, ())
    assert Layout().is_cut is False
