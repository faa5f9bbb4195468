"""One restore: look at everything first, then read each byte once, straight into place; then the plain values.

The life of a restore, on every rank: commit record and the parts it needs -> catalog -> what the live state wants ->
all ranks agree that stored and wanted match -> read and verify -> all ranks agree that all bytes are good -> values,
loaders, RNG last. Before the reading starts nothing live was touched.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from shardkeep.engine.catalog import find_rank_values
from shardkeep.engine.catalog import make_catalog as make_catalog
from shardkeep.engine.opened import CheckpointReader as CheckpointReader
from shardkeep.engine.phases import PhaseTimes
from shardkeep.errors import Corrupt, StateMismatch
from shardkeep.format.records import CommitRecord
from shardkeep.ranks.base import Group
from shardkeep.spec.tensors import Catalog, LocalTensor
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
    """What a restore read.

    Attributes:
        bytes_read: by this rank.
        notes: what is not as it was on this very rank.
        seconds: this rank's time by phase; `read`, `digest` and `copy` are added up over its threads, `load` is the
            time in which they happened.
    """

    commit: CommitRecord
    bytes_read: int
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


class _Wants(Struct, kw_only=True):
    """What one rank asks for.

    Attributes:
        unasked: which of the stored names it does not ask for: `pack_names` over `list_stored`.
        values: the values that it asks for; `per_rank`: those stored per rank that it could ask for.
    """

    unasked: bytes
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
    stored = list_stored(commit)
    made: list[W] = []

    def look() -> bytes:
        catalog = make_catalog(reader, group.rank, group.world_size)
        made.append(plan(catalog))
        wanted = made[0]
        return encode_wants(
            stored, wanted.consumed_tensors, wanted.consumed_values, wanted.problems, catalog.differing
        )

    agree_intact(group, "restore.check", look, lambda found: check_wants(found, reader, strict))
    own_rank = group.rank if commit.world_size == group.world_size else None
    sizes: list[int] = []
    spent = PhaseTimes()

    def read() -> bytes:
        wanted = ((t.key, piece.chunk, piece.data) for t in made[0].tensors for piece in t.pieces)
        with spent.phase("load"):
            sizes.append(reader.read(wanted, own_rank=own_rank, spent=spent))
        return b""

    agree_intact(group, "restore.read", read)

    def done() -> bytes:
        finish(made[0])
        return b""

    group.agree("restore.finish", done, lambda found: b"")
    notes = find_replaced(commit, group.world_size)
    return Restored(commit=commit, bytes_read=sizes[0], notes=notes, seconds=spent.seconds)


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


def list_stored(commit: CommitRecord) -> list[str]:
    """Return the keys that someone must ask for, ascending: storages behind views are asked for by their views."""
    table = commit.facts.layout
    bases = {view.base for view in table.views.values()}
    return sorted({*table.tensors, *table.aliases, *table.views, *table.per_rank} - bases)


def pack_names(names: list[str], without: Collection[str]) -> bytes:
    """Return a set of names but for some, one bit each, compressed: every rank sends one, of up to all tensors."""
    bits = bytearray(-(-len(names) // 8))
    for at, name in enumerate(names):
        if name not in without:
            bits[at >> 3] |= 1 << (at & 7)
    return zlib.compress(bytes(bits), 1)


def encode_wants(
    stored: list[str],
    tensors: Collection[str],
    values: Collection[str],
    problems: tuple[str, ...],
    per_rank: Collection[str],
) -> bytes:
    """Return what one rank says of its wants to all; see `check_wants`.

    Args:
        stored: of `list_stored`; `tensors`, `values`: what of the checkpoint it asks for.
        per_rank: values stored per rank that it could ask for.
    """
    wants = _Wants(
        unasked=pack_names(stored, tensors),
        values=tuple(sorted(values)),
        problems=problems,
        per_rank=tuple(sorted(per_rank)),
    )
    return msgspec.json.encode(wants)


def check_wants(found: list[bytes], reader: CheckpointReader, strict: bool) -> None:
    """Raise StateMismatch unless the ranks together want exactly what is stored."""
    facts, stored = reader.commit.facts, list_stored(reader.commit)
    values: set[str] = set()
    names = {name for holder in facts.holders for name in holder.names} | set(facts.differing)
    if facts.per_rank is not None:
        names.update(find_rank_values(reader, None))
    problems: dict[str, list[int]] = {}
    unasked = (1 << len(stored)) - 1
    # Ranks of one kind send the same; what thousands of them sent is looked at once.
    alike: dict[bytes, list[int]] = {}
    for rank, data in enumerate(found):
        alike.setdefault(data, []).append(rank)
    for data, ranks in alike.items():
        wants = msgspec.json.decode(data, type=_Wants)
        unasked &= int.from_bytes(zlib.decompress(wants.unasked), "little")
        values.update(wants.values)
        names.update(wants.per_rank)
        for problem in wants.problems:
            problems.setdefault(problem, []).extend(ranks)
    lines = [
        problem if len(ranks) == len(found) else f"{problem} (rank {', '.join(map(str, sorted(ranks)))})"
        for problem, ranks in problems.items()
    ]
    if strict:
        lines += [
            f"{key}: stored, but nothing in the live state takes it"
            for at, key in enumerate(stored)
            if unasked >> at & 1
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
