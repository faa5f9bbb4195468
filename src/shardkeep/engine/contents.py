"""What a save says of itself beside its tensors: facts, commit record, Hugging Face index."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from shardkeep.engine.environment import describe_environment
from shardkeep.engine.planning import Agreed
from shardkeep.engine.run import now
from shardkeep.engine.writer import ShardFile
from shardkeep.format.hf_index import encode_hf_index
from shardkeep.format.names import StepRef
from shardkeep.format.records import CommitRecord, Facts, FileRecord, LayoutTable, PartSummary, encode_metrics
from shardkeep.plan.shards import plan_all_outgoing, plan_shards


def make_facts(
    agreed: Agreed,
    *,
    metrics: Mapping[str, float],
    healthy: bool,
    assets: Mapping[str, bytes],
    overrides: Mapping[str, str],
) -> Facts:
    """Return what only the coordinator knows of a checkpoint, for its part and the commit record."""
    return Facts(
        layout=agreed.table,
        holders=agreed.holders,
        differing=agreed.differing,
        per_rank=agreed.per_rank,
        metrics=encode_metrics(metrics),
        healthy=healthy,
        created_at=now(),
        environment=describe_environment(),
        assets={
            name: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for name, data in sorted(assets.items())
        },
        overrides=dict(sorted(overrides.items())),
    )


def make_commit(run_id: str, ref: StepRef, plan: str, facts: Facts, receipts: Sequence[bytes]) -> CommitRecord:
    """Return the commit record that follows from the receipts of all ranks, by rank."""
    decoder = msgspec.json.Decoder(PartSummary)
    parts = tuple(map(decoder.decode, receipts))
    return CommitRecord(run_id=run_id, ref=ref, world_size=len(parts), plan=plan, parts=parts, facts=facts)


class _Receipt(PartSummary, frozen=True, gc=False, array_like=True):
    """What a rank tells the coordinator of its part; the commit record takes its first fields alone."""

    unchanged_bytes: int = 0


def make_receipt(summary: PartSummary, files: Sequence[ShardFile]) -> bytes:
    """Return the receipt of a part: how the commit record names it, and the bytes that were not written again."""
    receipt = _Receipt(
        size_bytes=summary.size_bytes,
        sha256=summary.sha256,
        shard_bytes=summary.shard_bytes,
        shard_count=summary.shard_count,
        unchanged_bytes=sum(file.plan.size_bytes for file in files if file.is_cloned),
    )
    return msgspec.json.encode(receipt)


def count_unchanged(receipts: Sequence[bytes]) -> int:
    """Return the bytes of all ranks that were not written again."""
    return sum(msgspec.json.decode(data, type=_Receipt).unchanged_bytes for data in receipts)


def make_index(table: LayoutTable, limit_bytes: int) -> bytes | None:
    """Return the Hugging Face index over the model's tensors, or None when some are not stored whole."""
    sections = {"model", "frozen"}
    model = {key: r for key, r in table.tensors.items() if r.section in sections and key.startswith("model/")}
    whole_only = all(not r.layout.boxes and set(r.layout.placements) <= {"R"} for r in model.values())
    if not model or not whole_only:
        return None
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for rank, outgoing in sorted(plan_all_outgoing(table, sections=frozenset(sections)).items()):
        for plan in plan_shards(outgoing, rank, limit_bytes=limit_bytes):
            if plan.section in sections:
                for item in plan.items:
                    weight_map[item.outgoing.name] = plan.name
                    total_bytes += item.end - item.begin
    return encode_hf_index(weight_map, total_bytes)
