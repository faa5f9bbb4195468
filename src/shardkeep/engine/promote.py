"""Copy a committed checkpoint to another tier: every rank its own part, verified on the way, then the commit record.

What is copied is the same bytes under the same keys. A copy that was interrupted is taken up again part by part: a
part record that is there says that its shards are, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable

from shardkeep import knobs
from shardkeep.engine.blocks import run_blocks
from shardkeep.engine.reader import PartReader, read_verified
from shardkeep.engine.run import read_commit, record_limit
from shardkeep.engine.tiers import is_committed
from shardkeep.errors import NotFound
from shardkeep.format.digests import BLOCK_BYTES
from shardkeep.format.names import COMMIT_RECORD, HF_INDEX, StepRef, format_digests, format_part
from shardkeep.format.records import CommitRecord
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


def promote(source: Store, target: Store, group: Group, ref: StepRef, *, run_id: str, pace: Pace) -> int:
    """Copy one committed checkpoint from one store to another (collective); return the bytes that this rank copied.

    Raises:
        Corrupt: a source's bytes are damaged; nothing is committed. NotCommitted: it is not there any more.
        StorageError, PeerFailure: likewise; the next try takes up what is there.
    """
    copied: list[int] = []

    def work() -> bytes:
        if is_committed(target, ref):
            copied.append(0)
            return b""
        commit = read_commit(source, ref, run_id=run_id)
        # Of a checkpoint of another number of ranks, the parts are dealt out.
        mine = range(group.rank, commit.world_size, group.world_size)
        copied.append(sum(_copy_part(source, target, commit, rank, pace) for rank in mine))
        return b""

    def decide(found: list[bytes]) -> bytes:
        if not is_committed(target, ref):
            _copy_beside(source, target, read_commit(source, ref, run_id=run_id))
            # ORDER: every part is durable in the target before this write.
            _copy_object(source, target, ref.key(COMMIT_RECORD))
        return b""

    group.agree("tier.promote", work, decide)
    return copied[0]


def _copy_part(source: Store, target: Store, commit: CommitRecord, rank: int, pace: Pace) -> int:
    ref = commit.ref
    key = ref.key(format_part(rank))
    summary = commit.parts[rank]
    try:
        if target.head(key).size_bytes == summary.size_bytes:
            return 0  # written last, so all of the part is there
    except NotFound:
        pass
    part = PartReader(source, commit, rank)
    names = [shard.name for shard in part.record.shards]
    # What an interrupted copy left may be half a file under its final name.
    target.delete([ref.key(name) for name in names])
    writers = {at: target.writer(ref.key(name), part.record.shards[at].size_bytes) for at, name in enumerate(names)}
    try:
        _copy_shards(part, writers, pace)
    except BaseException:
        for writer in writers.values():
            writer.abort()
        raise
    _copy_object(source, target, ref.key(format_digests(rank)))
    # ORDER: the part record after all that it names.
    _copy_object(source, target, key)
    return sum(shard.size_bytes for shard in part.record.shards)


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
        (at, begin) for at, size in enumerate(sizes) for begin in range(0, size, BLOCK_BYTES)
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
