"""What a layout must be before anything is computed from it, for tables that were read and may be hostile.

A table can name more chunks than any machine enumerates; nothing here enumerates them. The time is linear in the
size of the record. After `check_table` no function of `spec.layout` and `plan.owners` fails on the table, every
chunk lies within its tensor, and the stored pieces of every tensor tile it.
"""

from __future__ import annotations

import math
from typing import Final

from shardkeep.errors import Corrupt, UnsupportedState
from shardkeep.format.names import is_asset, is_section
from shardkeep.format.records import CommitRecord, Facts, LayoutTable, TensorRecord, ViewRecord
from shardkeep.format.shard import MAX_DIMS
from shardkeep.format.value_atoms import is_plain_text
from shardkeep.plan.coverage import find_coverage_problem
from shardkeep.plan.names import find_name_clashes
from shardkeep.spec.dtypes import get_dtype
from shardkeep.spec.layout import Mesh, get_cut_order

MAX_PLACES: Final = 1 << 31
"""Chunks of all tensors on all ranks: 16,384 ranks times 131,072 tensors. More is no training state."""

_INT64_MAX: Final = (1 << 63) - 1
_ROLES: Final = frozenset(("parameter", "buffer", "state"))


def check_commit(commit: CommitRecord, *, where: str) -> CommitRecord:
    """Return a commit record whose own numbers and whose facts fit together.

    Call it once on every commit record that was read.

    Raises:
        Corrupt, IncompatibleFormat: as `check_facts`.
    """
    if len(commit.parts) != commit.world_size or commit.world_size < 1:
        raise Corrupt(f"{where}: world size {commit.world_size}, but {len(commit.parts)} parts")
    check_facts(commit.facts, commit.world_size, where=where)
    return commit


def check_facts(facts: Facts, world_size: int, *, where: str) -> Facts:
    """Return what the coordinator wrote if it can be followed.

    Raises:
        Corrupt: a rank, name or layout that cannot be; says which.
        IncompatibleFormat: a dtype that this version does not know.
    """
    for holder in facts.holders:
        if not 0 <= holder.rank < world_size:
            raise Corrupt(f"{where}: values of rank {holder.rank} of {world_size}")
    if not facts.holders or facts.holders[0].rank != 0:
        raise Corrupt(f"{where}: the first holder of values must be rank 0")
    for name in facts.assets:
        if not is_asset(name):
            raise Corrupt(f"{where}: {name[:200]!r} cannot be the name of a file beside the shards")
    check_table(facts.layout, world_size, where=where)
    return facts


def check_table(table: LayoutTable, world_size: int, *, where: str) -> LayoutTable:
    """Return a layout table if it can be followed; see the module's docstring for what that says.

    Raises:
        Corrupt: what is wrong with which mesh, tensor, tie or view.
        IncompatibleFormat: a dtype that this version does not know.
    """
    for number, mesh in enumerate(table.meshes):
        if problem := _find_mesh_problem(mesh, world_size):
            raise Corrupt(f"{where}: mesh {number}: {problem}")
    places = 0
    # Most tensors are alike in shape and rule; what was found sound is not looked at again.
    sound: set[tuple[object, ...]] = set()
    for key, record in table.tensors.items():
        problem = _find_name_problem(key, record)
        case = (record.shape, record.dtype, record.layout, record.owner, record.split)
        if case not in sound:
            problem = problem or _find_shape_problem(record.shape, record.dtype)
            problem = problem or _find_layout_problem(record, table, world_size)
            sound.add(case)
        if problem:
            raise Corrupt(f"{where}: tensor {key[:200]!r}: {problem}", key=key)
        if record.layout.is_cut:
            places += sum(len(table.meshes[number].ranks) for number in record.layout.meshes)
            places += len(record.layout.boxes)
        places += record.split
    if places > MAX_PLACES:
        raise Corrupt(f"{where}: its tensors are cut into {places} chunks; up to {MAX_PLACES} are supported")
    _check_links(table, where)
    if clashes := find_name_clashes(table.tensors, table.per_rank):
        raise Corrupt(f"{where}: {clashes[0][:600]}")
    return table


def _find_mesh_problem(mesh: Mesh, world_size: int) -> str | None:
    if len(mesh.shape) > MAX_DIMS or any(size < 1 for size in mesh.shape):
        return f"shape {list(mesh.shape[:8])}: expected up to {MAX_DIMS} sizes of 1 or more"
    if math.prod(mesh.shape) != len(mesh.ranks):
        return f"shape {list(mesh.shape[:8])} over {len(mesh.ranks)} ranks"
    if not all(0 <= rank < world_size for rank in mesh.ranks):
        return f"ranks {min(mesh.ranks)} to {max(mesh.ranks)} of a world of {world_size}"
    if len(set(mesh.ranks)) != len(mesh.ranks):
        return "a rank stands twice"
    return None


def _find_name_problem(key: str, record: TensorRecord) -> str | None:
    if not key or not is_plain_text(key):
        return "expected a key of valid Unicode"
    if not is_section(record.section):
        return f"section {record.section[:40]!r} cannot begin a file's name"
    if not record.name or record.name == "__metadata__" or not is_plain_text(record.name):
        return f"name {record.name[:200]!r} cannot stand in a shard"
    if record.role not in _ROLES:
        return f"role {record.role[:40]!r}: expected one of {', '.join(sorted(_ROLES))}"
    return None


def _find_shape_problem(shape: tuple[int, ...], dtype: str) -> str | None:
    itemsize = get_dtype(dtype).itemsize_bytes
    # What has no tag in a shard takes a dimension more there; zeros do not hide what no tensor could have.
    if len(shape) + (get_dtype(dtype).tag is None) > MAX_DIMS or any(size < 0 for size in shape):
        return f"shape {list(shape[:8])}: expected less than {MAX_DIMS} sizes of 0 or more"
    if math.prod(size for size in shape if size) * itemsize > _INT64_MAX:
        return f"shape {list(shape[:8])} of {dtype}: its bytes overflow 64 bits"
    return None


def _find_layout_problem(record: TensorRecord, table: LayoutTable, world_size: int) -> str | None:
    layout = record.layout
    if bool(layout.meshes) == bool(layout.boxes):
        return "expected either meshes or boxes"
    if not all(0 <= number < len(table.meshes) for number in layout.meshes):
        return f"lies on meshes {list(layout.meshes[:8])} of {len(table.meshes)}"
    if len(set(layout.meshes)) != len(layout.meshes):
        return f"lies on meshes {list(layout.meshes[:8])}: one stands twice"
    if layout.boxes:
        problem = _find_box_problem(record, world_size)
    else:
        problem = _find_rule_problem(record, [table.meshes[number] for number in layout.meshes])
    if problem:
        return problem
    if not 0 <= record.owner < world_size:
        return f"owner {record.owner} of {world_size} ranks"
    rows = record.shape[0] if record.shape else 1
    if not 1 <= record.split <= max(1, min(rows, world_size)) or (record.split > 1 and layout.is_cut):
        return f"split in {record.split} of {rows} rows over {world_size} ranks"
    return None


def _find_box_problem(record: TensorRecord, world_size: int) -> str | None:
    for box in record.layout.boxes:
        if not 0 <= box.rank < world_size:
            return f"a chunk of rank {box.rank} of {world_size}"
    return find_coverage_problem(record.shape, list({box.chunk for box in record.layout.boxes}))


def _find_rule_problem(record: TensorRecord, meshes: list[Mesh]) -> str | None:
    """Say why placements do not cut a tensor; where this finds nothing, their chunks tile it."""
    placements = record.layout.placements
    sizes: list[tuple[int, ...]] = []
    for mesh in meshes:
        if len(placements) != len(mesh.shape):
            return f"{len(placements)} placements on a mesh of {len(mesh.shape)} dimensions"
        try:
            cuts = get_cut_order(placements, mesh.shape)
        except (Corrupt, UnsupportedState) as error:
            return error.message
        if any(dim >= len(record.shape) for _, dim in cuts):
            return f"placements {', '.join(placements)} on {len(record.shape)} dimensions"
        sizes.append(tuple(mesh.shape[mesh_dim] for mesh_dim, _ in cuts))
    if len(set(sizes)) > 1:
        return f"cut alike on meshes of the shapes {list(meshes[0].shape)} and others: its chunks are no replicas"
    return None


def _check_links(table: LayoutTable, where: str) -> None:
    """Every tie and view leads to a stored tensor in one step, so there are no cycles."""
    for alias, target in table.aliases.items():
        if not is_plain_text(alias) or alias in table.tensors or alias in table.views:
            raise Corrupt(f"{where}: {alias[:200]!r} is tied to another tensor and stored too", key=alias)
        if target not in table.tensors:
            raise Corrupt(f"{where}: {alias[:200]!r} is tied to {target[:200]!r}, which is not stored", key=alias)
    for key, view in table.views.items():
        if not is_plain_text(key) or key in table.tensors:
            raise Corrupt(f"{where}: {key[:200]!r} is a view of another tensor and stored too", key=key)
        if problem := _find_view_problem(view, table):
            raise Corrupt(f"{where}: view {key[:200]!r}: {problem}", key=key)
    if len(set(table.per_rank)) != len(table.per_rank) or not all(map(is_plain_text, table.per_rank)):
        raise Corrupt(f"{where}: a key that is kept per rank stands twice or is not valid Unicode")


def _find_view_problem(view: ViewRecord, table: LayoutTable) -> str | None:
    base = table.tensors.get(view.base)
    if base is None or len(base.shape) != 1:
        return f"its base {view.base[:200]!r} is not a stored tensor of one dimension"
    if problem := _find_shape_problem(view.shape, view.dtype):
        return problem
    if view.role not in _ROLES:
        return f"role {view.role[:40]!r}: expected one of {', '.join(sorted(_ROLES))}"
    if len(view.strides) != len(view.shape) or any(stride < 0 for stride in view.strides) or view.offset_bytes < 0:
        return f"strides {list(view.strides[:8])} at byte {view.offset_bytes} for the shape {list(view.shape[:8])}"
    if math.prod(view.shape) == 0:
        return None
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    end = view.offset_bytes + (last + 1) * get_dtype(view.dtype).itemsize_bytes
    base_bytes = base.shape[0] * get_dtype(base.dtype).itemsize_bytes
    return f"reaches to byte {end} of its base, which has {base_bytes}" if end > base_bytes else None
