"""What a stream is here, and how other libraries' sources become one.

A *stream* is iterable and has `state_dict()` and `load_state_dict(state)`. Its position is what it has handed out,
never what it has fetched. `iter()` goes on at the position; where that is the end of a pass, it begins the next pass.
Optional: `split_state(states, rank, world_size)` returns the state of one rank of a new world from the states of all
ranks of the old one, so that every sample comes once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol

from torch.utils.data import DataLoader

from shardkeep.data.samplers import SamplerSource
from shardkeep.errors import CheckpointError, StateMismatch, UnsupportedState

_FIX: Final = "read the data through sk.ResumableLoader, or give the source state_dict and load_state_dict"


class Source(Protocol):
    """A stream, as the module's docstring says."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> object: ...


def adapt(source: Any) -> Source:
    """Return the source itself if it is a stream, or an adapter that makes it one.

    Raises:
        UnsupportedState: nothing says where the source is, or a later run could not be brought there; the advice
            names what to use instead.
    """
    if type(source) is DataLoader:
        return SamplerSource(source)
    if is_hugging_face(source):
        return HuggingFaceSource(source)
    if isinstance(source, Iterable) and all(
        callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict")
    ):
        return source  # type: ignore[return-value]  # looked for just now
    raise UnsupportedState(
        f"a {type(source).__name__} as a source: it does not say where it is, so that no later run can go on there",
        advice=_FIX,
    )


def is_hugging_face(source: Any) -> bool:
    """Say whether this is a `datasets.IterableDataset`; does not import `datasets`."""
    return any(
        base.__name__ == "IterableDataset" and base.__module__.split(".")[0] == "datasets"
        for base in type(source).__mro__
    )


class HuggingFaceSource:
    """A `datasets.IterableDataset` as a stream.

    What it adds: each pass after a resumed one begins at the start (the dataset's own would begin where the resumed
    one did), passes reshuffle as `set_epoch` says, and a shuffle buffer comes back exactly. The dataset saves no
    buffer, so that one is filled anew by reading the pass from its start up to the position.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._rereads = _loses_buffer(dataset)
        self._start = copy.deepcopy(dataset.state_dict())
        self._epoch = 0
        self._count = 0
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        self._dataset.set_epoch(self._epoch)
        begin = self._start if self._rereads or self._state is None else self._state
        self._dataset.load_state_dict({**copy.deepcopy(begin), "epoch": self._epoch})
        iterator = iter(self._dataset)
        if self._rereads and self._count:
            logging.getLogger("shardkeep").info(
                "reading %d examples again to fill a shuffle buffer; sk.Shuffle saves its buffer instead", self._count
            )
            _skip(iterator, self._count)
        return self._go_on(iterator)

    def _go_on(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for item in iterator:
            self._count += 1
            self._state = None if self._rereads else _LIVE
            yield item
        self._epoch, self._count, self._state = self._epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the pass, the examples handed out in it, and the dataset's own state."""
        own = copy.deepcopy(self._dataset.state_dict()) if self._state is _LIVE else self._state
        return {"epoch": self._epoch, "count": self._count, "dataset": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; takes effect at the next `iter()`."""
        self._epoch, self._count = int(state["epoch"]), int(state["count"])
        self._state = copy.deepcopy(state["dataset"])


_LIVE: Final = object()


def _skip(iterator: Iterator[Any], count: int) -> None:
    found = sum(1 for _ in islice(iterator, count))
    if found < count:
        raise StateMismatch(
            f"the source ended after {found} items; the stored position is item {count}",
            advice="give the loader the data that the run was trained on",
        )


def _loses_buffer(dataset: Any) -> bool:
    """Say whether a shuffle buffer stands anywhere in the dataset's chain of steps; True where nobody can tell."""
    if not hasattr(dataset, "_ex_iterable"):
        return True
    waiting: list[Any] = [dataset._ex_iterable]
    while waiting:
        step = waiting.pop()
        if "BufferShuffled" in type(step).__name__:
            return True
        waiting += [step.ex_iterable] if hasattr(step, "ex_iterable") else []
        waiting += getattr(step, "ex_iterables", [])
    return False


def split_source(source: Any, states: Sequence[Any], rank: int, world_size: int) -> Any:
    """Return the state of one rank of a new world, by the source's own rule.

    Raises:
        StateMismatch: the source has no such rule, or its rule failed.
    """
    if states and all(state is None for state in states):
        return None
    split = getattr(source, "split_state", None)
    if not callable(split):
        raise StateMismatch(
            f"the positions of {len(states)} ranks in a {type(source).__name__}, which cannot be split over "
            f"{world_size}",
            advice=f"resume with {len(states)} data-parallel ranks, give the source "
            "split_state(states, rank, world_size), or read the data through sk.ResumableLoader",
        )
    try:
        return split(states, rank, world_size)
    except CheckpointError:
        raise
    except Exception as error:
        raise StateMismatch(f"split_state of a {type(source).__name__} raised {error!r}") from error
