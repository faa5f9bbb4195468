"""Can a stored layout be followed? Asked before anything is computed from the numbers of a record from anywhere."""

from __future__ import annotations

import math

from shardkeep.errors import Corrupt
from shardkeep.format.records import LayoutTable, TensorRecord, ViewRecord
from shardkeep.spec.dtypes import get_dtype


def check_table(table: LayoutTable, world_size: int) -> None:
    """Refuse a layout that cannot be followed, before anything is computed from its numbers.

    Raises:
        Corrupt, IncompatibleFormat: what is wrong, and where.
    """
    for number, mesh in enumerate(table.meshes):
        if math.prod(mesh.shape) != len(mesh.ranks) or not all(0 <= rank < world_size for rank in mesh.ranks):
            raise Corrupt(
                f"mesh {number} of shape {mesh.shape} over {len(mesh.ranks)} ranks does not fit {world_size}"
            )
    for key, record in table.tensors.items():
        layout = record.layout
        get_dtype(record.dtype)
        fits = all(0 <= number < len(table.meshes) for number in layout.meshes) and all(
            len(layout.placements) == len(table.meshes[number].shape) for number in layout.meshes
        )
        boxes = all(0 <= b.rank < world_size and len(b.chunk.sizes) == len(record.shape) for b in layout.boxes)
        if not fits or not boxes or not (layout.meshes or layout.boxes):
            raise Corrupt(f"{key}: its layout does not fit the meshes and the {world_size} ranks")
        if any(size < 0 for size in record.shape) or not 1 <= record.split <= world_size or record.owner < 0:
            raise Corrupt(f"{key}: shape {record.shape}, split {record.split} or owner {record.owner} cannot be")
        if record.split > 1 and not record.shape:
            raise Corrupt(f"{key}: a single element cannot be split by rows")
    for alias, target in table.aliases.items():
        if target not in table.tensors:
            raise Corrupt(f"{alias} is tied to {target}, which is not stored")
    for key, view in table.views.items():
        if view.base not in table.tensors:
            raise Corrupt(f"{key} is a view of {view.base}, which is not stored")
        _check_view(key, view, table.tensors[view.base])


def _check_view(key: str, view: ViewRecord, base: TensorRecord) -> None:
    itemsize = get_dtype(view.dtype).itemsize_bytes
    base_bytes = math.prod(base.shape) * get_dtype(base.dtype).itemsize_bytes
    last = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=False))
    fits = (
        len(view.shape) == len(view.strides) and all(n >= 0 for n in view.shape) and all(s >= 0 for s in view.strides)
    )
    inside = math.prod(view.shape) == 0 or 0 <= view.offset_bytes <= base_bytes - (last + 1) * itemsize
    if not fits or not inside:
        raise Corrupt(f"{key}: a view of {list(view.shape)} with strides {view.strides} does not fit {view.base}")
