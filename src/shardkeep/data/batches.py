"""The ids of one rank's batches: what the loader tells torch's DataLoader to fetch, and in which order.

Holds no reference to the loader, so that dropping a loader stops its workers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardkeep.data.coordinates import Coordinates
from shardkeep.order.cursor import Batch, Cursor, count_batches, ids_between, plan_batch, share_bounds
from shardkeep.order.permutation import PermutationCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How an order of samples is cut into global batches and these into shares."""

    batch_size: int
    drop_last: bool
    at: Coordinates
    orders: PermutationCache = field(default_factory=PermutationCache)

    def iter_epoch(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield the global batches from `cursor` to the end of its epoch."""
        while True:
            batch = plan_batch(cursor, self.batch_size, drop_last=self.drop_last)
            yield batch
            if batch.ends_epoch:
                return
            cursor = batch.after

    def count(self, sample_count: int) -> int:
        """Return how many batches so many samples make."""
        return count_batches(sample_count, self.batch_size, drop_last=self.drop_last)

    def local_ids(self, batch: Batch) -> list[int]:
        """Return the sample ids of this rank's share. Costs O(share), whatever the global batch."""
        start, stop = share_bounds(batch.count, self.at.rank, self.at.size)
        return self._ids(batch, batch.start + start, batch.start + stop)

    def global_ids(self, batch: Batch) -> list[int]:
        """Return the sample ids of all ranks, ascending by rank."""
        return self._ids(batch, batch.start, batch.stop)

    def _ids(self, batch: Batch, start: int, stop: int) -> list[int]:
        ids: list[int] = ids_between(batch.cursor, start, stop, self.orders).tolist()
        return ids


class IdBatches:
    """A batch sampler for torch's DataLoader: this rank's ids, from `start` to the end of its epoch."""

    def __init__(self, batching: Batching, start: Cursor) -> None:
        self.batching = batching
        self.start = start

    def __len__(self) -> int:
        return self.batching.count(self.start.remaining)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator function: `start` must be read now, not when the first ids are asked for.
        batches = self.batching.iter_epoch(self.start)
        return (self.batching.local_ids(batch) for batch in batches)
