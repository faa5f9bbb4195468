"""Plans, with NumPy as the judge: every byte is written once, by a rank that has it, and read to where it belongs."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tables import count_cover, guillotine_tilings, held, holding, rules, slices, worlds

from shardkeep.plan.checks import check_table
from shardkeep.plan.coverage import find_coverage_problem
from shardkeep.plan.owners import iter_pieces
from shardkeep.plan.reads import Segment, iter_segments, plan_ranges
from shardkeep.plan.shards import describe_shards, plan_all_outgoing, plan_outgoing, plan_own_outgoing, plan_shards
from shardkeep.plan.structure import Holding, decode_structure, digest_table, encode_structure, plan_layout
from shardkeep.spec.chunks import Chunk, intersect
from shardkeep.spec.dtypes import get_dtype
from shardkeep.spec.layout import chunk_at, coordinate_at

SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@given(guillotine_tilings())
@settings(max_examples=150)
def test_tilings_are_covers(tiling: tuple[tuple[int, ...], list[Chunk]]) -> None:
    assert find_coverage_problem(*tiling) is None


@given(guillotine_tilings(), st.data())
@settings(max_examples=300)
def test_a_changed_tiling_is_a_cover_only_if_numpy_says_so(
    tiling: tuple[tuple[int, ...], list[Chunk]], data: st.DataObject
) -> None:
    shape, chunks = tiling
    changed = list(chunks)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        how = data.draw(st.sampled_from(["drop", "repeat", "move", "resize", "swap"]))
        chunk = changed[at]
        if how == "repeat":
            changed.append(chunk)
        elif how == "drop" and len(changed) > 1:
            del changed[at]
        elif shape:
            dim = data.draw(st.integers(0, len(shape) - 1))
            step = data.draw(st.integers(-2, 2))
            numbers = list(chunk.offsets if how == "move" else chunk.sizes)
            numbers[dim] = numbers[dim] + step
            fields = (tuple(numbers), chunk.sizes) if how == "move" else (chunk.offsets, tuple(numbers))
            changed[at] = Chunk(*fields)
    inside = all(
        o >= 0 and s >= 0 and o + s <= n
        for chunk in changed
        for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )
    problem = find_coverage_problem(shape, changed)
    if not inside:
        assert problem is not None
        assert "does not lie within" in problem
        return
    counts = count_cover(shape, changed)
    assert (problem is None) == bool((counts == 1).all())
    if problem is not None and "overlap" in problem:
        assert counts.max() > 1
    elif problem is not None:
        missing, first = int(problem.partition(" of ")[0]), problem.rpartition("at ")[2]
        assert 1 <= missing <= (counts == 0).sum()
        assert counts[tuple(int(i) for i in first.strip("[]").split(",") if i)] == 0


@given(worlds())
@settings(max_examples=150)
def test_every_byte_is_written_once_by_a_rank_that_holds_it(drawn: tuple[int, list[Holding]]) -> None:
    world, holdings = drawn
    table = plan_layout(holdings)
    check_table(table, world, where="test")
    of_rank = {h.ranks[0]: {t.key: t for t in h.structure.tensors} for h in holdings}
    for key, record in table.tensors.items():
        pieces = list(iter_pieces(record, table))
        assert (count_cover(record.shape, [chunk for chunk, _ in pieces]) == 1).all()
        assert find_coverage_problem(record.shape, [chunk for chunk, _ in pieces]) is None
        for chunk, owner in pieces:
            tensor = of_rank[owner][key]
            if tensor.explicit:
                assert chunk in tensor.chunks
            elif tensor.mesh is not None and 0 not in record.shape:
                at = coordinate_at(tensor.mesh.shape, tensor.mesh.ranks.index(owner))
                assert chunk_at(record.shape, tensor.mesh.shape, tensor.placements, at) == chunk
    everyone = plan_all_outgoing(table)
    for rank in range(world):
        mine = plan_outgoing(table, rank)
        assert mine == everyone.get(rank, [])
        own = {t.key: (t.dtype, t.shape) for t in of_rank[rank].values() if t.key in table.per_rank}
        _check_files(rank, [*mine, *plan_own_outgoing(own)])


def _check_files(rank: int, outgoing: list) -> None:  # type: ignore[type-arg]
    for limit_bytes in (1, 300, 1 << 40):
        plans = plan_shards(outgoing, rank, limit_bytes=limit_bytes)
        assert len({plan.name for plan in plans}) == len(plans)
        shards, chunks, own = describe_shards(plans)
        assert [shard.name for shard in shards] == [plan.name for plan in plans]
        stored = {(key, stored.chunk) for key, some in chunks.items() for stored in some}
        assert stored == {(o.key, o.chunk) for o in outgoing if not o.per_rank}
        assert set(own) == {o.key for o in outgoing if o.per_rank}
        for plan in plans:
            at = len(plan.header)
            for item in plan.items:
                assert (item.begin, item.end - item.begin) == (at, item.outgoing.size_bytes)
                assert item.begin % get_dtype(item.outgoing.dtype).itemsize_bytes == 0
                at = item.end
            assert at == plan.size_bytes
            data_bytes = plan.size_bytes - len(plan.header)
            assert data_bytes <= limit_bytes or sum(item.end > item.begin for item in plan.items) == 1


@given(worlds())
@settings(max_examples=60)
def test_the_plan_does_not_depend_on_who_posts_first_or_how_ranks_are_grouped(
    drawn: tuple[int, list[Holding]],
) -> None:
    world, holdings = drawn
    table = plan_layout(holdings)
    alike: dict[bytes, list[int]] = {}
    for one in holdings:
        alike.setdefault(encode_structure(one.structure), []).append(one.ranks[0])
    grouped = [Holding(ranks=tuple(ranks), structure=decode_structure(data)) for data, ranks in alike.items()]
    assert plan_layout(grouped[::-1]) == table
    assert digest_table(plan_layout(holdings[::-1]), world) == digest_table(table, world)
    assert digest_table(table, world + 1) != digest_table(table, world)


@given(st.data(), st.integers(1, 8), st.integers(40, 120))
@settings(max_examples=40)
def test_replicas_are_spread_evenly(data: st.DataObject, world: int, count: int) -> None:
    """Longest-processing-time-first: at most 4/3 of the best there is, and no rank idles beside a busy one."""
    sizes = data.draw(st.lists(st.integers(64, 4000), min_size=count, max_size=count))
    sharded, _ = data.draw(rules(world, (64,)))
    tensors = [held(f"model/t{at}", (size,)) for at, size in enumerate(sizes)]
    parts = [
        holding(
            [rank],
            *tensors,
            *(
                [held("model/s", (64,), mesh=sharded, placements=("S0",) + ("R",) * (len(sharded.shape) - 1))]
                if rank in sharded.ranks
                else []
            ),
        )
        for rank in range(world)
    ]
    outgoing = plan_all_outgoing(plan_layout(parts))
    loads = [sum(piece.size_bytes for piece in outgoing.get(rank, [])) for rank in range(world)]
    assert max(loads) <= 1.34 * max(sum(loads) / world, 4 * max(sizes), 4 * 64)


def test_replicated_shards_and_replicas_share_one_balance() -> None:
    """HSDP beside DDP-like tensors: what one group of holders writes weighs in the choice of the other."""
    from shardkeep.spec.layout import Mesh

    mesh = Mesh(shape=(2, 4), ranks=tuple(range(8)))
    tensors = [held(f"model/h{at:02}", (400 + at,), mesh=mesh, placements=("R", "S0")) for at in range(40)]
    tensors += [held(f"model/r{at:02}", (100 + at,), mesh=mesh, placements=("R", "R")) for at in range(40)]
    tensors += [held(f"model/c{at:02}", (100 + at,), mesh=mesh, placements=("S0", "R")) for at in range(40)]
    outgoing = plan_all_outgoing(plan_layout([holding(range(8), *tensors)]))
    loads = [sum(piece.size_bytes for piece in outgoing.get(rank, [])) for rank in range(8)]
    assert max(loads) <= 1.1 * sum(loads) / 8


@given(st.data(), SHAPES, st.sampled_from([1, 2, 4]), st.integers(0, 50))
@settings(max_examples=200)
def test_segments_move_what_both_chunks_hold(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int, begin: int
) -> None:
    def draw_chunk() -> Chunk:
        offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        return Chunk(offsets, tuple(data.draw(st.integers(1, n - o)) for o, n in zip(offsets, shape, strict=True)))

    stored, wanted = draw_chunk(), draw_chunk()
    full = np.arange(1, math.prod(shape) * itemsize + 1, dtype=np.uint32).reshape(*shape, itemsize)
    file = np.concatenate([np.zeros(begin, np.uint32), full[slices(stored)].ravel()])
    target = np.zeros(wanted.numel * itemsize, np.uint32)
    segments = list(iter_segments(stored, begin, wanted, itemsize))
    for segment in segments:
        assert segment.length > 0
        target[segment.target : segment.target + segment.length] = file[
            segment.source : segment.source + segment.length
        ]
    expected = np.where(count_cover(shape, [stored])[..., None] == 1, full, 0)[slices(wanted)]
    assert (target == expected.ravel()).all()
    assert all(
        a.source + a.length <= b.source and a.target + a.length <= b.target for a, b in itertools.pairwise(segments)
    )
    common = intersect(stored, wanted)
    assert sum(segment.length for segment in segments) == (common.numel if common else 0) * itemsize


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 80)), max_size=12),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 5),
)
@settings(max_examples=200)
def test_ranges_cover_the_segments_in_whole_leaves_once(drawn: list[tuple[int, int]], leaf: int, leaves: int) -> None:
    block = leaf * leaves
    size = max((source + length for source, length in drawn), default=0) + 3
    ranges = plan_ranges([Segment(source, 0, length) for source, length in drawn], size, leaf, block)
    wanted = {byte // leaf for source, length in drawn for byte in range(source, source + length)}
    read = [index for begin, end in ranges for index in range(begin // leaf, -(-end // leaf))]
    assert read == sorted(wanted)
    for begin, end in ranges:
        assert begin % leaf == 0
        assert end % leaf == 0 or end == size
        assert 0 < end - begin <= block
        assert begin // block == (end - 1) // block
