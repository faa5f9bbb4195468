"""One save: plan, write every rank's part, commit.

The life of a save, on every rank: capture -> agree on the plan -> [stage] -> write own shards -> digests -> part ->
receipt; the coordinator, with all receipts: commit record. Only that last write makes the checkpoint exist.
A staged save goes on from there in a thread of its own, over a control channel of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
from msgspec import Struct

from shardkeep.engine.arena import Arena
from shardkeep.engine.attempt import choose_attempt
from shardkeep.engine.contents import count_unchanged, make_commit, make_facts, make_index, make_receipt
from shardkeep.engine.flight import Flight, forget_frames
from shardkeep.engine.phases import PhaseTimes
from shardkeep.engine.planning import Agreed, PlanCache, agree_plan
from shardkeep.engine.promote import may_pass_over
from shardkeep.engine.run import WRITER
from shardkeep.engine.space import check_space
from shardkeep.engine.staging import StagedState, place_images
from shardkeep.engine.unchanged import Unchanged
from shardkeep.engine.writer import ShardFile, own_names, remove_quietly, write_part
from shardkeep.errors import BarrierTimeout, CheckpointError, PeerFailure
from shardkeep.format.names import (
    COMMIT_RECORD,
    HF_INDEX,
    StepRef,
    check_step,
)
from shardkeep.format.records import (
    Facts,
    FileRecord,
    PartRecord,
    StepChain,
    encode_record,
)
from shardkeep.plan.shards import ShardPlan, plan_outgoing, plan_own_outgoing, plan_shards
from shardkeep.ranks.base import Group
from shardkeep.spec.tensors import Captured
from shardkeep.storage.base import Store

_NOTHING: Final = Captured(tensors=(), aliases={}, values={})


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
    """What a save made, as every rank learns it: a few bytes, whatever the model and the number of ranks.

    Attributes:
        unchanged_bytes: of `shard_bytes`, what a store cloned from an earlier checkpoint instead of being sent it.
        place: which of the stores that the save was given took it.
        seconds: this rank's time by phase; `copy`, `digest`, `write` and `sync` are added up over its threads.
    """

    ref: StepRef
    shard_bytes: int
    unchanged_bytes: int = 0
    place: int = 0
    seconds: Mapping[str, float] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A save whose plan is agreed."""

    ref: StepRef
    agreed: Agreed
    options: SaveOptions
    spent: PhaseTimes


class Saver:
    """Saves checkpoints of one generation of one run. All ranks make the same calls, and one save at a time.

    Attributes:
        flight: the last save that was staged, until `close`.
    """

    def __init__(
        self,
        store: Store,
        group: Group,
        *,
        run_id: str,
        generation: int,
        parent: StepRef | None = None,
        prepare: Callable[[Store], None] = lambda store: None,
        passed_over: Callable[[Store, CheckpointError], None] = lambda store, error: None,
    ) -> None:
        """Take the run, this start's generation, and the checkpoint that it resumed from.

        `prepare` is called before anything is written to a store; `passed_over` is told of each one that did not take
        a save which another one is tried for.
        """
        self._prepare, self._passed_over = prepare, passed_over
        self._store = store
        self._group = group
        self._run_id = run_id
        self._generation = generation
        self._newest = parent.step if parent is not None else 0
        self._unchanged = Unchanged(run_id, group.rank, parent)
        self._cache = PlanCache()
        self._shards: tuple[object, list[ShardPlan]] | None = None
        self._index: tuple[object, bytes | None] | None = None
        self._arena = Arena()
        self._channel: Group | None = None
        self.flight: Flight[Committed] | None = None

    def prepare(self, capture: Callable[[], Captured]) -> None:
        """Agree on the plan and make the memory for `stage` ready in the background, ahead of the first save.

        Raises:
            StateMismatch, UnsupportedState: the state could not be saved as it is. PeerFailure.
        """
        agreed = agree_plan(self._group, self._cache, 0, capture, lambda: 0)
        self._get_channel()
        self._arena.prepare(place_images(self._plan_shards(agreed))[1])

    def save(
        self, step: int, capture: Callable[[], Captured], options: SaveOptions, *, stores: Sequence[Store] = ()
    ) -> Committed:
        """Save one checkpoint; on return on any rank it is committed and durable.

        Args:
            step: optimizer steps done; equal on all ranks.
            capture: takes this rank's state apart.
            stores: where to; each further one is tried when storage failed in those before. By default the run's.

        Raises:
            Fenced: a later generation owns the run, or the root is another run's now. AlreadyExists: this generation
            committed the step before. UsageError: the step lies before that of the resume or of the last save.
            StateMismatch, UnsupportedState: the state cannot be saved; nothing was written.
            StorageError: this rank could not write. PeerFailure: another rank failed, and why.
            The live state is untouched in every case, and the same step can be saved again.
        """
        draft = self._open(step, capture, options)
        return self._deliver(self._group, draft, lambda: self._make_files(draft.agreed), stores)

    def stage(
        self,
        step: int,
        capture: Callable[[], Captured],
        options: SaveOptions,
        *,
        stores: Sequence[Store] = (),
        confirm: Callable[[], None] = lambda: None,
        ended: Callable[[Committed | BaseException], None] = lambda end: None,
    ) -> Flight[Committed]:
        """Copy this rank's state into host memory and write it from there in the background.

        On return every tensor is copied that the capture does not name as deferred; those are copied next, and
        the flight says when (`wait_staged`). Durable is the checkpoint when `flight.wait()` returns.

        Args:
            step, capture, stores: as for `save`.
            confirm: called in the background when all is written, before this rank says so: raises StateChanged when
                a deferred tensor did not stay as it was until it was copied.
            ended: called in the background with what `flight.wait()` returns or raises, before that returns; it
                must not raise.

        Raises:
            UsageError, Fenced, AlreadyExists, StateMismatch, UnsupportedState, PeerFailure: as `save`, before
            anything is staged. What goes wrong later is raised by `flight.wait()`, on every rank.
        """
        if self.flight is not None:
            self.flight.wait_ended()  # its images lie where this one's will
        draft = self._open(step, capture, options)
        channel = self._get_channel()
        staged = StagedState(draft.agreed.captured.deferred)
        try:
            with draft.spent.phase("stage"):
                staged.copy_first(self._make_files(draft.agreed), self._arena)
        except BaseException as error:  # noqa: BLE001  # goes on to all ranks, which otherwise would wait for this one
            staged.error = error
        # From here on only the images count: a model that is deleted meanwhile gives its memory back.
        draft = replace(draft, agreed=replace(draft.agreed, captured=_NOTHING))

        def fly(flight: Flight[Committed]) -> Committed:
            try:
                committed = self._deliver(channel, draft, lambda: staged.finish(flight, draft.spent), stores, confirm)
            except BaseException as error:
                forget_frames(error)
                ended(error)
                raise
            finally:
                staged.release()
                if not threading.main_thread().is_alive():
                    channel.close()  # nobody else will; rank 0 stays until the others know
            ended(committed)
            return committed

        self.flight = flight = Flight(draft.ref, fly)
        flight.start()
        if staged.error is not None and not isinstance(staged.error, Exception):
            flight.wait_ended()
            self.flight = None  # what became of it is said here
            raise staged.error
        return flight

    def close(self) -> None:
        """Give back memory and connections, once a flight under way has ended. Harmless twice."""
        if self.flight is not None:
            self.flight.wait_ended()
            self.flight = None
        self._arena.close()
        if self._channel is not None:
            self._channel.close()

    def _get_channel(self) -> Group:
        """Return the group that the background talks through (collective the first time)."""
        if self._channel is None:
            self._channel = self._group.clone()
        return self._channel

    def _open(self, step: int, capture: Callable[[], Captured], options: SaveOptions) -> _Draft:
        check_step(step)
        spent = PhaseTimes()
        with spent.phase("plan"):
            agreed = agree_plan(self._group, self._cache, step, capture, lambda: self._choose(step))
        ref = StepRef(step=step, generation=self._generation, attempt=agreed.attempt)
        return _Draft(ref=ref, agreed=agreed, options=options, spent=spent)

    def _deliver(
        self,
        group: Group,
        draft: _Draft,
        get_files: Callable[[], list[ShardFile]],
        stores: Sequence[Store],
        confirm: Callable[[], None] = lambda: None,
    ) -> Committed:
        """Write and commit in the first of the stores that takes it; all ranks try them alike."""
        files: list[ShardFile] = []

        def get_again() -> list[ShardFile]:
            if not files:
                files.extend(get_files())
            return files

        places = list(enumerate(stores or [self._store]))
        for place, store in places[:-1]:
            try:
                return self._write(group, draft, store, place, get_again, confirm)
            except CheckpointError as error:
                if not may_pass_over(group, error):
                    raise
                self._passed_over(store, error)
        place, store = places[-1]
        return self._write(group, draft, store, place, get_again, confirm)

    def _write(
        self,
        group: Group,
        draft: _Draft,
        store: Store,
        place: int,
        get_files: Callable[[], list[ShardFile]],
        confirm: Callable[[], None],
    ) -> Committed:
        """Write this rank's part and commit with all others; see `save`."""
        ref, agreed, options, spent = draft.ref, draft.agreed, draft.options, draft.spent
        facts: Facts | None = None
        files: Sequence[ShardFile] = ()
        wrote = False

        def work() -> bytes:
            # All of it within the phase: an error of one rank must not leave the others waiting for it.
            nonlocal facts, files, wrote
            files = get_files()
            self._prepare(store)
            self._unchanged.take_over(store, ref, files, spent)
            check_space(store, ref, files)
            if self._group.rank == 0:
                facts = make_facts(
                    agreed,
                    metrics=options.metrics,
                    healthy=options.healthy,
                    assets=options.assets,
                    overrides=options.overrides,
                )
                self._write_beside(store, ref, agreed, options)
            with spent.phase("part"):
                part = self._make_part(ref, agreed, options, facts)
                summary = write_part(store, part, files, spent, confirm)
            wrote = True
            return make_receipt(summary, files)

        try:
            with spent.phase("total"):
                verdict = group.agree(
                    "save.commit", work, lambda found: self._commit(store, ref, agreed, facts, found)
                )
        except BaseException as error:
            # CRASH: a rank whose receipt is out must not remove its part while the commit record may still be
            # written; then the files stay, as orphans that the next prune removes.
            if not wrote or _cannot_commit(error):
                names = own_names(self._group.rank, [file.plan.name for file in files])
                beside = [HF_INDEX, *sorted(options.assets)] if self._group.rank == 0 else []
                remove_quietly(store, ref, [*names, *beside])
            raise
        self._newest = ref.step
        self._unchanged.remember(store, ref, files)
        committed = msgspec.json.decode(verdict, type=Committed)
        return msgspec.structs.replace(committed, place=place, seconds=spent.seconds)

    def _make_files(self, agreed: Agreed) -> list[ShardFile]:
        tensors = {tensor.key: tensor for tensor in agreed.captured.tensors}
        return [ShardFile(plan, tensors) for plan in self._plan_shards(agreed)]

    def _choose(self, step: int) -> int:
        """Return the number of a try whose folder nothing was ever written to (the coordinator alone)."""
        return choose_attempt(
            self._store, step, run_id=self._run_id, generation=self._generation, newest_step=self._newest
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

    def _write_beside(self, store: Store, ref: StepRef, agreed: Agreed, options: SaveOptions) -> None:
        """Write what lies beside the shards: assets, and the Hugging Face index where it applies."""
        for name, data in sorted(options.assets.items()):
            store.put(ref.key(name), data)
        planned_for = (agreed.digest, agreed.shard_limit_bytes)
        if self._index is None or self._index[0] != planned_for:
            self._index = planned_for, make_index(agreed.table, agreed.shard_limit_bytes)
        index = self._index[1]
        if index is not None:
            store.put(ref.key(HF_INDEX), index)

    def _commit(self, store: Store, ref: StepRef, agreed: Agreed, facts: Facts | None, found: list[bytes]) -> bytes:
        assert facts is not None
        record = make_commit(self._run_id, ref, agreed.digest, facts, found)
        # ORDER: every part is durable before this write. CRASH: before it, the next start may write the same record.
        store.put(ref.key(COMMIT_RECORD), encode_record(record, writer=WRITER), if_absent=True)
        # Not the record itself: as large as the model's table, it would pass through one store once for each rank.
        total_bytes, unchanged_bytes = sum(part.shard_bytes for part in record.parts), count_unchanged(found)
        return msgspec.json.encode(Committed(ref=ref, shard_bytes=total_bytes, unchanged_bytes=unchanged_bytes))


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
