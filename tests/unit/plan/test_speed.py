"""Large jobs are planned in time that grows with what there is, not with tensors times ranks squared."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from shardkeep.plan.checks import check_table
from shardkeep.plan.coverage import find_coverage_problem
from shardkeep.plan.owners import iter_pieces
from shardkeep.plan.shards import plan_outgoing, plan_shards
from shardkeep.plan.structure import digest_table, plan_layout
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Mesh
from tests.support.tables import held, holding

T = TypeVar("T")
RANKS = tuple(range(256))


def timed(limit_s: float, work: Callable[[], T]) -> T:
    """Run something within a generous limit of this process's time (a quiet machine needs a tenth)."""
    start = time.process_time()
    result = work()
    taken_s = time.process_time() - start
    assert taken_s < limit_s, f"took {taken_s:.1f} s"
    return result


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        (Mesh(shape=(256,), ranks=RANKS), ("S0",)),
        (Mesh(shape=(8, 32), ranks=RANKS), ("R", "S0")),
        (Mesh(shape=(32, 8), ranks=RANKS), ("SS0:8", "S0")),
        (None, ()),
    ],
    ids=["fsdp", "hsdp", "fsdp and tp", "ddp"],
)
def test_ten_thousand_tensors_on_256_ranks(mesh: Mesh | None, placements: tuple[str, ...]) -> None:
    tensors = [
        held(f"model/layers.{at:05}", (1000 + at, 64), mesh=mesh, placements=placements) for at in range(10_000)
    ]
    table = timed(12, lambda: plan_layout([holding(RANKS, *tensors)]))
    timed(2, lambda: digest_table(table, 256))
    timed(4, lambda: check_table(table, 256, where="x"))
    outgoing = timed(6, lambda: plan_outgoing(table, 17))
    timed(4, lambda: plan_shards(outgoing, 17, limit_bytes=5_000_000_000))
    row = Chunk((500, 0), (1, 64))

    def look() -> int:
        return sum(len(list(iter_pieces(record, table, within=row))) for record in table.tensors.values())

    assert timed(6, look) == 10_000
    for record in list(table.tensors.values())[::2500]:
        assert find_coverage_problem(record.shape, [chunk for chunk, _ in iter_pieces(record, table)]) is None
