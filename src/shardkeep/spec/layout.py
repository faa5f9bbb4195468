"""How a tensor lies over the ranks: meshes, placements, and the chunk of any rank in O(dims).

Placements follow DTensor, one string per mesh dimension:

- `R`: every coordinate holds the same;
- `S<d>`: tensor dimension d is cut as `torch.chunk` cuts it (pieces of ceil(n / parts), last ones short or
  empty);
- `SS<d>:<f>`: the same cut, but made after the cuts of d by the mesh dimensions to its right, whose sizes
  multiply to f. FSDP2 over tensor parallelism makes these: tensor parallelism cuts first.

The functions trust their arguments; tables that were read are checked first, by `plan.checks`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, overload

from msgspec import Struct

from shardkeep.errors import Corrupt, UnsupportedState
from shardkeep.spec.chunks import Chunk, intersect, whole

_PLACEMENT: Final = re.compile(r"R|S(0|[1-9]\d{0,2})|SS(0|[1-9]\d{0,2}):([1-9]\d{0,8})", re.ASCII)

_FEW_HOLDERS: Final = 16
"""Sets of holders above this are remembered; smaller ones are made faster than they are looked up."""


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

    @property
    def is_cut(self) -> bool:
        """Whether a rank may hold less than the whole tensor."""
        return bool(self.boxes) or any(text != "R" for text in self.placements)


def parse_placement(text: str) -> tuple[int, int] | None:
    """Return `(dim, split_factor)` of a sharding placement (factor 0: not strided), or None for `R`.

    Raises:
        Corrupt: neither.
    """
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise Corrupt(f"placement {text[:40]!r}: expected R, S<dim> or SS<dim>:<factor>")
    if text == "R":
        return None
    return (int(match[1]), 0) if match[2] is None else (int(match[2]), int(match[3]))


@lru_cache(maxsize=4096)
def get_cut_order(placements: tuple[str, ...], mesh_shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return `(mesh_dim, tensor_dim)` in the order in which the cuts are made.

    Raises:
        Corrupt: not placements. UnsupportedState: a strided shard that is not a cut over cuts to its right.
    """
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
    """Return the chunk that the rank at `coordinate` of the mesh holds (maybe empty).

    Raises:
        Corrupt: a placement cuts a dimension that the tensor lacks. UnsupportedState: see `get_cut_order`.
    """
    offsets = [0] * len(shape)
    sizes = list(shape)
    for mesh_dim, dim in get_cut_order(placements, mesh_shape):
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


@lru_cache(maxsize=4096)
def _find_cuts(placements: tuple[str, ...], mesh_shape: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return `(tensor dimension, the mesh dimensions that cut it, in the order of the cuts)`, ascending."""
    cuts: dict[int, tuple[int, ...]] = {}
    for mesh_dim, dim in get_cut_order(placements, mesh_shape):
        cuts[dim] = (*cuts.get(dim, ()), mesh_dim)
    return tuple(sorted(cuts.items()))


class _Same:
    """A mesh as a key that is compared by identity: its ranks may be many thousands, and are hashed each time."""

    __slots__ = ("mesh",)

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __hash__(self) -> int:
        return id(self.mesh)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.mesh is self.mesh


class _Holders(Sequence[tuple[int, ...]]):
    """The ranks, ascending, that hold each chunk, found when asked for: O(holders of the chunk)."""

    def __init__(self, mesh: Mesh, placements: tuple[str, ...]) -> None:
        inner = [math.prod(mesh.shape[mesh_dim + 1 :]) for mesh_dim in range(len(mesh.shape))]
        cuts = [mesh_dim for _, mesh_dims in _find_cuts(placements, mesh.shape) for mesh_dim in mesh_dims]
        self._ranks = mesh.ranks
        self._steps = tuple((mesh.shape[mesh_dim], inner[mesh_dim]) for mesh_dim in reversed(cuts))
        self._count = math.prod(mesh.shape[mesh_dim] for mesh_dim in cuts)
        free = [range(0, mesh.shape[d] * inner[d], inner[d]) for d in range(len(mesh.shape)) if d not in cuts]
        self._free = tuple(sum(steps) for steps in itertools.product(*free))
        self._known: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[tuple[int, ...], ...]: ...
    def __getitem__(self, number: int | slice) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        if isinstance(number, slice):
            return tuple(self[at] for at in range(*number.indices(self._count)))
        if not 0 <= number < self._count:
            raise IndexError(number)
        found = self._known.get(number)
        if found is None:
            at, left = 0, number
            for size, inner in self._steps:
                left, coordinate = divmod(left, size)
                at += coordinate * inner
            found = tuple(sorted(self._ranks[at + step] for step in self._free))
            if len(found) > _FEW_HOLDERS:
                self._known[number] = found
        return found


@lru_cache(maxsize=1024)
def _find_holders(same: _Same, placements: tuple[str, ...]) -> _Holders:
    return _Holders(same.mesh, placements)


def get_holders(mesh: Mesh, placements: tuple[str, ...]) -> Sequence[tuple[int, ...]]:
    """Return the ranks, ascending, that hold each chunk of a tensor, whatever the tensor's shape.

    Chunks are numbered row-major over the tensor dimensions that are cut, ascending, and within one by position.
    They are found one by one when asked for, so that a look at a few takes no time that grows with the mesh.
    """
    return _find_holders(_Same(mesh), placements)


def _iter_cuts(
    offset: int, size: int, parts: tuple[int, ...], low: int, high: int, number: int = 0
) -> Iterator[tuple[int, int, int]]:
    """Yield `(number, offset, size)` of the non-empty pieces that overlap `[low, high)`, ascending.

    A range of one dimension is cut in `parts[0]`, each piece in `parts[1]` and so on; O(pieces yielded).
    """
    if not parts:
        yield number, offset, size
        return
    count, rest = parts[0], parts[1:]
    step = -(-size // count)
    first = max(0, low - offset) // step
    last = min(high - offset, size) - 1
    for index in range(first, last // step + 1):
        start = index * step
        yield from _iter_cuts(offset + start, min(step, size - start), rest, low, high, number * count + index)


def _iter_dim_parts(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[str, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each dimension that is cut, ascending, with the counts of the cuts that are made one in another."""
    for dim, mesh_dims in _find_cuts(placements, mesh.shape):
        if dim >= len(shape):
            raise Corrupt(f"placement S{dim} on a tensor of shape {shape}: it has no such dimension")
        yield dim, tuple(mesh.shape[mesh_dim] for mesh_dim in mesh_dims)


def iter_dim_cuts(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[str, ...]
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield each dimension that is cut, ascending, with the `(offset, size)` of its non-empty cuts, ascending.

    The chunks of a tensor with elements are all combinations of these; O(cuts of each dimension), not O(chunks).

    Raises:
        Corrupt, UnsupportedState: as `chunk_at`.
    """
    for dim, parts in _iter_dim_parts(shape, mesh, placements):
        yield dim, [(offset, size) for _, offset, size in _iter_cuts(0, shape[dim], parts, 0, shape[dim])]


def _iter_mesh_chunks(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[str, ...], within: Chunk
) -> Iterator[tuple[Chunk, tuple[int, ...]]]:
    """Yield the chunks on one mesh that overlap `within`, ascending, with their holders. Neither may be empty."""
    holders = get_holders(mesh, placements)
    ranges, dims, counts = [], [], []
    for dim, parts in _iter_dim_parts(shape, mesh, placements):
        low = within.offsets[dim]
        ranges.append(list(_iter_cuts(0, shape[dim], parts, low, low + within.sizes[dim])))
        dims.append(dim)
        counts.append(math.prod(parts))
    offsets, sizes = [0] * len(shape), list(shape)
    for combination in itertools.product(*ranges):
        at = 0
        for dim, count, (number, offset, size) in zip(dims, counts, combination, strict=True):
            at = at * count + number
            offsets[dim], sizes[dim] = offset, size
        yield Chunk(tuple(offsets), tuple(sizes)), holders[at]


def iter_chunks(
    shape: tuple[int, ...], layout: Layout, meshes: tuple[Mesh, ...], *, within: Chunk | None = None
) -> Iterator[tuple[Chunk, tuple[int, ...]]]:
    """Yield every distinct non-empty chunk of a tensor, ascending, with the ranks that hold it, ascending.

    A tensor without elements yields one (empty) chunk, so that it is written once too.

    Args:
        within: only chunks that overlap this one; the time is then that of what is yielded (and of all boxes).
    """
    if math.prod(shape) == 0:
        yield from _iter_empty(shape, layout, meshes)
        return
    if within is None:
        within = whole(shape)
    elif not within.numel:
        return
    if len(layout.meshes) == 1 and not layout.boxes:
        yield from _iter_mesh_chunks(shape, meshes[layout.meshes[0]], layout.placements, within)
        return
    holders: dict[Chunk, set[int]] = {}
    for box in layout.boxes:
        if intersect(box.chunk, within) is not None:
            holders.setdefault(box.chunk, set()).add(box.rank)
    for number in layout.meshes:
        for chunk, ranks in _iter_mesh_chunks(shape, meshes[number], layout.placements, within):
            holders.setdefault(chunk, set()).update(ranks)
    for chunk in sorted(holders):
        yield chunk, tuple(sorted(holders[chunk]))


def iter_numels(
    shape: tuple[int, ...], layout: Layout, meshes: tuple[Mesh, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield `(number of elements, holders)` of what `iter_chunks` yields, without making the chunks."""
    if len(layout.meshes) != 1 or layout.boxes or not math.prod(shape):
        for chunk, ranks in iter_chunks(shape, layout, meshes):
            yield chunk.numel, ranks
        return
    mesh = meshes[layout.meshes[0]]
    holders = get_holders(mesh, layout.placements)
    cuts = list(_iter_dim_parts(shape, mesh, layout.placements))
    whole_dims = set(range(len(shape))) - {dim for dim, _ in cuts}
    found = [(math.prod(shape[dim] for dim in whole_dims), 0)]
    for dim, parts in cuts:
        pieces = [(size, number) for number, _, size in _iter_cuts(0, shape[dim], parts, 0, shape[dim])]
        count = math.prod(parts)
        found = [(numel * size, at * count + number) for numel, at in found for size, number in pieces]
    for numel, at in found:
        yield numel, holders[at]


def _iter_empty(
    shape: tuple[int, ...], layout: Layout, meshes: tuple[Mesh, ...]
) -> Iterator[tuple[Chunk, tuple[int, ...]]]:
    ranks = {rank for number in layout.meshes for rank in meshes[number].ranks}
    if ranks:
        yield whole(shape), tuple(sorted(ranks))
    elif layout.boxes:
        # Boxes of nothing may differ; the one that is stored is one that its rank holds.
        chosen = min(box.chunk for box in layout.boxes)
        yield chosen, tuple(sorted({box.rank for box in layout.boxes if box.chunk == chosen}))
