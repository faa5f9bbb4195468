"""`StreamLoader`: any source that can say where it is, as a loader that stands in a state and in `manager.steps`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

from torch.utils.data import default_collate

from shardkeep.data.coordinates import as_int, default_coordinates, get_coordinates
from shardkeep.data.sources import adapt, split_source
from shardkeep.errors import CheckpointError, IncompatibleFormat, StateMismatch, UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

VERSION: Final = 1
_KEYS: Final = ("version", "rank", "size", "batches", "source")


class StreamLoader:
    """Yield batches of a stream so that a later run goes on at the next one.

    Sources: torchdata's `StatefulDataLoader`; a plain `torch.utils.data.DataLoader` over a map-style dataset whose
    order can be repeated (no shuffle, a generator of its own, a DistributedSampler); a Hugging Face
    `IterableDataset`; a `Filter`, `Shuffle` or `Pack` over any of these; and anything iterable with `state_dict` and
    `load_state_dict`, where `iter()` goes on at the position and begins the next pass at the end of one.

    Every rank has its own source and position, stored per rank. On another number of data-parallel ranks the
    positions are split by the source's `split_state(states, rank, world_size)`, or the resume is refused by name.

    Every `for` loop goes on at the first item that was not handed out and stops at the end of the source's pass.
    After an error of the source or of `collate_fn` the loader goes no further until `load_state_dict`, so that no
    item is skipped without a word.

    Args:
        source: this rank's part of the data.
        batch_size: items of the source per batch and rank; None: the source yields batches.
        collate_fn: makes a batch of a list of items, as in torch's DataLoader.
        drop_last: skip the last items of a pass that do not fill a batch.
        data_mesh, data_rank, data_size: as for `ResumableLoader`.

    Raises:
        UnsupportedState: a source that cannot be brought back to a position; the advice names what to use.
        UsageError: options that contradict each other.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: SupportsIndex | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        data_mesh: DeviceMesh | None = None,
        data_rank: SupportsIndex | None = None,
        data_size: SupportsIndex | None = None,
    ) -> None:
        self._source = adapt(source)
        self._batch_size = None if batch_size is None else as_int("batch_size", batch_size)
        if self._batch_size is None and (collate_fn is not None or drop_last):
            raise UsageError("collate_fn or drop_last without batch_size: the source yields batches as they are")
        if self._batch_size is not None and self._batch_size < 1:
            raise UsageError(f"batch_size is {self._batch_size}: expected 1 or more")
        self._collate = collate_fn if collate_fn is not None else default_collate
        self._drop_last = drop_last
        self._at = get_coordinates(data_mesh, data_rank, data_size) or default_coordinates()
        self._batches = 0
        self._iterator: Iterator[Any] | None = None
        self._started = False
        self._resumed = False
        self._failed: str | None = None
        # Taken from the source for the batch that is being made.
        self._items: list[Any] = []

    @property
    def batches(self) -> int:
        """Batches handed out to this rank since the run began."""
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        """Go on with the pass, or begin the next one."""
        while True:
            if self._failed is not None:
                self._refuse_to_go_on("go on")
            try:
                batch = self._take()
            except BaseException as error:
                self._failed = type(error).__name__
                raise
            if batch is not None:
                self._resumed = False
                self._batches += 1
                yield batch[0]
            elif self._resumed:
                # The saved position was the very end of a pass; nobody had asked for the next batch yet.
                self._resumed = False
            else:
                return

    def _refuse_to_go_on(self, doing: str) -> None:
        raise UsageError(
            f"the loader cannot {doing}: its source or collate_fn raised {self._failed} after batch {self._batches}, "
            f"when {len(self._items)} items were taken for the next one",
            advice="resume from the last checkpoint, with a new loader",
        )

    def _take(self) -> tuple[Any] | None:
        """Return the next batch, or None at the end of a pass."""
        if self._iterator is None:
            self._iterator = iter(self._source)
            self._started = True
        items = self._items
        wanted = self._batch_size or 1
        while len(items) < wanted:
            try:
                items.append(next(self._iterator))
            except StopIteration:
                break
        # A short batch is the pass's last: asking again would ask a source that has ended, which then says so again.
        if not items or (len(items) < wanted and self._drop_last):
            self._iterator, self._items = None, []
            return None
        batch = items[0] if self._batch_size is None else self._collate(items)
        self._items = []
        return (batch,)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position: plain values, and whatever the source's state holds.

        Raises:
            UsageError: a batch failed half-way, so that the source's position is past what was handed out.
        """
        if self._items:
            self._refuse_to_go_on("say where it is")
        return {
            "version": VERSION,
            "rank": self._at.rank,
            "size": self._at.size,
            "batches": self._batches,
            # A source that was not asked for anything is as it was built; asking for its state may start workers.
            "source": self._source.state_dict() if self._started else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position of a rank with the same place on the data axis.

        Raises:
            StateMismatch: not a StreamLoader's state, another place, or the source refuses it.
            IncompatibleFormat: a newer version wrote it.
        """
        _check(state)
        if (state["rank"], state["size"]) != (self._at.rank, self._at.size):
            raise StateMismatch(
                f"the position of data-parallel rank {state['rank']} of {state['size']}; this is rank "
                f"{self._at.rank} of {self._at.size}",
                advice="resume with the data-parallel size of the saving run",
            )
        self._iterator, self._batches = None, int(state["batches"])
        if state["source"] is None:
            if self._started:
                raise StateMismatch(
                    "the stored position is before the first item; this loader has given some already"
                )
            return
        try:
            self._source.load_state_dict(state["source"])
            # Now, not at the first batch: some sources draw from a global generator, which is restored after this.
            self._iterator = iter(self._source)
        except CheckpointError:
            raise
        except Exception as error:
            raise StateMismatch(f"a {type(self._source).__name__} refused its stored position: {error!r}") from error
        self._started = self._resumed = True
        self._failed, self._items = None, []

    def merge_states(self, states: Sequence[Any]) -> dict[str, Any]:
        """Return this rank's state from those of all ranks of a job of another size.

        Raises:
            StateMismatch: states that do not make a whole, or a source that cannot be split.
        """
        by_rank: dict[int, Mapping[str, Any]] = {}
        for state in states:
            _check(state)
            known = by_rank.setdefault(state["rank"], state)
            if known["batches"] != state["batches"] or known["size"] != state["size"]:
                raise StateMismatch(f"two ranks saved different positions as data-parallel rank {state['rank']}")
        size = states[0]["size"]
        if sorted(by_rank) != list(range(size)):
            raise StateMismatch(f"positions of data-parallel ranks {sorted(by_rank)}; expected 0 to {size - 1}")
        ordered = [by_rank[rank] for rank in range(size)]
        if size == self._at.size:
            return dict(ordered[self._at.rank])
        source = split_source(self._source, [state["source"] for state in ordered], self._at.rank, self._at.size)
        batches = max(state["batches"] for state in ordered)
        return {
            "version": VERSION,
            "rank": self._at.rank,
            "size": self._at.size,
            "batches": batches,
            "source": source,
        }


def _check(state: Any) -> None:
    if not isinstance(state, Mapping) or set(_KEYS) - set(state):
        raise StateMismatch(
            "this is not the state of a StreamLoader",
            advice="check that the checkpoint holds a StreamLoader under this name",
        )
    if state["version"] > VERSION:
        raise IncompatibleFormat(
            f"StreamLoader state of version {state['version']}: this shardkeep reads up to version {VERSION}",
            advice="upgrade shardkeep to the version that saved the checkpoint",
        )
