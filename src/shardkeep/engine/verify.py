"""Verify a run: is every committed checkpoint what was written, byte for byte?

Reads only; goes on after a finding; judges nothing damaged that a live job may just be writing or removing. Memory is
`IO_THREADS` blocks of 8 MiB and one part record at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardkeep.engine.findings import Finding, Findings, Kind
from shardkeep.engine.recover import find_commit
from shardkeep.engine.run import (
    StepFolder,
    list_generations,
    list_step_folders,
    read_commit,
    read_generation,
    read_run_id,
    record_limit,
    stands,
)
from shardkeep.engine.verify_part import PartCheck, Progress, flatten, judge
from shardkeep.errors import Corrupt, IncompatibleFormat, NotCommitted, NotFound, StorageError, UnsupportedState
from shardkeep.format.hf_index import parse_hf_index
from shardkeep.format.names import (
    COMMIT_RECORD,
    GENERATION_RECORD,
    HF_INDEX,
    MARKS,
    PRUNE_INTENT,
    RUN_RECORD,
    StepRef,
    find_mark,
    find_part,
    format_digests,
    format_generation,
    format_part,
    is_shard,
)
from shardkeep.format.records import CommitRecord, LayoutTable, MarkRecord, decode_record
from shardkeep.plan.checks import check_table
from shardkeep.plan.coverage import CoverageProof
from shardkeep.plan.shards import Outgoing, OutgoingPlans
from shardkeep.plan.structure import digest_table
from shardkeep.spec.dtypes import get_dtype
from shardkeep.storage.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one checkpoint's verification found. `checked_bytes` counts shard bytes compared with their digests."""

    ref: StepRef
    findings: Findings
    checked_bytes: int = 0
    shard_count: int = 0
    tensor_count: int = 0


def verify_run(store: Store, run_id: str | None = None) -> Findings:
    """Check what belongs to no single step: the run's record, every generation's, every mark.

    Raises:
        StorageError: the root cannot be listed.
    """
    findings = Findings()
    try:
        run_id = run_id or read_run_id(store)
        if run_id is None:
            findings.add(Finding(kind="run", key=RUN_RECORD, text="there are generations but no such file"))
    except (Corrupt, IncompatibleFormat, StorageError) as error:
        findings.add(Finding(kind=judge(error, "run"), key=RUN_RECORD, text=flatten(error)))
    for number in list_generations(store):
        _check_generation(store, number, run_id, findings)
    for info in store.list_objects(f"{MARKS}/"):
        _check_mark(store, info.key, run_id, findings)
    return findings


def _check_generation(store: Store, number: int, run_id: str | None, findings: Findings) -> None:
    key = f"{format_generation(number)}/{GENERATION_RECORD}"
    try:
        record = read_generation(store, number)
        if run_id is not None and record.run_id != run_id:
            raise Corrupt(f"{key}: belongs to run {record.run_id}, this root to run {run_id}")
        parent = record.parent
        if parent is not None and parent.generation >= number:
            raise Corrupt(f"{key}: its parent, {parent}, is not older")
    except NotFound:
        if any(folder.committed for folder in list_step_folders(store, number).values()):
            findings.add(Finding(kind="run", key=key, text="no such file, though the generation has checkpoints"))
        else:
            findings.note(f"generation {number}: nobody claimed it; its start died early")
    except (Corrupt, IncompatibleFormat, StorageError) as error:
        findings.add(Finding(kind=judge(error, "run"), key=key, text=flatten(error)))


def _check_mark(store: Store, key: str, run_id: str | None, findings: Findings) -> None:
    named = find_mark(key)
    if named is None:
        findings.note(f"{key}: not a mark's name; nothing reads it")
        return
    try:
        record = decode_record(MarkRecord, store.get(key, limit_bytes=record_limit()), where=key)
        if (record.kind, record.ref) != named or (run_id is not None and record.run_id != run_id):
            raise Corrupt(f"{key}: is a {record.kind} mark of {record.ref} of run {record.run_id}")
    except NotFound:
        return
    except (Corrupt, IncompatibleFormat, StorageError) as error:
        findings.add(Finding(kind=judge(error, "run"), key=key, ref=named[1], text=flatten(error)))


def verify_step(
    store: Store, run_id: str | None, folder: StepFolder, *, full: bool, progress: Progress = lambda count: None
) -> StepReport:
    """Check one checkpoint that has a commit record, down to every byte with `full`.

    Args:
        run_id: None where the run's own record cannot be read.
        folder: its files, as just listed.
        progress: told of shard bytes as they are checked (full only).

    Raises:
        NotCommitted: it was removed by a prune meanwhile, which is no damage.
    """
    findings = Findings()
    check = _StepCheck(store, folder, findings, full=full, progress=progress)
    report = check.run(run_id)
    if findings.count and not stands(store, folder.ref):
        raise NotCommitted(f"{folder.ref} was removed while it was being checked", step=folder.ref.step)
    return report


class _StepCheck:
    def __init__(
        self, store: Store, folder: StepFolder, findings: Findings, *, full: bool, progress: Progress
    ) -> None:
        self._store = store
        self._folder = folder
        self._ref = folder.ref
        self._findings = findings
        self._full = full
        self._progress = progress

    def _add(self, kind: Kind, name: str, text: str, tensors: tuple[str, ...] = ()) -> None:
        self._findings.add(
            Finding(
                kind=kind,
                key=self._ref.key(name),
                text=text,
                ref=self._ref,
                tensors=tensors,
                tensor_count=len(tensors),
            )
        )

    def run(self, run_id: str | None) -> StepReport:
        commit = self._read_commit(run_id)
        if commit is None:
            return StepReport(ref=self._ref, findings=self._findings)
        table = commit.facts.layout
        expected = self._check_layout(table, commit)
        weights: dict[str, str] = {}
        names: set[str] = set()
        unread = expected is None
        if expected is not None:
            for rank in range(commit.world_size):
                check = self._check_part(commit, rank, expected.of(rank))
                for name in sorted(names & check.names):
                    self._add("part", format_part(rank), f"its shard {name} is another rank's too")
                weights |= check.weights
                names |= check.names
                unread = unread or not check.opened
            self._check_index(table, weights)
        self._check_assets(commit)
        self._note_extras(commit, frozenset(names), unread=unread)
        return StepReport(
            ref=self._ref,
            findings=self._findings,
            checked_bytes=sum(part.shard_bytes for part in commit.parts)
            if self._full and expected is not None
            else 0,
            shard_count=sum(part.shard_count for part in commit.parts),
            tensor_count=len(table.tensors),
        )

    def _read_commit(self, run_id: str | None) -> CommitRecord | None:
        try:
            return read_commit(self._store, self._ref, run_id=run_id)
        except NotCommitted:
            raise
        except (Corrupt, IncompatibleFormat, StorageError) as error:
            self._add(judge(error, "commit"), COMMIT_RECORD, flatten(error))
            if not isinstance(error, Corrupt):
                return None
        # The parts say all that the record said, so that what else is damaged can still be found.
        commit = find_commit(self._store, self._folder, run_id) if run_id is not None else None
        if commit is not None:
            self._findings.note(f"{self._ref}: its parts are complete and say what the damaged commit record said")
        return commit

    def _check_layout(self, table: LayoutTable, commit: CommitRecord) -> OutgoingPlans | None:
        """Return what each rank must have stored, or None when the layout is not to be followed."""
        try:
            check_table(table, commit.world_size, where=self._ref.key(COMMIT_RECORD))
            proof = CoverageProof(table)
            problems = [
                (key, problem) for key, record in table.tensors.items() if (problem := proof.find_problem(record))
            ]
            expected = OutgoingPlans(table)
        except (Corrupt, IncompatibleFormat, UnsupportedState) as error:
            kind: Kind = "incompatible" if isinstance(error, IncompatibleFormat) else "layout"
            self._add(kind, COMMIT_RECORD, flatten(error))
            return None
        for key, problem in problems:
            self._add("layout", COMMIT_RECORD, f"{key}: {problem}", (key,))
        if digest_table(table, commit.world_size) != commit.plan:
            self._add("layout", COMMIT_RECORD, "its plan digest is not that of its layout")
        return expected

    def _check_part(self, commit: CommitRecord, rank: int, expected: Iterable[Outgoing]) -> PartCheck:
        check = PartCheck(self._store, commit, self._folder, rank, self._findings)
        try:
            check.run(list(expected), full=self._full, progress=self._progress)
        except (Corrupt, IncompatibleFormat) as error:
            self._add(judge(error, "part"), format_part(rank), flatten(error))
        return check

    def _check_index(self, table: LayoutTable, weights: Mapping[str, str]) -> None:
        """Compare the Hugging Face index, which other tools follow, with where the tensors are."""
        model = {r.name: r for key, r in table.tensors.items() if is_published(key, r.section)}
        whole_only = all(not r.layout.boxes and set(r.layout.placements) <= {"R"} for r in model.values())
        if HF_INDEX not in self._folder.files:
            if model and whole_only:
                self._add("missing", HF_INDEX, "no such file, though every model tensor is stored whole")
            return
        key = self._ref.key(HF_INDEX)
        try:
            index = parse_hf_index(self._store.get(key, limit_bytes=record_limit()), key)
        except (Corrupt, NotFound, StorageError) as error:
            self._add(judge(error, "index"), HF_INDEX, flatten(error))
            return
        for name in sorted(index.weight_map.keys() | model.keys()):
            found, wanted = index.weight_map.get(name), weights.get(name) if name in model else None
            if found != wanted and (wanted is not None or name not in model):
                self._add("index", HF_INDEX, f"{name!r}: expected {wanted or 'no entry'}, found {found or 'none'}")
        total = sum(math.prod(r.shape) * get_dtype(r.dtype).itemsize_bytes for r in model.values())
        if index.total_size_bytes != total:
            self._add("index", HF_INDEX, f"total_size is {index.total_size_bytes}, the tensors have {total} bytes")

    def _check_assets(self, commit: CommitRecord) -> None:
        for name, record in sorted(commit.facts.assets.items()):
            found = self._folder.files.get(name)
            if found is None:
                self._add("missing", name, f"no such file; expected {record.size_bytes} bytes")
            elif found != record.size_bytes:
                self._add("size", name, f"expected {record.size_bytes} bytes, found {found}")
            elif self._full:
                try:
                    data = self._store.get(self._ref.key(name), limit_bytes=record_limit())
                except (Corrupt, NotFound, StorageError) as error:
                    self._add(judge(error, "asset"), name, flatten(error))
                    continue
                digest = hashlib.sha256(data).hexdigest()
                if digest != record.sha256:
                    self._add("asset", name, f"expected sha256 {record.sha256}, found {digest}")

    def _note_extras(self, commit: CommitRecord, names: frozenset[str], *, unread: bool) -> None:
        """Note files that nothing reaches: harmless, but whoever put them there may think otherwise."""
        known = {COMMIT_RECORD, HF_INDEX, PRUNE_INTENT, *commit.facts.assets, *names}
        for rank in range(commit.world_size):
            known |= {format_part(rank), format_digests(rank)}
        for name in sorted(self._folder.files.keys() - known):
            if unread and is_shard(name):
                continue  # it may belong to the part that could not be read
            what = "a part beyond the world size" if find_part(name) is not None else "an extra file"
            self._findings.note(f"{self._ref.key(name)}: {what}; nothing reads it")


def is_published(key: str, section: str) -> bool:
    """Say whether a tensor belongs to the model, so that the Hugging Face index lists it."""
    return section in ("model", "frozen") and key.startswith("model/")
