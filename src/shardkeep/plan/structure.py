"""What each rank holds, and the one layout table that follows from all of them.

Every distinct structure is posted once (ranks of one FSDP2 job all have the same); the merge is a pure
function, so it does not matter which rank makes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import Struct

from shardkeep.errors import Corrupt, StateMismatch
from shardkeep.format.records import LayoutTable, TensorRecord, ViewRecord
from shardkeep.plan.owners import assign_owners
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Layout, Mesh, RankChunk


T = TypeVar("T", str, ViewRecord)


class HeldTensor(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One tensor as a rank describes it; fields as in `spec.tensors.LocalTensor`, without bytes.

    `chunks` is set for explicit layouts only: all other chunks follow from mesh and placements.
    """

    key: str
    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    mesh: Mesh | None = None
    placements: tuple[str, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    explicit: bool = False
    trainable: bool | None = None
    per_rank: bool = False
    device: str | None = None


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


def encode_structure(structure: Structure) -> bytes:
    """Return the structure's bytes; equal structures give equal bytes."""
    return msgspec.json.Encoder(order="deterministic").encode(structure)


def decode_structure(data: bytes) -> Structure:
    """Undo `encode_structure`.

    Raises:
        Corrupt: not such bytes (ranks run different versions).
    """
    try:
        return msgspec.json.decode(data, type=Structure)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Corrupt(f"a rank described its tensors in a way this version cannot read: {error}") from None


def digest_table(table: LayoutTable, world_size: int) -> str:
    """Return the plan digest: what every part carries to say that it follows this very plan."""
    text = msgspec.json.Encoder(order="deterministic").encode([world_size, table])
    return hashlib.sha256(text).hexdigest()


def plan_layout(holdings: Sequence[Holding], *, per_rank: frozenset[str] = frozenset()) -> LayoutTable:
    """Merge the structures of all ranks to the table of the checkpoint.

    Args:
        holdings: every rank is in exactly one.
        per_rank: keys whose content was found to differ between holders and may (buffers, state): the
            lowest holder's copy becomes the canonical one, every rank keeps its own besides.

    Raises:
        StateMismatch: ranks disagree on what a tensor is; lists every such key.
    """
    problems: list[str] = []
    seen: dict[str, list[tuple[HeldTensor, tuple[int, ...]]]] = {}
    for holding in sorted(holdings, key=lambda h: h.ranks):
        for tensor in holding.structure.tensors:
            seen.setdefault(tensor.key, []).append((tensor, holding.ranks))
    meshes: dict[Mesh, int] = {}
    records: dict[str, TensorRecord] = {}
    declared = {key for key, found in seen.items() if any(tensor.per_rank for tensor, _ in found)}
    for key in sorted(seen):
        if key in declared:
            continue
        record = _merge_tensor(key, seen[key], key in per_rank, meshes, problems)
        if record is not None:
            records[key] = record
    aliases = _merge_links("tied to", [h.structure.aliases for h in holdings], problems)
    views = _merge_links("a view of", [h.structure.views for h in holdings], problems)
    problems += [
        f"{key}: tied on some ranks, a tensor of its own on others" for key in sorted(aliases) if key in seen
    ]
    problems += _name_clashes(records)
    if problems:
        raise StateMismatch(
            "the ranks hold different things under the same names, so nothing was saved",
            problems=problems,
            advice="give each its own name, or wrap it in sk.PerRank(...) or sk.Sharded(...)",
        )
    table = LayoutTable(
        meshes=tuple(meshes),
        tensors=records,
        aliases=aliases,
        views=views,
        per_rank=tuple(sorted(declared | (per_rank & set(seen)))),
    )
    return assign_owners(table)


def _merge_tensor(
    key: str,
    found: list[tuple[HeldTensor, tuple[int, ...]]],
    differs: bool,
    meshes: dict[Mesh, int],
    problems: list[str],
) -> TensorRecord | None:
    first = found[0][0]
    for other, ranks in found[1:]:
        same = (first.dtype, first.shape, first.placements, first.explicit) == (
            other.dtype,
            other.shape,
            other.placements,
            other.explicit,
        )
        if not same or (first.mesh is None) != (other.mesh is None):
            problems.append(
                f"{key}: {_describe(first)} on rank {found[0][1][0]}, {_describe(other)} on rank {ranks[0]}"
            )
            return None
    if first.explicit:
        boxes = sorted(
            (RankChunk(rank, chunk) for tensor, ranks in found for rank in ranks for chunk in tensor.chunks),
            key=lambda box: (box.rank, box.chunk),
        )
        layout = Layout(boxes=tuple(boxes))
    else:
        if first.mesh is None:
            holders = tuple(sorted(rank for _, ranks in found for rank in ranks))
            if differs:
                holders = holders[:1]
            own = [Mesh(shape=(len(holders),), ranks=holders)]
        else:
            own = sorted({t.mesh for t, _ in found if t.mesh is not None}, key=lambda mesh: (mesh.ranks, mesh.shape))
        numbers = tuple(dict.fromkeys(meshes.setdefault(mesh, len(meshes)) for mesh in own))
        layout = Layout(meshes=numbers, placements=first.placements if first.mesh is not None else ("R",))
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


def _describe(tensor: HeldTensor) -> str:
    how = "explicit chunks" if tensor.explicit else ",".join(tensor.placements) or "whole"
    return f"{tensor.dtype}{list(tensor.shape)} ({how})"


def _merge_links(word: str, links: list[dict[str, T]], problems: list[str]) -> dict[str, T]:
    merged: dict[str, T] = {}
    for table in links:
        for key, target in table.items():
            if merged.setdefault(key, target) != target:
                problems.append(f"{key}: {word} {merged[key]} on one rank, {target} on another")
    return dict(sorted(merged.items()))


def _name_clashes(records: dict[str, TensorRecord]) -> list[str]:
    names: dict[tuple[str, str], str] = {}
    problems: list[str] = []
    for key, record in records.items():
        other = names.setdefault((record.section, record.name), key)
        if other != key:
            problems.append(f"{key}: the same name {record.name!r} in section {record.section!r} as {other}")
    return problems
