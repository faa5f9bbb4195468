"""Look, before a run, whether its root and tiers will do. Changes nothing that lasts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shardkeep.engine.diagnosis import Check, failed
from shardkeep.engine.listing import Entry, list_timeline
from shardkeep.engine.machine import check_machine, find_free_memory
from shardkeep.engine.probe import probe_place
from shardkeep.engine.run import read_run_id
from shardkeep.errors import CheckpointError, NotFound, UsageError
from shardkeep.format.names import RUN_RECORD
from shardkeep.storage import survey
from shardkeep.storage.base import MeasuredStore, Store
from shardkeep.storage.resolve import is_remote, open_store
from shardkeep.types import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A place to look at. `keep`: how many checkpoints stay there; None: all."""

    url: str
    keep: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found. `size_bytes`: of a checkpoint, where it is known."""

    checks: tuple[Check, ...]
    size_bytes: int | None

    def count(self, status: str) -> int:
        """Return how many checks ended so."""
        return sum(check.status == status for check in self.checks)


@dataclass(slots=True, kw_only=True)
class _Place:
    """A place while it is looked at. `folder`: its path, where it is one; `known`: its store answered."""

    name: str
    keep: int | None
    store: Store
    folder: str | None
    run_id: str | None = None
    entries: tuple[Entry, ...] = ()

    @property
    def is_root(self) -> bool:
        return self.name == "root"


def examine(
    root: Wanted | None, tiers: Sequence[Wanted], *, size_bytes: int | None = None, like: int | None = None
) -> Diagnosis:
    """Look at the machine and at every place, the root first.

    Args:
        size_bytes: of a checkpoint; None: that of step `like` at the root, or of the newest one there.

    Raises:
        UsageError: a place is given twice. NotFound: the root has no step `like`.
    """
    named = [] if root is None else [("root", root)]
    named += [(f"tier {number}", tier) for number, tier in enumerate(tiers)]
    places: list[_Place] = []
    checks: dict[str, list[Check]] = {name: [] for name, _ in named}
    for name, wanted in named:
        place = _open(name, wanted, checks[name])
        if place is not None:
            if any(place.store.url == other.store.url for other in places):
                raise UsageError(f"{place.store.url} is given twice", advice="give each place a folder of its own")
            places.append(place)
    looked = [place for place in places if _look(place, checks[place.name])]
    first = next((place for place in looked if place.is_root), None)
    if size_bytes is None and first is not None:
        size_bytes = _find_size(first, like)
    for place in looked:
        checks[place.name] += _check_place(place, first, size_bytes)
    remote = any(is_remote(wanted.url) for _, wanted in named)
    machine = list(check_machine(size_bytes=size_bytes, remote=remote))
    return Diagnosis(
        checks=(*machine, *(check for name, _ in named for check in checks[name])), size_bytes=size_bytes
    )


def _open(name: str, wanted: Wanted, checks: list[Check]) -> _Place | None:
    try:
        store = open_store(wanted.url)
    except UsageError as error:
        checks.append(failed(name, "address", error))
        return None
    folder = None if store.capabilities.remote else store.url
    return _Place(name=name, keep=wanted.keep, store=store, folder=folder)


def _look(place: _Place, checks: list[Check]) -> bool:
    """Find the run that is there already, touching nothing; say whether the place answered."""
    try:
        place.run_id = read_run_id(place.store)
        place.entries = list_timeline(place.store).entries if place.run_id is not None and place.is_root else ()
    except CheckpointError as error:
        checks.append(failed(place.name, "run", error))
        return False
    return True


def _find_size(root: _Place, like: int | None) -> int | None:
    """Return the size of a step at the root, by default of its newest. Raises NotFound."""
    sizes = {entry.ref.step: entry.size_bytes for entry in root.entries if entry.size_bytes}
    if like is not None and like not in sizes:
        raise NotFound(
            f"{root.store.url}: there is no step {like} to take the size of", advice=f"shardkeep ls {root.store.url}"
        )
    return sizes[like if like is not None else max(sizes)] if sizes else None


def _check_place(place: _Place, root: _Place | None, size_bytes: int | None) -> list[Check]:
    kind = survey.find_kind(place.folder) if place.folder is not None else None
    checks = [
        _check_run(place) if place.is_root else _check_tier(place, root),
        _check_owner(place, place.folder) if place.folder is not None else None,
        *probe_place(place.name, place.store, place.folder),
        _check_kind(place, root, kind),
        _check_space(place, size_bytes),
    ]
    if kind in survey.MEMORY_KINDS and size_bytes is not None:
        checks.append(check_slots(place.name, place.keep or 1, size_bytes, find_free_memory()))
    return [check for check in checks if check is not None]


def _check_run(root: _Place) -> Check:
    say = partial(Check, place=root.name, what="run", status="ok")
    if root.run_id is None:
        return say(found="none yet: a job begins one here")
    newest = f", the newest of step {root.entries[-1].ref.step}" if root.entries else ""
    return say(found=f"{root.run_id} with {len(root.entries)} checkpoints{newest}: a job goes on from there")


def _check_tier(tier: _Place, root: _Place | None) -> Check:
    say = partial(Check, place=tier.name, what="run")
    if tier.run_id is None:
        return say(status="ok", found="no checkpoints of any run")
    if root is None:
        return say(status="ok", found=f"checkpoints of run {tier.run_id}; whose that is, only the root says")
    if tier.run_id == root.run_id:
        return say(status="ok", found="checkpoints of the root's run: a job goes on with them")
    advice = f"rm -r {tier.folder}" if tier.folder is not None else "give the tier a prefix of its own"
    return say(
        status="warn",
        found=f"another run ({tier.run_id}, the root's is {root.run_id or 'new'}) left checkpoints: a job would "
        "leave this tier alone",
        advice=f"{advice}, once nobody needs them",
    )


def _check_owner(place: _Place, folder: str) -> Check | None:
    try:
        owner = os.stat(os.path.join(folder, RUN_RECORD)).st_uid
    except OSError:
        return None
    say = partial(Check, place=place.name, what="owner")
    if owner == os.geteuid():
        return say(status="ok", found="the run is this user's own")
    return say(
        status="warn",
        found=f"the run was begun by uid {owner}, this is uid {os.geteuid()}, which may be unable to remove old "
        "checkpoints",
        advice=f"ls -ln {folder}, and start the job as that user",
    )


def _check_kind(place: _Place, root: _Place | None, kind: str | None) -> Check:
    """Say what the place is made of, and who can see it."""
    say = partial(Check, place=place.name, what="sharing" if place.is_root else "medium")
    unseen = "whether all ranks see this same folder cannot be seen from one process"
    if place.folder is None:
        return say(status="ok", found="a service: all ranks with this address and credentials see the same")
    where = kind or "a file system that is not known"
    if not place.is_root:
        same = root is not None and root.folder is not None and _is_same_disk(place.folder, root.folder)
        found = f"on {where}"
        if same:
            return say(
                status="warn",
                found=f"{found}, the same file system as the root: no faster than the root itself",
                advice="take host memory (/dev/shm/...) or a local disk",
            )
        return say(status="ok", found=found + (", host memory" if kind in survey.MEMORY_KINDS else ""))
    if kind in survey.MEMORY_KINDS or kind == "overlay":
        gone = "memory of this node" if kind != "overlay" else "the container's own layer"
        return say(
            status="warn",
            found=f"on {where}, {gone}: every checkpoint is gone with it",
            advice="take a disk or a service as the root, and this as a tier (--tier)",
        )
    if survey.is_shareable(kind):
        return say(status="ok", found=f"on {where}, which nodes can share; {unseen}: run this on each node")
    return say(status="ok", found=f"on {where}: fine where all ranks are on one node. Of several, {unseen}")


def _is_same_disk(one: str, other: str) -> bool:
    try:
        return os.stat(survey.find_existing(one)).st_dev == os.stat(survey.find_existing(other)).st_dev
    except OSError:
        return False


def _check_space(place: _Place, size_bytes: int | None) -> Check:
    free_bytes = place.store.find_free_bytes() if isinstance(place.store, MeasuredStore) else None
    there_count = len(place.entries)
    return check_space(place.name, place.keep, there_count, size_bytes, free_bytes)


def check_space(
    place: str, keep: int | None, there_count: int, size_bytes: int | None, free_bytes: int | None
) -> Check:
    """Hold what is free against `keep` checkpoints and the one being written; those that are there take no more."""
    say = partial(Check, place=place, what="space")
    if free_bytes is None:
        return say(status="ok", found="how much is free is not known here; a quota shows at the first save")
    free = f"{format_bytes(free_bytes)} are free"
    if not size_bytes:
        return say(
            status="warn",
            found=f"{free}; how large a checkpoint is, is not known",
            advice="add --size, as in --size 3GiB",
        )
    fits_count = free_bytes // size_bytes
    more_count = max((keep or 0) + 1 - there_count, 1)
    found = f"{free}, room for {fits_count} more of {format_bytes(size_bytes)}"
    if fits_count < more_count:
        # A tier that is too small is passed over; without the root there is no run.
        return say(
            status="fail" if place == "root" else "warn",
            found=f"{found}; {more_count} are needed, one of them for the save under way",
            advice="free space, keep fewer, or take a larger place",
        )
    if keep is None:
        return say(
            status="ok" if fits_count > 10 else "warn",
            found=f"{found}; every one stays, as no rule was given",
            advice=None if fits_count > 10 else "add --keep N, and keep=shardkeep.Keep(last=N) to the job",
        )
    return say(status="ok", found=f"{found}; {more_count} are needed")


def check_slots(place: str, keep: int, size_bytes: int, free_bytes: int | None) -> Check:
    """Hold the slots of a place in memory, `keep` and the one being written, against free memory."""
    say = partial(Check, place=place, what="memory")
    needed_bytes = (keep + 1) * size_bytes
    needs = f"{keep + 1} slots take {format_bytes(needed_bytes)} where this node holds all of a checkpoint"
    if free_bytes is None:
        return say(status="ok", found=f"{needs}; how much memory is free is not known here")
    if needed_bytes <= free_bytes:
        return say(status="ok", found=f"{needs}, {format_bytes(free_bytes)} of memory are free")
    return say(
        status="fail",
        found=f"{needs}, {format_bytes(free_bytes)} of memory are free: the kernel would kill processes",
        advice="keep fewer, take a disk, or give --size for the share of one node",
    )
