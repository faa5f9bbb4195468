"""JSON records: their fields, and the envelope that lets a reader check every byte.

A record's file is `{"sha256":"<hex>","body":<body>}` and a newline; the digest is of the body's exact bytes, so
that any flipped bit is found without knowing the record's fields. The body begins with `head`: format
version, kind and the features that a reader must understand.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from shardkeep.errors import Corrupt, IncompatibleFormat
from shardkeep.format.metrics import Metric
from shardkeep.format.metrics import decode_metrics as decode_metrics
from shardkeep.format.metrics import encode_metrics as encode_metrics
from shardkeep.format.names import StepRef
from shardkeep.format.versions import FEATURES, FORMAT_VERSION
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Layout, Mesh

_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_WorldSize = Annotated[int, Meta(ge=1, lt=10**7)]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

_PREFIX: Final = b'{"sha256":"'
_MIDDLE: Final = b'","body":'
_SUFFIX: Final = b"}\n"
_HEAD: Final = b'{"head":'
_HEAD_BYTES: Final = 1024


class Head(Struct, frozen=True, gc=False, kw_only=True):
    """What every record begins with."""

    format: int
    kind: str
    requires: tuple[str, ...] = ()
    writer: str = ""


class FileRecord(Struct, frozen=True, gc=False):
    """A file by size and sha256 (hex)."""

    size_bytes: _Count
    sha256: _Digest


class RunRecord(Struct, frozen=True, kw_only=True):
    """`run.json`: the identity of a run."""

    run_id: str


class GenerationRecord(Struct, frozen=True, kw_only=True):
    """`gNNNN/generation.json`: one start of the job claims this generation.

    Attributes:
        parent: the commit it resumed from, or None for a fresh start.
        nonce: tells two claimants of one number apart.
        world_size: ranks of the job; 0 for a rollback, which no job made.
        created_at: wall clock of the claim, for people only; nothing is ordered by it.
    """

    run_id: str
    generation: Annotated[int, Meta(ge=1, lt=10**9)]
    parent: StepRef | None
    nonce: str
    world_size: Annotated[int, Meta(ge=0, lt=10**7)]
    created_at: str
    environment: dict[str, str] = {}


class ShardRecord(Struct, frozen=True, gc=False, array_like=True):
    """One shard file of a part."""

    name: str
    size_bytes: _Count
    section: str


class StoredChunk(Struct, frozen=True, gc=False, array_like=True):
    """Where one chunk's bytes are: `shard` indexes the part's shards, `[begin, end)` are bytes of that file."""

    chunk: Chunk
    shard: _Count
    begin: _Count
    end: _Count


class PerRankTensor(Struct, frozen=True, gc=False, array_like=True):
    """A tensor that each rank keeps for itself, stored whole by the rank whose part names it."""

    dtype: str
    shape: tuple[_Count, ...]
    shard: _Count
    begin: _Count
    end: _Count


class TensorRecord(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One tensor of the layout table: what it is, and by which rule it lies over ranks and parts.

    Attributes:
        owner: of the ranks that hold a chunk, ascending, the one at `(owner + piece) % count` wrote it.
        split: replicated chunks were cut by rows in so many pieces, written by successive owners.
    """

    dtype: str
    shape: tuple[int, ...]
    section: str
    name: str
    role: str
    layout: Layout
    owner: int = 0
    split: int = 1
    trainable: bool | None = None
    device: str | None = None


class ViewRecord(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A tensor that is a strided view into the bytes of another, 1-D one; strides count elements of its dtype."""

    base: str
    offset_bytes: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    role: str
    trainable: bool | None = None


class LayoutTable(Struct, frozen=True, kw_only=True):
    """Everything about where tensors are, of size O(tensors): the plan, as stored.

    Attributes:
        per_rank: keys that each rank stored for itself besides (or instead of) the table's tensors.
    """

    meshes: tuple[Mesh, ...]
    tensors: dict[str, TensorRecord]
    aliases: dict[str, str] = {}
    views: dict[str, ViewRecord] = {}
    per_rank: tuple[str, ...] = ()


class ValueHolder(Struct, frozen=True, gc=False, array_like=True):
    """Names of values that stand in `rank`'s part and in no part before it in the list."""

    rank: _Count
    names: tuple[str, ...]


RankRanges = tuple[tuple[_Count, _Count], ...]
"""Ranks as half-open ranges, ascending."""


class RankValues(Struct, frozen=True, gc=False, array_like=True):
    """Names of values that each of `ranks` keeps for itself, in its own part."""

    names: tuple[str, ...]
    ranks: RankRanges


class Facts(Struct, frozen=True, kw_only=True):
    """What only the coordinator knows; stands in rank 0's part, so that the commit follows from the parts.

    Attributes:
        holders: where each value is found; the first holder is rank 0.
        differing: names of values that were not equal on all ranks that have them.
        per_rank: which values stand in which parts for their ranks alone (`rng`); None where the parts alone say it,
            as earlier versions wrote.
        metrics: numbers that the user gave with the save (`loss`), for retention by the best; see `encode_metrics`.
        healthy: False when the user said that this checkpoint must not be relied on.
        created_at: wall clock, for people only.
        assets: user's files beside the shards.
        overrides: what this generation changed on purpose when it resumed: name -> what it was and is.
    """

    layout: LayoutTable
    holders: tuple[ValueHolder, ...]
    differing: tuple[str, ...] = ()
    metrics: dict[str, Metric] = {}
    healthy: bool = True
    created_at: str = ""
    environment: dict[str, str] = {}
    assets: dict[str, FileRecord] = {}
    overrides: dict[str, str] = {}
    per_rank: tuple[RankValues, ...] | None = None


class StepChain(Struct, frozen=True, gc=False, kw_only=True):
    """What one rank saw of the steps that led to a checkpoint, as digests: equal ones prove equal steps.

    Attributes:
        since: the steps are those after this one, up to the checkpoint's.
        digests: quantity -> how many of the steps have it, and xxh3-64 (hex) over its texts in order, each
            followed by a newline.
    """

    since: _Count
    digests: dict[str, tuple[_Count, str]]


class PartRecord(Struct, frozen=True, kw_only=True):
    """`part-rNNNNN.json`: what one rank contributed to one checkpoint."""

    run_id: str
    ref: StepRef
    rank: _Count
    world_size: _WorldSize
    plan: str
    shards: tuple[ShardRecord, ...]
    digests: FileRecord
    tensors: dict[str, tuple[StoredChunk, ...]]
    per_rank: dict[str, PerRankTensor] = {}
    values: dict[str, Any] = {}
    facts: Facts | None = None
    journal: StepChain | None = None


class PartValues(Struct, frozen=True, kw_only=True):
    """`part-rNNNNN.json` without its tensors: quick to decode for who wants one value of many ranks."""

    values: dict[str, Any] = {}


class PartSummary(Struct, frozen=True, gc=False, array_like=True):
    """One part as the commit record names it."""

    size_bytes: _Count
    sha256: _Digest
    shard_bytes: _Count
    shard_count: _Count


class CommitRecord(Struct, frozen=True, kw_only=True):
    """`commit.json`: the single write that makes a step exist. A pure function of the parts."""

    run_id: str
    ref: StepRef
    world_size: _WorldSize
    plan: str
    parts: tuple[PartSummary, ...]
    facts: Facts


class FactsBrief(Struct, frozen=True, kw_only=True):
    """The part of `Facts` that a list of checkpoints shows."""

    metrics: dict[str, Metric] = {}
    healthy: bool = True
    created_at: str = ""


class CommitBrief(Struct, frozen=True, kw_only=True):
    """`commit.json` without its layout, which is nearly all of it: quick to decode for a list of checkpoints."""

    run_id: str
    ref: StepRef
    world_size: _WorldSize
    parts: tuple[PartSummary, ...]
    facts: FactsBrief


class MarkRecord(Struct, frozen=True, kw_only=True):
    """`marks/<kind>-...json`: a fact set later about a committed step, never changed."""

    run_id: str
    kind: str
    ref: StepRef
    reason: str
    created_at: str


class PruneRecord(Struct, frozen=True, kw_only=True):
    """`prune.json` in a step's folder: its removal has been decided by `by_generation`."""

    run_id: str
    ref: StepRef
    by_generation: _Count


class JournalRecord(Struct, frozen=True, kw_only=True):
    """The first line of a `journal-*.jsonl` segment.

    Attributes:
        world_size: ranks of the job that took the steps.
        step_count: lines that follow; `sha256` (hex) is of their bytes.
    """

    run_id: str
    generation: Annotated[int, Meta(ge=1, lt=10**9)]
    world_size: _WorldSize
    step_count: _Count
    sha256: _Digest


KINDS: Final[dict[type[Struct], str]] = {
    RunRecord: "run",
    GenerationRecord: "generation",
    PartRecord: "part",
    PartValues: "part",
    CommitRecord: "commit",
    CommitBrief: "commit",
    MarkRecord: "mark",
    PruneRecord: "prune",
    JournalRecord: "journal",
}

R = TypeVar("R", bound=Struct)


class _Peek(Struct):
    head: Head


def encode_record(record: Struct, *, writer: str = "", requires: tuple[str, ...] = ()) -> bytes:
    """Return the file bytes of a record. The same record gives the same bytes."""
    head = Head(format=FORMAT_VERSION, kind=KINDS[type(record)], requires=requires, writer=writer)
    encoder = msgspec.json.Encoder(order="deterministic")
    fields = encoder.encode(record)
    body = _HEAD + encoder.encode(head) + b"," + fields[1:]
    return _PREFIX + hashlib.sha256(body).hexdigest().encode() + _MIDDLE + body + _SUFFIX


def decode_record(kind: type[R], data: bytes, *, where: str) -> R:
    """Check and parse a record's file.

    Args:
        where: the object's key, for messages.

    Raises:
        Corrupt: the bytes are not those that were written, or not a record of this kind.
        IncompatibleFormat: a newer format, or a required feature that this version lacks.
    """
    body = _check_envelope(data, where)
    try:
        head = _peek(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Corrupt(f"{where}: not a shardkeep record: {error}") from None
    if head.format < 1:
        raise Corrupt(f"{where}: written in format {head.format}; expected 1 or more")
    if head.format > FORMAT_VERSION:
        raise IncompatibleFormat(
            f"{where}: written in format {head.format}; this version reads up to {FORMAT_VERSION}",
            advice="upgrade shardkeep to read this checkpoint",
        )
    if missing := sorted(set(head.requires) - FEATURES):
        raise IncompatibleFormat(
            f"{where}: needs the features {', '.join(missing)}, which this version lacks",
            advice="upgrade shardkeep to read this checkpoint",
        )
    if head.kind != KINDS[kind]:
        raise Corrupt(f"{where}: expected a {KINDS[kind]} record, found a {head.kind} record")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Corrupt(f"{where}: malformed {KINDS[kind]} record: {error}") from None


def _peek(body: memoryview) -> Head:
    """Return a record's head, which stands first, without a look at the rest if that is possible."""
    start = bytes(body[:_HEAD_BYTES])
    if start.startswith(_HEAD):
        end = start.find(b"}")
        try:
            return msgspec.json.decode(start[len(_HEAD) : end + 1], type=Head)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass  # a head with braces or of more fields than ours
    return msgspec.json.decode(body, type=_Peek).head


def _check_envelope(data: bytes, where: str) -> memoryview:
    start = len(_PREFIX) + 64 + len(_MIDDLE)
    digest = data[len(_PREFIX) : len(_PREFIX) + 64]
    framed = (
        data.startswith(_PREFIX)
        and data[start - len(_MIDDLE) : start] == _MIDDLE
        and data.endswith(_SUFFIX)
        and len(data) > start + len(_SUFFIX)
    )
    if not framed:
        raise Corrupt(f"{where}: not a shardkeep record ({len(data)} bytes, begins with {data[:16]!r})")
    body = memoryview(data)[start : -len(_SUFFIX)]
    found = hashlib.sha256(body).hexdigest().encode()
    if found != digest:
        raise Corrupt(f"{where}: its sha256 is {found.decode()}, the record says {digest.decode(errors='replace')}")
    return body
