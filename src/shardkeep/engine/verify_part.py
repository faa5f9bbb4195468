"""Check one rank's part of a committed checkpoint: its record against the layout, its files against its record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardkeep import knobs
from shardkeep.engine.blocks import run_blocks
from shardkeep.engine.catalog import is_in
from shardkeep.engine.findings import MAX_NAMES, Finding, Findings, Kind
from shardkeep.engine.reader import PartReader
from shardkeep.engine.run import StepFolder
from shardkeep.engine.writer import summarize_part
from shardkeep.errors import CheckpointError, Corrupt, IncompatibleFormat, NotFound, StorageError
from shardkeep.format.digests import BLOCK_BYTES, DIGEST_BYTES, LEAF_BYTES, DigestTable, digest_leaves, leaf_count
from shardkeep.format.names import format_digests, format_part
from shardkeep.format.records import CommitRecord, PartRecord, ShardRecord, StoredChunk
from shardkeep.format.shard import ShardHeader, header_length, parse_shard_header
from shardkeep.plan.coverage import format_chunk
from shardkeep.plan.shards import RANK_SECTION, Outgoing
from shardkeep.spec.chunks import whole
from shardkeep.spec.dtypes import get_dtype
from shardkeep.storage.base import Store

Progress = Callable[[int], None]
"""Told of every so many bytes that were checked."""

# What a read or a parse can fail with, and how it counts; anything else is a defect of this program.
Failure = Corrupt | IncompatibleFormat | NotFound | StorageError


def judge(error: Failure, damage: Kind) -> Kind:
    """Return the kind of finding an error makes; only Corrupt and NotFound are damage."""
    if isinstance(error, IncompatibleFormat):
        return "incompatible"
    return "unreadable" if isinstance(error, StorageError) else damage


def flatten(error: CheckpointError) -> str:
    """Return an error's message as one line."""
    return " ".join(error.message.split("\n"))


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor's bytes `[begin, end)` in a shard, as the part says."""

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class PartCheck:
    """The checks of one part.

    Attributes, after `run`:
        opened: its record could be read.
        names: its shards' file names.
        weights: names of tensors that it stores whole -> the shard's file name.
    """

    def __init__(
        self,
        store: Store,
        commit: CommitRecord,
        folder: StepFolder,
        rank: int,
        findings: Findings,
    ) -> None:
        self._store = store
        self._commit = commit
        self._folder = folder
        self._rank = rank
        self._findings = findings
        self._places: list[list[_Place]] = []
        self.weights: dict[str, str] = {}
        self.names: set[str] = set()
        self.opened = False

    def run(self, expected: Sequence[Outgoing], *, full: bool, progress: Progress) -> None:
        """Check everything of this part, and go on after each finding."""
        reader = self._open()
        if reader is None:
            progress(self._commit.parts[self._rank].shard_bytes if full else 0)
            return
        self.opened = True
        self.names = {shard.name for shard in reader.record.shards}
        self._check_identity(reader)
        self._check_against_layout(reader, expected)
        sizes = [self._check_size(shard, number) for number, shard in enumerate(reader.record.shards)]
        for number, shard in enumerate(reader.record.shards):
            if sizes[number] is not None:
                self._check_header(shard, number, sizes[number] or 0)
        digests = self._check_digests(reader, full=full)
        if full and digests is not None:
            self._check_leaves(reader, digests, sizes, progress)
        elif full:
            progress(sum(shard.size_bytes for shard in reader.record.shards))

    def _add(self, kind: Kind, name: str, text: str, tensors: Sequence[str] = ()) -> None:
        self._findings.add(
            Finding(
                kind=kind,
                key=self._commit.ref.key(name),
                text=text,
                ref=self._commit.ref,
                rank=self._rank,
                tensors=tuple(tensors[:MAX_NAMES]),
                tensor_count=len(tensors),
            )
        )

    def _open(self) -> PartReader | None:
        name = format_part(self._rank)
        try:
            return PartReader(self._store, self._commit, self._rank)
        except (Corrupt, IncompatibleFormat, StorageError) as error:
            damage: Kind = "part" if name in self._folder.files else "missing"
            self._add(judge(error, damage), name, flatten(error))
            return None

    def _check_identity(self, reader: PartReader) -> None:
        """A part must be this very checkpoint's and sum up to what the commit record says of it."""
        part, commit, name = reader.record, self._commit, format_part(self._rank)
        for what, found, wanted in (
            ("run", part.run_id, commit.run_id),
            ("step", str(part.ref), str(commit.ref)),
            ("rank", part.rank, self._rank),
            ("world size", part.world_size, commit.world_size),
            ("plan", part.plan, commit.plan),
        ):
            if found != wanted:
                self._add("part", name, f"is of {what} {found}, the commit record is of {what} {wanted}")
        summary = summarize_part(part, b"")
        wanted_summary = commit.parts[self._rank]
        totals = (summary.shard_bytes, summary.shard_count)
        if totals != (wanted_summary.shard_bytes, wanted_summary.shard_count):
            self._add(
                "part",
                name,
                f"has {totals[1]} shards of {totals[0]} bytes, the commit record says "
                f"{wanted_summary.shard_count} of {wanted_summary.shard_bytes}",
            )
        if self._rank == 0 and part.facts != commit.facts:
            self._add("part", name, "its facts are not those of the commit record")
        self._check_values(part)

    def _check_values(self, part: PartRecord) -> None:
        """The part must have the values that the commit record says are found there, and no others."""
        facts, name = self._commit.facts, format_part(self._rank)
        if facts.per_rank is None:
            return
        own = {value for some in facts.per_rank if is_in(self._rank, some.ranks) for value in some.names}
        wanted = own.union(*(holder.names for holder in facts.holders if holder.rank == self._rank))
        known = own.union(*(holder.names for holder in facts.holders))
        for value in sorted(wanted - part.values.keys()):
            self._add("part", name, f"the commit record says that value {value!r} is here")
        for value in sorted(part.values.keys() - known):
            self._add("part", name, f"value {value!r} is not of this rank by the commit record")

    def _check_against_layout(self, reader: PartReader, expected: Sequence[Outgoing]) -> None:
        """The part must hold exactly the chunks that the layout gives to its rank, each of the right size."""
        part, name = reader.record, format_part(self._rank)
        self._places = [[] for _ in part.shards]
        stored = {(key, chunk.chunk): chunk for key, chunks in part.tensors.items() for chunk in chunks}
        wanted = {(item.key, item.chunk): item for item in expected}
        for (key, box), item in wanted.items():
            chunk = stored.get((key, box))
            if chunk is None:
                self._add("part", name, f"{key}: the layout says that chunk {format_chunk(box)} is here", [key])
            else:
                self._place(item, chunk, part.shards)
        for key, box in sorted(stored.keys() - wanted.keys()):
            self._add("part", name, f"{key}: chunk {format_chunk(box)} is not of this rank by the layout", [key])
        known = set(self._commit.facts.layout.per_rank)
        for key, own in part.per_rank.items():
            if key not in known:
                self._add("part", name, f"{key}: kept for this rank alone, which the layout does not say", [key])
            item = Outgoing(
                key=key,
                section=RANK_SECTION,
                name=key,
                dtype=own.dtype,
                chunk=whole(own.shape),
                per_rank=True,
            )
            self._place(item, StoredChunk(whole(own.shape), own.shard, own.begin, own.end), part.shards)

    def _place(self, item: Outgoing, chunk: StoredChunk, shards: Sequence[ShardRecord]) -> None:
        wanted_bytes = item.chunk.numel * get_dtype(item.dtype).itemsize_bytes
        if chunk.end - chunk.begin != wanted_bytes:
            self._add(
                "part",
                format_part(self._rank),
                f"{item.key}: {item.dtype}{list(item.chunk.sizes)} takes {wanted_bytes} bytes, "
                f"it is given {chunk.end - chunk.begin}",
                [item.key],
            )
        shard = shards[chunk.shard]
        self._places[chunk.shard].append(
            _Place(item.key, item.name, item.dtype, item.chunk.sizes, chunk.begin, chunk.end)
        )
        if not item.per_rank and item.chunk == whole(self._shape(item)):
            self.weights[item.name] = shard.name

    def _shape(self, item: Outgoing) -> tuple[int, ...]:
        return self._commit.facts.layout.tensors[item.key].shape

    def _names_in(self, number: int, begin: int, end: int) -> list[str]:
        """Return the keys of tensors with bytes in `[begin, end)` of a shard, in the order of their bytes."""
        places = sorted(self._places[number], key=lambda place: (place.begin, place.key))
        return list(dict.fromkeys(p.key for p in places if p.begin < end and begin < p.end))

    def _check_size(self, shard: ShardRecord, number: int) -> int | None:
        """Return the shard's size as found, or None when it is missing."""
        found = self._folder.files.get(shard.name)
        if found is None:
            names = self._names_in(number, 0, shard.size_bytes)
            self._add("missing", shard.name, f"no such file; expected {shard.size_bytes} bytes", names)
        elif found != shard.size_bytes:
            names = self._names_in(number, found, shard.size_bytes)
            self._add("size", shard.name, f"expected {shard.size_bytes} bytes, found {found}", names)
        return found

    def _check_header(self, shard: ShardRecord, number: int, size_bytes: int) -> None:
        """Parse the header again and compare it with the part: names, dtypes, shapes, places."""
        key = self._commit.ref.key(shard.name)
        try:
            header = read_header(self._store, key, min(size_bytes, shard.size_bytes), shard.size_bytes)
        except (Corrupt, IncompatibleFormat, NotFound, StorageError) as error:
            self._add(judge(error, "header"), shard.name, flatten(error))
            return
        found = {
            t.name: (t.dtype, t.shape, t.begin + header.data_start, t.end + header.data_start) for t in header.tensors
        }
        wanted = {p.name: (p.dtype, p.shape, p.begin, p.end) for p in self._places[number]}
        keys = {place.name: place.key for place in self._places[number]}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                text = f"{name!r}: the part says {_say(wanted.get(name))}, the header {_say(found.get(name))}"
                self._add("header", shard.name, text, [keys[name]] if name in keys else [])
        if header.metadata.get("shardkeep.section") != shard.section:
            self._add("header", shard.name, f"expected section {shard.section!r} in its metadata")

    def _check_digests(self, reader: PartReader, *, full: bool) -> DigestTable | None:
        name = format_digests(self._rank)
        found, wanted = self._folder.files.get(name), reader.record.digests.size_bytes
        counted = sum(leaf_count(shard.size_bytes) for shard in reader.record.shards) * DIGEST_BYTES
        if wanted != counted:
            self._add("digests", name, f"the part says {wanted} bytes, its shards have {counted} bytes of digests")
        if found is None:
            self._add("missing", name, f"no such file; expected {wanted} bytes: its shards cannot be checked")
            return None
        if found != wanted:
            self._add("size", name, f"expected {wanted} bytes, found {found}: its shards cannot be checked")
            return None
        if not full:
            return None
        try:
            return reader.digests
        except (Corrupt, StorageError) as error:
            self._add(judge(error, "digests"), name, f"{flatten(error)}: its shards cannot be checked")
            return None

    def _check_leaves(
        self, reader: PartReader, digests: DigestTable, sizes: Sequence[int | None], progress: Progress
    ) -> None:
        """Read every byte of every shard and compare each leaf; adjacent bad leaves make one finding."""
        tasks: list[tuple[int, int, int]] = []
        for number, shard in enumerate(reader.record.shards):
            readable = min(sizes[number] or 0, shard.size_bytes)
            tasks += [
                (number, begin, min(begin + BLOCK_BYTES, readable)) for begin in range(0, readable, BLOCK_BYTES)
            ]
            progress(shard.size_bytes - readable)
        bad: dict[int, list[int]] = {}
        lock = threading.Lock()

        def work(task: tuple[int, int, int], block: memoryview) -> None:
            number, begin, end = task
            shard = reader.record.shards[number]
            found = self._find_bad_leaves(shard, number, begin, block[: end - begin], digests)
            with lock:
                bad.setdefault(number, []).extend(found)
            progress(end - begin)

        run_blocks(tasks, work, thread_count=knobs.get_int("IO_THREADS"))
        for number in sorted(bad):
            shard = reader.record.shards[number]
            for first, count in _group(sorted(bad[number])):
                self._add_block(shard, number, first, count)

    def _find_bad_leaves(
        self, shard: ShardRecord, number: int, begin: int, data: memoryview, digests: DigestTable
    ) -> list[int]:
        """Return the numbers of the shard's leaves in `data` that are wrong, twice."""
        first = begin // LEAF_BYTES
        # A leaf that the file's end cuts off is never right, and is left to the finding about the size.
        complete = len(data) // LEAF_BYTES if begin + len(data) < shard.size_bytes else leaf_count(len(data))
        wanted = bytes(digests.leaves(number, first, first + complete))
        bad: set[int] | None = None
        for _ in range(2):
            try:
                self._store.read_into(self._commit.ref.key(shard.name), begin, data)
            except (Corrupt, NotFound, StorageError) as error:
                self._add_unread(shard, number, begin, begin + len(data), error)
                return []
            found = digest_leaves(data)
            wrong = {
                first + at
                for at in range(complete)
                if found[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
                != wanted[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            }
            bad = wrong if bad is None else bad & wrong
            if not bad:
                return []
        return sorted(bad or ())

    def _add_unread(self, shard: ShardRecord, number: int, begin: int, end: int, error: Failure) -> None:
        self._add_range(judge(error, "missing"), shard, number, begin, end, flatten(error))

    def _add_block(self, shard: ShardRecord, number: int, first: int, count: int) -> None:
        begin, end = first * LEAF_BYTES, min((first + count) * LEAF_BYTES, shard.size_bytes)
        leaves = f"leaf {first}" if count == 1 else f"leaves {first} to {first + count - 1}"
        text = f"bytes {begin}..{end} of {shard.size_bytes} are not what was written ({leaves})"
        self._add_range("block", shard, number, begin, end, text)

    def _add_range(self, kind: Kind, shard: ShardRecord, number: int, begin: int, end: int, text: str) -> None:
        names = self._names_in(number, begin, end)
        self._findings.add(
            Finding(
                kind=kind,
                key=self._commit.ref.key(shard.name),
                text=text,
                ref=self._commit.ref,
                rank=self._rank,
                begin=begin,
                end=end,
                first_leaf=begin // LEAF_BYTES,
                leaf_count=leaf_count(end - begin),
                tensors=tuple(names[:MAX_NAMES]),
                tensor_count=len(names),
            )
        )


def read_header(store: Store, key: str, found_bytes: int, size_bytes: int) -> ShardHeader:
    """Read and parse a shard's header.

    Args:
        found_bytes: of the file as it is; `size_bytes`: as it should be, which the tensors must cover.

    Raises:
        Corrupt, IncompatibleFormat, NotFound, StorageError.
    """
    first = bytearray(min(8, found_bytes))
    store.read_into(key, 0, memoryview(first))
    length = header_length(bytes(first), found_bytes)
    data = bytearray(8 + length)
    store.read_into(key, 0, memoryview(data))
    return parse_shard_header(bytes(data), size_bytes)


def _say(place: tuple[str, tuple[int, ...], int, int] | None) -> str:
    if place is None:
        return "nothing"
    dtype, shape, begin, end = place
    return f"{dtype}{list(shape)} at bytes {begin}..{end}"


def _group(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return runs `(first, count)` of ascending numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
