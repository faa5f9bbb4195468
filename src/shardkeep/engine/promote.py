"""Copy a committed checkpoint to another tier: every rank its own part, verified on the way, then the commit record.

What is copied is the same bytes under the same keys. A copy that was interrupted is taken up again part by part: a
part record that is there says that its shards are, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from shardkeep import knobs
from shardkeep.engine.blocks import run_blocks
from shardkeep.engine.reader import PartReader, read_verified
from shardkeep.engine.run import exists, record_limit
from shardkeep.engine.tiers import is_committed
from shardkeep.engine.unchanged import Origin, clone_quietly, describe_part
from shardkeep.errors import CheckpointError, Corrupt, NotCommitted, NotFound, PeerFailure, StorageError
from shardkeep.format.digests import BLOCK_BYTES
from shardkeep.format.names import COMMIT_RECORD, HF_INDEX, StepRef, format_digests, format_part
from shardkeep.format.records import CommitRecord, decode_record
from shardkeep.plan.checks import check_commit
from shardkeep.ranks.base import Group
from shardkeep.storage.base import ObjectWriter, Store


class Pace:
    """Keeps the bytes of one rank's copies below a rate, on average."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def spend(self, size_bytes: int) -> None:
        """Wait until so many bytes may go."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            begin_s = max(self._free_at_s, time.monotonic())
            self._free_at_s = begin_s + size_bytes / self._bytes_per_s
        if (pause_s := begin_s - time.monotonic()) > 0:
            time.sleep(pause_s)


@dataclass(slots=True)
class Lane:
    """What the copies to one place share: how fast they may be, and the shards that the last one left there."""

    pace: Pace
    origins: dict[str, Origin] = field(default_factory=dict)


class Promotion(Struct, frozen=True, kw_only=True):
    """What became of a copy, the same on every rank but for the bytes.

    Attributes:
        copied_bytes: what this rank copied, without what the place cloned from an earlier checkpoint.
        problem: why it is not there; empty: it is.
        lasting: no later try will do better.
    """

    copied_bytes: int = 0
    problem: str = ""
    lasting: bool = False


def promote(
    source: Store,
    target: Store,
    group: Group,
    ref: StepRef,
    *,
    run_id: str,
    lane: Lane,
    prepare: Callable[[], None] = lambda: None,
) -> Promotion:
    """Copy one committed checkpoint from one store to another (collective).

    Nothing is raised that all ranks do not raise: what one of them meets is the outcome for all, so that their next
    calls are the same. A copy that did not come to its end is taken up by the next try.

    Args:
        lane: of this place. Shards that are what the last checkpoint left there are cloned in the place itself.
        prepare: called on every rank before it writes.
    """
    copied: list[int] = []
    origins: dict[str, Origin] = {}

    def work() -> bytes:
        try:
            prepare()
            if not is_committed(target, ref):
                commit = _decode_commit(data, ref, run_id)
                # Of a checkpoint of another number of ranks, the parts are dealt out.
                mine = range(group.rank, commit.world_size, group.world_size)
                copied.append(sum(_copy_part(source, target, commit, rank, lane, origins) for rank in mine))
        except (CheckpointError, OSError, MemoryError) as error:
            return msgspec.json.encode(_judge(error))
        return msgspec.json.encode(Promotion())

    def decide(found: list[bytes]) -> bytes:
        seen = [msgspec.json.decode(one, type=Promotion) for one in found]
        failed = sorted((one for one in seen if one.problem), key=lambda one: not one.lasting)
        if failed:
            return msgspec.json.encode(failed[0])
        if not is_committed(target, ref):
            _copy_beside(source, target, _decode_commit(data, ref, run_id))
            # ORDER: every part is durable in the target before this write.
            target.put(ref.key(COMMIT_RECORD), data, if_absent=True)
        return msgspec.json.encode(Promotion())

    try:
        data = _share_record(source, group, ref)
        verdict = msgspec.json.decode(group.agree("tier.promote", work, decide), type=Promotion)
        if not verdict.problem:
            spread_record(target, group, ref)
    except CheckpointError as error:  # alike on all ranks: the coordinator's own, or a peer that is lost
        return _judge(error)
    if not verdict.problem and origins:
        lane.origins = origins
    return msgspec.structs.replace(verdict, copied_bytes=sum(copied))


def spread_record(store: Store, group: Group, ref: StepRef) -> None:
    """Bring a commit record to where ranks do not see what the coordinator wrote: other nodes (collective).

    Raises alike on all ranks: NotCommitted, StorageError, PeerFailure.
    """
    if group.world_size == 1:
        return
    data = _share_record(store, group, ref)

    def write() -> bytes:
        if not exists(store, ref.key(COMMIT_RECORD)):
            store.put(ref.key(COMMIT_RECORD), data, if_absent=True)
        return b""

    agree_alike(group, "tier.spread", write)


def agree_alike(group: Group, name: str, work: Callable[[], bytes]) -> None:
    """Do something on every rank; raise StorageError on all of them when storage failed on any."""

    def attempt() -> bytes:
        try:
            work()
        except StorageError as error:
            return f"rank {group.rank}: {error}".encode()
        return b""

    problem = group.agree(name, attempt, lambda found: next((one for one in found if one), b""))
    if problem:
        raise StorageError(problem.decode(), retryable=True)


def may_pass_over(group: Group, error: CheckpointError) -> bool:
    """Say whether a save that failed goes on in its next place: when storage was all that failed, on any rank.

    Collective; every rank has an error, not all the same one.
    """
    own = b"1" if is_storage_failure(error) else b"0"
    return group.agree("save.passed_over", lambda: own, lambda found: min(found)) == b"1"


def is_storage_failure(error: BaseException) -> bool:
    """Say whether storage failed, and nothing else, on this rank or on others."""
    if isinstance(error, PeerFailure):
        return set(error.exit_codes.values()) == {StorageError.exit_code}
    return isinstance(error, StorageError)


def _judge(error: BaseException) -> Promotion:
    """Return what an error makes of a copy. By its exit code, which all ranks know."""
    codes = {getattr(error, "exit_code", CheckpointError.exit_code)}
    if isinstance(error, PeerFailure) and error.exit_codes:
        codes = set(error.exit_codes.values())
    text = error.message if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    passing = {StorageError.exit_code, PeerFailure.exit_code, CheckpointError.exit_code}
    return Promotion(problem=text or "it failed", lasting=not codes <= passing)


def _share_record(store: Store, group: Group, ref: StepRef) -> bytes:
    """Return a commit record as this rank sees it; to a rank that does not, the coordinator gives its own."""
    own: list[bytes] = []
    errors: list[CheckpointError] = []

    def look() -> bytes:
        try:
            own.append(store.get(ref.key(COMMIT_RECORD), limit_bytes=record_limit()))
        except (NotFound, StorageError) as error:
            errors.append(error)
            return b"lacks"
        return b""

    def decide(found: list[bytes]) -> bytes:
        if errors and isinstance(errors[0], StorageError):
            raise errors[0]
        if not own:
            raise NotCommitted(f"{store.url}: {ref} is not there any more", step=ref.step)
        return own[0] if any(found) else b""

    verdict = group.agree("tier.record", look, decide)
    return own[0] if own else verdict


def _decode_commit(data: bytes, ref: StepRef, run_id: str) -> CommitRecord:
    key = ref.key(COMMIT_RECORD)
    record = decode_record(CommitRecord, data, where=key)
    if record.ref != ref or record.run_id != run_id:
        raise Corrupt(f"{key}: is the commit record of {record.ref} of run {record.run_id}", step=ref.step)
    return check_commit(record, where=key)


def _copy_part(
    source: Store, target: Store, commit: CommitRecord, rank: int, lane: Lane, origins: dict[str, Origin]
) -> int:
    """Copy a part, return the bytes that went; `origins` takes its shards, as they are in the target then."""
    ref = commit.ref
    key = ref.key(format_part(rank))
    with contextlib.suppress(NotFound):
        found = target.get(key, limit_bytes=record_limit())
        if hashlib.sha256(found).hexdigest() == commit.parts[rank].sha256:
            return 0  # written last, so all of the part is there
        target.delete([key])
    part = PartReader(source, commit, rank)
    shards = part.record.shards
    # What an interrupted copy left may be half a file under its final name.
    target.delete([ref.key(shard.name) for shard in shards])
    own = describe_part(part)
    to_copy = {at: shard for at, shard in enumerate(shards) if not _clone(target, own[shard.name], lane)}
    writers = {at: target.writer(ref.key(shard.name), shard.size_bytes) for at, shard in to_copy.items()}
    try:
        _copy_shards(part, writers, lane.pace)
    except BaseException:
        for writer in writers.values():
            writer.abort()
        raise
    _copy_object(source, target, ref.key(format_digests(rank)))
    # ORDER: the part record after all that it names.
    _copy_object(source, target, key)
    origins.update(own)
    return sum(shard.size_bytes for shard in to_copy.values())


def _clone(target: Store, wanted: Origin, lane: Lane) -> bool:
    """Make a shard of the one of its name that the last copy left in the target, if that has the same bytes."""
    there = lane.origins.get(wanted.key.rpartition("/")[2])
    if there is None or (there.size_bytes, there.digests) != (wanted.size_bytes, wanted.digests):
        return False
    return clone_quietly(target, there.key, wanted.key) is None


def _copy_shards(part: PartReader, writers: dict[int, ObjectWriter], pace: Pace) -> None:
    sizes = [shard.size_bytes for shard in part.record.shards]
    left = {at: -(-size // BLOCK_BYTES) for at, size in enumerate(sizes)}
    lock = threading.Lock()

    def copy(task: tuple[int, int], block: memoryview) -> None:
        shard, begin = task
        data = block[: min(BLOCK_BYTES, sizes[shard] - begin)]
        pace.spend(len(data))
        read_verified(part, shard, begin, data)
        writers[shard].write_at(begin, data)
        with lock:
            left[shard] -= 1
            is_last = not left[shard]
        if is_last:
            writers[shard].finish()

    tasks: Iterable[tuple[int, int]] = [
        (at, begin) for at in sorted(writers) for begin in range(0, sizes[at], BLOCK_BYTES)
    ]
    run_blocks(tasks, copy, thread_count=knobs.get_int("IO_THREADS"))


def _copy_beside(source: Store, target: Store, commit: CommitRecord) -> None:
    """Copy what lies beside the parts: assets, and the Hugging Face index where there is one."""
    for name in sorted(commit.facts.assets):
        _copy_object(source, target, commit.ref.key(name))
    with contextlib.suppress(NotFound):
        _copy_object(source, target, commit.ref.key(HF_INDEX))


def _copy_object(source: Store, target: Store, key: str) -> None:
    target.put(key, source.get(key, limit_bytes=record_limit()), if_absent=True)
