"""The position in the order of samples, and what follows from it: batches, epochs, shares.

The order of one epoch is a permutation of the dataset; a cursor says how many samples of it the loop has consumed,
all ranks together. It knows nothing of batches, ranks or workers, so all of these may change between two runs. A
*settled* cursor stands before a batch that will be handed out: behind an epoch's last batch that is the start of the
next epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from shardkeep.errors import UsageError
from shardkeep.order.mixture import MIXED
from shardkeep.order.permutation import KEYED, SIZE_MAX, Ids, PermutationCache, derive_key

SEQUENTIAL: Final = "sequential-1"
"""The name of the order without a shuffle: sample p at position p, every epoch alike."""

ALGORITHMS: Final = (KEYED, SEQUENTIAL)
_TRIES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a run is in its order of samples.

    Attributes:
        seed: chooses the order, with the epoch; any integer from 0 up.
        epoch: from 0.
        consumed: samples of this epoch that the loop has consumed, over all ranks; `0 <= consumed <= size`.
        size: samples in the dataset.
        algorithm: one of ALGORITHMS, or a mixture's.
    """

    seed: int
    epoch: int
    consumed: int
    size: int
    algorithm: str = KEYED

    def __post_init__(self) -> None:
        for name in ("seed", "epoch", "consumed", "size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"cursor: {name} is {value!r}: expected an integer from 0 up")
        if not 0 < self.size <= SIZE_MAX:
            raise UsageError(f"cursor: a dataset of {self.size} samples: expected 1 to 2^62")
        if self.consumed > self.size:
            raise UsageError(f"cursor: {self.consumed} samples consumed of {self.size}: expected at most all of them")
        if self.algorithm not in ALGORITHMS and not self.algorithm.startswith(MIXED):
            raise UsageError(f"cursor: algorithm {self.algorithm!r}: expected one of {', '.join(ALGORITHMS)}")

    @property
    def remaining(self) -> int:
        """Samples of this epoch that are not consumed yet."""
        return self.size - self.consumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One global batch: the positions `[start, stop)` of an epoch's order, and the cursor behind it."""

    cursor: Cursor
    start: int
    stop: int
    after: Cursor

    @property
    def count(self) -> int:
        """Samples in the batch, over all ranks."""
        return self.stop - self.start

    @property
    def ends_epoch(self) -> bool:
        """Whether the next batch belongs to another epoch."""
        return self.after.epoch != self.cursor.epoch


def settle(cursor: Cursor, batch_size: int, *, drop_last: bool) -> Cursor:
    """Return `cursor`, moved to the next epoch if this one holds no further batch of `batch_size`."""
    _require_batch(cursor.size, batch_size, drop_last=drop_last)
    needed = batch_size if drop_last else 1
    return cursor if cursor.remaining >= needed else replace(cursor, epoch=cursor.epoch + 1, consumed=0)


def plan_batch(cursor: Cursor, batch_size: int, *, drop_last: bool) -> Batch:
    """Return the global batch that comes next. Without `drop_last` an epoch's last one may be smaller."""
    here = settle(cursor, batch_size, drop_last=drop_last)
    stop = min(here.consumed + batch_size, here.size)
    after = settle(replace(here, consumed=stop), batch_size, drop_last=drop_last)
    return Batch(cursor=here, start=here.consumed, stop=stop, after=after)


def ids_between(cursor: Cursor, start: int, stop: int, cache: PermutationCache | None = None) -> Ids:
    """Return the sample ids at positions `[start, stop)` of the cursor's epoch, int64, in their order.

    A mixture's are those of its plan (`MixturePlan.ids_between`), which this refuses to guess.
    """
    positions = np.arange(start, stop, dtype=np.int64)
    if cursor.algorithm == SEQUENTIAL:
        return positions
    if cursor.algorithm != KEYED:
        raise UsageError(f"the order {cursor.algorithm!r} is a mixture's: ask its plan for ids")
    key = derive_key(cursor.seed, cursor.epoch)
    return (cache or PermutationCache()).get(cursor.size, key).ids_at(positions)


def next_batch(
    cursor: Cursor, batch_size: int, *, drop_last: bool, cache: PermutationCache | None = None
) -> tuple[Ids, Cursor]:
    """Return the ids of the next global batch and the cursor behind it.

    The same for every data-parallel size and worker count. A `cache` saves sorting the table of a small dataset
    (up to 65,536 samples) on every call.
    """
    batch = plan_batch(cursor, batch_size, drop_last=drop_last)
    return ids_between(batch.cursor, batch.start, batch.stop, cache), batch.after


def count_batches(remaining: int, batch_size: int, *, drop_last: bool) -> int:
    """Return how many batches `remaining` samples make."""
    return remaining // batch_size if drop_last else -(-remaining // batch_size)


def share_bounds(count: int, dp_rank: int, dp_size: int) -> tuple[int, int]:
    """Return the half-open range of a batch of `count` samples that belongs to one data-parallel rank.

    Ranges are contiguous, ascending by rank, and differ by at most one sample; the longer ones come first.
    """
    if not 0 <= dp_rank < dp_size:
        raise UsageError(f"data-parallel rank {dp_rank} of {dp_size}: expected 0 to {dp_size - 1}")
    base, longer = divmod(count, dp_size)
    start = dp_rank * base + min(dp_rank, longer)
    return start, start + base + (dp_rank < longer)


def share(ids: Ids, dp_rank: int, dp_size: int) -> Ids:
    """Return the part of a global batch's ids that one data-parallel rank trains on."""
    start, stop = share_bounds(len(ids), dp_rank, dp_size)
    return ids[start:stop]


def check_batches(cursor: Cursor, batch_size: int, dp_size: int, *, drop_last: bool) -> None:
    """Refuse a batch size under which some batch, this epoch or later, could not be split over the ranks.

    Raises:
        UsageError: the dataset holds no whole batch, a whole batch does not divide by `dp_size`, or the last batch
            of an epoch would leave some rank without a sample. The advice names sizes that work.
    """
    _require_batch(cursor.size, batch_size, drop_last=drop_last)
    if dp_size < 1:
        raise UsageError(f"data-parallel size {dp_size}: expected at least 1")
    if batch_size % dp_size:
        raise UsageError(
            f"global_batch_size {batch_size} does not divide by the {dp_size} data-parallel ranks",
            advice=_advise_sizes(cursor, batch_size, dp_size, drop_last=drop_last),
        )
    tail = 0 if drop_last else _find_short_tail(cursor, batch_size, dp_size)
    if tail:
        advice = _advise_sizes(cursor, batch_size, dp_size, drop_last=False)
        dropping = "pass drop_last=True to skip it, or " if cursor.size >= batch_size else ""
        raise UsageError(
            f"{cursor.size} samples ({cursor.remaining} left in epoch {cursor.epoch}) in global batches of "
            f"{batch_size}: the last batch of an epoch has {tail} samples for {dp_size} data-parallel ranks, so that "
            "some rank would get none",
            advice=dropping + advice,
        )


def _find_short_tail(cursor: Cursor, batch_size: int, dp_size: int) -> int:
    """Return the size of a last batch too small to go round, 0 if there is none."""
    # This epoch may have begun under another batch size, so that its tail differs from all later ones.
    tails = (cursor.size % batch_size, cursor.remaining % batch_size)
    return next((tail for tail in tails if 0 < tail < dp_size), 0)


def _advise_sizes(cursor: Cursor, batch_size: int, dp_size: int, *, drop_last: bool) -> str:
    """Name the nearest batch sizes below and above that work."""

    def works(size: int) -> bool:
        if drop_last:
            return size <= cursor.size
        return not _find_short_tail(cursor, size, dp_size)

    whole = batch_size // dp_size * dp_size
    below = range(whole if whole < batch_size else whole - dp_size, 0, -dp_size)[:_TRIES]
    above = range(whole + dp_size, whole + dp_size * (_TRIES + 1), dp_size)
    found = [next((size for size in sizes if works(size)), None) for sizes in (below, above)]
    named = [str(size) for size in found if size is not None]
    if not named:
        return f"use fewer than {dp_size} data-parallel ranks or a larger dataset"
    return f"use global_batch_size={' or '.join(named)}"


def _require_batch(size: int, batch_size: int, *, drop_last: bool) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"global_batch_size is {batch_size!r}: expected an integer from 1 up")
    if drop_last and size < batch_size:
        raise UsageError(
            f"drop_last=True with {size} samples and global_batch_size {batch_size}: no epoch would have a batch",
            advice=f"use global_batch_size={size} or less, or drop_last=False",
        )
