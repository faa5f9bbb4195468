"""Tensors that share memory: found, and stored once.

Three cases. The same elements under two names are an alias. Tensors that overlap in part are views of one
stored base. Tensors that only lie on one storage side by side are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardkeep.spec.chunks import whole
from shardkeep.spec.tensors import LocalTensor, Piece, Role, View
from shardkeep.state.hostbytes import TensorBytes, dtype_name
from shardkeep.state.subclasses import Entry

_SEARCH_LIMIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Deduplicated:
    """What `Captured` holds of a list of entries: `tensors` by ascending key, aliases, views."""

    tensors: tuple[LocalTensor, ...]
    aliases: dict[str, str]
    views: dict[str, View]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A plain tensor's place in its storage, in bytes: `start .. stop`, and `(size, stride)` per dimension."""

    entry: Entry
    data: torch.Tensor
    start: int
    stop: int
    steps: tuple[tuple[int, int], ...]


def deduplicate(entries: Sequence[Entry]) -> Deduplicated:
    """Find tensors that share memory. The first of several names, in the order given, is the canonical one.

    Overlapping tensors become views only where together they fill the base without a gap, so that no memory
    is stored that the state does not own; else each is stored for itself, which keeps the bytes right too.
    """
    aliases: dict[str, str] = {}
    kept: list[Entry] = []
    by_owner: dict[tuple[int, str], Entry] = {}
    by_place: dict[object, Entry] = {}
    shared = _find_shared(entries)
    for entry in entries:
        first = by_owner.setdefault((id(entry.owner), entry.slot), entry)
        place = place_of(entry) if id(entry) in shared else None
        if first is entry and place is not None:
            first = by_place.setdefault(place, entry)
        if first is entry:
            kept.append(entry)
        else:
            # The first of the same place, so that no alias points to another alias.
            aliases[entry.local.key] = aliases.get(first.local.key, first.local.key)
    views: dict[str, View] = {}
    tensors = {entry.local.key: entry.local for entry in kept}
    for group in find_overlapping([entry for entry in kept if id(entry) in shared]):
        described = _describe_base(group)
        if described is not None:
            base, group_views = described
            tensors = {key: local for key, local in tensors.items() if key not in group_views}
            tensors[base.key] = base
            views.update(group_views)
    return Deduplicated(tensors=tuple(tensors[key] for key in sorted(tensors)), aliases=aliases, views=views)


def _find_shared(entries: Sequence[Entry]) -> set[int]:
    """Return the ids of the entries whose storage another entry lies on, too: most lie alone, and are done with."""
    first_on: dict[int, Entry] = {}
    shared: set[int] = set()
    for entry in entries:
        if entry.data is None or entry.data.is_meta:
            continue
        # Without the device: a storage number that occurs on two devices is only looked at more closely.
        first = first_on.setdefault(entry.data.untyped_storage().data_ptr(), entry)
        if first is not entry:
            shared.update((id(first), id(entry)))
    return shared


def place_of(entry: Entry) -> object:
    """Return what two tensors must have in common to be the same elements in the same order, or None."""
    data, local = entry.data, entry.local
    if data is None or data.is_meta or data.numel() == 0:
        return None
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(data.shape, data.stride(), strict=True))
    memory = (str(data.device), data.untyped_storage().data_ptr(), data.storage_offset(), data.dtype)
    bits = (data.is_conj(), data.is_neg())
    layout = (local.shape, local.mesh, local.placements, local.explicit, local.per_rank)
    return memory, tuple(data.shape), strides, bits, layout


def _span(entry: Entry, *, plain_only: bool = True) -> _Span | None:
    """Return the place of a tensor that may become a view: plain, held whole, with memory of its own device.

    Args:
        plain_only: False: of any other tensor of this rank too.
    """
    data, local = entry.data, entry.local
    if data is None or data.is_meta or data.numel() == 0:
        return None
    special = data.is_conj() or data.is_neg() or local.mesh is not None or local.explicit or local.per_rank
    if plain_only and special:
        return None
    itemsize = data.element_size()
    steps = tuple(
        (size, int(stride) * itemsize)
        for size, stride in zip(data.shape, data.stride(), strict=True)
        if size > 1 and stride > 0
    )
    start = int(data.storage_offset()) * itemsize
    stop = start + sum((size - 1) * stride for size, stride in steps) + itemsize
    return _Span(entry=entry, data=data, start=start, stop=stop, steps=steps)


def overlaps_itself(data: torch.Tensor) -> bool:
    """Say whether several elements of a tensor may lie on the same bytes; for odd strides it says yes too soon."""
    if data.is_meta or data.numel() == 0:
        return False
    steps = [(int(s), n) for n, s in zip(data.shape, data.stride(), strict=True) if n > 1]
    reach = 0
    for stride, size in sorted(steps):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def find_overlapping(entries: Sequence[Entry], *, plain_only: bool = True) -> list[list[_Span]]:
    """Return the groups of tensors that are connected by common bytes, each in the order of `entries`.

    Args:
        plain_only: leave out shards of DTensors, tensors per rank, and conjugate and negative views.
    """
    storages: dict[tuple[str, int], list[_Span]] = {}
    for entry in entries:
        span = _span(entry, plain_only=plain_only)
        if span is not None:
            where = (str(span.data.device), span.data.untyped_storage().data_ptr())
            storages.setdefault(where, []).append(span)
    groups: list[list[_Span]] = []
    for spans in storages.values():
        group_of = {id(span): [span] for span in spans}
        active: list[_Span] = []
        for span in sorted(spans, key=lambda s: s.start):
            active = [other for other in active if other.stop > span.start]
            for other in active:
                mine, theirs = group_of[id(span)], group_of[id(other)]
                if mine is not theirs and share_bytes(span, other):
                    theirs.extend(mine)
                    for member in mine:
                        group_of[id(member)] = theirs
            active.append(span)
        distinct = {id(group): group for group in group_of.values() if len(group) > 1}
        order = {id(span): index for index, span in enumerate(spans)}
        groups.extend(sorted(group, key=lambda s: order[id(s)]) for group in distinct.values())
    return groups


def share_bytes(a: _Span, b: _Span) -> bool:
    """Say whether two strided tensors of one storage have a byte in common.

    Exact: looks for indexes with `a.start + sum(i * a.strides) == b.start + sum(j * b.strides)`, searching the
    strides from the largest down and keeping only counts after which the smaller ones can still make up the
    rest. Beyond `_SEARCH_LIMIT` steps it says yes, which is always safe.
    """
    counts: dict[int, tuple[int, int]] = {}
    for sign, span in ((1, a), (-1, b)):
        for size, stride in (*span.steps, (span.data.element_size(), 1)):
            low, high = counts.get(stride, (0, 0))
            counts[stride] = (low, high + size - 1) if sign > 0 else (low - size + 1, high)
    steps = sorted(((stride, *bounds) for stride, bounds in counts.items()), reverse=True)
    # What all strides from `at` on can add, at least and at most.
    reach = [(0, 0)]
    for stride, low, high in reversed(steps):
        reach.append((reach[-1][0] + low * stride, reach[-1][1] + high * stride))
    reach.reverse()
    todo, looked = [(0, b.start - a.start)], 0
    while todo:
        at, target = todo.pop()
        looked += 1
        if looked > _SEARCH_LIMIT:
            return True
        if at == len(steps):
            return True
        stride, low, high = steps[at]
        rest_low, rest_high = reach[at + 1]
        first = max(low, -((rest_high - target) // stride))
        last = min(high, (target - rest_low) // stride)
        todo.extend((at + 1, target - n * stride) for n in range(first, min(last, first + _SEARCH_LIMIT) + 1))
    return False


def _is_dense(span: _Span) -> bool:
    """Say whether a tensor covers every byte from its first to its last exactly once."""
    if any(stride == 0 and size > 1 for size, stride in zip(span.data.shape, span.data.stride(), strict=True)):
        return False
    expected = span.data.element_size()
    for size, stride in sorted(span.steps, key=lambda step: step[1]):
        if stride != expected:
            return False
        expected *= size
    return True


def _describe_base(group: list[_Span]) -> tuple[LocalTensor, dict[str, View]] | None:
    """Return the stored base of overlapping tensors and their views on it, or None where it would have gaps."""
    start, stop = min(span.start for span in group), max(span.stop for span in group)
    covered = start
    for span in sorted(filter(_is_dense, group), key=lambda s: s.start):
        if span.start > covered:
            break
        covered = max(covered, span.stop)
    if covered < stop:
        return None
    first = group[0]
    dtypes = {span.data.dtype for span in group}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    itemsize = first.data.element_size() if dtype != torch.uint8 else 1
    storage = first.data.untyped_storage()
    flat = torch.empty(0, dtype=dtype, device=storage.device)
    flat = flat.set_(storage, start // itemsize, ((stop - start) // itemsize,), (1,))
    roles = {span.entry.local.role for span in group}
    role: Role = "parameter" if roles == {"parameter"} else "state" if "state" in roles else "buffer"
    local = first.entry.local
    base = LocalTensor(
        key=f"{local.key}#storage",
        section=local.section,
        name=f"{local.name}#storage",
        dtype=dtype_name(dtype),
        shape=tuple(flat.shape),
        role=role,
        pieces=(Piece(chunk=whole(flat.shape), data=TensorBytes(flat)),),
        device=local.device,
    )
    views = {
        span.entry.local.key: View(
            base=base.key,
            offset_bytes=span.start - start,
            dtype=span.entry.local.dtype,
            shape=tuple(span.data.shape),
            strides=tuple(span.data.stride()),
            role=span.entry.local.role,
            trainable=span.entry.local.trainable,
        )
        for span in group
    }
    return base, views
