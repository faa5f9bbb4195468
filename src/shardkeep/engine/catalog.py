"""What a checkpoint holds, as one rank that may restore it sees it. Values are read and decoded when asked for.

So a rank reads its own part and those of which it takes something, whatever the number of ranks that saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from shardkeep.engine.opened import CheckpointReader
from shardkeep.errors import Corrupt
from shardkeep.format.records import RankRanges, TensorRecord
from shardkeep.format.values import decode_value
from shardkeep.spec.tensors import Catalog, StoredTensor, View


def make_catalog(reader: CheckpointReader, rank: int, world_size: int) -> Catalog:
    """Return what a checkpoint holds, as `rank` of `world_size` may restore it."""
    commit = reader.commit
    same = commit.world_size == world_size
    own = rank if rank < commit.world_size else None
    holders = {name: holder.rank for holder in commit.facts.holders for name in holder.names}
    ranked = find_rank_values(reader, own if same else None)
    names = [*commit.facts.differing, *sorted(ranked.keys() - holders.keys())]
    differing: Mapping[str, Sequence[Any]]
    if same:
        mine = {name for name, ranks in ranked.items() if own is not None and is_in(own, ranks)}
        differing = dict.fromkeys([n for n in names if n in holders or n in mine], ())
    else:
        mine = set(ranked)
        differing = {name: _ByRank(reader, name, ranked.get(name)) for name in names}
    return Catalog(
        tensors=dict(_iter_stored(reader, rank if same else None)),
        aliases=dict(reader.table.aliases),
        values=_Values(reader, own, holders, {name: ranked[name] for name in sorted(mine)}),
        differing=differing,
        same_ranks=same,
        world_size=commit.world_size,
        is_new=own is None,
        views={key: _make_view(view) for key, view in reader.table.views.items()},
    )


def is_in(rank: int, ranges: RankRanges) -> bool:
    """Say whether a rank is in one of the ranges."""
    return any(begin <= rank < end for begin, end in ranges)


def find_rank_values(reader: CheckpointReader, own: int | None) -> dict[str, RankRanges]:
    """Return the values that ranks keep for themselves: name -> the ranks that have one.

    Records of earlier versions lack this fact; then the parts alone say it.

    Args:
        own: a rank to which alone it matters what such a record says; None: all parts are read.
    """
    facts = reader.commit.facts
    if facts.per_rank is not None:
        return {name: some.ranks for some in facts.per_rank for name in some.names}
    shared = {name for holder in facts.holders for name in holder.names}
    found: dict[str, list[tuple[int, int]]] = {}
    for rank in range(reader.commit.world_size) if own is None else (own,):
        for name in reader.values_of(rank).keys() - shared:
            ranges = found.setdefault(name, [])
            if ranges and ranges[-1][1] == rank:
                ranges[-1] = (ranges[-1][0], rank + 1)
            else:
                ranges.append((rank, rank + 1))
    return {name: tuple(ranges) for name, ranges in sorted(found.items())}


class _Values(Mapping[str, Any]):
    """Decoded values by name: this rank's own where its number saved one, else the first that there is."""

    def __init__(
        self, reader: CheckpointReader, own: int | None, holders: Mapping[str, int], ranked: Mapping[str, RankRanges]
    ) -> None:
        self._reader = reader
        self._own = own
        self._holders = holders
        self._ranked = ranked
        self._decoded: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._holders, *self._ranked)))

    def __len__(self) -> int:
        return len(self._holders.keys() | self._ranked.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._holders or name in self._ranked

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        if name not in self._decoded:
            self._decoded[name] = self._read(name)
        return self._decoded[name]

    def _read(self, name: str) -> Any:
        # Of what all have alike too, its own: that part is needed for tensors anyway.
        rank = self._own
        if rank is None or name not in self._reader.part(rank).record.values:
            rank = self._holders[name] if name in self._holders else self._ranked[name][0][0]
        return _decode(self._reader, self._reader.part(rank).record.values, rank, name)


class _ByRank(Sequence[Any]):
    """One value of every saving rank, read when asked for; None where a rank lacks it."""

    def __init__(self, reader: CheckpointReader, name: str, ranges: RankRanges | None) -> None:
        self._reader = reader
        self._name = name
        self._ranges = ranges

    def __len__(self) -> int:
        return self._reader.commit.world_size

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return tuple(self[at] for at in range(*rank.indices(len(self))))
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        if self._ranges is not None and not is_in(rank, self._ranges):
            return None
        values = self._reader.values_of(rank)
        if self._ranges is None and self._name not in values:
            return None
        return _decode(self._reader, values, rank, self._name)


def _decode(reader: CheckpointReader, values: Mapping[str, Any], rank: int, name: str) -> Any:
    where = f"{reader.commit.ref}, part {rank}: {name}"
    if name not in values:
        raise Corrupt(f"{where}: the commit record says that this value is there, the part lacks it", rank=rank)
    return decode_value(values[name], where)


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
