"""One save: plan, write every rank's part, commit.

The life of a save, on every rank: capture -> agree on the plan -> stream own shards -> digests -> part -> receipt;
the coordinator, with all receipts: commit record. Only that last write makes the checkpoint exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from shardkeep.engine.environment import describe_environment
from shardkeep.engine.planning import Agreed, PlanCache, agree_plan
from shardkeep.engine.run import WRITER, list_generations, now, read_generation, read_run_id
from shardkeep.engine.writer import remove_quietly, write_part
from shardkeep.errors import AlreadyExists, BarrierTimeout, Fenced, NotFound, PeerFailure, StorageError, UsageError
from shardkeep.format.hf_index import encode_hf_index
from shardkeep.format.names import (
    COMMIT_RECORD,
    HF_INDEX,
    StepRef,
    check_step,
    find_step,
    format_digests,
    format_generation,
    format_part,
)
from shardkeep.format.records import (
    CommitRecord,
    Facts,
    FileRecord,
    LayoutTable,
    PartRecord,
    PartSummary,
    StepChain,
    encode_metrics,
    encode_record,
)
from shardkeep.plan.shards import ShardPlan, plan_all_outgoing, plan_outgoing, plan_own_outgoing, plan_shards
from shardkeep.ranks.base import Group
from shardkeep.spec.tensors import Captured
from shardkeep.storage.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """What the user says about one checkpoint.

    Attributes:
        metrics: finite or not, stored as given; retention may keep the best by them.
        healthy: False: kept, but never counted on by retention.
        assets: file name -> content, stored beside the shards (config.json, tokenizer.json).
        overrides: what this start changed on purpose when it resumed: name -> what it was and is.
        chain: what this rank saw of the steps since the last checkpoint.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    healthy: bool = True
    assets: Mapping[str, bytes] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    chain: StepChain | None = None


class Committed(Struct, frozen=True, kw_only=True):
    """What a save made, as every rank learns it: a few bytes, whatever the model and the number of ranks."""

    ref: StepRef
    shard_bytes: int


class Saver:
    """Saves checkpoints of one generation of one run. All ranks call `save` alike, one at a time."""

    def __init__(self, store: Store, group: Group, *, run_id: str, generation: int, start: int = 0) -> None:
        """Take the run, this start's generation, and the step that it resumed from."""
        self._store = store
        self._group = group
        self._run_id = run_id
        self._generation = generation
        self._newest = start
        self._cache = PlanCache()
        self._shards: tuple[object, list[ShardPlan]] | None = None

    def save(self, step: int, capture: Callable[[], Captured], options: SaveOptions) -> Committed:
        """Save one checkpoint; on return on any rank it is committed and durable.

        Args:
            step: optimizer steps done; equal on all ranks.
            capture: takes this rank's state apart.

        Raises:
            Fenced: a later generation owns the run, or the root is another run's now. AlreadyExists: this generation
            committed the step before. UsageError: the step lies before that of the resume or of the last save.
            StateMismatch, UnsupportedState: the state cannot be saved; nothing was written.
            StorageError: this rank could not write. PeerFailure: another rank failed, and why.
            The live state is untouched in every case, and the same step can be saved again.
        """
        check_step(step)
        agreed = agree_plan(self._group, self._cache, step, capture, lambda: self._choose_attempt(step))
        ref = StepRef(step=step, generation=self._generation, attempt=agreed.attempt)
        facts: Facts | None = None
        plans: list[ShardPlan] = []
        wrote = False

        def work() -> bytes:
            # All of it within the phase: an error of one rank must not leave the others waiting for it.
            nonlocal facts, plans, wrote
            plans = self._plan_shards(agreed)
            if self._group.rank == 0:
                facts = self._make_facts(agreed, options)
                self._write_beside(ref, agreed, options)
            tensors = {tensor.key: tensor for tensor in agreed.captured.tensors}
            summary = write_part(self._store, self._make_part(ref, agreed, options, facts), plans, tensors)
            wrote = True
            return msgspec.json.encode(summary)

        try:
            verdict = self._group.agree("save.commit", work, lambda found: self._commit(ref, agreed, facts, found))
        except BaseException as error:
            # CRASH: a rank whose receipt is out must not remove its part while the commit record may still be
            # written; then the files stay, as orphans that the next prune removes.
            if not wrote or _cannot_commit(error):
                names = own_names(self._group.rank, [plan.name for plan in plans])
                beside = [HF_INDEX, *sorted(options.assets)] if self._group.rank == 0 else []
                remove_quietly(self._store, ref, [*names, *beside])
            raise
        self._newest = step
        return msgspec.json.decode(verdict, type=Committed)

    def _choose_attempt(self, step: int) -> int:
        """Return the number of a try whose folder nothing was ever written to."""
        if step < self._newest:
            raise UsageError(
                f"step {step}: this start is at step {self._newest} already, and the next one would go on from "
                "there, not from what is saved now",
                step=step,
                advice="count on from manager.step, as manager.steps() does, or begin with resume(state, fresh=True)",
            )
        self._check_root(step)
        newest = max(list_generations(self._store), default=0)
        if newest > self._generation:
            raise Fenced(
                f"generation {newest} has taken over this run; this process is generation {self._generation}",
                step=step,
                advice="stop this process: what it would save, nobody would ever read",
            )
        tries = [
            ref
            for name in self._store.list_folders(f"{format_generation(self._generation)}/")
            if (ref := find_step(self._generation, name)) and ref.step == step
        ]
        for ref in tries:
            if any(info.key == ref.key(COMMIT_RECORD) for info in self._store.list_objects(f"{ref.folder}/")):
                raise AlreadyExists(
                    f"{ref} is committed already",
                    step=step,
                    advice="save a later step, or start the job again: each start has folders of its own",
                )
        return max((ref.attempt for ref in tries), default=0) + 1

    def _check_root(self, step: int) -> None:
        """Raise unless the root still is that of this run: it may have been removed, unmounted or exchanged."""
        url = self._store.url
        try:
            found = read_run_id(self._store)
            owner = read_generation(self._store, self._generation).run_id
        except NotFound:
            found = owner = None
        if found is None:
            raise StorageError(
                f"{url}: generation {self._generation}, which this process claimed there, is gone: the root was "
                "removed or is not mounted; what is saved there now could not be resumed",
                retryable=False,
                step=step,
                advice=f"bring the root back (findmnt -T {url}), or start the job again",
            )
        if (found, owner) != (self._run_id, self._run_id):
            raise Fenced(
                f"{url} holds another run ({found}) than the one that this process began there ({self._run_id})",
                step=step,
                advice="stop this process, and give each run a root of its own",
            )

    def _plan_shards(self, agreed: Agreed) -> list[ShardPlan]:
        per_rank = frozenset(agreed.table.per_rank)
        # The table only names what ranks keep for themselves; dtypes and shapes are each rank's own.
        own = {t.key: (t.dtype, t.shape) for t in agreed.captured.tensors if t.key in per_rank}
        planned_for = (agreed.digest, agreed.shard_limit_bytes, own)
        if self._shards is None or self._shards[0] != planned_for:
            outgoing = plan_outgoing(agreed.table, self._group.rank) + plan_own_outgoing(own)
            plans = plan_shards(outgoing, self._group.rank, limit_bytes=agreed.shard_limit_bytes)
            self._shards = planned_for, plans
        return self._shards[1]

    def _make_part(self, ref: StepRef, agreed: Agreed, options: SaveOptions, facts: Facts | None) -> PartRecord:
        """Return this rank's part but for what follows from its files."""
        return PartRecord(
            run_id=self._run_id,
            ref=ref,
            rank=self._group.rank,
            world_size=self._group.world_size,
            plan=agreed.digest,
            shards=(),
            digests=FileRecord(0, ""),
            tensors={},
            values=agreed.values,
            facts=facts,
            journal=options.chain,
        )

    def _make_facts(self, agreed: Agreed, options: SaveOptions) -> Facts:
        return Facts(
            layout=agreed.table,
            holders=agreed.holders,
            differing=agreed.differing,
            metrics=encode_metrics(options.metrics),
            healthy=options.healthy,
            created_at=now(),
            environment=describe_environment(),
            assets={
                name: FileRecord(len(data), hashlib.sha256(data).hexdigest())
                for name, data in sorted(options.assets.items())
            },
            overrides=dict(sorted(options.overrides.items())),
        )

    def _write_beside(self, ref: StepRef, agreed: Agreed, options: SaveOptions) -> None:
        """Write what lies beside the shards: assets, and the Hugging Face index where it applies."""
        for name, data in sorted(options.assets.items()):
            self._store.put(ref.key(name), data)
        index = make_index(agreed.table, agreed.shard_limit_bytes)
        if index is not None:
            self._store.put(ref.key(HF_INDEX), index)

    def _commit(self, ref: StepRef, agreed: Agreed, facts: Facts | None, found: list[bytes]) -> bytes:
        assert facts is not None
        parts = tuple(msgspec.json.decode(data, type=PartSummary) for data in found)
        record = CommitRecord(
            run_id=self._run_id,
            ref=ref,
            world_size=self._group.world_size,
            plan=agreed.digest,
            parts=parts,
            facts=facts,
        )
        # ORDER: every part is durable before this write. CRASH: before it, the next start may write the same record.
        self._store.put(ref.key(COMMIT_RECORD), encode_record(record, writer=WRITER), if_absent=True)
        # Not the record itself: as large as the model's table, it would pass through one store once for each rank.
        return msgspec.json.encode(Committed(ref=ref, shard_bytes=sum(part.shard_bytes for part in parts)))


def _cannot_commit(error: BaseException) -> bool:
    """Say whether a failed phase rules out that the commit record was or will be written.

    It does when a rank other than the coordinator failed at its own work: its receipt is missing for good. A
    timeout, a lost rank or a failure of the coordinator (whose last write may have arrived) rule out nothing.
    """
    return (
        isinstance(error, PeerFailure)
        and not isinstance(error, BarrierTimeout)
        and bool(error.exit_codes)
        and 0 not in error.exit_codes
    )


def own_names(rank: int, shards: list[str]) -> list[str]:
    """Return a rank's files in a step's folder, in the order in which they are removed: the part first."""
    return [format_part(rank), format_digests(rank), *shards]


def make_index(table: LayoutTable, limit_bytes: int) -> bytes | None:
    """Return the Hugging Face index over the model's tensors, or None when some are not stored whole."""
    sections = {"model", "frozen"}
    model = {key: r for key, r in table.tensors.items() if r.section in sections and key.startswith("model/")}
    whole_only = all(not r.layout.boxes and set(r.layout.placements) <= {"R"} for r in model.values())
    if not model or not whole_only:
        return None
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for rank, outgoing in sorted(plan_all_outgoing(table).items()):
        for plan in plan_shards(outgoing, rank, limit_bytes=limit_bytes):
            if plan.section in sections:
                for item in plan.items:
                    weight_map[item.outgoing.name] = plan.name
                    total_bytes += item.end - item.begin
    return encode_hf_index(weight_map, total_bytes)
