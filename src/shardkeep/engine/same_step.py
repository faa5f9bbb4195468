"""A step that two generations saved in one layout: is it the same checkpoint, bit for bit?

Digests say so without reading data. Only where they differ is one leaf of either side read, to name the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardkeep.engine.diff import iter_value_changes
from shardkeep.engine.reader import PartReader, read_verified
from shardkeep.format.digests import DIGEST_BYTES, LEAF_BYTES
from shardkeep.format.records import CommitRecord
from shardkeep.storage.base import Store

_MAX_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PartComparison:
    """One rank's part of two checkpoints.

    Attributes:
        comparable: they have one plan and the same files; else nothing else is set.
        shard_bytes: size of what was compared.
        differing_leaves: leaves whose digests differ.
        tensors: the first tensor that differs in each file, by file; at most 8.
        streams: random streams that differ (`rng/torch`), ascending.
        values: paths of other plain values that differ, ascending; at most 8.
        quantities: what the rank's steps since the checkpoint before differ in (`metric/loss`).
    """

    comparable: bool
    shard_bytes: int = 0
    differing_leaves: int = 0
    tensors: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    quantities: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return self.comparable and not (self.differing_leaves or self.streams or self.values or self.quantities)


def compare_parts(store: Store, a: CommitRecord, b: CommitRecord, rank: int) -> PartComparison:
    """Compare what `rank` wrote to two checkpoints of one step.

    Raises:
        Corrupt: a part, its digests or the leaf that was read are damaged. StorageError: they cannot be read.
    """
    if (a.plan, a.world_size) != (b.plan, b.world_size):
        return PartComparison(comparable=False)
    one, two = PartReader(store, a, rank), PartReader(store, b, rank)
    if one.record.shards != two.record.shards:
        return PartComparison(comparable=False)
    names: list[str] = []
    count = 0
    for shard in range(len(one.record.shards)):
        leaves = list(_iter_differing(one, two, shard))
        count += len(leaves)
        if leaves and len(names) < _MAX_NAMES:
            names.append(_name_first(one, two, shard, leaves[0]))
    streams, values = _compare_values(one.record.values, two.record.values)
    return PartComparison(
        comparable=True,
        shard_bytes=sum(shard.size_bytes for shard in one.record.shards),
        differing_leaves=count,
        tensors=tuple(names),
        streams=streams,
        values=values,
        quantities=_compare_chains(one, two),
    )


def format_comparison(found: PartComparison) -> str:
    """Return what differs, in half a sentence; the cause of the rest comes first."""
    texts = []
    if found.quantities:
        texts.append(f"steps before it ({', '.join(found.quantities)})")
    if found.streams:
        texts.append(f"random streams {', '.join(found.streams)}")
    if found.tensors:
        texts.append(f"tensors, the first in each file being {', '.join(found.tensors)}")
    elif found.differing_leaves:
        texts.append(f"{found.differing_leaves} leaves")
    if found.values:
        texts.append(f"values {', '.join(found.values)}")
    return "; ".join(texts)


def _iter_differing(one: PartReader, two: PartReader, shard: int) -> Iterator[int]:
    """Yield the numbers of a shard's leaves whose digests differ."""
    a, b = one.digests.leaves(shard), two.digests.leaves(shard)
    if a != b:
        for at in range(0, len(a), DIGEST_BYTES):
            if a[at : at + DIGEST_BYTES] != b[at : at + DIGEST_BYTES]:
                yield at // DIGEST_BYTES


def _name_first(one: PartReader, two: PartReader, shard: int, leaf: int) -> str:
    """Return the tensor that holds the first byte in which two leaves differ."""
    begin = leaf * LEAF_BYTES
    size = min(one.record.shards[shard].size_bytes - begin, LEAF_BYTES)
    sides = bytearray(size), bytearray(size)
    for reader, side in zip((one, two), sides, strict=True):
        read_verified(reader, shard, begin, memoryview(side))
    at = begin + next((at for at in range(size) if sides[0][at] != sides[1][at]), 0)
    return one.describe(shard, at, at + 1)


def _compare_values(a: dict[str, Any], b: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    streams: set[str] = set()
    values: list[str] = []
    for name in sorted(a.keys() | b.keys()):
        for change in iter_value_changes(a.get(name), b.get(name), name):
            parts = change.path.split(".")
            if name == "rng":
                streams.add("/".join(parts[:2]))
            elif len(values) < _MAX_NAMES:
                values.append(change.path)
    return tuple(sorted(streams)), tuple(values)


def _compare_chains(one: PartReader, two: PartReader) -> tuple[str, ...]:
    """Return the quantities whose steps differ, where both counted the same steps."""
    a, b = one.record.journal, two.record.journal
    if a is None or b is None or a.since != b.since:
        return ()
    return tuple(
        name
        for name in sorted(a.digests.keys() & b.digests.keys())
        if a.digests[name][0] == b.digests[name][0] and a.digests[name] != b.digests[name]
    )
