"""How a tensor lies over the ranks: meshes, placements, and the chunk of any rank in O(dims).

Placements follow DTensor, one string per mesh dimension:

- `R`: every coordinate holds the same;
- `S<d>`: tensor dimension d is cut as `torch.chunk` cuts it (pieces of ceil(n / parts), last ones short or
  empty);
- `SS<d>:<f>`: the same cut, but made after the cuts of d by the mesh dimensions to its right, whose sizes
  multiply to f. FSDP2 over tensor parallelism makes these: tensor parallelism cuts first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from msgspec import Struct

from shardkeep.errors import Corrupt, UnsupportedState
from shardkeep.spec.chunks import Chunk, whole


class Mesh(Struct, frozen=True, gc=False):
    """A grid of ranks. `ranks` is row-major over `shape`; `names` are the axes, or empty."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()


class RankChunk(Struct, frozen=True, gc=False, array_like=True):
    """One chunk that one rank holds, said outright."""

    rank: int
    chunk: Chunk


class Layout(Struct, frozen=True, gc=False, omit_defaults=True):
    """Where the chunks of one tensor are.

    Attributes:
        meshes: indexes into the table of meshes; the tensor lies on each of them in the same way, so
            equal coordinates on several meshes are replicas.
        placements: one string per mesh dimension.
        boxes: instead of placements, chunks said outright (for layouts that no rule describes).
    """

    meshes: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()
    boxes: tuple[RankChunk, ...] = ()


def parse_placement(text: str) -> tuple[int, int] | None:
    """Return `(dim, split_factor)` of a sharding placement (factor 0: not strided), or None for `R`."""
    if text == "R":
        return None
    head, _, factor = text.partition(":")
    strided = head.startswith("SS")
    digits = head[2:] if strided else head[1:]
    valid = digits.isascii() and digits.isdigit() and (factor.isascii() and factor.isdigit()) == strided
    if not (text.startswith("S") and valid and len(text) < 24):
        raise Corrupt(f"placement {text!r}: expected R, S<dim> or SS<dim>:<factor>")
    return int(digits), int(factor) if strided else 0


@lru_cache(maxsize=4096)
def _cut_order(placements: tuple[str, ...], mesh_shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return `(mesh_dim, tensor_dim)` in the order in which the cuts are made."""
    order: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for mesh_dim, text in enumerate(placements):
        parsed = parse_placement(text)
        if parsed is None:
            continue
        dim, factor = parsed
        (strided if factor > 1 else order).append((mesh_dim, dim))
        if factor > 1:
            right = math.prod(
                mesh_shape[other]
                for other in range(mesh_dim + 1, len(placements))
                if (cut := parse_placement(placements[other])) and cut[0] == dim
            )
            if right != factor:
                raise UnsupportedState(
                    f"placement {text!r} in {placements} on a mesh of {mesh_shape}: its factor must be the "
                    f"product of the mesh dimensions to its right that cut dimension {dim}, {right}"
                )
    # Strided cuts come last, the rightmost first: each was laid over all cuts to its right.
    return tuple(order + strided[::-1])


def chunk_at(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[str, ...], coordinate: tuple[int, ...]
) -> Chunk:
    """Return the chunk that the rank at `coordinate` of the mesh holds (maybe empty)."""
    offsets = [0] * len(shape)
    sizes = list(shape)
    for mesh_dim, dim in _cut_order(placements, mesh_shape):
        if dim >= len(shape):
            raise Corrupt(f"placement S{dim} on a tensor of shape {shape}: it has no such dimension")
        step = -(-sizes[dim] // mesh_shape[mesh_dim])
        start = min(step * coordinate[mesh_dim], sizes[dim])
        sizes[dim] = min(step, sizes[dim] - start)
        offsets[dim] += start
    return Chunk(tuple(offsets), tuple(sizes))


def coordinate_at(mesh_shape: tuple[int, ...], index: int) -> tuple[int, ...]:
    """Return the coordinate of the `index`-th position of a mesh, row-major."""
    coordinate: list[int] = []
    for size in reversed(mesh_shape):
        index, at = divmod(index, size)
        coordinate.append(at)
    return tuple(reversed(coordinate))


def iter_chunks(
    shape: tuple[int, ...], layout: Layout, meshes: tuple[Mesh, ...]
) -> Iterator[tuple[Chunk, tuple[int, ...]]]:
    """Yield every distinct non-empty chunk of a tensor with the ranks that hold it, ascending by rank.

    A tensor without elements yields its one (empty) chunk, held by all, so that it is written once too.
    """
    holders: dict[Chunk, list[int]] = {}
    for box in layout.boxes:
        holders.setdefault(box.chunk, []).append(box.rank)
    empty = math.prod(shape) == 0
    for number in layout.meshes:
        mesh = meshes[number]
        sharding = [d for d, text in enumerate(layout.placements) if text != "R"]
        for index, rank in enumerate(mesh.ranks):
            if empty or not sharding:
                chunk = whole(shape)
            else:
                chunk = chunk_at(shape, mesh.shape, layout.placements, coordinate_at(mesh.shape, index))
                if chunk.numel == 0:
                    continue
            holders.setdefault(chunk, []).append(rank)
    for chunk in sorted(holders):
        yield chunk, tuple(sorted(set(holders[chunk])))
