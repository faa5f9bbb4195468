"""A checkpoint in memory: what `capture` gave, as bytes and decoded values, and back through `plan_restore`.

    saved = save(state)                 # one rank
    lines = load(saved, other_state)    # raises StateMismatch with all problems

Several ranks: each calls `save`, the results are gathered, `merge` makes one of them. No live object is kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardkeep.errors import StateMismatch
from shardkeep.format.values import decode_value, encode_value
from shardkeep.spec.chunks import Chunk, iter_runs, whole
from shardkeep.spec.dtypes import get_dtype
from shardkeep.spec.tensors import Captured, Catalog, StoredTensor, View
from shardkeep.state.capture import capture
from shardkeep.state.restore import RestorePlan, plan_restore


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One rank's part, free of live objects."""

    tensors: dict[str, StoredTensor]
    pieces: dict[str, list[tuple[Chunk, bytes]]]
    aliases: dict[str, str]
    views: dict[str, View]
    values: dict[str, str]
    per_rank: frozenset[str]
    per_rank_tensors: frozenset[str] = frozenset()
    others: tuple[Saved, ...] = field(default=())


def save(state: Mapping[str, Any], **options: Any) -> Saved:
    """Capture and copy everything out."""
    return freeze(capture(state, **options))


def freeze(captured: Captured) -> Saved:
    """Copy the bytes out and encode the values to text."""
    tensors: dict[str, StoredTensor] = {}
    pieces: dict[str, list[tuple[Chunk, bytes]]] = {}
    for local in captured.tensors:
        tensors[local.key] = StoredTensor(
            key=local.key,
            dtype=local.dtype,
            shape=local.shape,
            role=local.role,
            trainable=local.trainable,
            device=local.device,
            placements=local.placements,
        )
        held = []
        for piece in local.pieces:
            buffer = bytearray(piece.data.nbytes)
            piece.data.copy_out(0, memoryview(buffer))
            held.append((piece.chunk, bytes(buffer)))
        pieces[local.key] = held
    names = [(local.section, local.name) for local in captured.tensors]
    assert len(set(names)) == len(names)
    return Saved(
        tensors=tensors,
        pieces=pieces,
        aliases=dict(captured.aliases),
        views=dict(captured.views),
        values={name: json.dumps(encode_value(value, name)) for name, value in captured.values.items()},
        per_rank=captured.per_rank_values,
        per_rank_tensors=frozenset(local.key for local in captured.tensors if local.per_rank),
    )


def merge(parts: Sequence[Saved]) -> Saved:
    """Make one checkpoint of all ranks' parts; values come first found."""
    values: dict[str, str] = {}
    tensors: dict[str, StoredTensor] = {}
    pieces: dict[str, list[tuple[Chunk, bytes]]] = {}
    for part in parts:
        for name, value in part.values.items():
            values.setdefault(name, value)
        tensors.update(part.tensors)
        for key, held in part.pieces.items():
            pieces.setdefault(key, []).extend(held)
    return replace(parts[0], values=values, tensors=tensors, pieces=pieces, others=tuple(parts))


def make_catalog(saved: Saved, *, rank: int = 0, world_size: int = 1) -> Catalog:
    """Return what the engine would show to `rank` of `world_size`."""
    parts = saved.others or (saved,)
    same = len(parts) == world_size
    own = parts[rank].values if rank < len(parts) else {}
    texts = {**saved.values, **own}
    unequal = {
        name
        for name in texts
        if name in saved.per_rank or len({p.values[name] for p in parts if name in p.values}) > 1
    }
    differing = {
        name: () if same else tuple(_decode(p.values.get(name), name) for p in parts) for name in sorted(unequal)
    }
    tensors = dict(saved.tensors)
    for alias, target in saved.aliases.items():
        tensors[alias] = replace(saved.tensors[target], key=alias) if target in saved.tensors else tensors[target]
    return Catalog(
        tensors=tensors,
        aliases=dict(saved.aliases),
        values={name: _decode(text, name) for name, text in texts.items()},
        differing=differing,
        same_ranks=same,
        world_size=len(parts),
        views=dict(saved.views),
    )


def _decode(text: str | None, name: str) -> Any:
    return None if text is None else decode_value(json.loads(text), name)


def fill(plan: RestorePlan, saved: Saved, rank: int = 0) -> None:
    """Copy every wanted chunk into its destination, in blocks whose edges cut elements."""
    for local in plan.tensors:
        own = saved.others[rank].pieces if saved.others and local.per_rank else saved.pieces
        content = _assemble(saved.tensors[local.key], own[local.key])
        itemsize = get_dtype(local.dtype).itemsize_bytes
        assert local.dtype == saved.tensors[local.key].dtype
        for piece in local.pieces:
            wanted = bytearray()
            if piece.chunk.numel:
                for start, count in iter_runs(piece.chunk, whole(local.shape)):
                    wanted += content[start * itemsize : (start + count) * itemsize]
            assert len(wanted) == piece.data.nbytes
            for at in range(0, len(wanted), 4099):
                piece.data.copy_in(at, memoryview(wanted)[at : at + 4099])


def _assemble(stored: StoredTensor, pieces: list[tuple[Chunk, bytes]]) -> bytes:
    itemsize = get_dtype(stored.dtype).itemsize_bytes
    content = bytearray(math.prod(stored.shape) * itemsize)
    for chunk, data in pieces:
        at = 0
        if not chunk.numel:
            continue
        for start, count in iter_runs(chunk, whole(stored.shape)):
            length = count * itemsize
            content[start * itemsize : start * itemsize + length] = data[at : at + length]
            at += length
    return bytes(content)


def load(
    saved: Saved,
    state: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    rng_derivation: tuple[int, int, int] | None = None,
    check_unread: bool = True,
    **options: Any,
) -> tuple[str, ...]:
    """Restore as the engine does.

    Raises:
        StateMismatch: the plan has problems, or (single rank) a stored entry stays unread.
    """
    catalog = make_catalog(saved, rank=rank, world_size=world_size)
    planned = plan_restore(state, catalog, **options)
    problems = list(planned.problems)
    if check_unread and not saved.others:
        problems += [f"{key}: unread" for key in sorted(set(catalog.tensors) - planned.consumed_tensors)]
        problems += [f"{name}: unread value" for name in sorted(set(catalog.values) - planned.consumed_values)]
    if problems:
        raise StateMismatch("stored and wanted differ", problems=problems)
    fill(planned, saved, rank)
    return planned.finish(rng_derivation=rng_derivation)
