"""Tensors that share memory: stored once, and given back to whatever shares memory when they are restored.

Three cases. The same elements under two names are an alias. Tensors that overlap in part are views of one
stored base. Tensors that only lie on one storage side by side are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardkeep.errors import StateMismatch
from shardkeep.spec.chunks import whole
from shardkeep.spec.tensors import HostBytes, LocalTensor, Piece, Role, StoredTensor, View
from shardkeep.state.hostbytes import TEMPORARY_BYTES, TensorBytes, dtype_name, torch_dtype
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
    for entry in entries:
        first = by_owner.setdefault((id(entry.owner), entry.slot), entry)
        place = _place(entry)
        if first is entry and place is not None:
            first = by_place.setdefault(place, entry)
        if first is entry:
            kept.append(entry)
        else:
            # The first of the same place, so that no alias points to another alias.
            aliases[entry.local.key] = aliases.get(first.local.key, first.local.key)
    views: dict[str, View] = {}
    tensors = {entry.local.key: entry.local for entry in kept}
    for group in _find_overlapping(kept):
        described = _describe_base(group)
        if described is not None:
            base, group_views = described
            tensors = {key: local for key, local in tensors.items() if key not in group_views}
            tensors[base.key] = base
            views.update(group_views)
    return Deduplicated(tensors=tuple(tensors[key] for key in sorted(tensors)), aliases=aliases, views=views)


def _place(entry: Entry) -> object:
    """Return what two tensors must have in common to be the same elements in the same order, or None."""
    data, local = entry.data, entry.local
    if data is None or data.is_meta or data.numel() == 0:
        return None
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(data.shape, data.stride(), strict=True))
    memory = (str(data.device), data.untyped_storage().data_ptr(), data.storage_offset(), data.dtype)
    bits = (data.is_conj(), data.is_neg())
    layout = (local.shape, local.mesh, local.placements, local.explicit, local.per_rank)
    return memory, tuple(data.shape), strides, bits, layout


def _span(entry: Entry) -> _Span | None:
    """Return the place of a tensor that may become a view: plain, held whole, with memory of its own device."""
    data, local = entry.data, entry.local
    if data is None or data.is_meta or data.numel() == 0 or data.is_conj() or data.is_neg():
        return None
    if local.mesh is not None or local.explicit or local.per_rank:
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


def _find_overlapping(entries: Sequence[Entry]) -> list[list[_Span]]:
    """Return the groups of tensors that are connected by common bytes, each in the order of `entries`."""
    storages: dict[tuple[str, int], list[_Span]] = {}
    for entry in entries:
        span = _span(entry)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """What to read so that live tensors get what a checkpoint says of them.

    Attributes:
        reads: targets by *stored* key, at most one per key, ascending; a key that the checkpoint does not hold
            is among them, for the caller to report.
        finish: to be called once all reads are done.
        consumed: every stored name that this fills from: tensors, aliases, views and bases.
    """

    reads: tuple[LocalTensor, ...]
    finish: Callable[[], None]
    consumed: frozenset[str]


def plan_fill(
    entries: Sequence[Entry],
    *,
    stored: Mapping[str, StoredTensor],
    aliases: Mapping[str, str],
    views: Mapping[str, View],
    cast: bool = False,
) -> Fill:
    """Plan how live tensors are filled, whether or not they share memory as the stored ones did.

    Live tensors that are tied as stored are read once. Where views of a stored base are views of one live base in
    the same way, the base is read in place; else into host memory, and `finish` spreads it. Live tensors that are
    tied although the checkpoint holds them apart must have been equal: the second is read aside and `finish`
    compares the bytes.

    Args:
        entries: the live tensors, under the names that they have there.
        stored, aliases, views: of the checkpoint; `stored` must hold the bases.
        cast: convert views whose live dtype is another one, instead of refusing them.

    Raises (from `finish`):
        StateMismatch: a view's shape or dtype differs, or the checkpoint holds different values for what is one
            tensor here.
    """
    reads: dict[str, LocalTensor] = {}
    after: list[Callable[[], None]] = []
    consumed: set[str] = set()
    by_base: dict[str, list[tuple[Entry, View]]] = {}
    filled_by: dict[object, tuple[str, Entry]] = {}
    for entry in entries:
        key = entry.local.key
        source = aliases.get(key, key)
        consumed.update((key, source))
        if source in views:
            by_base.setdefault(views[source].base, []).append((entry, views[source]))
            continue
        place = _place(entry) or (id(entry.owner), entry.slot)
        earlier_source, earlier = filled_by.setdefault(place, (source, entry))
        target = replace(entry.local, key=source)
        if earlier is not entry:
            if earlier_source == source:
                continue
            target, compare = _read_aside(entry, target, earlier.local.key)
            after.append(compare)
        reads[source] = _merge(reads.get(source), target)
    live = deduplicate(entries) if by_base else None
    for base, users in sorted(by_base.items()):
        consumed.add(base)
        in_place = _find_live_base(live, stored[base], users) if live else None
        if in_place is not None:
            reads[base] = in_place
        else:
            reads[base], spread = _read_base(stored[base], users, cast=cast)
            after.append(spread)

    def finish() -> None:
        for step in after:
            step()

    return Fill(reads=tuple(reads[key] for key in sorted(reads)), finish=finish, consumed=frozenset(consumed))


def _merge(first: LocalTensor | None, second: LocalTensor) -> LocalTensor:
    """Return one target that fills both; the bytes of one stored tensor may go to several live ones."""
    return second if first is None else replace(first, pieces=(*first.pieces, *second.pieces))


def _read_aside(entry: Entry, target: LocalTensor, earlier_key: str) -> tuple[LocalTensor, Callable[[], None]]:
    """Return a target beside the live tensor, and the check that it got the same bytes as that."""
    aside = tuple(
        Piece(chunk=piece.chunk, data=TensorBytes(torch.empty(piece.data.nbytes, dtype=torch.uint8)))
        for piece in target.pieces
    )

    def compare() -> None:
        for live, other in zip(target.pieces, aside, strict=True):
            if not _same_bytes(live.data, other.data):
                raise StateMismatch(
                    f"{earlier_key} and {entry.local.key} are one tensor here, the checkpoint holds two that differ",
                    key=entry.local.key,
                    advice="build the model without tying the two",
                )

    return replace(target, pieces=aside), compare


def _same_bytes(a: HostBytes, b: HostBytes) -> bool:
    mine, theirs = bytearray(TEMPORARY_BYTES), bytearray(TEMPORARY_BYTES)
    for start in range(0, a.nbytes, TEMPORARY_BYTES):
        length = min(TEMPORARY_BYTES, a.nbytes - start)
        left, right = memoryview(mine)[:length], memoryview(theirs)[:length]
        a.copy_out(start, left)
        b.copy_out(start, right)
        if left != right:
            return False
    return True


def _find_live_base(
    live: Deduplicated, base: StoredTensor, users: Sequence[tuple[Entry, View]]
) -> LocalTensor | None:
    """Return the live base that is cut into views exactly as the stored one, or None."""
    for entry, view in users:
        key = entry.local.key
        found = live.views.get(live.aliases.get(key, key))
        if found is None or replace(found, role=view.role, trainable=view.trainable) != view:
            return None
    target = next((tensor for tensor in live.tensors if tensor.key == base.key), None)
    same = target is not None and target.shape == base.shape and target.dtype == base.dtype
    return target if same else None


def _read_base(
    base: StoredTensor, users: Sequence[tuple[Entry, View]], *, cast: bool
) -> tuple[LocalTensor, Callable[[], None]]:
    """Return a target in host memory for a stored base, and the step that copies its views to their live tensors."""
    flat = torch.empty(base.shape, dtype=torch_dtype(base.dtype))
    local = LocalTensor(
        key=base.key,
        section="",
        name=base.key,
        dtype=base.dtype,
        shape=base.shape,
        role=base.role,
        pieces=(Piece(chunk=whole(base.shape), data=TensorBytes(flat)),),
    )

    def spread() -> None:
        for entry, view in users:
            target = entry.local
            if target.shape != view.shape or (target.dtype != view.dtype and not cast):
                raise StateMismatch(
                    f"{target.key}: stored {view.dtype} {view.shape}, live {target.dtype} {target.shape}",
                    key=target.key,
                    advice="pass cast=True to convert dtypes; shapes must be equal",
                )
            dtype = torch_dtype(view.dtype)
            source = torch.empty(0, dtype=dtype).set_(
                flat.untyped_storage(), view.offset_bytes // dtype.itemsize, view.shape, view.strides
            )
            for piece in target.pieces:
                part = source
                for dim, (start, size) in enumerate(zip(piece.chunk.offsets, piece.chunk.sizes, strict=True)):
                    part = part.narrow(dim, start, size)
                if target.dtype != view.dtype:
                    part = part.to(torch_dtype(target.dtype))
                _copy_bytes(TensorBytes(part), piece.data)

    return local, spread


def _copy_bytes(source: HostBytes, target: HostBytes) -> None:
    buffer = bytearray(TEMPORARY_BYTES)
    for start in range(0, source.nbytes, TEMPORARY_BYTES):
        part = memoryview(buffer)[: min(TEMPORARY_BYTES, source.nbytes - start)]
        source.copy_out(start, part)
        target.copy_in(start, part)
