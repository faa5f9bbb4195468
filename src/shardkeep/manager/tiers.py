"""Faster places before the root: which of them a save goes to, and how it comes from there to the slower ones.

Each save goes to the fastest tier that is due and takes it. From there a thread copies it to every slower place that
is due, over a control channel of its own, while training goes on. A tier that fails is passed over and tried
again with the next save; a copy that fails is tried again with the next one, and by the next start.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, Literal

import msgspec
from msgspec import Struct

from shardkeep.engine.promote import Pace, promote
from shardkeep.engine.run import scan_run
from shardkeep.engine.tiers import Place, TieredStore, is_committed, mirror_claims, take_inventory
from shardkeep.errors import CheckpointError, PeerFailure, StorageError, UsageError
from shardkeep.events import Event, EventSink
from shardkeep.format.names import StepRef
from shardkeep.knobs import read_local_rank
from shardkeep.manager.policies import Minutes, Steps
from shardkeep.manager.resume import Claim
from shardkeep.manager.retain import Retention
from shardkeep.plan.retention import Keep
from shardkeep.ranks.base import Group
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_store
from shardkeep.storage.retry import RetryingStore

_MIB: Final = 1 << 20
_LAST_TRIES: Final = 2

Fields = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class Tier:
    """A faster place for checkpoints, before the root.

    Attributes:
        url: a folder (`/dev/shm/run` is host memory) or an object store's URL, with nothing of another run in it.
        every: at which steps a checkpoint goes there; an int stands for `Steps`.
        keep: which ones stay there; an int keeps the newest so many. A checkpoint that is still to be copied to a
            slower place stays in any case.
        scope: `"node"`: each node has its own (host memory, a local disk); it goes with its node. `"shared"`: all
            ranks see the same objects.
        rate_mib_s: what one rank copies into it at most, in MiB/s; None: as fast as it goes.
    """

    url: str | os.PathLike[str]
    every: Steps | int
    keep: Keep | int = 1
    scope: Literal["node", "shared"] = "node"
    rate_mib_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.every, Steps | int):
            raise UsageError(f"Tier({self.url!r}, every={self.every!r}): expected a number of steps")
        Steps(self.steps.count)
        if not isinstance(self.keep, Keep) and (isinstance(self.keep, bool) or self.keep < 1):
            raise UsageError(f"Tier({self.url!r}, keep={self.keep!r}): expected a count of 1 or more, or Keep(...)")
        if self.scope not in ("node", "shared"):
            raise UsageError(f"Tier({self.url!r}, scope={self.scope!r}): expected 'node' or 'shared'")
        if self.rate_mib_s is not None and not self.rate_mib_s > 0:
            raise UsageError(f"Tier({self.url!r}, rate_mib_s={self.rate_mib_s!r}): expected a positive number")

    @property
    def steps(self) -> Steps:
        return self.every if isinstance(self.every, Steps) else Steps(self.every)

    @property
    def retention(self) -> Keep:
        return self.keep if isinstance(self.keep, Keep) else Keep(last=self.keep)


class _Landing(Struct, frozen=True, kw_only=True):
    """A checkpoint that was committed somewhere, just now if it was `saved`, and goes on to `due` places."""

    ref: StepRef
    due: tuple[int, ...]
    saved: bool = False


class Places:
    """Where the checkpoints of one manager go. All ranks make the same calls in the same order.

    Places are numbered: tiers from the fastest on, the root last. Without tiers there is only the root.

    Attributes:
        store: all of them as one store.
    """

    def __init__(self, root: Store, tiers: Sequence[Tier], keep: Keep, events: EventSink) -> None:
        self._tiers = tuple(tiers)
        self._keep = keep
        self._events = events
        self._tiered = _open_tiers(tiers, root, events) if tiers else None
        self._root = root
        self.store: Store = self._tiered or root
        self._retentions: list[Retention] = []
        self._ready: list[bool] = [False] * len(tiers)
        self._paces = [Pace(t.rate_mib_s * _MIB if t.rate_mib_s else None) for t in tiers] + [Pace(None)]
        self._queue: SimpleQueue[_Landing | None] = SimpleQueue()
        self._behind: list[tuple[StepRef, int]] = []
        self._thread: threading.Thread | None = None
        self._group: Group | None = None
        self._channel: Group | None = None
        self._run_id = ""

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
            Retention(self.get_store(number), group, self._events, claim) for number in range(self.root + 1)
        ]
        if claim.parent is not None:
            # ORDER: before anything is copied, whose unfinished files would look as if nobody wanted them.
            self.retention.sweep(Keep())
        if self._tiered is not None:
            self._channel = group.clone()
            self._ready = self._mirror(self._tiered, group)
            for landing in self._find_left(self._tiered, group, claim, every):
                self._send(landing)

    def _find_left(
        self, store: TieredStore, group: Group, claim: Claim, every: Steps | Minutes | None
    ) -> list[_Landing]:
        """Return what is in faster places and not in slower ones where it was due, or where the run goes on from."""

        def decide(found: list[bytes]) -> bytes:
            view = scan_run(store) if claim.parent is not None else None
            left: list[_Landing] = []
            for ref in view.timeline if view is not None else ():
                first = next((n for n in range(self.root) if store.has(n, ref)), self.root)
                due = self.find_due(ref.step, root=ref == claim.parent or _is_due(every, ref.step))
                slower = tuple(n for n in due if n > first and not is_committed(self.get_store(n), ref))
                if slower:
                    left.append(_Landing(ref=ref, due=slower))
            return msgspec.json.encode(left)

        found = group.agree("tiers.left", lambda: b"", decide)
        return msgspec.json.decode(found, type=list[_Landing])

    def _mirror(self, store: TieredStore, group: Group) -> list[bool]:
        """Make every tier a part of the run; say which are (the same on all ranks)."""

        def work() -> bytes:
            done = []
            for number, place in enumerate(store.tiers):
                try:
                    leads = (group.rank if place.shared else read_local_rank()) == 0
                    if leads and store.is_open(number):
                        mirror_claims(store, number)
                    done.append(store.is_open(number))
                except (CheckpointError, OSError) as error:
                    self._degraded(number, f"cannot be used: {error}")
                    done.append(False)
            return msgspec.json.encode(done)

        def join(found: list[bytes]) -> bytes:
            seen = [msgspec.json.decode(data, type=list[bool]) for data in found]
            return msgspec.json.encode([all(column) for column in zip(*seen, strict=True)])

        return msgspec.json.decode(group.agree("tiers.mirror", work, join), type=list[bool])

    def find_due(self, step: int, *, root: bool) -> tuple[int, ...]:
        """Return the places that a step goes to, the fastest first."""
        due = [number for number, tier in enumerate(self._tiers) if tier.steps.is_due(step)]
        return tuple([number for number in due if self._ready[number]] + ([self.root] if root else []))

    def find_lasting(self) -> tuple[int, ...]:
        """Return the places that outlive a node, the fastest first."""
        shared = [number for number, tier in enumerate(self._tiers) if tier.scope == "shared" and self._ready[number]]
        return (*shared, self.root)

    def get_store(self, number: int) -> Store:
        """Return a place's store."""
        return self._root if self._tiered is None or number == self.root else self._tiered.tiers[number].store

    def passed_over(self, store: Store, error: CheckpointError) -> None:
        """Take note that a save went past a place."""
        number = next((n for n in range(self.root) if self.get_store(n) is store), self.root)
        self._degraded(number, f"did not take a checkpoint, the next place is tried: {error}")

    def landed(self, ref: StepRef, number: int, due: Sequence[int]) -> None:
        """Take note of a commit at a place: remove what is not kept, and send it on to slower places that are due."""
        if self._tiered is None:
            self.retention.after_save(self._keep)
            return
        if number != self.root:
            self._tiered.count(number, [ref])
        self._send(_Landing(ref=ref, due=tuple(other for other in due if other > number), saved=True))

    def failed(self) -> None:
        """Take note that a save failed, and may have left files anywhere."""
        for retention in self._retentions:
            retention.left_behind = True

    def _send(self, landing: _Landing) -> None:
        if self._thread is None:
            # No daemon: a process that ends first brings its checkpoints where they belong.
            self._thread = threading.Thread(target=self._run, name="shardkeep-promote")
            self._thread.start()
        self._queue.put(landing)

    def _run(self) -> None:
        while (landing := self._queue.get()) is not None:
            waiting = [*self._behind, *((landing.ref, number) for number in landing.due)]
            self._behind = [one for one in waiting if not self._promote(*one)]
            if landing.saved:
                self._sweep(landing.ref.step)
        for _ in range(_LAST_TRIES):
            self._behind = [one for one in self._behind if not self._promote(*one)]
        if self._behind and self._rank == 0:
            names = ", ".join(f"{ref} to {self.get_store(number).url}" for ref, number in self._behind)
            text = f"not copied before the end: {names}; the next start goes on with it"
            self._events.emit(Event(name="tier.behind", level="warning", text=text))

    def _promote(self, ref: StepRef, number: int) -> bool:
        """Copy a checkpoint to a place; return whether that is done with, well or for good."""
        assert self._channel is not None
        assert self._tiered is not None
        store = self.get_store(number)
        begin_s = time.monotonic()
        try:
            copied_bytes = promote(
                self._tiered, store, self._channel, ref, run_id=self._run_id, pace=self._paces[number]
            )
        except (StorageError, PeerFailure) as error:
            self._degraded(number, f"{ref} could not be copied there yet: {error}")
            return False
        except CheckpointError as error:
            self._degraded(number, f"{ref} is not copied there: {error}")
            return True
        if number != self.root:
            self._tiered.count(number, [ref])
        if self._rank == 0:
            text = f"{ref} is in {store.url} now"
            took_s = round(time.monotonic() - begin_s, 6)
            fields: Fields = {"step": ref.step, "tier": number, "copied_bytes": copied_bytes, "total_s": took_s}
            self._events.emit(Event(name="tier.promoted", text=text, fields=fields))
        return True

    def _sweep(self, settled: int) -> None:
        """Remove from each place what its rule does not keep and no slower place waits for.

        A later save may be under way meanwhile: tries beyond the step `settled` are left alone.
        """
        assert self._tiered is not None
        waiting = frozenset(ref for ref, _ in self._behind)
        for retention in self._retentions:
            retention.settled = settled
        self.retention.after_save(self._keep)
        for number, tier in enumerate(self._tiers):
            if self._ready[number]:
                self._retentions[number].waiting = waiting
                self._tiered.discount(number, self._retentions[number].sweep(tier.retention))

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


def _is_due(every: Steps | Minutes | None, step: int) -> bool:
    return every is not None and every.is_due(step)


def _open_tiers(tiers: Sequence[Tier], root: Store, events: EventSink) -> TieredStore:
    """Return the root with the tiers before it, as one store; touches nothing."""
    places = [
        Place(store=RetryingStore(open_store(tier.url), events=events), shared=tier.scope == "shared")
        for tier in tiers
    ]
    urls = [place.store.url for place in places] + [root.url]
    for at, url in enumerate(urls):
        if url in urls[:at]:
            raise UsageError(f"{url} is given twice", advice="give each tier, and the root, a place of its own")
    return TieredStore(places, root)
