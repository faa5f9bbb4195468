"""What each rank holds, and the one layout table that follows from all of them.

Every distinct structure is posted once (ranks of one FSDP2 job all have the same); the merge is a pure
function, so it does not matter which rank makes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from shardkeep.errors import Corrupt, StateMismatch
from shardkeep.format.records import LayoutTable, TensorRecord, ViewRecord
from shardkeep.plan.checks import check_table
from shardkeep.plan.coverage import format_chunk
from shardkeep.plan.names import find_name_clashes
from shardkeep.plan.owners import assign_owners
from shardkeep.spec.chunks import Chunk, is_inside
from shardkeep.spec.layout import Layout, Mesh, RankChunk, get_cut_order

T = TypeVar("T", str, ViewRecord)


class _Described(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What a rank says of one tensor, but for its mesh."""

    key: str
    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    placements: tuple[str, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    explicit: bool = False
    trainable: bool | None = None
    per_rank: bool = False
    device: str | None = None


_FIELDS: Final = _Described.__struct_fields__


class HeldTensor(_Described, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One tensor as a rank describes it; fields as in `spec.tensors.LocalTensor`, without bytes.

    `chunks` is set for explicit layouts only: all other chunks follow from mesh and placements.
    """

    mesh: Mesh | None = None


class Structure(Struct, frozen=True, kw_only=True):
    """All tensors of one rank, ascending by key, with ties and views."""

    tensors: tuple[HeldTensor, ...]
    aliases: dict[str, str] = {}
    views: dict[str, ViewRecord] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One distinct structure and the ranks that have it, ascending."""

    ranks: tuple[int, ...]
    structure: Structure


class _PostedTensor(_Described, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A `HeldTensor` with the number of its mesh in place of the mesh."""

    mesh: int | None = None


class _Posted(Struct, frozen=True, kw_only=True):
    """A `Structure` as it is sent: a mesh of many ranks stands there once, and not with every tensor."""

    meshes: tuple[Mesh, ...]
    tensors: tuple[_PostedTensor, ...]
    aliases: dict[str, str]
    views: dict[str, ViewRecord]


def encode_structure(structure: Structure) -> bytes:
    """Return the structure's bytes; equal structures give equal bytes."""
    meshes = _Meshes()
    tensors = tuple(
        _PostedTensor(
            mesh=None if tensor.mesh is None else meshes.number(meshes.get(tensor.mesh)),
            **{name: getattr(tensor, name) for name in _FIELDS},
        )
        for tensor in structure.tensors
    )
    posted = _Posted(meshes=meshes.table, tensors=tensors, aliases=structure.aliases, views=structure.views)
    return msgspec.json.Encoder(order="deterministic").encode(posted)


def decode_structure(data: bytes) -> Structure:
    """Undo `encode_structure`.

    Raises:
        Corrupt: not such bytes (ranks run different versions).
    """
    try:
        posted = msgspec.json.decode(data, type=_Posted)
        tensors = tuple(
            HeldTensor(
                mesh=None if tensor.mesh is None else posted.meshes[tensor.mesh],
                **{name: getattr(tensor, name) for name in _FIELDS},
            )
            for tensor in posted.tensors
        )
    except (msgspec.MsgspecError, RecursionError, LookupError) as error:
        raise Corrupt(f"a rank described its tensors in a way this version cannot read: {error}") from None
    return Structure(tensors=tensors, aliases=posted.aliases, views=posted.views)


def digest_table(table: LayoutTable, world_size: int) -> str:
    """Return the plan digest: what every part carries to say that it follows this very plan."""
    text = msgspec.json.Encoder(order="deterministic").encode([world_size, table])
    return hashlib.sha256(text).hexdigest()


_Found = list[tuple[HeldTensor, tuple[int, ...]]]
"""What the ranks say of one key: each description with the ranks that gave it, by lowest rank."""


def plan_layout(holdings: Sequence[Holding], *, per_rank: frozenset[str] = frozenset()) -> LayoutTable:
    """Merge the structures of all ranks to the table of the checkpoint.

    Args:
        holdings: every rank is in exactly one.
        per_rank: keys whose content was found to differ between holders and may (buffers, state): the
            lowest holder's copy becomes the canonical one, every rank keeps its own besides. Counts for
            tensors that are held whole; a layout that cuts a tensor says what each rank holds of it.

    Raises:
        StateMismatch: ranks disagree on what a tensor is; lists every such key.
        UnsupportedState: strided placements that are no cut over other cuts.
    """
    problems: list[str] = []
    seen: dict[str, _Found] = {}
    ordered = sorted(holdings, key=lambda holding: holding.ranks)
    for holding in ordered:
        for tensor in holding.structure.tensors:
            seen.setdefault(tensor.key, []).append((tensor, holding.ranks))
    declared = {key for key, found in seen.items() if any(tensor.per_rank for tensor, _ in found)}
    meshes = _Meshes()
    records: dict[str, TensorRecord] = {}
    for key in sorted(seen):
        if key in declared:
            problems += _find_uneven_kinds(key, seen[key])
        elif problem := _find_disagreement(seen[key], meshes) or meshes.find_absence(seen[key]):
            problems.append(f"{key}: {problem}")
        else:
            records[key] = _make_record(seen[key], key in per_rank, meshes)
    aliases = _merge_links("tied to", [(h.ranks, h.structure.aliases) for h in ordered], problems)
    views = _merge_links("a view of", [(h.ranks, h.structure.views) for h in ordered], problems)
    plain = {key for key in per_rank & seen.keys() if not seen[key][0][0].explicit and seen[key][0][0].mesh is None}
    kept_apart = tuple(sorted(declared | plain))
    problems += _find_broken_links(aliases, views, seen, declared)
    problems += find_name_clashes(records, kept_apart)
    if problems:
        raise StateMismatch(
            "the ranks hold different things under the same names, so nothing was saved",
            problems=problems,
            advice="give each its own name, or wrap it in sk.PerRank(...) or sk.Sharded(...)",
        )
    table = assign_owners(
        LayoutTable(meshes=meshes.table, tensors=records, aliases=aliases, views=views, per_rank=kept_apart)
    )
    try:
        # What a reader would refuse must not be saved.
        return check_table(table, max(rank for holding in holdings for rank in holding.ranks) + 1, where="the plan")
    except Corrupt as error:
        raise StateMismatch(
            "the ranks' tensors cannot be stored as described, so nothing was saved", problems=[error.message]
        ) from None


class _Meshes:
    """The table of meshes as it grows, and what is known of them: each is looked at once for all its tensors.

    Meshes are told apart by identity where that is enough; those that are asked about must outlive this object.
    """

    def __init__(self) -> None:
        self._equal: dict[Mesh, Mesh] = {}
        self._first: dict[int, Mesh] = {}
        self._numbers: dict[int, int] = {}
        self._lines: dict[tuple[int, ...], Mesh] = {}
        self._filled: set[tuple[int, tuple[int, ...]]] = set()
        self._sound: set[int] = set()
        self._table: list[Mesh] = []

    def get(self, mesh: Mesh) -> Mesh:
        """Return the first mesh that was equal to this one."""
        found = self._first.get(id(mesh))
        if found is None:
            found = self._first[id(mesh)] = self._equal.setdefault(mesh, mesh)
        return found

    def number(self, mesh: Mesh) -> int:
        """Return the number in the table of a mesh that `get` or `get_line` returned."""
        number = self._numbers.get(id(mesh))
        if number is None:
            number = self._numbers[id(mesh)] = len(self._table)
            self._table.append(mesh)
        return number

    @property
    def table(self) -> tuple[Mesh, ...]:
        """The meshes by number."""
        return tuple(self._table)

    def get_line(self, classes: Sequence[tuple[int, ...]]) -> Mesh:
        """Return the mesh of one dimension over the ranks of some holdings, ascending."""
        key = tuple(ranks[0] for ranks in classes)
        if key not in self._lines:
            ranks = tuple(sorted(rank for some in classes for rank in some))
            line = Mesh(shape=(len(ranks),), ranks=ranks)
            self._lines[key] = self._equal.setdefault(line, line)
        return self._lines[key]

    def is_sound(self, mesh: Mesh) -> bool:
        """Say whether a mesh has as many ranks as places, each once."""
        if id(mesh) not in self._sound:
            if math.prod(mesh.shape) != len(mesh.ranks) or len(set(mesh.ranks)) != len(mesh.ranks):
                return False
            self._sound.add(id(mesh))
        return True

    def find_absence(self, found: _Found) -> str | None:
        """Return which rank a mesh names as a holder that does not have the tensor, or None."""
        # A rank is in one holding only, so that its lowest rank stands for it.
        classes = tuple(ranks[0] for _, ranks in found)
        for tensor, ranks in found:
            mesh = None if tensor.mesh is None else self.get(tensor.mesh)
            if mesh is None or (id(mesh), classes) in self._filled:
                continue
            absent = sorted(set(mesh.ranks) - {rank for _, some in found for rank in some})
            if absent:
                return (
                    f"rank {ranks[0]} has it on ranks {_shorten(mesh.ranks)}, but rank {absent[0]} does not have it"
                )
            self._filled.add((id(mesh), classes))
        return None


def _find_disagreement(found: _Found, meshes: _Meshes) -> str | None:
    """Return what is wrong with one key's descriptions, both sides named, or None."""
    first, first_ranks = found[0]
    mesh = None if first.mesh is None else meshes.get(first.mesh)
    for tensor, ranks in found:
        if _identity(tensor) != _identity(first):
            one, other = _describe(first, tensor), _describe(tensor, first)
            return f"{one} on rank {first_ranks[0]}, {other} on rank {ranks[0]}"
        if problem := _find_defect(tensor, meshes):
            return f"{problem} (rank {ranks[0]})"
        if mesh is not None and tensor.mesh is not None and meshes.get(tensor.mesh) is not mesh:
            cut = [mesh_dim for mesh_dim, _ in get_cut_order(first.placements, mesh.shape)]
            if any(mesh.shape[dim] != tensor.mesh.shape[dim] for dim in cut):
                return (
                    f"cut over a mesh of {list(mesh.shape)} on rank {first_ranks[0]}, "
                    f"of {list(tensor.mesh.shape)} on rank {ranks[0]}"
                )
    return None


def _identity(tensor: HeldTensor) -> tuple[object, ...]:
    """Return all that must be equal on all ranks that hold the tensor."""
    mesh_ndim = None if tensor.mesh is None else len(tensor.mesh.shape)
    where = (tensor.section, tensor.name, tensor.role, tensor.trainable)
    return (tensor.dtype, tensor.shape, tensor.placements, tensor.explicit, mesh_ndim, *where)


def _find_defect(tensor: HeldTensor, meshes: _Meshes) -> str | None:
    mesh = None if tensor.mesh is None else meshes.get(tensor.mesh)
    if mesh is not None and not (meshes.is_sound(mesh) and len(tensor.placements) == len(mesh.shape)):
        return (
            f"{len(tensor.placements)} placements on a mesh of {list(mesh.shape)} over the ranks "
            f"{_shorten(mesh.ranks)}: expected one for each dimension, and each rank once"
        )
    for chunk in tensor.chunks:
        if not is_inside(chunk, tensor.shape):
            return f"chunk {format_chunk(chunk)} does not lie within {list(tensor.shape)}"
    return None


def _find_uneven_kinds(key: str, found: _Found) -> list[str]:
    """Refuse a per-rank tensor that is not held whole: a rank can keep only what it has."""
    return [
        f"{key}: kept per rank, but on rank {ranks[0]} it is {_describe(tensor)}"
        for tensor, ranks in found
        if tensor.explicit or tensor.mesh is not None
    ][:1]


def _make_record(found: _Found, differs: bool, meshes: _Meshes) -> TensorRecord:
    first = found[0][0]
    if first.explicit:
        boxes = {RankChunk(rank, chunk) for tensor, ranks in found for rank in ranks for chunk in tensor.chunks}
        layout = Layout(boxes=tuple(sorted(boxes, key=lambda box: (box.rank, box.chunk))))
    elif first.mesh is None:
        classes = [(min(ranks[0] for _, ranks in found),)] if differs else [ranks for _, ranks in found]
        layout = Layout(meshes=(meshes.number(meshes.get_line(classes)),), placements=("R",))
    else:
        own = {id(mesh): mesh for mesh in (meshes.get(t.mesh) for t, _ in found if t.mesh is not None)}
        ordered = sorted(own.values(), key=lambda mesh: (mesh.ranks, mesh.shape, mesh.names))
        numbers = [meshes.number(mesh) for mesh in ordered]
        layout = Layout(meshes=tuple(numbers), placements=first.placements)
    return TensorRecord(
        dtype=first.dtype,
        shape=first.shape,
        section=first.section,
        name=first.name,
        role=first.role,
        layout=layout,
        trainable=first.trainable,
        device=first.device,
    )


def _describe(tensor: HeldTensor, other: HeldTensor | None = None) -> str:
    """Return what a tensor is; of what is seldom the point, only that in which it differs from `other`."""
    how = "explicit chunks" if tensor.explicit else ",".join(tensor.placements) or "whole"
    if tensor.mesh is not None:
        how += f" on a mesh of {list(tensor.mesh.shape)}"
    more = ""
    for field in ("section", "name", "role", "trainable"):
        if other is not None and getattr(tensor, field) != getattr(other, field):
            more += f", {field} {getattr(tensor, field)!r}"
    return f"{tensor.dtype}{list(tensor.shape)} ({how}{more})"


def _shorten(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} in all)" if len(ranks) > 8 else shown


def _merge_links(word: str, links: list[tuple[tuple[int, ...], dict[str, T]]], problems: list[str]) -> dict[str, T]:
    merged: dict[str, T] = {}
    first: dict[str, int] = {}
    for ranks, table in links:
        for key, target in table.items():
            known = merged.setdefault(key, target)
            if known != target:
                one, other = _format_link(known), _format_link(target)
                problems.append(f"{key}: {word} {one} on rank {first[key]}, {other} on rank {ranks[0]}")
            first.setdefault(key, ranks[0])
    return dict(sorted(merged.items()))


def _format_link(target: str | ViewRecord) -> str:
    if isinstance(target, str):
        return target
    what = f"{target.dtype}{list(target.shape)}, strides {list(target.strides)}, at byte {target.offset_bytes}"
    return f"{target.base} ({what})"


def _find_broken_links(
    aliases: dict[str, str], views: dict[str, ViewRecord], seen: dict[str, _Found], declared: set[str]
) -> list[str]:
    """Return ties and views that would not lead to a stored tensor."""
    problems = [f"{key}: tied on some ranks, a view on others" for key in sorted(aliases.keys() & views.keys())]
    links = [(key, target, "tied to") for key, target in aliases.items()]
    links += [(key, view.base, "a view of") for key, view in views.items()]
    for key, target, word in links:
        if key in seen:
            problems.append(f"{key}: {word} {target} on some ranks, a tensor of its own on others")
        elif target in declared:
            problems.append(f"{key}: {word} {target}, which is kept per rank")
        elif target not in seen:
            problems.append(f"{key}: {word} {target}, which no rank holds")
    return problems
