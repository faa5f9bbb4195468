"""Placements as text, and the refusals of layouts that no rule describes."""

from __future__ import annotations

import pytest

from shardkeep.errors import Corrupt, UnsupportedState
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import (
    Layout,
    Mesh,
    chunk_at,
    coordinate_at,
    get_cut_order,
    get_holders,
    iter_chunks,
    parse_placement,
)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("R", None), ("S0", (0, 0)), ("S12", (12, 0)), ("SS0:2", (0, 2)), ("SS3:16384", (3, 16384)), ("SS0:1", (0, 1))],
)
def test_placements(text: str, parsed: tuple[int, int] | None) -> None:
    assert parse_placement(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        *("", "r", "R ", "P", "S", "SS", "S-1", "S00", "S0:", "S0:2", "S\u0663", "S0\n", "S9999", "S" + "1" * 1000),
        *("SS0", "SS0:", "SS0:0", "SS0:02", "SS0:" + "1" * 1000),
    ],
)
def test_what_is_no_placement(text: str) -> None:
    with pytest.raises(Corrupt, match="expected R, S<dim> or SS<dim>:<factor>") as caught:
        parse_placement(text)
    assert len(str(caught.value)) < 200


def test_a_dimension_that_is_not_there() -> None:
    for call in (
        lambda: chunk_at((4,), (2,), ("S1",), (0,)),
        lambda: list(iter_chunks((4,), Layout(meshes=(0,), placements=("S1",)), (Mesh(shape=(2,), ranks=(0, 1)),))),
    ):
        with pytest.raises(Corrupt, match="no such dimension"):
            call()


@pytest.mark.parametrize(
    ("placements", "mesh_shape"),
    [(("SS0:2",), (2,)), (("SS0:2", "S0"), (2, 4)), (("S0", "SS0:2"), (2, 2)), (("SS0:2", "S1"), (2, 2))],
)
def test_strided_shards_that_are_no_cut_over_others(placements: tuple[str, ...], mesh_shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedState, match="its factor must be the product"):
        get_cut_order(placements, mesh_shape)


def test_a_strided_shard_over_one_piece_is_a_plain_one() -> None:
    assert chunk_at((6,), (3,), ("SS0:1",), (1,)) == chunk_at((6,), (3,), ("S0",), (1,))


def test_coordinates_are_row_major() -> None:
    assert [coordinate_at((2, 3), index) for index in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert coordinate_at((), 0) == ()


def test_holders() -> None:
    mesh = Mesh(shape=(2, 3), ranks=(5, 4, 3, 2, 1, 0))
    assert tuple(get_holders(mesh, ("R", "S0"))) == ((2, 5), (1, 4), (0, 3))
    assert tuple(get_holders(mesh, ("S0", "R"))) == ((3, 4, 5), (0, 1, 2))
    assert tuple(get_holders(mesh, ("R", "R"))) == ((0, 1, 2, 3, 4, 5),)
    # Numbered by tensor dimension, not by mesh dimension.
    assert tuple(get_holders(mesh, ("S1", "S0"))) == ((5,), (2,), (4,), (1,), (3,), (0,))


def test_rows_that_do_not_divide() -> None:
    """NVIDIA/Megatron-LM#659: sizes prime to the number of ranks, without padding."""
    mesh = Mesh(shape=(4,), ranks=(0, 1, 2, 3))
    found = list(iter_chunks((5, 2), Layout(meshes=(0,), placements=("S0",)), (mesh,)))
    assert found == [
        (Chunk((0, 0), (2, 2)), (0,)),
        (Chunk((2, 0), (2, 2)), (1,)),
        (Chunk((4, 0), (1, 2)), (2,)),
    ]
    assert chunk_at((5, 2), (4,), ("S0",), (3,)) == Chunk((5, 0), (0, 2))
