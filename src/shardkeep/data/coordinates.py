"""Which data-parallel rank this process is: from a mesh, from numbers, or from the default process group.

Every ask of torch.distributed is here; nothing is communicated.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

import torch.distributed as dist

from shardkeep.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank on the data axis. Ranks with equal coordinates get the same samples."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(f"data_rank {self.rank} of data_size {self.size}: expected 0 to {self.size - 1}")


def get_coordinates(
    mesh: DeviceMesh | None, rank: SupportsIndex | None, size: SupportsIndex | None
) -> Coordinates | None:
    """Return the coordinates that the caller named, or None if they follow the default process group.

    Raises:
        UsageError: both a mesh and numbers, one number without the other, a mesh of several dimensions, or a mesh
            that this process is not part of.
    """
    if mesh is not None:
        if rank is not None or size is not None:
            raise UsageError("data_mesh beside data_rank or data_size: expected one of the two ways")
        return _mesh_coordinates(mesh)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        raise UsageError(f"data_rank {rank} and data_size {size}: expected both or neither")
    return Coordinates(rank=as_int("data_rank", rank), size=as_int("data_size", size))


def default_coordinates() -> Coordinates:
    """Return this process's place in the default process group, or rank 0 of 1 where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return Coordinates(rank=0, size=1)
    return Coordinates(rank=dist.get_rank(), size=dist.get_world_size())


def as_int(name: str, value: SupportsIndex) -> int:
    """Return an integer argument, numpy's included, as an int. Raises UsageError for anything else."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise UsageError(f"{name} is {value!r}: expected an integer")


def _mesh_coordinates(mesh: DeviceMesh) -> Coordinates:
    if mesh.ndim != 1:
        raise UsageError(
            f"data_mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}: expected the data axis alone",
            advice='pass one axis of the mesh, such as data_mesh=mesh["dp"]',
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(
            "this process is not part of data_mesh",
            advice="build the loader only on ranks of the mesh, or pass the mesh that holds this rank",
        )
    return Coordinates(rank=int(coordinate[0]), size=mesh.size())
