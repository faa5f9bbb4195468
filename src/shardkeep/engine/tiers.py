"""One run in several places: the root, and faster tiers that hold some of its checkpoints, under the same keys.

A checkpoint is the same bytes under the same keys wherever it lies, so that a reader needs no more than a store that
looks in the fastest place first. Only the root says which generations there are. A copy in a tier counts when it is
committed there and every rank can read what it needs of it (`take_inventory`); nothing else there is ever read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from shardkeep.engine.recover import roll_forward
from shardkeep.engine.run import (
    StepFolder,
    exists,
    list_generations,
    list_step_folders,
    read_commit,
    read_run_id,
    scan_run,
)
from shardkeep.errors import AlreadyExists, CheckpointError, Corrupt, NotFound, StorageError
from shardkeep.events import Event, EventSink
from shardkeep.format.names import (
    COMMIT_RECORD,
    GENERATION_RECORD,
    PRUNE_INTENT,
    RUN_RECORD,
    StepRef,
    find_generation,
    find_step,
    format_digests,
    format_generation,
    format_part,
)
from shardkeep.ranks.base import Group
from shardkeep.storage.base import CachingStore, Capabilities, MeasuredStore, ObjectInfo, ObjectWriter, Store

_RECORD_LIMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tier: a store, and whether all ranks see the same objects in it or only those of one node."""

    store: Store
    shared: bool


class TieredStore:
    """The root with faster tiers before it, as one store. Implements `Store`; one for each rank.

    Reads of a checkpoint go to the fastest tier whose copy counts, then to the others, then to the root. Everything
    else, and every write, is the root's.
    """

    def __init__(self, tiers: Sequence[Place], root: Store) -> None:
        self.tiers = tuple(tiers)
        self.root = root
        self._lock = threading.Lock()
        self._usable: list[set[StepRef]] = [set() for _ in tiers]
        self._closed: set[int] = set()

    @property
    def url(self) -> str:
        return self.root.url

    @property
    def capabilities(self) -> Capabilities:
        return self.root.capabilities

    # Which copies count

    def is_open(self, number: int) -> bool:
        """Say whether a tier belongs to this run."""
        return number not in self._closed

    def close(self, number: int) -> None:
        """Leave a tier alone from now on: another run's."""
        with self._lock:
            self._closed.add(number)
            self._usable[number].clear()

    def count(self, number: int, refs: Iterable[StepRef]) -> None:
        """Say that these checkpoints are committed in a tier, readable by every rank."""
        with self._lock:
            self._usable[number].update(refs)

    def discount(self, number: int, refs: Iterable[StepRef]) -> None:
        """Say that these copies are gone, or damaged."""
        with self._lock:
            self._usable[number].difference_update(refs)

    def has(self, number: int, ref: StepRef) -> bool:
        """Say whether a tier's copy of a checkpoint counts."""
        with self._lock:
            return ref in self._usable[number]

    def pass_over(self, ref: StepRef) -> int | None:
        """Leave the fastest copy of a checkpoint alone; return its tier, or None when no tier had one."""
        with self._lock:
            for number, refs in enumerate(self._usable):
                if ref in refs:
                    refs.discard(ref)
                    return number
        return None

    def _sources(self, ref: StepRef) -> list[Store]:
        with self._lock:
            found = [tier.store for tier, refs in zip(self.tiers, self._usable, strict=True) if ref in refs]
        return [*found, self.root]

    # Store

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self.root.put(key, data, if_absent=if_absent)

    def writer(self, key: str, size_bytes: int) -> ObjectWriter:
        return self.root.writer(key, size_bytes)

    def clone(self, source: str, target: str) -> None:
        self.root.clone(source, target)

    def delete(self, keys: Iterable[str]) -> None:
        self.root.delete(keys)

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """Return an object from the fastest place that has it."""
        ref = find_ref(key)
        if ref is None:
            return self.root.get(key, limit_bytes=limit_bytes)
        for store in self._sources(ref)[:-1]:
            try:
                return store.get(key, limit_bytes=limit_bytes)
            except (NotFound, StorageError):
                continue
        return self.root.get(key, limit_bytes=limit_bytes)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from the fastest place that has the object."""
        ref = find_ref(key)
        for store in self._sources(ref)[:-1] if ref is not None else ():
            try:
                store.read_into(key, offset, buffer)
            except (NotFound, StorageError):
                continue
            return
        self.root.read_into(key, offset, buffer)

    def read_cached_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Fill buffers if the fastest place that has the object holds these bytes in this host's memory."""
        ref = find_ref(key)
        first = self._sources(ref)[0] if ref is not None else self.root
        return isinstance(first, CachingStore) and first.read_cached_into(key, offset, buffers)

    def find_free_bytes(self) -> int | None:
        """Return what the root has left, where every write of this store goes."""
        return self.root.find_free_bytes() if isinstance(self.root, MeasuredStore) else None

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size, from the fastest place that has it."""
        ref = find_ref(key)
        for store in self._sources(ref)[:-1] if ref is not None else ():
            try:
                return store.head(key)
            except (NotFound, StorageError):
                continue
        return self.root.head(key)

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """Return the root's objects, and of checkpoints with a copy in a tier the fastest copy's."""
        found = {info.key: info for info in self.root.list_objects(prefix)}
        for number in reversed(range(len(self.tiers))):
            with self._lock:
                refs = {ref for ref in self._usable[number] if ref.folder.startswith(prefix.rpartition("/")[0])}
            if not refs:
                continue
            try:
                listed = self.tiers[number].store.list_objects(prefix)
            except StorageError:
                continue  # down since it was looked at: what slower places have must do
            copies = [info for info in listed if find_ref(info.key) in refs]
            found = {key: info for key, info in found.items() if find_ref(key) not in refs}
            found.update((info.key, info) for info in copies)
        return [found[key] for key in sorted(found)]

    def list_folders(self, prefix: str) -> list[str]:
        """Return the folders below a prefix; those of tries in any tier count, so that no name is used twice."""
        found = set(self.root.list_folders(prefix))
        if prefix:
            for number, tier in enumerate(self.tiers):
                if self.is_open(number):
                    try:
                        found.update(tier.store.list_folders(prefix))
                    except StorageError:
                        continue  # a tier that is down takes no save either
        return sorted(found)


def find_ref(key: str) -> StepRef | None:
    """Return the try at a step that an object belongs to, or None."""
    generation, _, rest = key.partition("/")
    number = find_generation(generation)
    folder, slash, _ = rest.partition("/")
    return find_step(number, folder) if number is not None and slash else None


class _Seen(msgspec.Struct, kw_only=True):
    """What one rank sees in its tiers: by tier the checkpoints that it can read, or why the tier is left alone."""

    usable: list[tuple[StepRef, ...]]
    problems: list[str]


def take_inventory(store: TieredStore, group: Group, events: EventSink) -> None:
    """Let all ranks agree which copies in the tiers count (collective), before a parent is chosen.

    A tier that another run left is told and left alone. A try whose parts are all durable in a tier is committed.
    """

    def begin(found: list[bytes]) -> bytes:
        run_id = read_run_id(store.root) or ""
        for tier in store.tiers:
            _roll_forward(tier.store, run_id, events)
        return run_id.encode()

    run_id = group.agree("tiers.begin", lambda: b"", begin).decode()
    count = range(len(store.tiers))

    def look() -> bytes:
        usable: list[tuple[StepRef, ...]] = []
        problems: list[str] = []
        for number, place in enumerate(store.tiers):
            # Of what all see alike, the coordinator's look is enough.
            refs, problem = (
                _look_at(store, number, run_id, group) if group.rank == 0 or not place.shared else ((), "")
            )
            usable.append(refs)
            problems.append(problem)
        return msgspec.json.encode(_Seen(usable=usable, problems=problems))

    def join(found: list[bytes]) -> bytes:
        seen = [msgspec.json.decode(data, type=_Seen) for data in found]
        usable = [
            tuple(sorted(set.intersection(*(set(one.usable[at]) for one in (seen[:1] if place.shared else seen)))))
            for at, place in enumerate(store.tiers)
        ]
        problems = [next((one.problems[at] for one in seen if one.problems[at]), "") for at in count]
        return msgspec.json.encode(_Seen(usable=usable, problems=problems))

    joined = msgspec.json.decode(group.agree("tiers.inventory", look, join), type=_Seen)
    for number, (refs, problem) in enumerate(zip(joined.usable, joined.problems, strict=True)):
        if problem.startswith("!"):
            store.close(number)
        store.count(number, refs)
        if problem and group.rank == 0:
            events.emit(Event(name="tier.ignored", level="warning", text=problem.removeprefix("!")))


def _roll_forward(tier: Store, run_id: str, events: EventSink) -> None:
    """Commit what lacks only its record in a tier; trouble there is told by whoever looks next."""
    with contextlib.suppress(CheckpointError):
        if run_id and read_run_id(tier) == run_id:
            view = scan_run(tier)
            if view is not None:
                roll_forward(tier, view, events)


def _look_at(store: TieredStore, number: int, run_id: str, group: Group) -> tuple[tuple[StepRef, ...], str]:
    """Return the checkpoints of a tier that this rank can read, and what is wrong with the tier ("!": for good)."""
    tier = store.tiers[number]
    try:
        theirs = read_run_id(tier.store)
        if theirs is None:
            return (), ""
        if theirs != run_id:
            return (), (
                f"!{tier.store.url} holds checkpoints of another run ({theirs}, this one is {run_id or 'new'}): that "
                "tier is left alone; give it a folder of its own, or remove what is there"
            )
        folders = [f for n in list_generations(tier.store) for f in list_step_folders(tier.store, n).values()]
        found = [f.ref for f in folders if _can_read(tier, f, run_id, group)]
    except CheckpointError as error:
        return (), f"{tier.store.url} could not be looked at, and is left out of this resume: {error.message}"
    return tuple(found), ""


def _can_read(tier: Place, folder: StepFolder, run_id: str, group: Group) -> bool:
    """Say whether this rank finds in a tier's folder what it needs to restore a committed checkpoint.

    Of a tier that all ranks see alike: whether all of them do.
    """
    if not folder.committed or folder.pruning:
        return False
    files = folder.files
    try:
        commit = read_commit(tier.store, folder.ref, run_id=run_id)
    except CheckpointError:
        return False
    if commit.world_size == group.world_size and not tier.shared:
        # Its own part, and the parts of those who hold what all ranks share.
        needed = {group.rank, *(holder.rank for holder in commit.facts.holders)}
        own = {format_digests(group.rank)}
    else:
        needed = set(range(commit.world_size))
        own = {format_digests(rank) for rank in needed}
    parts = all(files.get(format_part(rank)) == commit.parts[rank].size_bytes for rank in needed)
    return parts and own <= files.keys()


def mirror_claims(store: TieredStore, number: int) -> None:
    """Make a tier a part of this run: its own record, and the claims of all generations there are.

    Raises:
        Corrupt: the tier is another run's. StorageError.
    """
    tier = store.tiers[number].store
    names = [RUN_RECORD, *(f"{format_generation(n)}/{GENERATION_RECORD}" for n in list_generations(store.root))]
    for key in names:
        try:
            data = store.root.get(key, limit_bytes=_RECORD_LIMIT_BYTES)
        except NotFound:
            continue  # a claim whose start died before its record
        try:
            tier.put(key, data, if_absent=True)
        except AlreadyExists:
            raise Corrupt(f"{tier.url}: its {key} is not that of {store.root.url}", key=key) from None


def is_committed(store: Store, ref: StepRef) -> bool:
    """Say whether a store holds a checkpoint that nobody is removing."""
    return exists(store, ref.key(COMMIT_RECORD)) and not exists(store, ref.key(PRUNE_INTENT))
