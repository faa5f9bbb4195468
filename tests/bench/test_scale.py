"""Big jobs, without tensors: what the simulator describes is sound, and no cost grows with the square of anything."""

from __future__ import annotations

import math

import pytest

from shardkeep.bench.scale import find_worst, measure_job, plan_jobs
from shardkeep.bench.scale_jobs import FAMILIES, Topology, make_job
from shardkeep.bench.scale_listing import measure_ls_ms
from shardkeep.errors import UsageError
from shardkeep.plan.coverage import CoverageProof, find_coverage_problem
from shardkeep.plan.owners import iter_pieces
from shardkeep.plan.structure import decode_structure, encode_structure, plan_layout


def test_jobs_have_the_parameters_that_were_asked_for() -> None:
    for job in plan_jobs(16384, 10**12):
        assert 0.9e12 < job.params <= 1e12
        assert job.topology.ranks == 16384
        assert sum(len(holding.ranks) for holding in job.holdings) == 16384
        for tensor in job.holdings[0].structure.tensors:
            assert tensor.mesh is None or len(tensor.placements) == len(tensor.mesh.shape)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name == "deepseek-named")) for name in FAMILIES]
)
@pytest.mark.parametrize(
    "topology", [Topology(ranks=8, tp=2, pp=2, ep=2), Topology(ranks=6, tp=1, pp=1, ep=3)], ids=str
)
def test_every_family_is_a_sound_job(family: str, topology: Topology) -> None:
    job = make_job(family, topology, 10**9)
    table = plan_layout(job.holdings)
    proof = CoverageProof(table)
    for record in list(table.tensors.values())[::29]:
        assert proof.find_problem(record) is None
        assert find_coverage_problem(record.shape, [chunk for chunk, _ in iter_pieces(record, table)]) is None
    model = sum(math.prod(record.shape) for key, record in table.tensors.items() if key.startswith("model/"))
    assert model == job.params
    rank = topology.ranks - 1
    own = next(holding for holding in job.holdings if rank in holding.ranks)
    assert [tensor.key for tensor in job.locals_of(rank)] == [tensor.key for tensor in own.structure.tensors]


def test_a_topology_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(UsageError, match="divide"):
        Topology(ranks=12, tp=8)


def test_a_structure_names_a_mesh_of_thousands_once() -> None:
    job = make_job("llama", Topology(ranks=4096), 10**11)
    data = encode_structure(job.holdings[0].structure)
    assert decode_structure(data) == job.holdings[0].structure
    assert len(data) < 4096 * 8 + 300 * len(job.holdings[0].structure.tensors)


def test_a_thousand_ranks_in_little_time() -> None:
    """A quiet machine needs a tenth of these; what is quadratic in ranks, or ranks times tensors, needs minutes."""
    measured = [measure_job(job) for job in plan_jobs(1024, 10**11)[::3]]
    for figures in measured:
        assert figures["merge_s"] < 10
        assert figures["restart_check_s"] < 1
        assert figures["commit_bytes"] < 5_000_000
        assert figures["restart_parts"] <= 32
        assert figures["reshard_parts"] <= 64
    worst = find_worst(measured)
    assert set(worst) == {"scale.commit_s", "scale.proof_s", "scale.reshard_plan_s", "scale.restart_plan_s"}
    assert worst["scale.commit_s"] < 3
    assert worst["scale.proof_s"] < 1
    assert worst["scale.restart_plan_s"] < 3
    assert worst["scale.reshard_plan_s"] < 6


def test_ls_is_timed_as_a_user_calls_it() -> None:
    assert 1 < measure_ls_ms(3) < 60_000
