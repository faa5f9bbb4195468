"""Where the bytes of stored tensors go, whether or not the live ones share memory as the stored ones did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import torch

from shardkeep.errors import StateMismatch
from shardkeep.spec.chunks import whole
from shardkeep.spec.tensors import HostBytes, LocalTensor, Piece, StoredTensor, View
from shardkeep.state.aliases import Deduplicated, deduplicate, find_overlapping, overlaps_itself, place_of
from shardkeep.state.casts import CastBytes
from shardkeep.state.hostbytes import TEMPORARY_BYTES, TensorBytes, torch_dtype
from shardkeep.state.subclasses import Entry


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

    Live tensors that are tied as stored are read once. Views of a stored base that are views of one live base in the
    same way are read in place; others into host memory, and `finish` spreads them. Live tensors that share memory
    although the checkpoint holds them apart (tied, overlapping, or one that overlaps itself) must have been equal
    there: they are read aside, and `finish` compares the bytes.

    Args:
        entries: the live tensors, under the names that they have there.
        stored, aliases, views: of the checkpoint; `stored` must hold the bases.
        cast: convert views whose live dtype is another one, instead of refusing them.

    Raises (from `finish`):
        StateMismatch: a view's shape or dtype differs, or the checkpoint holds different values for what is one
            memory here.
    """
    reads: dict[str, LocalTensor] = {}
    puts: list[Callable[[], None]] = []
    checks: list[Callable[[], None]] = []
    named = [(key, aliases.get(key, key), entry) for entry in entries for key in [entry.local.key]]
    by_base: dict[str, list[tuple[Entry, View]]] = {}
    for _, source, entry in named:
        if source in views:
            by_base.setdefault(views[source].base, []).append((entry, views[source]))
    viewing = {key for key, source, _ in named if source in views}
    sharing = _find_sharing(entries, viewing)
    filled_by: dict[object, tuple[str, Entry]] = {}
    for key, source, entry in named:
        if key in viewing:
            continue
        target = replace(entry.local, key=source)
        place = place_of(entry) or (id(entry.owner), entry.slot)
        earlier_source, earlier = filled_by.setdefault(place, (source, entry))
        if earlier is not entry and earlier_source == source:
            continue
        if earlier is not entry or key in sharing:
            target, put, check = _read_aside(entry, target, sharing.get(key) or (earlier.local.key, key))
            puts += [put] if key in sharing else []
            checks.append(check)
        reads[source] = _merge(reads.get(source), target)
    for local, steps in _plan_bases(entries, stored, by_base, sharing, cast=cast):
        reads[local.key] = local
        puts += steps[:1]
        checks += steps[1:]

    consumed = {name for key, source, _ in named for name in (key, source)}
    return Fill(
        reads=tuple(reads[key] for key in sorted(reads)),
        # All bytes first: what is compared must be what the live tensors hold in the end.
        finish=partial(_run_all, (*puts, *checks)),
        consumed=frozenset(consumed | set(by_base)),
    )


def _run_all(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()


def _find_sharing(entries: Sequence[Entry], viewing: Set[str]) -> dict[str, tuple[str, ...]]:
    """Return key -> the keys that share its memory, its own too, where a byte has more than one element to hold.

    Tensors that are the very same elements are left out, unless views of a stored base (`viewing`) are among them.
    """
    found: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        if entry.data is not None and overlaps_itself(entry.data):
            found[entry.local.key] = (entry.local.key,)
    for group in find_overlapping(entries, plain_only=False):
        keys = tuple(span.entry.local.key for span in group)
        places = {place_of(span.entry) for span in group}
        if len(places) > 1 or not viewing.isdisjoint(keys) or not found.keys().isdisjoint(keys):
            found.update(dict.fromkeys(keys, keys))
    return found


def _merge(first: LocalTensor | None, second: LocalTensor) -> LocalTensor:
    """Return one target that fills both; the bytes of one stored tensor may go to several live ones."""
    return second if first is None else replace(first, pieces=(*first.pieces, *second.pieces))


def _read_aside(
    entry: Entry, target: LocalTensor, keys: Sequence[str]
) -> tuple[LocalTensor, Callable[[], None], Callable[[], None]]:
    """Return a target beside the live tensor, what puts its bytes there, and the check that they are there."""
    pieces: list[Piece] = []
    pairs: list[tuple[HostBytes, HostBytes]] = []
    for piece in target.pieces:
        live = piece.data.inner if isinstance(piece.data, CastBytes) else piece.data
        aside = TensorBytes(torch.empty(live.nbytes, dtype=torch.uint8))
        data = piece.data.onto(aside) if isinstance(piece.data, CastBytes) else aside
        pieces.append(Piece(chunk=piece.chunk, data=data))
        pairs.append((live, aside))

    def put() -> None:
        for live, aside in pairs:
            _copy_bytes(aside, live)

    def check() -> None:
        for live, aside in pairs:
            _check_same(live, aside, entry, keys)

    return replace(target, pieces=tuple(pieces)), put, check


def _check_same(live: HostBytes, stored: HostBytes, entry: Entry, keys: Sequence[str]) -> None:
    if _same_bytes(live, stored):
        return
    key, names = entry.local.key, ", ".join(keys[:4]) + (" and others" if len(keys) > 4 else "")
    same = f"elements of {key} are one element" if len(keys) == 1 else f"{names} share memory"
    raise StateMismatch(
        f"{same} here, the checkpoint holds values that differ: {key} does not have what is stored",
        key=key,
        advice="give each a memory of its own: do not tie, expand or overlap them",
    )


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


def _plan_bases(
    entries: Sequence[Entry],
    stored: Mapping[str, StoredTensor],
    by_base: Mapping[str, Sequence[tuple[Entry, View]]],
    sharing: Mapping[str, Sequence[str]],
    *,
    cast: bool,
) -> Iterator[tuple[LocalTensor, tuple[Callable[[], None], ...]]]:
    """Yield a target for each stored base, with what spreads it and the check; neither where it is read in place."""
    live = deduplicate(entries) if by_base else None
    for base, users in sorted(by_base.items()):
        keys = {entry.local.key for entry, _ in users}
        alone = all(keys.issuperset(sharing.get(key, ())) for key in keys)
        in_place = _find_live_base(live, stored[base], users) if live and alone else None
        if in_place is not None:
            yield in_place, ()
        else:
            local, *steps = _read_base(stored[base], users, sharing, cast=cast)
            yield local, tuple(steps)


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
    base: StoredTensor, users: Sequence[tuple[Entry, View]], sharing: Mapping[str, Sequence[str]], *, cast: bool
) -> tuple[LocalTensor, Callable[[], None], Callable[[], None]]:
    """Return a target in host memory for a stored base, what copies its views to their live tensors, and a check."""
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
            for source, live in _cut_view(flat, view, target):
                _copy_bytes(source, live)

    def check() -> None:
        for entry, view in users:
            if entry.local.key in sharing:
                for source, live in _cut_view(flat, view, entry.local):
                    _check_same(live, source, entry, sharing[entry.local.key])

    return local, spread, check


def _cut_view(flat: torch.Tensor, view: View, target: LocalTensor) -> Iterator[tuple[HostBytes, HostBytes]]:
    """Yield each piece's bytes as stored, in the live dtype, and the live ones."""
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
        yield TensorBytes(part), piece.data


def _copy_bytes(source: HostBytes, target: HostBytes) -> None:
    buffer = bytearray(TEMPORARY_BYTES)
    for start in range(0, source.nbytes, TEMPORARY_BYTES):
        part = memoryview(buffer)[: min(TEMPORARY_BYTES, source.nbytes - start)]
        source.copy_out(start, part)
        target.copy_in(start, part)
