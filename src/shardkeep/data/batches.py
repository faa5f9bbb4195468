"""The ids of one rank's batches: what the loader tells torch's DataLoader to fetch, and in which order.

Holds no reference to the loader, so that dropping a loader stops its workers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardkeep.data.coordinates import Coordinates
from shardkeep.data.draws import Request
from shardkeep.order.cursor import Batch, Cursor, count_batches, ids_between, plan_batch, share_bounds
from shardkeep.order.mixture import MixturePlan
from shardkeep.order.permutation import PermutationCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How an order of samples is cut into global batches and these into shares."""

    batch_size: int
    drop_last: bool
    at: Coordinates
    mixture: MixturePlan | None = None
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
        return self._ids(batch, *self._local_bounds(batch))

    def local_request(self, batch: Batch) -> Request:
        """Return what a worker is told about this rank's share."""
        start, stop = self._local_bounds(batch)
        # A mixture may hold a sample twice in an epoch; each time it is to be transformed anew.
        marks = None if self.mixture is None else range(start, stop)
        return Request(ids=self._ids(batch, start, stop), epoch=batch.cursor.epoch, start=start, marks=marks)

    def global_ids(self, batch: Batch) -> list[int]:
        """Return the sample ids of all ranks, ascending by rank."""
        return self._ids(batch, batch.start, batch.stop)

    def _local_bounds(self, batch: Batch) -> tuple[int, int]:
        start, stop = share_bounds(batch.count, self.at.rank, self.at.size)
        return batch.start + start, batch.start + stop

    def _ids(self, batch: Batch, start: int, stop: int) -> list[int]:
        cursor = batch.cursor
        if self.mixture is not None:
            before = cursor.epoch * cursor.size
            found = self.mixture.ids_between(cursor.seed, before + start, before + stop)
        else:
            found = ids_between(cursor, start, stop, self.orders)
        ids: list[int] = found.tolist()
        return ids


class IdBatches:
    """A batch sampler for torch's DataLoader: this rank's ids, from `start` to the end of its epoch.

    Yields lists of ids, or, where draws are `seeded` per sample, `Request`s.
    """

    def __init__(self, batching: Batching, start: Cursor, *, seeded: bool) -> None:
        self.batching = batching
        self.start = start
        self._make = batching.local_request if seeded else batching.local_ids

    def __len__(self) -> int:
        return self.batching.count(self.start.remaining)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator function: `start` must be read now, not when the first ids are asked for.
        batches = self.batching.iter_epoch(self.start)
        return (self._make(batch) for batch in batches)
