"""`ResumableLoader`: torch's DataLoader over an order of samples that is a number.

It owns the cursor and moves it when a batch is handed to the loop, never when a worker fetches one ahead. The
order comes from `order`; workers and pinning stay torch's. It never draws from a global random generator: torch's
DataLoader takes its base seed from a generator that belongs to the loader, and `draws` gives each sample's
transforms streams of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardkeep.data.batches import Batching, IdBatches
from shardkeep.data.coordinates import as_int, default_coordinates, get_coordinates
from shardkeep.data.draws import make_fetcher
from shardkeep.data.mixture import Mixture
from shardkeep.errors import UsageError
from shardkeep.order.cursor import SEQUENTIAL, Batch, Cursor, check_batches, settle
from shardkeep.order.permutation import KEYED, derive_key
from shardkeep.order.state import decode_state, encode_state
from shardkeep.types import Json

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_AGAIN: Final = "iterate over the loader again: it goes on at the first batch that was not handed out"


class ResumableLoader:
    """Yield the batches of a map-style dataset in an order that any later run can take up exactly.

    The global batch of a step is the same for every data-parallel size and worker count; each data-parallel rank gets
    a contiguous share of it. Every `for` loop over the loader yields the rest of the current epoch and stops; the
    next one yields the next epoch. After a `break`, the next loop goes on at the first batch that was not handed out;
    what workers had fetched ahead is thrown away and fetched again. A batch counts as consumed once the loop has
    received it, so that `state_dict()` in the loop's body, after training on the batch, says where to go on.

    One iterator is live at a time: beginning a new one, or `load_state_dict`, ends the one before, whose `next()`
    then raises UsageError. So does the `next()` after one that raised; the batch that failed comes again in a new
    loop. Use a loader from one thread.

    `drop_last` is False by default: no sample is left out without being asked for. An epoch's last batch may then be
    smaller, and shares of it differ by up to one sample.

    Args:
        dataset: has `__len__` and `__getitem__` (or `__getitems__`), and keeps its length; or a `Mixture`.
        global_batch_size: samples per step over all data-parallel ranks; a multiple of their number.
        seed: chooses the order, any integer from 0 up. Equal on all ranks.
        shuffle: a new keyed permutation every epoch; otherwise ids ascend.
        drop_last: skip the last samples of an epoch that do not fill a batch.
        seed_samples: fetch each sample under random streams (`random`, `numpy.random`, torch's CPU generator) seeded
            from the seed, the epoch and the sample's id, so that what its transforms draw is the same for every
            number of workers and ranks and after every resume. `collate_fn`, and datasets that fetch whole batches
            (`__getitems__`), run under streams of the batch. Without workers, the process's own streams are put back
            before a batch is handed out: fetching never moves them. False: transforms draw from whatever stream
            the fetching process has, and only their order of samples is exact.
        data_mesh: the data axis, a 1-D DeviceMesh. Needed beside tensor, pipeline or context parallelism,
            where several ranks must get the same samples.
        data_rank, data_size: the same, as two numbers. Without either, the default process group is the data
            axis; without one, this process is alone.
        num_workers, collate_fn, pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor,
            persistent_workers: as in torch's DataLoader. Workers start under seeds of the seed, the data rank and
            the epoch.

    Raises:
        UsageError: options that contradict each other or cannot be split over the ranks; nothing was started.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: SupportsIndex,
        seed: SupportsIndex,
        shuffle: bool = True,
        drop_last: bool = False,
        seed_samples: bool = True,
        data_mesh: DeviceMesh | None = None,
        data_rank: SupportsIndex | None = None,
        data_size: SupportsIndex | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        self._dataset = dataset
        named = get_coordinates(data_mesh, data_rank, data_size)
        self._follows_default_group = named is None
        self._batching = Batching(
            batch_size=as_int("global_batch_size", global_batch_size),
            drop_last=drop_last,
            at=named or default_coordinates(),
            mixture=dataset.plan if isinstance(dataset, Mixture) else None,
        )
        self._cursor = Cursor(
            seed=as_int("seed", seed),
            epoch=0,
            consumed=0,
            size=_count_samples(dataset),
            algorithm=_choose_order(dataset, shuffle=shuffle),
        )
        self._check(self._cursor)
        self._last: Batch | None = None
        self._live: weakref.ref[_EpochIterator] | None = None
        self._generator = torch.Generator()
        self._seeded = seed_samples
        self._ids = IdBatches(self._batching, self._cursor, seeded=seed_samples)
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        self._fetcher: DataLoader[Any] | None = self._make_fetcher()

    @property
    def is_global_position(self) -> bool:
        """True: the position is one number for all ranks, and fits any number of them."""
        return True

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0: in the loop's body for an epoch's last batch, one more already."""
        return self._cursor.epoch

    @property
    def consumed(self) -> int:
        """Samples of the current epoch that were handed out, over all data-parallel ranks."""
        return self._cursor.consumed

    @property
    def cursor(self) -> Cursor:
        """The position before the next batch."""
        return self._cursor

    @property
    def batches_left(self) -> int:
        """Batches that the next loop yields: what is left of the current epoch."""
        return self._batching.count(self._cursor.remaining)

    @property
    def last_batch_ids(self) -> tuple[int, ...] | None:
        """Sample ids of the batch just handed to this rank, in its order; None before the first."""
        return None if self._last is None else tuple(self._batching.local_ids(self._last))

    @property
    def last_global_ids(self) -> tuple[int, ...] | None:
        """Sample ids of that batch over all data-parallel ranks, ascending by rank; None before the first."""
        return None if self._last is None else tuple(self._batching.global_ids(self._last))

    def __len__(self) -> int:
        """Return the batches of a whole epoch (of which the first loop after a resume yields the rest)."""
        return self._batching.count(self._cursor.size)

    def __iter__(self) -> Iterator[Any]:
        """Begin the rest of the current epoch; ends the iterator before this one."""
        self._check_surroundings()
        self._end_live("another loop over the same loader began")
        # Of the data rank too: worker 0 of each rank would draw the same augmentations otherwise.
        key = derive_key(self._cursor.seed, self._cursor.epoch, domain="workers", index=self._batching.at.rank)
        self._generator.manual_seed(key.words[0])
        self._ids.start = self._cursor
        iterator = _EpochIterator(self, self._batching.iter_epoch(self._cursor), self._begin_fetching())
        self._live = weakref.ref(iterator)
        return iterator

    def state_dict(self) -> dict[str, Json]:
        """Return the position as plain JSON values, under 1 KiB. The same on every rank."""
        return encode_state(self._cursor, batch_size=self._batching.batch_size, drop_last=self._batching.drop_last)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position. Batch size, `drop_last`, world size and workers may differ from the saving run's.

        A live iterator ends. If fewer samples are left of the stored epoch than make a batch here, and
        `drop_last` says to skip them, the position is the start of the next epoch.

        Raises (the loader keeps its position):
            StateMismatch: another dataset size, seed or shuffle; or not a loader's state.
            IncompatibleFormat: a newer version wrote it.
            UsageError: what is left of the stored epoch ends in a batch too small to go round.
        """
        cursor = self._find_cursor(state)
        self._end_live("load_state_dict moved the loader")
        self._cursor = cursor
        self._last = None

    def check_state_dict(self, state: Mapping[str, object]) -> None:
        """Raise what `load_state_dict` would raise; change nothing."""
        self._find_cursor(state)

    def _find_cursor(self, state: Mapping[str, object]) -> Cursor:
        stored = decode_state(state, self._cursor)
        cursor = settle(stored, self._batching.batch_size, drop_last=self._batching.drop_last)
        self._check(cursor)
        return cursor

    def _check(self, cursor: Cursor) -> None:
        check_batches(cursor, self._batching.batch_size, self._batching.at.size, drop_last=self._batching.drop_last)

    def _check_surroundings(self) -> None:
        built, now = self._batching.at, default_coordinates()
        if self._follows_default_group and now != built:
            raise UsageError(
                f"the loader was built as data-parallel rank {built.rank} of {built.size}, but the default process "
                f"group says rank {now.rank} of {now.size}",
                advice="build the loader after torch.distributed.init_process_group, or pass data_mesh",
            )
        size = _count_samples(self._dataset)
        if size != self._cursor.size:
            raise UsageError(
                f"the dataset had {self._cursor.size} samples when the loader was built and has {size} now",
                advice="build a new loader: another size is another order of samples",
            )

    def _make_fetcher(self) -> DataLoader[Any]:
        try:
            if self._seeded:
                return make_fetcher(
                    self._dataset,
                    self._ids,
                    seed=self._cursor.seed,
                    generator=self._generator,
                    options=self._options,
                )
            return DataLoader(self._dataset, batch_sampler=self._ids, generator=self._generator, **self._options)
        except (ValueError, TypeError) as error:
            raise UsageError(f"torch's DataLoader refuses the options: {error}") from error

    def _begin_fetching(self) -> Iterator[Any]:
        if self._fetcher is None:
            self._fetcher = self._make_fetcher()
        try:
            return iter(self._fetcher)
        except BaseException:
            self._drop_fetcher()
            raise

    def _end_live(self, reason: str) -> None:
        live = self._live() if self._live is not None else None
        if live is not None:
            live.end(reason)
        self._live = None

    def _hand_out(self, batch: Batch) -> None:
        """Count a batch as consumed. For the iterator alone."""
        self._cursor = batch.after
        self._last = batch

    def _drop_fetcher(self) -> None:
        """Start new workers in the next loop: after a failure they may be dead or out of step. For the iterator."""
        self._fetcher = None


class _EpochIterator:
    """Hands out fetched batches beside their plan, and moves the loader's cursor with each."""

    def __init__(self, loader: ResumableLoader, plan: Iterator[Batch], fetched: Iterator[Any]) -> None:
        self._loader = loader
        self._plan = plan
        self._fetched: Iterator[Any] | None = fetched
        self._ended: str | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ended is not None:
            raise UsageError(f"this iterator has ended: {self._ended}", advice=_AGAIN)
        batch = next(self._plan, None) if self._fetched is not None else None
        if self._fetched is None or batch is None:
            self._fetched = None
            raise StopIteration
        try:
            data = next(self._fetched)
        except BaseException as error:
            # The fetcher has moved on and the cursor has not: going on here would pair batches with wrong ids.
            _stop_workers(self._fetched)
            self.end(f"{type(error).__name__} while fetching a batch")
            self._loader._drop_fetcher()
            if isinstance(error, StopIteration):  # let through, it would end the epoch early without a word
                raise UsageError(
                    f"StopIteration while fetching positions {batch.start} to {batch.stop - 1} of epoch "
                    f"{batch.cursor.epoch}",
                    advice="raise another exception from the dataset's __getitem__ or from collate_fn",
                ) from error
            raise
        self._loader._hand_out(batch)
        return data

    def end(self, reason: str) -> None:
        """Refuse every further `next()` and let go of the workers."""
        if self._fetched is not None:
            self._ended = reason
            self._fetched = None


def _stop_workers(fetched: Iterator[Any]) -> None:
    # Letting go of the iterator would do, but the exception's traceback holds it. As long as torch watches a dead
    # worker, each SIGCHLD, of any child, raises that worker's error again wherever the main thread then is.
    stop = getattr(fetched, "_shutdown_workers", None)
    if stop is not None:
        stop()


def _choose_order(dataset: Dataset[Any], *, shuffle: bool) -> str:
    if not isinstance(dataset, Mixture):
        return KEYED if shuffle else SEQUENTIAL
    if not shuffle:
        raise UsageError(
            "shuffle=False with a Mixture: its sources follow each other at random", advice="leave it out"
        )
    return dataset.plan.algorithm


def _count_samples(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            f"{type(dataset).__name__} is an IterableDataset: it has no samples by number",
            advice="put it into a StreamLoader, or use a map-style dataset",
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise UsageError(f"{type(dataset).__name__} has no {' and no '.join(missing)}: expected a map-style dataset")
    size = len(dataset)  # type: ignore[arg-type]  # looked for above
    if size < 1:
        raise UsageError(f"{type(dataset).__name__} is empty: expected at least one sample")
    return size
