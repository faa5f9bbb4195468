"""Structures and layout tables for tests of the pure layers, random ones among them, and NumPy as the judge."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardkeep.format.records import LayoutTable, TensorRecord
from shardkeep.plan.structure import HeldTensor, Holding, Structure
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Layout, Mesh


def slices(chunk: Chunk) -> tuple[slice, ...]:
    """Return a chunk as an index."""
    return tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))


def count_cover(shape: Sequence[int], chunks: Sequence[Chunk]) -> NDArray[np.int64]:
    """Return in how many chunks each element is."""
    counts = np.zeros(tuple(shape), dtype=np.int64)
    for chunk in chunks:
        counts[slices(chunk)] += 1
    return counts


def held(key: str, shape: Sequence[int], **fields: object) -> HeldTensor:
    """Return a tensor as a rank describes it; `model`'s, float32, a parameter, unless said otherwise."""
    section, _, name = key.partition("/")
    words: dict[str, object] = {"section": section, "name": name, "dtype": "float32", "role": "parameter"} | fields
    return HeldTensor(key=key, shape=tuple(shape), **words)  # type: ignore[arg-type]


def holding(ranks: Sequence[int], *tensors: HeldTensor, **links: object) -> Holding:
    """Return what these ranks have, all alike."""
    ordered = tuple(sorted(tensors, key=lambda tensor: tensor.key))
    return Holding(ranks=tuple(ranks), structure=Structure(tensors=ordered, **links))  # type: ignore[arg-type]


def make_record(shape: Sequence[int], layout: Layout, **fields: object) -> TensorRecord:
    words: dict[str, object] = {"dtype": "float32", "section": "model", "name": "w", "role": "parameter"} | fields
    return TensorRecord(shape=tuple(shape), layout=layout, **words)  # type: ignore[arg-type]


def make_table(meshes: Sequence[Mesh], **tensors: TensorRecord) -> LayoutTable:
    return LayoutTable(meshes=tuple(meshes), tensors=dict(sorted(tensors.items())))


def line(*ranks: int) -> Mesh:
    """Return a mesh of one dimension."""
    return Mesh(shape=(len(ranks),), ranks=ranks)


@st.composite
def guillotine_tilings(draw: st.DrawFn, max_ndim: int = 3) -> tuple[tuple[int, ...], list[Chunk]]:
    """Draw a shape without zeros and chunks that tile it, cut again and again from edge to edge."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=max_ndim)))
    chunks = [Chunk((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        at = draw(st.integers(0, len(chunks) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        chunk = chunks[at]
        if chunk.sizes[dim] > 1:
            chunks[at : at + 1] = _cut(chunk, dim, draw(st.integers(1, chunk.sizes[dim] - 1)))
    return shape, draw(st.permutations(chunks))


def _cut(chunk: Chunk, dim: int, size: int) -> list[Chunk]:
    offsets, sizes = list(chunk.offsets), list(chunk.sizes)
    offsets[dim] += size
    first, second = [*sizes], [*sizes]
    first[dim], second[dim] = size, sizes[dim] - size
    return [Chunk(chunk.offsets, tuple(first)), Chunk(tuple(offsets), tuple(second))]


@st.composite
def rules(draw: st.DrawFn, world: int, shape: tuple[int, ...]) -> tuple[Mesh, tuple[str, ...]]:
    """Draw a mesh over some ranks of a world and placements for a shape: replicas, shards, strided shards."""
    mesh_shape: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        left = world // math.prod(mesh_shape)
        mesh_shape.append(draw(st.integers(1, max(1, min(left, 4)))))
    ranks = draw(st.permutations(range(world)))[: math.prod(mesh_shape)]
    placements = [
        f"S{draw(st.integers(0, len(shape) - 1))}" if shape and draw(st.booleans()) else "R" for _ in mesh_shape
    ]
    for at, text in enumerate(placements[:-1]):
        right = math.prod(mesh_shape[other] for other in range(at + 1, len(placements)) if placements[other] == text)
        if text != "R" and right > 1 and draw(st.booleans()):
            placements[at] = f"S{text}:{right}"
    return Mesh(shape=tuple(mesh_shape), ranks=tuple(ranks)), tuple(placements)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[Holding]]:
    """Draw a world and what its ranks hold: plain, sharded by rule, on submeshes, outright, or of one rank alone."""
    world = draw(st.integers(1, 8))
    tensors: list[list[HeldTensor]] = [[] for _ in range(world)]
    for at in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["plain", "some", "rule", "replicas", "boxes", "own"]))
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        key = f"{draw(st.sampled_from(['model', 'optimizer']))}/t{at}"
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "complex128"]))
        words = {"dtype": dtype, "role": draw(st.sampled_from(["parameter", "state"]))}
        if kind == "rule":
            mesh, placements = draw(rules(world, shape))
            _give(tensors, mesh.ranks, held(key, shape, mesh=mesh, placements=placements, **words))
        elif kind == "replicas" and world >= 2:
            half = world // 2
            mesh, placements = draw(rules(half, shape))
            for shift in (0, half):
                moved = Mesh(shape=mesh.shape, ranks=tuple(rank + shift for rank in mesh.ranks))
                _give(tensors, moved.ranks, held(key, shape, mesh=moved, placements=placements, **words))
        elif kind == "boxes" and 0 not in shape:
            _give_boxes(draw, tensors, key, words)
        elif kind == "own":
            _give(tensors, range(world), held(key, shape, per_rank=True, **words))
        else:
            ranks = draw(st.sets(st.integers(0, world - 1), min_size=1)) if kind == "some" else range(world)
            _give(tensors, sorted(ranks), held(key, shape, **words))
    return world, [holding([rank], *mine) for rank, mine in enumerate(tensors)]


def _give(tensors: list[list[HeldTensor]], ranks: Sequence[int], tensor: HeldTensor) -> None:
    for rank in ranks:
        tensors[rank].append(tensor)


def _give_boxes(draw: st.DrawFn, tensors: list[list[HeldTensor]], key: str, words: dict[str, object]) -> None:
    shape, chunks = draw(guillotine_tilings())
    of: list[list[Chunk]] = [[] for _ in tensors]
    for chunk in chunks:
        for rank in draw(st.sets(st.integers(0, len(tensors) - 1), min_size=1, max_size=2)):
            of[rank].append(chunk)
    for rank, mine in enumerate(of):
        tensors[rank].append(held(key, shape, chunks=tuple(mine), explicit=True, **words))
