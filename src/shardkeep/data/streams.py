"""Steps over a stream that keep something between two items: `Filter`, `Shuffle` and `Pack`; each is a stream itself.

Whatever a step has taken from its source and not yet handed out is part of its state, so that nothing is lost or
comes twice wherever a run is cut. A step pulls from its source only when it is asked for an item; nothing is fetched
ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from torch.utils.data import IterableDataset

from shardkeep.data.coordinates import as_int
from shardkeep.data.sources import adapt, split_source
from shardkeep.errors import StateMismatch, UsageError
from shardkeep.order.draws import draw_below
from shardkeep.order.permutation import derive_key


class Step(IterableDataset[Any]):
    """What all steps share: one iterator of the source, the end of a pass, and the state of both."""

    def __init__(self, source: Any) -> None:
        self._source = adapt(source)
        self._pulled: Iterator[Any] | None = None
        # The source's pass is over and ours is not yet: it must not be asked again, that would begin its next pass.
        self._drained = False
        self._started = False

    def __iter__(self) -> Iterator[Any]:
        """Go on with the pass, or begin the next one."""
        return _Pass(self)

    def _next_item(self) -> Any:
        """Return the next item; raises StopIteration at the end of a pass."""
        raise NotImplementedError

    def _pull(self) -> Any:
        """Return the source's next item; raises StopIteration once its pass is over."""
        if self._drained:
            raise StopIteration
        if self._pulled is None:
            self._pulled = iter(self._source)
            self._started = True
        try:
            return next(self._pulled)
        except StopIteration:
            self._drained, self._pulled = True, None
            raise

    def _end_pass(self) -> StopIteration:
        self._drained = False
        return StopIteration()

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own(self, state: Mapping[str, Any]) -> None:
        """Take over what `_own_state` gave."""

    def _split_own(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the source's position and what was taken from it and not handed out."""
        source = self._source.state_dict() if self._started else None
        return {"source": source, "drained": self._drained, **self._own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        if not isinstance(state, Mapping) or not {"source", "drained"} <= set(state):
            raise StateMismatch(f"this is not the state of a {type(self).__name__}: {type(state).__name__}")
        self._load_own(state)
        self._drained = bool(state["drained"])
        self._pulled = None
        if state["source"] is not None:
            self._source.load_state_dict(state["source"])
            self._started = True
            # Now, not at the first item: some sources draw from a global generator, which is restored after this.
            self._pulled = None if self._drained else iter(self._source)

    def split_state(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return one rank's state of a new world: the source's by its own rule, leftovers dealt out to the ranks.

        Raises:
            StateMismatch: the source cannot be split, or only some ranks had come to the end of a pass.
        """
        if len({bool(state["drained"]) for state in states}) > 1:
            raise StateMismatch(
                "some ranks' sources were at the end of their pass and others were not",
                advice=f"resume with {len(states)} data-parallel ranks and save again at another step",
            )
        source = split_source(self._source, [state["source"] for state in states], rank, world_size)
        return {
            "source": source,
            "drained": bool(states[0]["drained"]),
            **self._split_own(states, rank, world_size),
        }


class _Pass:
    """One pass; once it has ended it stays so, whatever its step does later."""

    def __init__(self, step: Step) -> None:
        self._step: Step | None = step

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._step is None:
            raise StopIteration
        try:
            return self._step._next_item()
        except StopIteration:
            self._step = None
            raise


class Filter(Step):
    """Hands out the items of a stream for which `keep` is true.

    The state holds the source's own position, so that items that were dropped are not read again.

    Args:
        source: a stream: has `state_dict` and `load_state_dict`; or a plain DataLoader or Hugging Face
            IterableDataset, which is adapted.
        keep: a function of one item; draws from no generator of its own.
    """

    def __init__(self, source: Any, keep: Callable[[Any], object]) -> None:
        super().__init__(source)
        self._keep = keep

    def _next_item(self) -> Any:
        try:
            while True:
                item = self._pull()
                if self._keep(item):
                    return item
        except StopIteration:
            raise self._end_pass() from None


class Shuffle(Step):
    """Hands out the items of a stream in another order: each is picked at random from a buffer of the next ones.

    The picks are a pure function of the seed and their number. The buffer's items are part of the state: keep them
    small (file names, token arrays), and free of what a checkpoint cannot hold.

    Args:
        source: as for `Filter`.
        buffer_size: items to pick from.
        seed: any integer from 0 up. Ranks may share it: each has its own items.
    """

    def __init__(self, source: Any, *, buffer_size: SupportsIndex, seed: SupportsIndex) -> None:
        super().__init__(source)
        self._size = as_int("buffer_size", buffer_size)
        if self._size < 1:
            raise UsageError(f"buffer_size is {self._size}: expected 1 or more")
        self._key = derive_key(as_int("seed", seed), 0, domain="shuffle")
        self._buffer: list[Any] = []
        self._picked = 0

    def _next_item(self) -> Any:
        while len(self._buffer) < self._size and not self._drained:
            try:
                self._buffer.append(self._pull())
            except StopIteration:
                break
        if not self._buffer:
            raise self._end_pass()
        at = draw_below(self._key, self._picked, len(self._buffer))
        self._picked += 1
        self._buffer[at], self._buffer[-1] = self._buffer[-1], self._buffer[at]
        return self._buffer.pop()

    def _own_state(self) -> dict[str, Any]:
        return {"buffer": list(self._buffer), "picked": self._picked}

    def _load_own(self, state: Mapping[str, Any]) -> None:
        self._buffer, self._picked = list(state["buffer"]), int(state["picked"])

    def _split_own(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        picked = max(state["picked"] for state in states)
        return {"buffer": _deal([state["buffer"] for state in states], rank, world_size), "picked": picked}


class Pack(Step):
    """Makes new items of a stream's: packs documents into sequences, joins or cuts them.

    `pack(leftover, item)` gets what was left over and the next item; it returns the items that are ready (any number)
    and what is left over now, two lists. What is left at the end of a pass goes into the next pass's first items. The
    leftover is part of the state, wherever in a half-filled sequence a run is cut.

        def pack(tokens, document):
            tokens = tokens + document
            whole = len(tokens) // 512 * 512
            return [tokens[at : at + 512] for at in range(0, whole, 512)], tokens[whole:]

    Args:
        source: as for `Filter`.
        pack: a function of two arguments that changes neither.
    """

    def __init__(self, source: Any, pack: Callable[[list[Any], Any], tuple[Iterable[Any], Iterable[Any]]]) -> None:
        super().__init__(source)
        self._pack = pack
        self._leftover: list[Any] = []
        self._ready: deque[Any] = deque()

    def _next_item(self) -> Any:
        while not self._ready:
            try:
                item = self._pull()
            except StopIteration:
                raise self._end_pass() from None
            ready, leftover = self._pack(self._leftover, item)
            self._ready, self._leftover = deque(ready), list(leftover)
        return self._ready.popleft()

    def _own_state(self) -> dict[str, Any]:
        return {"leftover": list(self._leftover), "ready": list(self._ready)}

    def _load_own(self, state: Mapping[str, Any]) -> None:
        self._leftover, self._ready = list(state["leftover"]), deque(state["ready"])

    def _split_own(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        return {
            "leftover": _deal([state["leftover"] for state in states], rank, world_size),
            "ready": _deal([state["ready"] for state in states], rank, world_size),
        }


def _deal(lists: Sequence[Sequence[Any]], rank: int, world_size: int) -> list[Any]:
    """Return what one rank of a new world gets: lists of whole old ranks, so that a leftover stays in one piece."""
    return [item for old, items in enumerate(lists) if old % world_size == rank for item in items]
