"""What one rank writes: its pieces grouped into shard files, every header byte known before any data moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardkeep.format.names import format_shard
from shardkeep.format.records import LayoutTable, PerRankTensor, ShardRecord, StoredChunk, TensorRecord
from shardkeep.format.shard import plan_shard
from shardkeep.plan.names import RANK_SECTION as RANK_SECTION
from shardkeep.plan.names import format_piece
from shardkeep.plan.owners import RankPieces, iter_own_pieces, iter_pieces
from shardkeep.spec.chunks import Chunk, whole
from shardkeep.spec.dtypes import get_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One piece that this rank writes: a chunk of `key`, or its own copy of a per-rank tensor.

    Attributes:
        frozen: of a parameter that is not trained, so likely to be what it was in the checkpoint before.
    """

    key: str
    section: str
    name: str
    dtype: str
    chunk: Chunk
    per_rank: bool = False
    frozen: bool = False

    @property
    def size_bytes(self) -> int:
        return self.chunk.numel * get_dtype(self.dtype).itemsize_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardItem:
    """A piece's place in a shard file: bytes `[begin, end)` of the file."""

    outgoing: Outgoing
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One file: its header (data starts right after it) and its items, ascending by place.

    Attributes:
        frozen: all its pieces are.
    """

    name: str
    section: str
    header: bytes
    size_bytes: int
    items: tuple[ShardItem, ...]
    frozen: bool


def plan_all_outgoing(table: LayoutTable, *, sections: frozenset[str] | None = None) -> dict[int, list[Outgoing]]:
    """Return what every rank writes of the table's tensors, by rank (ranks that write nothing are absent).

    Takes memory for each piece of the whole job.

    Args:
        sections: only tensors of these.
    """
    outgoing: dict[int, list[Outgoing]] = {}
    for key, record in table.tensors.items():
        if sections is not None and record.section not in sections:
            continue
        for chunk, owner in iter_pieces(record, table):
            outgoing.setdefault(owner, []).append(_make_outgoing(key, record, chunk))
    return outgoing


def plan_outgoing(table: LayoutTable, rank: int) -> list[Outgoing]:
    """Return what one rank writes of the table's tensors, in O(its tensors) whatever the number of ranks."""
    return [_make_outgoing(key, record, chunk) for key, record, chunk in iter_own_pieces(table, rank)]


class OutgoingPlans:
    """What each rank writes, for who asks for all ranks one after another: each in O(its tensors)."""

    def __init__(self, table: LayoutTable) -> None:
        self._pieces = RankPieces(table)

    def of(self, rank: int) -> list[Outgoing]:
        """Return what `plan_outgoing` returns."""
        return [_make_outgoing(key, record, chunk) for key, record, chunk in self._pieces.of(rank)]


def _make_outgoing(key: str, record: TensorRecord, chunk: Chunk) -> Outgoing:
    name = format_piece(record.name, record.shape, chunk)
    frozen = record.trainable is False
    return Outgoing(key=key, section=record.section, name=name, dtype=record.dtype, chunk=chunk, frozen=frozen)


def plan_own_outgoing(own: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[Outgoing]:
    """Return the pieces of a rank's per-rank tensors; `own`: key -> (dtype, shape)."""
    return [
        Outgoing(key=key, section=RANK_SECTION, name=key, dtype=dtype, chunk=whole(shape), per_rank=True)
        for key, (dtype, shape) in sorted(own.items())
    ]


def plan_shards(outgoing: Iterable[Outgoing], rank: int, *, limit_bytes: int) -> list[ShardPlan]:
    """Group pieces into files of one section each, begun anew when the next piece would pass `limit_bytes`.

    A piece larger than the limit gets a file of its own. Frozen pieces come last in a section, in files without any
    other, so that these files stay the same from one checkpoint to the next.
    """
    sections: dict[str, list[list[Outgoing]]] = {}
    filled: dict[str, int] = {}
    for piece in sorted(outgoing, key=lambda piece: (piece.section, piece.frozen, piece.key, piece.chunk)):
        files = sections.setdefault(piece.section, [])
        size = filled.get(piece.section, 0)
        is_full = bool(files) and size + piece.size_bytes > limit_bytes
        if not files or is_full or files[-1][0].frozen != piece.frozen:
            files.append([])
            size = 0
        files[-1].append(piece)
        filled[piece.section] = size + piece.size_bytes
    return [
        _plan_file(format_shard(section, rank, sequence), section, pieces)
        for section, files in sorted(sections.items())
        for sequence, pieces in enumerate(files, start=1)
    ]


def _plan_file(name: str, section: str, pieces: list[Outgoing]) -> ShardPlan:
    by_name = {piece.name: piece for piece in pieces}
    header = plan_shard([(p.name, p.dtype, p.chunk.sizes) for p in pieces], {"shardkeep.section": section})
    items = tuple(
        ShardItem(
            outgoing=by_name[tensor.name],
            begin=len(header.data) + tensor.begin,
            end=len(header.data) + tensor.end,
        )
        for tensor in header.tensors
    )
    frozen = pieces[0].frozen
    return ShardPlan(
        name=name, section=section, header=header.data, size_bytes=header.size_bytes, items=items, frozen=frozen
    )


def describe_shards(
    plans: Iterable[ShardPlan],
) -> tuple[tuple[ShardRecord, ...], dict[str, tuple[StoredChunk, ...]], dict[str, PerRankTensor]]:
    """Return what the part record says of these files: shards, chunks by key, per-rank tensors by key."""
    shards: list[ShardRecord] = []
    chunks: dict[str, list[StoredChunk]] = {}
    own: dict[str, PerRankTensor] = {}
    for at, plan in enumerate(plans):
        shards.append(ShardRecord(plan.name, plan.size_bytes, plan.section))
        for item in plan.items:
            piece = item.outgoing
            if piece.per_rank:
                own[piece.key] = PerRankTensor(piece.dtype, piece.chunk.sizes, at, item.begin, item.end)
            else:
                chunks.setdefault(piece.key, []).append(StoredChunk(piece.chunk, at, item.begin, item.end))
    return tuple(shards), {key: tuple(found) for key, found in sorted(chunks.items())}, dict(sorted(own.items()))
