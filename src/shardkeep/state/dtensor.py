"""How a live tensor lies over the ranks: DTensor meshes and placements, `Sharded` boxes, plain tensors.

The only module that knows torch's placement classes. It never communicates and never touches autograd.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch

from shardkeep.errors import UnsupportedState
from shardkeep.spec.chunks import Chunk, whole
from shardkeep.spec.layout import Mesh, chunk_at
from shardkeep.spec.tensors import LocalTensor, Piece, Role
from shardkeep.state.hostbytes import TensorBytes, dtype_name
from shardkeep.state.wrappers import PerRank, Sharded

Runs = tuple[tuple[int, int], ...]
"""`(start, length)` ranges of one dimension, in the order in which a local tensor holds them."""


PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Types, exactly, whose strided bytes are all that they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Where one tensor lies: the rule, and this rank's part of it.

    Attributes:
        shape: global.
        mesh, placements, explicit: as in `LocalTensor`.
        local: this rank's tensor, maybe of a subclass; None where this rank is not in the mesh.
        parts: the chunks in `local`, each with the offsets of its first element in `local`.
    """

    shape: tuple[int, ...]
    mesh: Mesh | None
    placements: tuple[str, ...]
    explicit: bool
    local: torch.Tensor | None
    parts: tuple[tuple[Chunk, tuple[int, ...]], ...]


def is_dtensor(value: object) -> bool:
    """Say whether `value` is a DTensor, without importing torch.distributed where nobody has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def settle(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a pending functional collective gives, waiting for it; any other tensor as it is."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and type(tensor) is functional.AsyncCollectiveTensor:
        pending: Any = tensor
        waited: torch.Tensor = pending.wait()
        return waited
    return tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's tensor of a DTensor, without communication or autograd; any other tensor as it is."""
    live: Any = tensor
    return settle(live._local_tensor if is_dtensor(tensor) else tensor)


def describe_tensor(
    key: str,
    value: torch.Tensor | Sharded | PerRank,
    *,
    section: str,
    name: str,
    role: Role,
    trainable: bool | None = None,
    device: str | None = None,
) -> LocalTensor:
    """Say what a tensor is and where this rank's bytes of it are. Reads no bytes, talks to nobody.

    `value` is a plain tensor, a DTensor over plain tensors, `Sharded`, or `PerRank` around a plain tensor;
    tensor subclasses are taken apart before (`subclasses.take_apart`).

    Raises:
        UnsupportedState: a layout that no rule says (Partial, uneven shards made by hand) or a tensor
            that has no strided bytes; the message names `key`.
    """
    if isinstance(value, torch.Tensor) and type(value) in PLAIN:  # nearly all of a state, on the way of every save
        piece = _whole_piece(key, value)
        # fmt: off
        return LocalTensor(
            key=key, section=section, name=name, dtype=dtype_name(value.dtype), shape=piece.chunk.sizes, role=role,
            pieces=(piece,), trainable=trainable, device=device,
        )
        # fmt: on
    per_rank = isinstance(value, PerRank)
    tensor = value.value if isinstance(value, PerRank) else value
    if isinstance(tensor, Sharded):
        if per_rank:
            raise UnsupportedState(f"{key}: Sharded inside PerRank says two things; use one of them", key=key)
        pieces = tuple(
            Piece(chunk=Chunk(at, tuple(part.shape)), data=_bytes(key, part))
            for part, at in tensor.pieces
            if part.numel() or math.prod(tensor.shape) == 0
        )
        spread, dtype = _explicit(tensor.shape), tensor.dtype
    else:
        spread, dtype = _whole(tensor) if per_rank else get_spread(key, tensor), tensor.dtype
        if per_rank and is_dtensor(tensor):
            raise UnsupportedState(f"{key}: a DTensor inside PerRank; pass its to_local()", key=key)
        pieces = cut_pieces(key, spread, spread.local)
    return LocalTensor(
        key=key,
        section=section,
        name=name,
        dtype=dtype_name(dtype),
        shape=spread.shape,
        role=role,
        pieces=pieces,
        mesh=spread.mesh,
        placements=spread.placements,
        explicit=spread.explicit,
        trainable=trainable,
        per_rank=per_rank,
        device=device,
    )


def _whole_piece(key: str, tensor: torch.Tensor) -> Piece:
    data = TensorBytes(tensor, key)  # first: what it refuses has no shape
    return Piece(chunk=whole(tuple(tensor.shape)), data=data)


def cut_pieces(key: str, spread: Spread, local: torch.Tensor | None) -> tuple[Piece, ...]:
    """Return the pieces of a spread tensor with `local` as the place of this rank's bytes."""
    if local is None:
        return ()
    pieces: list[Piece] = []
    for chunk, at in spread.parts:
        part = local.detach()
        if tuple(part.shape) != chunk.sizes:
            for dim, (start, size) in enumerate(zip(at, chunk.sizes, strict=True)):
                part = part.narrow(dim, start, size)
        # Undivided, the tensor itself: it is then read through whatever its `data` is at that time.
        pieces.append(Piece(chunk=chunk, data=_bytes(key, local if tuple(local.shape) == chunk.sizes else part)))
    return tuple(pieces)


def get_spread(key: str, tensor: torch.Tensor) -> Spread:
    """Return where a plain tensor or DTensor lies.

    Raises:
        UnsupportedState: see `describe_tensor`.
    """
    if not is_dtensor(tensor):
        return _whole(tensor)
    live: Any = tensor
    mesh, shape = _get_mesh(live.device_mesh), tuple(int(n) for n in live.shape)
    coordinate = live.device_mesh.get_coordinate()
    texts = tuple(_format_placement(key, placement, len(shape)) for placement in live.placements)
    local: torch.Tensor | None = None if coordinate is None else local_of(live)
    at_zero = (0,) * len(shape)
    try:
        here = chunk_at(shape, mesh.shape, texts, tuple(coordinate or (0,) * len(mesh.shape)))
    except UnsupportedState:
        return _spread_by_runs(key, live, mesh, texts, local)
    if local is not None and tuple(local.shape) != here.sizes and not (here.numel == local.numel() == 0):
        raise UnsupportedState(
            f"{key}: the local tensor is {tuple(local.shape)}, but {texts} of {shape} on a mesh of {mesh.shape} "
            f"gives {here.sizes} at {tuple(coordinate)}",
            key=key,
            advice="wrap shards of a layout of your own in shardkeep.Sharded with their offsets",
        )
    parts: tuple[tuple[Chunk, tuple[int, ...]], ...] = ()
    if math.prod(shape) == 0:
        # Stored once, as the one empty chunk; any tensor without elements holds all of it.
        parts, local = ((whole(shape), at_zero),), None if local is None else local.new_empty(shape)
    elif here.numel and local is not None:
        parts = ((here, at_zero),)
    return Spread(shape=shape, mesh=mesh, placements=texts, explicit=False, local=local, parts=parts)


def _bytes(key: str, tensor: torch.Tensor) -> TensorBytes:
    return TensorBytes(tensor, key)


def _whole(tensor: torch.Tensor) -> Spread:
    shape = tuple(tensor.shape)
    parts = ((whole(shape), (0,) * len(shape)),)
    return Spread(shape=shape, mesh=None, placements=(), explicit=False, local=tensor, parts=parts)


def _explicit(shape: tuple[int, ...]) -> Spread:
    return Spread(shape=shape, mesh=None, placements=(), explicit=True, local=None, parts=())


@lru_cache(maxsize=64)
def _get_mesh(mesh: Any) -> Mesh:
    # Once for each DeviceMesh: thousands of tensors lie on one, and it may have thousands of ranks.
    ranks = mesh.mesh
    return Mesh(
        shape=tuple(int(n) for n in ranks.shape),
        ranks=tuple(int(rank) for rank in ranks.flatten().tolist()),
        names=tuple(mesh.mesh_dim_names or ()),
    )


def _format_placement(key: str, placement: Any, ndim: int) -> str:
    """Return the text of a torch placement, by type. `_StridedShard` was a kind of Shard up to torch 2.9."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, _StridedShard) and int(placement.split_factor) > 1:
        return f"SS{placement.dim % ndim}:{int(placement.split_factor)}"
    if isinstance(placement, (Shard, _StridedShard)):
        return f"S{placement.dim % ndim}"
    raise UnsupportedState(
        f"{key}: placement {placement} holds a pending reduction, not a value; expected Replicate or Shard",
        key=key,
        advice="redistribute it first, e.g. tensor.redistribute(placements=[Replicate()])",
    )


def _spread_by_runs(key: str, live: Any, mesh: Mesh, texts: tuple[str, ...], local: torch.Tensor | None) -> Spread:
    """Say outright which boxes a strided shard holds that is not FSDP2 over tensor parallelism.

    View operations make these. Evenly cut, every torch version agrees on what they mean; else it is refused.
    """
    shape = tuple(int(n) for n in live.shape)
    if local is None:
        return _explicit(shape)
    runs: list[Runs] = [((0, size),) for size in shape]
    for mesh_dim, at in enumerate(live.device_mesh.get_coordinate()):
        if texts[mesh_dim] == "R":
            continue
        placement, parts = live.placements[mesh_dim], mesh.shape[mesh_dim]
        dim, factor = placement.dim % len(shape), int(getattr(placement, "split_factor", 1))
        if sum(length for _, length in runs[dim]) % (parts * factor):
            raise UnsupportedState(
                f"{key}: {texts} cuts dimension {dim} of {shape} unevenly on a mesh of {mesh.shape}, "
                "and torch versions differ in what that means",
                key=key,
                advice="redistribute it to Shard or Replicate placements, or wrap its parts in shardkeep.Sharded",
            )
        runs[dim] = _cut_runs(runs[dim], parts, factor, at)
    if tuple(sum(length for _, length in dim_runs) for dim_runs in runs) != tuple(local.shape):
        raise UnsupportedState(f"{key}: the local tensor {tuple(local.shape)} is not what {texts} of {shape} gives")
    boxes: list[tuple[Chunk, tuple[int, ...]]] = []
    for combination in itertools.product(*(_with_local_starts(dim_runs) for dim_runs in runs)):
        starts, lengths, at_local = zip(*combination, strict=True)
        boxes.append((Chunk(tuple(starts), tuple(lengths)), tuple(at_local)))
    return Spread(shape=shape, mesh=None, placements=(), explicit=True, local=local, parts=tuple(boxes))


def _cut_runs(runs: Runs, parts: int, factor: int, at: int) -> Runs:
    """Return what the `at`-th of `parts` holds when each of `factor` equal pieces is cut in `parts`."""
    total = sum(length for _, length in runs)
    piece = total // factor
    step = piece // parts
    taken: list[tuple[int, int]] = []
    for index in range(factor):
        low = index * piece + at * step
        position = 0
        for start, length in runs:
            first, last = max(low, position), min(low + step, position + length)
            if first < last:
                begin = start + first - position
                if taken and sum(taken[-1]) == begin:
                    taken[-1] = (taken[-1][0], taken[-1][1] + last - first)
                else:
                    taken.append((begin, last - first))
            position += length
    return tuple(taken)


def _with_local_starts(runs: Runs) -> list[tuple[int, int, int]]:
    at, result = 0, []
    for start, length in runs:
        result.append((start, length, at))
        at += length
    return result
