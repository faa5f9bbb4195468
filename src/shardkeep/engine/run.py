"""A run on storage: which generations and committed steps there are, and claiming the next generation.

Nothing here is cached between calls: what counts is what storage says now.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from shardkeep import knobs
from shardkeep._version import __version__
from shardkeep.errors import AlreadyExists, Corrupt, NotCommitted, NotFound, UsageError
from shardkeep.format.names import (
    COMMIT_RECORD,
    GENERATION_CLAIM,
    GENERATION_RECORD,
    MARKS,
    PRUNE_INTENT,
    RUN_RECORD,
    StepRef,
    find_generation,
    find_mark,
    find_step,
    format_generation,
    format_mark,
)
from shardkeep.format.records import (
    CommitRecord,
    GenerationRecord,
    MarkRecord,
    PruneRecord,
    RunRecord,
    decode_record,
    encode_record,
)
from shardkeep.plan.checks import check_commit
from shardkeep.plan.timeline import plan_timeline
from shardkeep.storage.base import Store

WRITER = f"shardkeep {__version__}"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFolder:
    """What lies in the folder of one try at a step: file name -> size."""

    ref: StepRef
    files: dict[str, int]

    @property
    def committed(self) -> bool:
        return COMMIT_RECORD in self.files

    @property
    def pruning(self) -> bool:
        return PRUNE_INTENT in self.files


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as storage showed it at one moment.

    Attributes:
        generations: every claimed generation on the chain from the newest one to its first ancestor.
        numbers: every generation number there is a folder for, ascending.
        folders: the step folders of every generation, on the chain or not. An intent that came too late to be carried
            out is not among their files.
        quarantined, held: steps that a mark names.
    """

    run_id: str
    generations: dict[int, GenerationRecord]
    numbers: tuple[int, ...]
    folders: dict[StepRef, StepFolder]
    quarantined: frozenset[StepRef] = field(default_factory=frozenset)
    held: frozenset[StepRef] = field(default_factory=frozenset)

    @property
    def head(self) -> int:
        """The newest claimed generation, or 0."""
        return max(self.generations, default=0)

    @property
    def timeline(self) -> tuple[StepRef, ...]:
        """Committed steps that count, ascending; those whose removal was decided are left out."""
        parents = {number: record.parent for number, record in self.generations.items()}
        commits = [ref for ref, folder in self.folders.items() if folder.committed and not folder.pruning]
        return plan_timeline(parents, commits)


def now() -> str:
    """Return the wall clock for people; nothing is ordered by it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def record_limit() -> int:
    return knobs.get_int("RECORD_BYTES")


def read_twice(read: Callable[[], T]) -> T:
    """Return `read()`, made once more when it finds damage, so that a slip of the transport is not taken for it."""
    try:
        return read()
    except Corrupt:
        return read()


def read_run_id(store: Store) -> str | None:
    """Return the run's id, or None where there is no run."""

    def read() -> str:
        data = store.get(RUN_RECORD, limit_bytes=record_limit())
        return decode_record(RunRecord, data, where=RUN_RECORD).run_id

    try:
        return read_twice(read)
    except NotFound:
        return None


def create_run(store: Store) -> str:
    """Return the run's id, creating the run when there is none; safe when several processes try."""
    for _ in range(8):
        if run_id := read_run_id(store):
            return run_id
        record = RunRecord(run_id=secrets.token_hex(16))
        with contextlib.suppress(AlreadyExists):
            store.put(RUN_RECORD, encode_record(record, writer=WRITER), if_absent=True)
    raise Corrupt(f"{store.url}: {RUN_RECORD} can neither be read nor created")


def read_generation(store: Store, number: int) -> GenerationRecord:
    """Return a generation's record. Raises NotFound when nobody claimed it."""
    key = f"{format_generation(number)}/{GENERATION_RECORD}"
    record = read_twice(
        lambda: decode_record(GenerationRecord, store.get(key, limit_bytes=record_limit()), where=key)
    )
    if record.generation != number:
        raise Corrupt(f"{key}: expected generation {number}, found generation {record.generation}")
    return record


def list_generations(store: Store) -> tuple[int, ...]:
    """Return the numbers of all generation folders, ascending, claimed or not."""
    return tuple(sorted(n for name in store.list_folders("") if (n := find_generation(name)) is not None))


def scan_run(store: Store) -> RunView | None:
    """Return what storage holds of the run, or None where there is no run.

    Raises:
        Corrupt: a record that decides which checkpoints count is damaged: nothing is guessed then.
    """
    run_id = read_run_id(store)
    if run_id is None:
        if list_generations(store):
            raise Corrupt(
                f"{store.url}: there are generations but no {RUN_RECORD}",
                advice=f"restore {RUN_RECORD} from another copy of the run",
            )
        return None
    numbers = list_generations(store)
    records = read_chain(store, numbers, run_id)
    folders: dict[StepRef, StepFolder] = {}
    # Those off the chain too: what a start that died before its first commit left is found here or never.
    for number in numbers:
        folders.update(list_step_folders(store, number))
    for record in records.values():
        parent = folders.get(record.parent) if record.parent is not None else None
        if parent is not None and parent.pruning and is_void(store, parent.ref):
            files = {name: size for name, size in parent.files.items() if name != PRUNE_INTENT}
            folders[parent.ref] = StepFolder(ref=parent.ref, files=files)
    quarantined, held = read_marks(store)
    return RunView(
        run_id=run_id, generations=records, numbers=numbers, folders=folders, quarantined=quarantined, held=held
    )


def read_chain(store: Store, numbers: tuple[int, ...], run_id: str) -> dict[int, GenerationRecord]:
    """Return the newest claimed generation and its ancestors. Raises Corrupt when one of them is damaged or gone."""
    records: dict[int, GenerationRecord] = {}
    pending = list(numbers)
    while pending:
        number = pending.pop()
        try:
            record = read_generation(store, number)
        except NotFound:
            if records:
                raise Corrupt(f"generation {number} is a parent but its record is missing") from None
            _check_unclaimed(store, number)
            continue
        if record.run_id != run_id:
            raise Corrupt(f"generation {number} belongs to run {record.run_id}, this root to run {run_id}")
        records[number] = record
        pending = [] if record.parent is None else [record.parent.generation]
        if record.parent is not None and record.parent.generation >= number:
            raise Corrupt(f"generation {number} names generation {record.parent.generation} as its parent: not older")
    return records


def _check_unclaimed(store: Store, number: int) -> None:
    """Accept a folder whose claimant died before its record was written; it wrote nothing else before that."""
    folder = f"{format_generation(number)}/"
    if any(find_step(number, name) for name in store.list_folders(folder)):
        raise Corrupt(
            f"{store.url}/{folder} holds checkpoints but no {GENERATION_RECORD}",
            advice=f"restore {folder}{GENERATION_RECORD} from another copy of the run",
        )


def list_step_folders(store: Store, number: int) -> dict[StepRef, StepFolder]:
    """Return the folders of one generation's tries, ascending by step."""
    prefix = f"{format_generation(number)}/"
    files: dict[StepRef, dict[str, int]] = {}
    for info in store.list_objects(prefix):
        name, slash, rest = info.key[len(prefix) :].partition("/")
        ref = find_step(number, name) if slash else None
        if ref is not None and "/" not in rest:
            files.setdefault(ref, {})[rest] = info.size_bytes
    return {ref: StepFolder(ref=ref, files=found) for ref, found in sorted(files.items())}


def list_step_files(store: Store, ref: StepRef) -> dict[str, int]:
    """Return the files of one try: name -> size; none where there is no such folder."""
    prefix = f"{ref.folder}/"
    found = {info.key[len(prefix) :]: info.size_bytes for info in store.list_objects(prefix)}
    return {name: size for name, size in found.items() if "/" not in name}


def read_marks(store: Store) -> tuple[frozenset[StepRef], frozenset[StepRef]]:
    """Return the steps that a mark calls quarantined, and those held; by the marks' names alone."""
    found: dict[str, set[StepRef]] = {}
    for info in store.list_objects(f"{MARKS}/"):
        mark = find_mark(info.key)
        if mark is not None:
            found.setdefault(mark[0], set()).add(mark[1])
    return frozenset(found.get("quarantine", ())), frozenset(found.get("hold", ()))


def write_mark(store: Store, run_id: str, kind: str, ref: StepRef, reason: str) -> None:
    """Set a fact about a committed step; durable on return, never changed afterwards."""
    record = MarkRecord(run_id=run_id, kind=kind, ref=ref, reason=reason, created_at=now())
    key = format_mark(kind, ref, secrets.token_hex(8))
    store.put(key, encode_record(record, writer=WRITER), if_absent=True)


def read_commit(store: Store, ref: StepRef, *, run_id: str | None = None) -> CommitRecord:
    """Return the commit record of a step.

    Raises:
        NotCommitted: the folder has no commit record. Corrupt: the record is damaged, another step's, or names
            what cannot be.
    """
    key = ref.key(COMMIT_RECORD)
    try:
        record = read_twice(
            lambda: decode_record(CommitRecord, store.get(key, limit_bytes=record_limit()), where=key)
        )
    except NotFound:
        raise NotCommitted(
            f"{store.url}: {ref} has no commit record: it was never completed, or it is being removed",
            step=ref.step,
            advice=f"shardkeep ls {store.url}",
        ) from None
    if record.ref != ref or (run_id is not None and record.run_id != run_id):
        raise Corrupt(f"{key}: is the commit record of {record.ref} of run {record.run_id}: it was moved or copied")
    return check_commit(record, where=key)


def claim_generation(
    store: Store, run_id: str, parent: StepRef | None, *, world_size: int, environment: dict[str, str]
) -> GenerationRecord | None:
    """Claim the next generation as a child of `parent`; durable on return.

    Returns None when the parent stopped being a committed checkpoint meanwhile: choose another and claim again.
    """
    for _ in range(64):
        number = max(list_generations(store), default=0) + 1
        record = GenerationRecord(
            run_id=run_id,
            generation=number,
            parent=parent,
            nonce=secrets.token_hex(16),
            world_size=world_size,
            created_at=now(),
            environment=environment,
        )
        # ORDER: the exclusive create of the claim, the look at the parent, the record. A pruner writes its intent
        # before it lists generations, so that of two that race, one sees the other. CRASH: a claim without a record
        # takes the number and means nothing else; a record proves that the parent stood.
        folder, data = format_generation(number), encode_record(record, writer=WRITER)
        try:
            store.put(f"{folder}/{GENERATION_CLAIM}", data, if_absent=True)
        except AlreadyExists:
            continue
        if parent is not None and not stands(store, parent):
            return None
        store.put(f"{folder}/{GENERATION_RECORD}", data, if_absent=True)
        return record
    raise UsageError(f"{store.url}: 64 other starts of this run claimed a generation first", advice="start again")


def exists(store: Store, key: str) -> bool:
    """Say whether there is an object of this key: one request, however many objects lie beside it."""
    try:
        store.head(key)
    except NotFound:
        return False
    return True


def stands(store: Store, ref: StepRef) -> bool:
    """Say whether a step is committed now and nobody is removing it."""
    # ORDER: the intent first. A pruner writes it before it removes the commit record, and removes it last.
    intended = exists(store, ref.key(PRUNE_INTENT)) and not is_void(store, ref)
    return not intended and exists(store, ref.key(COMMIT_RECORD))


def is_void(store: Store, ref: StepRef) -> bool:
    """Say whether a step's prune intent will never be carried out: a newer generation began at the step.

    Its record proves that it saw no intent after it had taken its number, so that whoever wrote the intent since sees
    the number before it removes anything. It died there, or is about to withdraw.
    """
    key = ref.key(PRUNE_INTENT)
    try:
        by = decode_record(PruneRecord, store.get(key, limit_bytes=record_limit()), where=key).by_generation
    except (Corrupt, NotFound):
        return False
    for number in list_generations(store):
        if number > by:
            with contextlib.suppress(NotFound):
                if read_generation(store, number).parent == ref:
                    return True
    return False
