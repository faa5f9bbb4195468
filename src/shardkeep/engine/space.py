"""Is there room for what a save is about to write? Asked before the first byte, so that nothing is half written."""

from __future__ import annotations

from collections.abc import Sequence

from shardkeep.engine.writer import ShardFile
from shardkeep.errors import OutOfSpace
from shardkeep.format.names import StepRef
from shardkeep.storage.base import MeasuredStore, Store


def check_space(store: Store, ref: StepRef, files: Sequence[ShardFile]) -> None:
    """Refuse a save whose shards of this rank do not fit into a store that can tell.

    Only this rank's own bytes are counted, a lower bound: what others of the same file system have reserved
    meanwhile is missing from what is free already, so that a sum over them would refuse what fits. What gets past
    here meets the reservation of each file (`Store.writer`).

    Raises:
        OutOfSpace: names the place, the bytes needed and free. Nothing was written by this rank.
    """
    free_bytes = store.find_free_bytes() if isinstance(store, MeasuredStore) else None
    needed_bytes = sum(file.plan.size_bytes for file in files if not file.is_cloned)
    if free_bytes is None or needed_bytes <= free_bytes:
        return
    raise OutOfSpace(
        f"{store.url}: {ref} needs {needed_bytes} bytes for this rank's shards, {free_bytes} are free; "
        "this rank wrote nothing",
        step=ref.step,
        advice=f"shardkeep doctor {store.url} shows what fits; free space (shardkeep prune {store.url} --keep-last 1 "
        "--yes removes old checkpoints) or take a larger place, then save again",
    )
