"""Agree on one plan for a save: which rank writes what, cached as long as nobody's structure changes.

Two phases over the group. In the first every rank posts digests only; while they are as they were, that is all.
In the second the lowest rank of each distinct structure (or set of values, or of fingerprints) posts it in full, the
coordinator merges, and every rank reads the one result.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import xxhash
from msgspec import Struct

from shardkeep import knobs
from shardkeep.engine.fingerprints import combine, find_differing, fingerprint_tensors
from shardkeep.errors import StateMismatch, UsageError
from shardkeep.format.records import LayoutTable, RankValues, ValueHolder, ViewRecord
from shardkeep.format.values import encode_value
from shardkeep.plan.coverage import CoverageProof
from shardkeep.plan.structure import (
    HeldTensor,
    Holding,
    Structure,
    decode_structure,
    digest_table,
    encode_structure,
    plan_layout,
)
from shardkeep.ranks.base import Group
from shardkeep.spec.tensors import Captured


class _Summary(Struct, kw_only=True):
    """What a rank says of itself in the first phase: digests, and what it is about to save.

    `plan` is the digest of the plan it remembers; `fingerprints` has one digest for each mesh of holders.
    """

    step: int
    plan: str
    structure: str
    values: str
    fingerprints: dict[str, str]


class _Opening(Struct, kw_only=True):
    """The coordinator's answer: the number of this try, and per kind the classes of ranks to hear in full.

    No classes: nothing new there.
    """

    attempt: int
    structure: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]
    fingerprints: tuple[tuple[int, ...], ...]


class _Details(Struct, kw_only=True, omit_defaults=True):
    structure: bytes = b""
    values: dict[str, str] = {}
    own: tuple[str, ...] = ()
    fingerprints: dict[str, str] = {}


class _Merged(Struct, kw_only=True):
    table: LayoutTable | None
    holders: tuple[ValueHolder, ...]
    differing: tuple[str, ...]
    per_rank: tuple[RankValues, ...]
    shard_limit_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The plan of one save, the same on every rank.

    Attributes:
        digest: the plan digest, over the table and the world size.
        attempt: the number of this try at the step.
        holders, differing, per_rank: as in `format.records.Facts`.
        shard_limit_bytes: the coordinator's knob, so that all ranks cut alike.
        captured, values: this rank's state; its values also encoded.
    """

    table: LayoutTable
    digest: str
    attempt: int
    holders: tuple[ValueHolder, ...]
    differing: tuple[str, ...]
    per_rank: tuple[RankValues, ...]
    shard_limit_bytes: int
    captured: Captured
    values: dict[str, msgspec.Raw]


@dataclass(slots=True, kw_only=True)
class PlanCache:
    """What one rank remembers from its last agreed plan; `structures` on the coordinator only.

    An empty `digest` says that it remembers nothing to go on with.
    """

    table: LayoutTable | None = None
    digest: str = ""
    shard_limit_bytes: int = 0
    structures: tuple[str, ...] = ()
    differing: frozenset[str] = frozenset()


def describe_structure(captured: Captured) -> Structure:
    """Return what this rank holds, without bytes."""
    held = tuple(
        HeldTensor(
            key=tensor.key,
            section=tensor.section,
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            role=tensor.role,
            mesh=tensor.mesh,
            placements=tensor.placements,
            chunks=tuple(piece.chunk for piece in tensor.pieces) if tensor.explicit else (),
            explicit=tensor.explicit,
            trainable=tensor.trainable,
            per_rank=tensor.per_rank,
            device=tensor.device,
        )
        for tensor in captured.tensors
    )
    views = {
        key: ViewRecord(
            base=view.base,
            offset_bytes=view.offset_bytes,
            dtype=view.dtype,
            shape=view.shape,
            strides=view.strides,
            role=view.role,
            trainable=view.trainable,
        )
        for key, view in captured.views.items()
    }
    return Structure(tensors=held, aliases=captured.aliases, views=views)


def encode_values(captured: Captured) -> dict[str, msgspec.Raw]:
    """Return the values as JSON text. Raises UnsupportedState for what cannot be stored without pickle.

    As text, because the order of a dict's keys is part of the value, and a record's encoder sorts keys.
    """
    return {
        name: msgspec.Raw(msgspec.json.encode(encode_value(value, name)))
        for name, value in sorted(captured.values.items())
    }


def digest_values(values: Mapping[str, msgspec.Raw], per_rank: frozenset[str]) -> dict[str, str]:
    """Return a digest of each value that should be the same on all ranks that have it."""
    return {name: xxhash.xxh3_128_hexdigest(text) for name, text in values.items() if name not in per_rank}


def agree_plan(
    group: Group, cache: PlanCache, step: int, capture: Callable[[], Captured], choose_attempt: Callable[[], int]
) -> Agreed:
    """Return the plan that all ranks follow for this save.

    Args:
        capture: takes this rank's state apart; its exception stops every rank.
        choose_attempt: run by the coordinator alone; its exception stops every rank.

    Raises:
        UnsupportedState: a value cannot be stored. StateMismatch: ranks hold different things under one name.
        UsageError: ranks save different steps. PeerFailure: the same, found by another rank.
    """
    values: dict[str, msgspec.Raw] = {}
    details = _Details()
    taken: list[Captured] = []

    def summarize() -> bytes:
        captured = capture()
        taken.append(captured)
        values.update(encode_values(captured))
        details.structure = encode_structure(describe_structure(captured))
        details.values = digest_values(values, captured.per_rank_values)
        details.own = tuple(sorted(captured.per_rank_values & values.keys()))
        if group.world_size > 1:
            details.fingerprints = fingerprint_tensors(captured.tensors, skip=cache.differing)
        summary = _Summary(
            step=step,
            plan=cache.digest,
            structure=xxhash.xxh3_128_hexdigest(details.structure),
            values=xxhash.xxh3_128_hexdigest(msgspec.json.encode((details.values, details.own))),
            fingerprints=combine(details.fingerprints, cache.table),
        )
        return msgspec.json.encode(summary)

    def look() -> bytes:
        with _without_collector():
            return summarize()

    answer = group.agree("save.open", look, lambda found: _open(found, cache, choose_attempt))
    opening = msgspec.json.decode(answer, type=_Opening)
    if opening.structure or opening.values:
        merged = _exchange(group, cache, opening, details)
        holders, differing, own = merged.holders, merged.differing, merged.per_rank
    else:
        holders, differing = (ValueHolder(0, tuple(sorted(details.values))),), ()
        own = _place_own([(tuple(range(group.world_size)), details.own)])
    assert cache.table is not None
    return Agreed(
        table=cache.table,
        digest=cache.digest,
        attempt=opening.attempt,
        holders=holders,
        differing=differing,
        per_rank=own,
        shard_limit_bytes=cache.shard_limit_bytes,
        values=values,
        captured=taken[0],
    )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the cyclic collector from walking a training process's whole heap while training stands still.

    Taking a state apart makes many small objects, and no garbage: they would trigger it, for a tenth of a second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _open(found: list[bytes], cache: PlanCache, choose_attempt: Callable[[], int]) -> bytes:
    summaries = [msgspec.json.decode(data, type=_Summary) for data in found]
    if len({s.step for s in summaries}) > 1:
        steps = ", ".join(f"rank {rank}: {s.step}" for rank, s in enumerate(summaries))
        raise UsageError(
            f"the ranks are about to save different steps ({steps}); nothing was saved",
            advice="call the manager with the same step on every rank",
        )
    structures = tuple(s.structure for s in summaries)
    known = (
        bool(cache.digest)
        and cache.structures == structures
        and all(s.plan == cache.digest for s in summaries)
        and not find_differing([(rank, s.fingerprints) for rank, s in enumerate(summaries)])
    )
    if not known:
        # ORDER: the digest comes back when the plan for these structures is agreed; what fails before must not
        # leave a plan for other ones behind.
        cache.structures, cache.digest = structures, ""
    values = _pattern([s.values for s in summaries])
    return msgspec.json.encode(
        _Opening(
            attempt=choose_attempt(),
            structure=() if known else _pattern(structures),
            values=() if known and len(values) == 1 else values,
            fingerprints=() if known else _pattern([tuple(sorted(s.fingerprints.items())) for s in summaries]),
        )
    )


def _exchange(group: Group, cache: PlanCache, opening: _Opening, details: _Details) -> _Merged:
    """Run the second phase and remember its table."""
    posted = _Details(
        structure=details.structure if _is_lowest(group.rank, opening.structure) else b"",
        values=details.values if _is_lowest(group.rank, opening.values) else {},
        own=details.own if _is_lowest(group.rank, opening.values) else (),
        fingerprints=details.fingerprints if _is_lowest(group.rank, opening.fingerprints) else {},
    )
    verdict = group.agree(
        "save.plan", lambda: msgspec.json.encode(posted), lambda found: _merge(found, opening, cache)
    )
    merged = msgspec.json.decode(verdict, type=_Merged)
    if merged.table is not None:
        prove_coverage(group, merged.table)
        cache.table = merged.table
        cache.digest = digest_table(merged.table, group.world_size)
        cache.shard_limit_bytes = merged.shard_limit_bytes
        cache.differing = frozenset(merged.table.per_rank)
    return merged


def _is_lowest(rank: int, classes: Sequence[Sequence[int]]) -> bool:
    return any(ranks[0] == rank for ranks in classes)


def _pattern(digests: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks grouped by equal digest, by ascending lowest rank."""
    groups: dict[Hashable, list[int]] = {}
    for rank, digest in enumerate(digests):
        groups.setdefault(digest, []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values())


def _merge(found: list[bytes], opening: _Opening, cache: PlanCache) -> bytes:
    details = [msgspec.json.decode(data, type=_Details) for data in found]
    holders, differing = _place_values([(ranks[0], details[ranks[0]].values) for ranks in opening.values])
    table = _merge_structures(details, opening, cache) if opening.structure else None
    return msgspec.json.encode(
        _Merged(
            table=table,
            holders=holders,
            differing=differing,
            per_rank=_place_own([(ranks, details[ranks[0]].own) for ranks in opening.values]),
            shard_limit_bytes=knobs.get_int("SHARD_BYTES"),
        )
    )


def _merge_structures(details: list[_Details], opening: _Opening, cache: PlanCache) -> LayoutTable:
    holdings = [
        Holding(ranks=ranks, structure=decode_structure(details[ranks[0]].structure)) for ranks in opening.structure
    ]
    roles = {tensor.key: tensor.role for holding in holdings for tensor in holding.structure.tensors}
    differing = find_differing([(ranks[0], details[ranks[0]].fingerprints) for ranks in opening.fingerprints])
    refused = [
        f"{key}: the parameter's content on rank {a} is not that on rank {b}"
        for key, (a, b) in differing.items()
        if roles.get(key) == "parameter"
    ]
    if refused:
        raise StateMismatch(
            "parameters that should be the same on all ranks differ, so nothing was saved",
            problems=refused,
            advice="give each rank's parameter its own name (experts: their global number), "
            "or wrap it in sk.PerRank(...) or sk.Sharded(...)",
        )
    return plan_layout(holdings, per_rank=frozenset(differing) | (cache.differing & set(roles)))


def _place_values(tables: list[tuple[int, dict[str, str]]]) -> tuple[tuple[ValueHolder, ...], tuple[str, ...]]:
    placed: set[str] = set()
    holders: list[ValueHolder] = []
    for rank, table in tables:
        names = tuple(sorted(set(table) - placed))
        placed.update(names)
        if names or rank == 0:
            holders.append(ValueHolder(rank, names))
    return tuple(holders), tuple(find_differing(tables))


def _place_own(classes: Sequence[tuple[Sequence[int], tuple[str, ...]]]) -> tuple[RankValues, ...]:
    """Return which ranks keep which values for themselves, from the names that the ranks of each class have."""
    found: dict[str, list[int]] = {}
    for ranks, names in classes:
        for name in names:
            found.setdefault(name, []).extend(ranks)
    alike: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name, ranks in sorted(found.items()):
        alike.setdefault(_find_ranges(sorted(ranks)), []).append(name)
    return tuple(RankValues(tuple(names), ranges) for ranges, names in alike.items())


def _find_ranges(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending ranks as half-open ranges."""
    edges = [at for at in range(1, len(ranks)) if ranks[at] != ranks[at - 1] + 1]
    bounds = itertools.pairwise([0, *edges, len(ranks)])
    return tuple((ranks[begin], ranks[end - 1] + 1) for begin, end in bounds)


def prove_coverage(group: Group, table: LayoutTable) -> None:
    """Prove, split over the ranks by tensor, that the stored pieces tile every tensor.

    Raises:
        StateMismatch: on every rank (as PeerFailure where another rank found it).
    """

    def work() -> bytes:
        problems: list[str] = []
        proof = CoverageProof(table)
        for key in itertools.islice(table.tensors, group.rank, None, group.world_size):
            problem = proof.find_problem(table.tensors[key])
            if problem:
                problems.append(f"{key}: {problem}")
        if problems:
            raise StateMismatch(
                "the ranks' chunks do not make whole tensors, so nothing was saved", problems=problems
            )
        return b""

    group.agree("save.proof", work, lambda found: b"")
