"""Plan, proof, commit, restart and resharding of big jobs, timed over their metadata with the functions that do it.

No tensor is made: a job is what its ranks say of theirs (`scale_jobs`). The posts of thousands of ranks are real,
made once for each kind of rank and outside of the timing; what is timed is what one rank computes: the coordinator,
or one rank of a restart. It is one thread's work, so seconds are those of its core: waiting for the network and for
storage is in no figure, and neither are other programs.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import msgspec

from shardkeep.bench.scale_jobs import Job, Topology, make_job
from shardkeep.bench.scale_listing import measure_command_ms, start_run, write_commit
from shardkeep.bench.scale_listing import measure_ls_ms as measure_ls_ms
from shardkeep.bench.scale_ranks import SimulatedJob, make_part
from shardkeep.engine.catalog import make_catalog
from shardkeep.engine.contents import make_commit, make_index
from shardkeep.engine.opened import CheckpointReader
from shardkeep.engine.planning import Agreed
from shardkeep.engine.restore import check_wants, encode_wants, list_stored
from shardkeep.engine.run import WRITER, now, read_commit
from shardkeep.format.names import COMMIT_RECORD, StepRef, format_part
from shardkeep.format.records import CommitRecord, Facts, PartSummary, encode_record
from shardkeep.plan.owners import iter_pieces
from shardkeep.spec.chunks import Chunk
from shardkeep.storage.memory import MemoryStore

RUN_ID: Final = "5" * 32
REF: Final = StepRef(step=1000, generation=1)
_KEYS: Final = ("commit_s", "restart_plan_s", "reshard_plan_s", "proof_s")


def plan_jobs(ranks: int, params: int) -> list[Job]:
    """Return the jobs that are measured: each family on the parallel dimensions that its users give it."""
    tp = math.gcd(ranks, 8)
    pp = math.gcd(ranks // tp, 16)
    ep = math.gcd(ranks // pp, 64)
    return [
        make_job("llama", Topology(ranks=ranks, tp=tp), params),
        make_job("llama", Topology(ranks=ranks, tp=tp, pp=pp), params),
        make_job("gpt", Topology(ranks=ranks, tp=tp), params),
        make_job("deepseek", Topology(ranks=ranks, tp=tp, pp=pp, ep=ep), params),
    ]


def measure_scale(*, ranks: int = 16384, params: int = 10**12) -> dict[str, float]:
    """Return the worst of all jobs, in seconds.

    Keys: `scale.commit_s`, `scale.restart_plan_s`, `scale.reshard_plan_s`, `scale.proof_s`.
    """
    return find_worst([measure_job(job) for job in plan_jobs(ranks, params)])


def find_worst(measured: Collection[dict[str, float]]) -> dict[str, float]:
    """Return the figures that there are bars for, under their stable keys."""
    return {f"scale.{key}": max(figures[key] for figures in measured) for key in _KEYS}


def measure_job(job: Job) -> dict[str, float]:
    """Return one job's figures in seconds (`_s`), bytes and counts.

    `merge_s`: the coordinator's part of the first plan; `reopen_s`: of the plan of a later save, in `commit_s` too.
    """
    figures: dict[str, float] = {"params": job.params, "ranks": job.topology.ranks}
    simulated = SimulatedJob(job)
    agreed, first = simulated.agree()
    figures["merge_s"] = first["save.open"] + first["save.plan"]
    figures["proof_s"] = first["save.proof"]
    figures["tensors"] = len(agreed.table.tensors)
    agreed, later = simulated.agree()
    figures["reopen_s"] = later["total"]
    commit = _measure_commit(agreed, job.topology.ranks, figures)
    rank = job.topology.ranks // 2
    _measure_restore(commit, job, rank, "restart", figures)
    _measure_restore(commit, _reshape(job), job.topology.ranks // 4, "reshard", figures)
    return figures


def timed(figures: dict[str, float], name: str, work: Callable[[], object]) -> None:
    """Add to a figure the seconds that something takes of one core; it waits for nothing."""
    start = time.process_time()
    work()
    figures[name] = figures.get(name, 0.0) + time.process_time() - start


def measure_big_ms(job: Job) -> dict[str, float]:
    """Return the milliseconds of `shardkeep ls` and `shardkeep show` on one checkpoint of a job."""
    agreed, _ = SimulatedJob(job).agree()
    facts = Facts(layout=agreed.table, holders=agreed.holders, per_rank=agreed.per_rank, created_at=now())
    receipts = [msgspec.json.encode(PartSummary(100_000, "0" * 64, 10**9, 3))] * job.topology.ranks
    with tempfile.TemporaryDirectory(prefix="shardkeep-bench-") as folder:
        run_id = start_run(Path(folder))
        write_commit(Path(folder), make_commit(run_id, REF, agreed.digest, facts, receipts))
        return {name: measure_command_ms(name, folder) for name in ("ls", "show")}


def _measure_commit(agreed: Agreed, ranks: int, figures: dict[str, float]) -> CommitRecord:
    """Time what the coordinator adds to a save after the first: facts, its part's record, receipts, commit record."""
    index = make_index(agreed.table, agreed.shard_limit_bytes)
    assert index is None, "the jobs shard their models"
    receipts = [
        msgspec.json.encode(PartSummary(100_000 + rank, hashlib.sha256(b"%d" % rank).hexdigest(), 10**9, 3))
        for rank in range(ranks)
    ]
    own = make_part(agreed.table, agreed.digest, REF, 0, ranks, RUN_ID)
    made: list[CommitRecord] = []
    sizes: list[int] = []

    def commit() -> None:
        facts = Facts(
            layout=agreed.table,
            holders=agreed.holders,
            differing=agreed.differing,
            per_rank=agreed.per_rank,
            created_at=now(),
        )
        part = encode_record(msgspec.structs.replace(own, facts=facts), writer=WRITER)
        hashlib.sha256(part).hexdigest()
        made.append(make_commit(RUN_ID, REF, agreed.digest, facts, receipts))
        sizes.extend((len(encode_record(made[0], writer=WRITER)), len(part)))

    timed(figures, "commit_s", commit)
    figures["commit_s"] += figures["reopen_s"]
    figures["commit_bytes"], figures["part0_bytes"] = sizes
    return made[0]


def _reshape(job: Job) -> Job:
    """Return the same model on half the ranks, with other tensor and pipeline parallelism."""
    old = job.topology
    topology = Topology(
        ranks=max(old.ranks // 2, 1), tp=max(old.tp // 2, 1), pp=max(old.pp // 2, 1), ep=max(old.ep // 2, 1)
    )
    return make_job(job.family, topology, job.params)


def _measure_restore(commit: CommitRecord, job: Job, rank: int, name: str, figures: dict[str, float]) -> None:
    """Time one rank from the commit record's bytes to the list of its copies, as `job` restores it."""
    wanted = job.locals_of(rank)
    store, commit = _store_parts(commit, [(t.key, p.chunk) for t in wanted for p in t.pieces], rank)
    consumed = frozenset(tensor.key for tensor in wanted)
    ranks = job.topology.ranks
    posts: list[bytes] = []
    counts: list[int] = []

    def plan() -> None:
        found = read_commit(store, REF, run_id=RUN_ID)
        reader = CheckpointReader(store, found)
        catalog = make_catalog(reader, rank, ranks)
        values = frozenset(value for value in catalog.values if catalog.values[value] is not None)
        posts.append(encode_wants(list_stored(found), consumed, values, (), catalog.differing))
        own = rank if catalog.same_ranks else None
        copies = reader.plan_copies(((t.key, p.chunk, p.data) for t in wanted for p in t.pieces), own_rank=own)
        counts.extend((len({part.rank for part, _, _ in copies}), sum(len(some) for _, _, some in copies)))

    timed(figures, f"{name}_plan_s", plan)
    figures[f"{name}_parts"], figures[f"{name}_copies"] = counts
    reader = CheckpointReader(store, commit)
    timed(figures, f"{name}_check_s", lambda: check_wants(posts * ranks, reader, strict=False))


def _store_parts(
    commit: CommitRecord, wanted: list[tuple[str, Chunk]], rank: int
) -> tuple[MemoryStore, CommitRecord]:
    """Return a store with the commit record and those parts that a rank needs for what it wants."""
    table, ranks = commit.facts.layout, commit.world_size
    pieces = (piece for key, chunk in wanted for piece in iter_pieces(table.tensors[key], table, within=chunk))
    owners = {0, rank, *(owner for _, owner in pieces)}
    store, parts = MemoryStore(), list(commit.parts)
    for owner in sorted(owners):
        part = make_part(table, commit.plan, REF, owner, ranks, RUN_ID)
        data = encode_record(msgspec.structs.replace(part, facts=commit.facts if owner == 0 else None), writer=WRITER)
        store.put(REF.key(format_part(owner)), data)
        parts[owner] = PartSummary(len(data), hashlib.sha256(data).hexdigest(), 10**9, len(part.shards))
    commit = msgspec.structs.replace(commit, parts=tuple(parts))
    store.put(REF.key(COMMIT_RECORD), encode_record(commit, writer=WRITER))
    return store, commit
