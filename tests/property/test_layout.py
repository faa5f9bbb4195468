"""Chunks by rule, with `torch.chunk` as the judge of what a cut is."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tables import guillotine_tilings, rules

from shardkeep.spec.chunks import Chunk, intersect
from shardkeep.spec.layout import (
    Layout,
    Mesh,
    RankChunk,
    chunk_at,
    coordinate_at,
    get_cut_order,
    iter_chunks,
    iter_numels,
    parse_placement,
)

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def cut_with_torch(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[str, ...], coordinate: tuple[int, ...]
) -> torch.Tensor:
    """Return the element numbers at a coordinate: all plain cuts left to right, then strided ones right to left."""
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    plain = [d for d, text in enumerate(placements) if text != "R" and not text.startswith("SS")]
    strided = [d for d, text in enumerate(placements) if text.startswith("SS")]
    for mesh_dim in plain + strided[::-1]:
        dim = parse_placement(placements[mesh_dim])[0]  # type: ignore[index]
        pieces = list(torch.chunk(tensor, mesh_shape[mesh_dim], dim))
        none = tensor.narrow(dim, 0, 0)
        at = coordinate[mesh_dim]
        tensor = pieces[at] if at < len(pieces) and tensor.shape[dim] else none
    return tensor


def elements(chunk: Chunk, shape: tuple[int, ...]) -> list[int]:
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        numbers = numbers.narrow(dim, start, size)
    return numbers.flatten().tolist()


@given(st.data(), SHAPES)
@settings(max_examples=150)
def test_every_rank_holds_what_torch_would_give_it(data: st.DataObject, shape: tuple[int, ...]) -> None:
    mesh, placements = data.draw(rules(16, shape))
    layout = Layout(meshes=(0,), placements=placements)
    of_rank: dict[int, list[int]] = {rank: [] for rank in mesh.ranks}
    for index, rank in enumerate(mesh.ranks):
        coordinate = coordinate_at(mesh.shape, index)
        chunk = chunk_at(shape, mesh.shape, placements, coordinate)
        of_rank[rank] = elements(chunk, shape)
        assert of_rank[rank] == cut_with_torch(shape, mesh.shape, placements, coordinate).flatten().tolist()
    found = list(iter_chunks(shape, layout, (mesh,)))
    for chunk, holders in found:
        assert list(holders) == sorted(set(holders))
        assert chunk.numel or 0 in shape
        for rank in holders:
            assert of_rank[rank] == elements(chunk, shape)
    chunks = [chunk for chunk, _ in found]
    assert chunks == sorted(set(chunks))
    if 0 not in shape:
        # Whoever holds anything is a holder of some chunk, and together the chunks are the tensor.
        assert {r for _, holders in found for r in holders} == {r for r, mine in of_rank.items() if mine}
        assert sorted(e for chunk in chunks for e in elements(chunk, shape)) == list(range(math.prod(shape)))


@given(st.data(), SHAPES)
@settings(max_examples=80)
def test_torch_agrees_on_even_strided_shards(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """What FSDP2 over tensor parallelism means, in the words of torch itself."""
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    if not hasattr(utils, "_compute_local_shape_and_global_offset"):
        pytest.skip("this torch computes local shapes another way")
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, placements = data.draw(rules(16, shape))
    sizes = tuple(n * math.prod(mesh.shape) for n in shape)
    theirs = [
        Replicate()
        if (cut := parse_placement(text)) is None
        else _StridedShard(cut[0], split_factor=cut[1])
        if cut[1] > 1
        else Shard(cut[0])
        for text in placements
    ]
    for index in range(math.prod(mesh.shape)):
        at = coordinate_at(mesh.shape, index)
        local, offset = utils._compute_local_shape_and_global_offset(
            sizes, mesh.shape, lambda dim, at=at: at[dim], theirs
        )
        mine = chunk_at(sizes, mesh.shape, placements, at)
        assert mine.sizes == tuple(local)
        if mine.numel:
            assert mine.offsets == tuple(offset)


@given(st.data(), SHAPES)
@settings(max_examples=150)
def test_a_look_within_a_chunk_finds_what_overlaps_it(data: st.DataObject, shape: tuple[int, ...]) -> None:
    meshes = [data.draw(rules(8, shape))]
    if data.draw(st.booleans()):
        meshes.append((Mesh(shape=meshes[0][0].shape, ranks=tuple(r + 8 for r in meshes[0][0].ranks)), meshes[0][1]))
    layout = Layout(meshes=tuple(range(len(meshes))), placements=meshes[0][1])
    table = tuple(mesh for mesh, _ in meshes)
    everything = list(iter_chunks(shape, layout, table))
    assert [(chunk.numel, holders) for chunk, holders in everything] == list(iter_numels(shape, layout, table))
    if len(meshes) == 2 and 0 not in shape:
        single = iter_chunks(shape, Layout(meshes=(0,), placements=meshes[0][1]), table[:1])
        assert everything == [(chunk, holders + tuple(r + 8 for r in holders)) for chunk, holders in single]
    offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
    within = Chunk(offsets, tuple(data.draw(st.integers(0, n - o)) for o, n in zip(offsets, shape, strict=True)))
    wanted = [(c, h) for c, h in everything if 0 in shape or intersect(c, within) is not None]
    assert list(iter_chunks(shape, layout, table, within=within)) == wanted


@given(st.data(), guillotine_tilings())
def test_boxes_are_merged_by_chunk(data: st.DataObject, tiling: tuple[tuple[int, ...], list[Chunk]]) -> None:
    shape, chunks = tiling
    holders = {chunk: data.draw(st.sets(st.integers(0, 5), min_size=1)) for chunk in chunks}
    boxes = [RankChunk(rank, chunk) for chunk, ranks in holders.items() for rank in ranks]
    boxes.append(RankChunk(9, Chunk((0,) * len(shape), (0,) * len(shape)))) if shape else None
    layout = Layout(boxes=tuple(data.draw(st.permutations(boxes))))
    assert list(iter_chunks(shape, layout, ())) == [
        (chunk, tuple(sorted(holders[chunk]))) for chunk in sorted(chunks)
    ]


def test_a_tensor_without_elements_has_one_chunk() -> None:
    mesh = Mesh(shape=(3,), ranks=(4, 2, 0))
    for placements in (("R",), ("S0",), ("S1",)):
        layout = Layout(meshes=(0,), placements=placements)
        assert list(iter_chunks((0, 5), layout, (mesh,))) == [(Chunk((0, 0), (0, 5)), (0, 2, 4))]
    boxes = (RankChunk(1, Chunk((0, 2), (0, 3))), RankChunk(0, Chunk((0, 0), (0, 2))))
    assert list(iter_chunks((0, 5), Layout(boxes=boxes), ())) == [(Chunk((0, 0), (0, 2)), (0,))]


def test_cut_orders() -> None:
    assert get_cut_order(("SS0:4", "R", "S0"), (2, 3, 4)) == ((2, 0), (0, 0))
    assert get_cut_order(("SS0:12", "SS0:4", "S0"), (2, 3, 4)) == ((2, 0), (1, 0), (0, 0))
    assert get_cut_order(("S1", "S0"), (2, 3)) == ((0, 1), (1, 0))
    # FSDP2 over tensor parallelism: rank (i, j) has the i-th part of the j-th half.
    got = {at: chunk_at((8,), (2, 2), ("SS0:2", "S0"), at).offsets for at in itertools.product(range(2), range(2))}
    assert got == {(0, 0): (0,), (1, 0): (2,), (0, 1): (4,), (1, 1): (6,)}
