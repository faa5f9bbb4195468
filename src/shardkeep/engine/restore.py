"""One restore: look at everything first, then read each byte once, straight into place; then the plain values.

The life of a restore, on every rank: commit record and the parts it needs -> catalog -> what the live state wants ->
all ranks agree that stored and wanted match -> read and verify -> all ranks agree that all bytes are good -> values,
loaders, RNG last. Before the reading starts nothing live was touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from shardkeep.engine.reader import Copy, PartReader, read_copies
from shardkeep.errors import Corrupt, StateMismatch
from shardkeep.format.records import CommitRecord, LayoutTable, TensorRecord
from shardkeep.format.values import decode_value
from shardkeep.plan.owners import iter_pieces
from shardkeep.plan.reads import Segment, iter_segments, iter_view_segments
from shardkeep.ranks.base import Group
from shardkeep.spec.chunks import Chunk, intersect, whole
from shardkeep.spec.dtypes import get_dtype
from shardkeep.spec.tensors import Catalog, HostBytes, LocalTensor, StoredTensor, View
from shardkeep.storage.base import Store


class Wanted(Protocol):
    """What a live state wants of a checkpoint: destinations, and the stored names they account for."""

    @property
    def tensors(self) -> tuple[LocalTensor, ...]: ...
    @property
    def consumed_tensors(self) -> frozenset[str]: ...
    @property
    def consumed_values(self) -> frozenset[str]: ...
    @property
    def problems(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore read. `bytes_read` is this rank's; `notes` says what is not as it was on this very rank."""

    commit: CommitRecord
    bytes_read: int
    notes: tuple[str, ...] = ()


class CheckpointReader:
    """One committed checkpoint, opened by one rank: its parts are read when first needed, and checked."""

    def __init__(self, store: Store, commit: CommitRecord) -> None:
        self.store = store
        self.commit = commit
        self._parts: dict[int, PartReader] = {}

    @property
    def table(self) -> LayoutTable:
        return self.commit.facts.layout

    def part(self, rank: int) -> PartReader:
        """Return the part of a saving rank. Raises Corrupt."""
        if rank not in self._parts:
            if not 0 <= rank < self.commit.world_size:
                raise Corrupt(f"{self.commit.ref}: its layout names rank {rank} of {self.commit.world_size}")
            self._parts[rank] = PartReader(self.store, self.commit, rank)
        return self._parts[rank]

    def find_stored(self, key: str, wanted: Chunk) -> Iterator[tuple[PartReader, Chunk, int, int]]:
        """Yield `(part, stored chunk, shard, begin)` for every stored chunk that overlaps `wanted`."""
        record = self.table.tensors[key]
        for chunk, owner in iter_pieces(record, self.table, within=wanted if wanted.numel else None):
            if wanted.numel == 0 or intersect(chunk, wanted) is not None:
                part = self.part(owner)
                for stored in part.record.tensors.get(key, ()):
                    if stored.chunk == chunk:
                        expected = chunk.numel * get_dtype(record.dtype).itemsize_bytes
                        if stored.end - stored.begin != expected:
                            raise Corrupt(
                                f"{key}: chunk {chunk} takes {expected} bytes, its part gives it "
                                f"{stored.end - stored.begin}",
                                rank=owner,
                            )
                        yield part, chunk, stored.shard, stored.begin
                        break
                else:
                    raise Corrupt(
                        f"{key}: the layout says that rank {owner} stored chunk {chunk}, its part lacks it",
                        step=self.commit.ref.step,
                        rank=owner,
                    )

    def copies_of(
        self, key: str, chunk: Chunk, data: HostBytes, *, own_rank: int | None
    ) -> Iterator[tuple[PartReader, int, Copy]]:
        """Yield the copies that fill `data` with `chunk` of `key`.

        Args:
            own_rank: the saving rank whose own copy of a per-rank tensor is wanted, if any.
        """
        if own_rank is not None and key in self.table.per_rank:
            part = self.part(own_rank)
            own = part.record.per_rank.get(key)
            if own is not None:
                for segment in iter_segments(whole(own.shape), own.begin, chunk, get_dtype(own.dtype).itemsize_bytes):
                    yield part, own.shard, Copy(key=key, segment=segment, data=data)
                return
        view = self.table.views.get(key)
        if view is not None:
            base = self.table.tensors[view.base]
            unit = get_dtype(base.dtype).itemsize_bytes
            for part, stored, shard, begin in self.find_stored(view.base, whole(base.shape)):
                first = stored.offsets[0] * unit
                for segment in iter_view_segments(
                    view.shape, view.strides, view.offset_bytes, get_dtype(view.dtype).itemsize_bytes
                ):
                    start = max(segment.source, first)
                    stop = min(segment.source + segment.length, first + stored.numel * unit)
                    if start < stop:
                        moved = Segment(begin + start - first, segment.target + start - segment.source, stop - start)
                        yield part, shard, Copy(key=key, segment=moved, data=data)
            return
        record = self.table.tensors[key]
        if chunk.numel == 0:
            return
        for part, stored, shard, begin in self.find_stored(key, chunk):
            for segment in iter_segments(stored, begin, chunk, get_dtype(record.dtype).itemsize_bytes):
                yield part, shard, Copy(key=key, segment=segment, data=data)

    def read(self, wanted: Iterable[tuple[str, Chunk, HostBytes]], *, own_rank: int | None = None) -> int:
        """Fill every destination with its chunk, verified; return the bytes read."""
        grouped: dict[tuple[int, int], list[Copy]] = {}
        parts: dict[int, PartReader] = {}
        for key, chunk, data in wanted:
            for part, shard, copy in self.copies_of(key, chunk, data, own_rank=own_rank):
                parts[part.rank] = part
                grouped.setdefault((part.rank, shard), []).append(copy)
        return read_copies((parts[rank], shard, grouped[rank, shard]) for rank, shard in sorted(grouped))

    def read_value_parts(self, own_rank: int | None) -> dict[int, dict[str, Any]]:
        """Return the encoded values by saving rank: own first, then every holder's."""
        ranks = dict.fromkeys([own_rank] if own_rank is not None else [])
        ranks.update(dict.fromkeys(holder.rank for holder in self.commit.facts.holders))
        return {rank: self.part(rank).record.values for rank in ranks}


def make_catalog(reader: CheckpointReader, rank: int, world_size: int) -> Catalog:
    """Return what a checkpoint holds, as `rank` of `world_size` may restore it."""
    commit = reader.commit
    same = commit.world_size == world_size
    values: dict[str, Any] = {}
    own = rank if rank < commit.world_size else None
    shared = {name for holder in commit.facts.holders for name in holder.names}
    for holder, encoded in reader.read_value_parts(own).items():
        for name, value in encoded.items():
            # What is per rank is not taken from another rank, as long as there is one of this number.
            if name not in values and (not same or holder == own or name in shared):
                values[name] = decode_value(value, f"{commit.ref}, part {holder}: {name}")
    found_per_rank = set(values)
    if not same:
        found_per_rank.update(name for r in range(commit.world_size) for name in reader.part(r).record.values)
    differing: dict[str, tuple[Any, ...]] = {}
    names = [*commit.facts.differing, *sorted(found_per_rank - shared)]
    if names and not same:
        for name in names:
            found = [reader.part(r).record.values.get(name) for r in range(commit.world_size)]
            differing[name] = tuple(decode_value(value, name) for value in found)
    elif names:
        differing = dict.fromkeys(names, ())
    return Catalog(
        tensors=dict(_iter_stored(reader, rank if same else None)),
        aliases=dict(reader.table.aliases),
        values=values,
        differing=differing,
        same_ranks=same,
        world_size=commit.world_size,
        views={key: _make_view(view) for key, view in reader.table.views.items()},
    )


def _make_view(record: Any) -> View:
    return View(**{name: getattr(record, name) for name in View.__dataclass_fields__})


def _iter_stored(reader: CheckpointReader, own_rank: int | None) -> Iterator[tuple[str, StoredTensor]]:
    table = reader.table
    for key, record in table.tensors.items():
        yield key, _describe(key, record)
    for alias, target in table.aliases.items():
        if target not in table.tensors:
            raise Corrupt(f"{reader.commit.ref}: {alias} is tied to {target}, which is not stored")
        yield alias, _describe(alias, table.tensors[target])
    for key in table.per_rank:
        if key not in table.tensors and own_rank is not None:
            own = reader.part(own_rank).record.per_rank.get(key)
            if own is not None:
                yield (
                    key,
                    StoredTensor(
                        key=key,
                        dtype=own.dtype,
                        shape=own.shape,
                        role="state",
                        trainable=None,
                        device=None,
                        placements=(),
                    ),
                )


def _describe(key: str, record: TensorRecord) -> StoredTensor:
    return StoredTensor(
        key=key,
        dtype=record.dtype,
        shape=record.shape,
        role=record.role,  # type: ignore[arg-type]  # checked when the record was written
        trainable=record.trainable,
        device=record.device,
        placements=record.layout.placements,
    )


class _Wants(Struct, kw_only=True):
    """What one rank asks for; `per_rank`: values stored per rank that it could ask for."""

    tensors: tuple[str, ...]
    values: tuple[str, ...]
    problems: tuple[str, ...]
    per_rank: tuple[str, ...]


W = TypeVar("W", bound=Wanted)


def restore(
    store: Store,
    group: Group,
    commit: CommitRecord,
    plan: Callable[[Catalog], W],
    finish: Callable[[W], object],
    *,
    strict: bool = True,
) -> Restored:
    """Restore one committed checkpoint on all ranks; all ranks call it alike.

    Args:
        plan: decides what the live state wants, and touches nothing.
        finish: puts the plain values and RNG in place; runs when every rank has all its bytes.
        strict: refuse stored entries that no rank wants.

    Raises:
        StateMismatch: stored and wanted differ; the live state is untouched (but where one live tensor has two
            names that are stored apart with different values: that is seen only after reading). Corrupt: on every
            rank alike, when any rank met damage; tensors may be partly overwritten then. StorageError, PeerFailure:
            likewise.
    """
    reader = CheckpointReader(store, commit)
    made: list[W] = []

    def look() -> bytes:
        catalog = make_catalog(reader, group.rank, group.world_size)
        made.append(plan(catalog))
        wants = _Wants(
            tensors=tuple(sorted(made[0].consumed_tensors)),
            values=tuple(sorted(made[0].consumed_values)),
            problems=made[0].problems,
            per_rank=tuple(sorted(catalog.differing)),
        )
        return msgspec.json.encode(wants)

    agree_intact(group, "restore.check", look, lambda found: _check_wants(found, reader, strict))
    own_rank = group.rank if commit.world_size == group.world_size else None
    sizes: list[int] = []

    def read() -> bytes:
        wanted = ((t.key, piece.chunk, piece.data) for t in made[0].tensors for piece in t.pieces)
        sizes.append(reader.read(wanted, own_rank=own_rank))
        return b""

    agree_intact(group, "restore.read", read)

    def done() -> bytes:
        finish(made[0])
        return b""

    group.agree("restore.finish", done, lambda found: b"")
    return Restored(commit=commit, bytes_read=sizes[0], notes=find_replaced(commit, group.world_size))


def find_replaced(commit: CommitRecord, world_size: int) -> tuple[str, ...]:
    """Return a line that names the tensors of which another number of ranks gets the lowest holder's copy."""
    table = commit.facts.layout
    names = [key for key in table.per_rank if key in table.tensors]
    if not names or commit.world_size == world_size:
        return ()
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"{commit.world_size} ranks saved different contents of {shown}; each of the {world_size} ranks got that of "
        "the lowest rank that had it",
    )


def agree_intact(
    group: Group,
    name: str,
    work: Callable[[], bytes],
    check: Callable[[list[bytes]], None] = lambda found: None,
) -> None:
    """Run a phase in which damage that any rank meets is raised as Corrupt on every rank.

    So all ranks take the same next step: quarantine and an older checkpoint, not one rank that way and the rest
    another. Other errors go the usual way.
    """

    def guarded() -> bytes:
        try:
            return b"+" + work()
        except Corrupt as error:
            return b"-" + str(error).encode()

    def decide(found: list[bytes]) -> bytes:
        damage = [(rank, data[1:].decode()) for rank, data in enumerate(found) if data[:1] == b"-"]
        if damage:
            return msgspec.json.encode(damage)
        check([data[1:] for data in found])
        return b""

    verdict = group.agree(name, guarded, decide)
    if verdict:
        damage = msgspec.json.decode(verdict, type=list[tuple[int, str]])
        texts = list(dict.fromkeys(text for _, text in damage))
        more = f"\n  and {len(texts) - 1} more findings on other ranks" if len(texts) > 1 else ""
        raise Corrupt(texts[0] + more)


def _check_wants(found: list[bytes], reader: CheckpointReader, strict: bool) -> None:
    """Raise StateMismatch unless the ranks together want exactly what is stored."""
    table, facts = reader.table, reader.commit.facts
    tensors: set[str] = set()
    values: set[str] = set()
    names = {name for holder in facts.holders for name in holder.names} | set(facts.differing)
    problems: dict[str, list[int]] = {}
    for rank, data in enumerate(found):
        wants = msgspec.json.decode(data, type=_Wants)
        tensors.update(wants.tensors)
        values.update(wants.values)
        names.update(wants.per_rank)
        for problem in wants.problems:
            problems.setdefault(problem, []).append(rank)
    lines = [
        problem if len(ranks) == len(found) else f"{problem} (rank {', '.join(map(str, ranks))})"
        for problem, ranks in problems.items()
    ]
    if strict:
        stored = set(table.tensors) | set(table.aliases) | set(table.views) | set(table.per_rank)
        bases = {view.base for view in table.views.values()}
        lines += [
            f"{key}: stored, but nothing in the live state takes it" for key in sorted(stored - tensors - bases)
        ]
        lines += [f"{name}: stored, but nothing in the live state takes it" for name in sorted(names - values)]
    if lines:
        raise StateMismatch(
            f"{reader.commit.ref} and the live state do not match; nothing was restored",
            problems=lines,
            step=reader.commit.ref.step,
            advice="build the same model, optimizer and objects as when it was saved; to change something on "
            "purpose: resume(state, override={...}); to load only a part: shardkeep.load(root, state, strict=False)",
        )
