"""Faster places before the root: which of them a save goes to, and how it comes from there to the slower ones.

Each save goes to the fastest tier that is due and takes it. From there a thread copies it to every slower place that
is due, over a control channel of its own, while training goes on. A tier that fails is passed over and tried
again with the next save; a copy that fails is tried again with the next one, and by the next start.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

import msgspec
from msgspec import Struct

from shardkeep.engine.promote import Lane, Pace, is_storage_failure, promote, spread_record
from shardkeep.engine.run import RunView, scan_run
from shardkeep.engine.tiers import Place, TieredStore, is_committed, mirror_claims, take_inventory
from shardkeep.errors import CheckpointError, Corrupt, PeerFailure, StorageError, UsageError
from shardkeep.events import Event, EventSink
from shardkeep.format.names import StepRef
from shardkeep.knobs import read_local_rank
from shardkeep.manager.policies import Minutes, Steps, Tier
from shardkeep.manager.resume import Claim
from shardkeep.manager.retain import Retention
from shardkeep.plan.retention import Candidate, Keep, plan_removal
from shardkeep.ranks.base import Group
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_store
from shardkeep.storage.retry import RetryingStore

_MIB: Final = 1 << 20
_LAST_TRIES: Final = 2
_POLL_S: Final = 0.05
_IDLE_S: Final = 0.5

Fields = dict[str, str | int | float | bool | None]


class _Landing(Struct, frozen=True, kw_only=True):
    """A checkpoint that is committed `at` a place (None: by an earlier start), and goes on to `due` places.

    `littered`: a save before it failed and may have left files.
    """

    ref: StepRef
    due: tuple[int, ...]
    at: int | None = None
    littered: bool = False


class Places:
    """Where the checkpoints of one manager go. All ranks make the same calls in the same order.

    Places are numbered: tiers from the fastest on, the root last. Without tiers there is only the root.

    Attributes:
        store: all of them as one store.
    """

    def __init__(self, root: Store, tiers: Sequence[Tier], keep: Keep, events: EventSink) -> None:
        self._tiers = tuple(tiers)
        self._by_clock = frozenset(n for n, tier in enumerate(tiers) if isinstance(tier.rule, Minutes))
        self._keep = keep
        self._events = events
        self._tiered = _open_tiers(tiers, root, events) if tiers else None
        self._root = root
        self.store: Store = self._tiered or root
        self._retentions: list[Retention] = []
        self._mirrored: set[int] = set()
        self._lanes = [Lane(Pace(t.rate_mib_s * _MIB if t.rate_mib_s else None)) for t in tiers] + [Lane(Pace(None))]
        self._queue: SimpleQueue[_Landing | None] = SimpleQueue()
        self._behind: list[tuple[StepRef, int]] = []
        self._thread: threading.Thread | None = None
        self._group: Group | None = None
        self._channel: Group | None = None
        self._run_id = ""
        self._littered = False
        self._sent_count = 0
        self._done_count = 0
        self._lasting_step = -1

    @property
    def root(self) -> int:
        """The number of the root."""
        return len(self._tiers)

    @property
    def retention(self) -> Retention:
        """That of the root."""
        return self._retentions[-1]

    def look(self, group: Group) -> None:
        """Agree which copies in the tiers count, before a parent is chosen (collective)."""
        if self._tiered is not None:
            take_inventory(self._tiered, group, self._events)

    def own(self, group: Group, claim: Claim, every: Steps | Minutes | None) -> None:
        """Work for this start from now on, and send on what an earlier one left in faster places (collective).

        Args:
            every: at which steps a checkpoint goes to the root.
        """
        self._group = group
        self._run_id = claim.run_id
        self._retentions = [
            Retention(self.get_store(number), self._events, claim, leads=self._leads(number))
            for number in range(self.root + 1)
        ]
        left = self._find_left(self._tiered, group, claim, every) if self._tiered is not None else []
        # What an earlier start had begun to copy is gone on with.
        self.retention.waiting = frozenset(landing.ref for landing in left)
        if claim.parent is not None:
            # ORDER: before anything is copied, whose unfinished files would look as if nobody wanted them.
            self.retention.sweep(Keep())
        if self._tiered is not None:
            self._channel = group.clone()
            self._mirror(self._tiered, group)
            for landing in left:
                self._send(landing)

    def _leads(self, number: int) -> bool:
        """Say whether this rank is the one that tidies a place, of those that see the same objects there."""
        assert self._group is not None
        by_node = number != self.root and self._tiers[number].scope == "node"
        return (read_local_rank() if by_node else self._group.rank) == 0

    def _find_left(
        self, store: TieredStore, group: Group, claim: Claim, every: Steps | Minutes | None
    ) -> list[_Landing]:
        """Return what is in faster places and not in slower ones where it was due, or where the run goes on from."""

        def decide(found: list[bytes]) -> bytes:
            view = scan_run(store) if claim.parent is not None else None
            left = list(self._list_left(store, view, claim, every)) if view is not None else []
            return msgspec.json.encode(left)

        found = group.agree("tiers.left", lambda: b"", decide)
        return msgspec.json.decode(found, type=list[_Landing])

    def _list_left(
        self, store: TieredStore, view: RunView, claim: Claim, every: Steps | Minutes | None
    ) -> Iterator[_Landing]:
        places = {ref: {n for n in range(self.root) if store.has(n, ref)} for ref in view.timeline}
        for ref, found in places.items():
            if not found or is_committed(self._root, ref):
                found.add(self.root)
        for ref, found in places.items():
            last = ref == claim.parent
            root = last or (every is not None and every.is_due(ref.step))
            # What the clock said of the older ones is past.
            due = self.find_due(ref.step, root=root, clocked=self._by_clock if last else frozenset())
            slower = [n for n in due if n > min(found) and n not in found]
            wanted = tuple(n for n in slower if self._would_stay(n, ref, view, places, claim.parent))
            if wanted:
                yield _Landing(ref=ref, due=wanted)

    def _would_stay(
        self, number: int, ref: StepRef, view: RunView, places: dict[StepRef, set[int]], parent: StepRef | None
    ) -> bool:
        """Say whether the rule of a place keeps a checkpoint there, or removed it and would do so again."""
        rule = self._keep if number == self.root else self._tiers[number].retention
        there = [other for other, found in places.items() if number in found or other == ref]
        known = [Candidate(ref=one, metrics={}, healthy=True, held=one in view.held) for one in there]
        return rule.best is not None or ref not in plan_removal(known, rule, parent=parent)

    def _mirror(self, store: TieredStore, group: Group) -> None:
        """Make every tier a part of the run; what cannot be one now is tried again by each save (`prepare`)."""

        def work() -> bytes:
            done = []
            for number in range(self.root):
                try:
                    if store.is_open(number) and self._leads(number):
                        mirror_claims(store, number)
                    done.append(store.is_open(number))
                except (CheckpointError, OSError) as error:
                    self._degraded(number, f"cannot be used now: {error}")
                    done.append(False)
            return msgspec.json.encode(done)

        def join(found: list[bytes]) -> bytes:
            seen = [msgspec.json.decode(data, type=list[bool]) for data in found]
            return msgspec.json.encode([all(column) for column in zip(*seen, strict=True)])

        done = msgspec.json.decode(group.agree("tiers.mirror", work, join), type=list[bool])
        self._mirrored = {number for number, is_done in enumerate(done) if is_done}

    def prepare(self, place: Store) -> None:
        """Make a place a part of the run, where it is not yet; called before anything is written there.

        Raises:
            StorageError: it cannot be; another place is to be taken.
        """
        number = self._get_number(place)
        if self._tiered is None or number == self.root or number in self._mirrored:
            return
        if not self._tiered.is_open(number):
            raise StorageError(f"{place.url} is another run's", retryable=False)
        try:
            mirror_claims(self._tiered, number)
        except Corrupt as error:
            raise StorageError(error.message, retryable=False) from error
        self._mirrored.add(number)

    def find_due(self, step: int, *, root: bool, clocked: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """Return the places that a step goes to, the fastest first; `clocked`: tiers whose time has come."""
        wanted = [n for n, tier in enumerate(self._tiers) if tier.rule.is_due(step) or n in clocked]
        due = [n for n in wanted if self._is_open(n)]
        return (*due, self.root) if root else tuple(due)

    def find_lasting(self) -> tuple[int, ...]:
        """Return the places that outlive a node, the fastest first."""
        shared = [n for n, tier in enumerate(self._tiers) if tier.scope == "shared" and self._is_open(n)]
        return (*shared, self.root)

    def _is_open(self, number: int) -> bool:
        """Say whether a tier takes part in this start; the same on all ranks."""
        return self._tiered is not None and self._tiered.is_open(number)

    def get_store(self, number: int) -> Store:
        """Return a place's store."""
        return self._root if self._tiered is None or number == self.root else self._tiered.tiers[number].store

    def get_stores(self, numbers: Sequence[int]) -> list[Store]:
        """Return the stores of several places."""
        return [self.get_store(number) for number in numbers]

    def _get_number(self, store: Store) -> int:
        return next((n for n in range(self.root) if self.get_store(n) is store), self.root)

    def passed_over(self, store: Store, error: CheckpointError) -> None:
        """Take note that a save went past a place."""
        self._littered = True
        # Those whose peers failed have nothing to add to what the peers say.
        if self._rank == 0 or not isinstance(error, PeerFailure):
            self._degraded(
                self._get_number(store), f"did not take a checkpoint, the next place is tried: {error.message}"
            )

    def landed(self, ref: StepRef, number: int, due: Sequence[int]) -> None:
        """Take note of a commit at a place: remove what is not kept, and send it on to slower places that are due."""
        littered, self._littered = self._littered, False
        if self._tiered is None:
            self.retention.after_save(self._keep)
            return
        if number != self.root:
            self._tiered.count(number, [ref])
        if number in self.find_lasting():
            self._lasting_step = ref.step
        slower = tuple(other for other in due if other > number)
        self._send(_Landing(ref=ref, due=slower, at=number, littered=littered))

    def is_lasting(self, step: int) -> bool:
        """Wait until a save that has landed is where it outlives the node, or cannot be brought there; say which."""
        while self._tiered is not None and self._lasting_step < step:
            if self._thread is None or not self._thread.is_alive() or self._done_count == self._sent_count:
                return self._lasting_step >= step
            time.sleep(_POLL_S)
        return True

    def failed(self, due: Sequence[int], error: BaseException) -> bool:
        """Take note that a save failed and may have left files anywhere; say whether the run can do without it.

        It can where only storage failed, and the root was not to have it.
        """
        self._littered = True
        if self._tiered is None:
            for retention in self._retentions:
                retention.left_behind = True
        return self.root not in due and is_storage_failure(error)

    def _send(self, landing: _Landing) -> None:
        self._sent_count += 1
        self._queue.put(landing)
        if self._thread is None:
            # No daemon: a process that ends first brings its checkpoints where they belong.
            self._thread = threading.Thread(target=self._run, name="shardkeep-promote")
            self._thread.start()

    def _receive(self) -> _Landing | None:
        """Return the next landing; None when there will be none: after `close`, or at the end of the process."""
        while True:
            with contextlib.suppress(Empty):
                return self._queue.get(timeout=_IDLE_S)
            saves = any(one.name.startswith("shardkeep-save") for one in threading.enumerate())
            if not threading.main_thread().is_alive() and not saves and self._queue.empty():
                return None

    def _run(self) -> None:
        while (landing := self._receive()) is not None:
            if landing.at is not None:
                self._spread(landing.ref, landing.at)
            self._behind += [(landing.ref, number) for number in landing.due]
            self._bring()
            if landing.at is not None:
                self._sweep(landing)
            self._done_count += 1
        for _ in range(_LAST_TRIES):
            self._bring()
        if self._behind and self._rank == 0:
            names = ", ".join(f"{ref} to {self.get_store(number).url}" for ref, number in self._behind)
            text = f"not copied before the end: {names}; the next start goes on with it"
            self._events.emit(Event(name="tier.behind", level="warning", text=text))
        if not threading.main_thread().is_alive() and self._channel is not None:
            self._channel.close()  # nobody else will

    def _spread(self, ref: StepRef, number: int) -> None:
        """Bring a commit record to the other nodes, where it was committed in each one's own place."""
        assert self._channel is not None
        if number == self.root or self._tiers[number].scope == "shared":
            return
        try:
            spread_record(self.get_store(number), self._channel, ref)
        except CheckpointError as error:
            self._degraded(number, f"{ref} is not whole there on every node: {error.message}")

    def _bring(self) -> None:
        """Copy what is to be copied; a place that fails once is left alone until the next time."""
        left: list[tuple[StepRef, int]] = []
        for ref, number in self._behind:
            if any(number == failed for _, failed in left) or not self._promote(ref, number):
                left.append((ref, number))
        self._behind = left

    def _promote(self, ref: StepRef, number: int) -> bool:
        """Copy a checkpoint to a place; return whether that is done with, well or for good: alike on all ranks."""
        assert self._channel is not None
        assert self._tiered is not None
        store, lane = self.get_store(number), self._lanes[number]
        ready, begin_s = partial(self.prepare, store), time.monotonic()
        done = promote(self._tiered, store, self._channel, ref, run_id=self._run_id, lane=lane, prepare=ready)
        if done.problem:
            how = "is not copied there" if done.lasting else "could not be copied there yet"
            if self._rank == 0:
                self._degraded(number, f"{ref} {how}: {done.problem}")
            return done.lasting
        if number != self.root:
            self._tiered.count(number, [ref])
        if number in self.find_lasting():
            self._lasting_step = max(self._lasting_step, ref.step)
        if self._rank == 0:
            text = f"{ref} is in {store.url} now"
            took_s = round(time.monotonic() - begin_s, 6)
            fields: Fields = {"step": ref.step, "tier": number, "copied_bytes": done.copied_bytes, "total_s": took_s}
            self._events.emit(Event(name="tier.promoted", text=text, fields=fields))
        return True

    def _sweep(self, landing: _Landing) -> None:
        """Remove from each place what its rule does not keep and no slower place waits for.

        A later save may be under way meanwhile: tries beyond the step that has landed are left alone.
        """
        assert self._tiered is not None
        for retention in self._retentions:
            retention.settled = landing.ref.step
            retention.waiting = frozenset(ref for ref, _ in self._behind)
            retention.left_behind |= landing.littered
        self.retention.after_save(self._keep)
        for number, tier in enumerate(self._tiers):
            if number in self._mirrored:
                self._tiered.discount(number, self._retentions[number].sweep(tier.retention, cached=True))

    @property
    def _rank(self) -> int:
        return self._group.rank if self._group is not None else 0

    def _degraded(self, number: int, what: str) -> None:
        text = f"{self.get_store(number).url}: {what}"
        fields: Fields = {"tier": number, "rank": self._rank}
        self._events.emit(Event(name="tier.degraded", level="warning", text=text, fields=fields))

    def close(self) -> None:
        """Wait until everything is where it belongs or cannot be brought there; harmless twice."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        if self._channel is not None:
            self._channel.close()


def _open_tiers(tiers: Sequence[Tier], root: Store, events: EventSink) -> TieredStore:
    """Return the root with the tiers before it, as one store; touches nothing."""
    stores = [open_store(t.url) if isinstance(t.url, str | os.PathLike) else t.url for t in tiers]
    places = [
        Place(store=RetryingStore(store, events=events), shared=tier.scope == "shared")
        for store, tier in zip(stores, tiers, strict=True)
    ]
    urls = [place.store.url for place in places] + [root.url]
    for at, url in enumerate(urls):
        if url in urls[:at]:
            raise UsageError(f"{url} is given twice", advice="give each tier, and the root, a place of its own")
    return TieredStore(places, root)
