"""`engine.verify`: sees what `commit.json` hides, follows no nonsense, is not fooled by flaky reads or a prune."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from shardkeep.engine.findings import MAX_LISTED, Finding, Findings
from shardkeep.engine.run import WRITER, list_step_folders, read_commit
from shardkeep.engine.verify import StepReport, verify_run, verify_step
from shardkeep.errors import NotCommitted, StorageError
from shardkeep.format.names import StepRef
from shardkeep.format.records import (
    CommitRecord,
    Facts,
    LayoutTable,
    PartRecord,
    PartSummary,
    TensorRecord,
    decode_record,
    encode_record,
)
from shardkeep.plan.structure import digest_table
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Mesh
from tests.support.fake_state import FakeRun, FakeTensor, flip, make_tensor, pattern, small_state

REF = StepRef(5, 1)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    made = FakeRun(tmp_path / "run", world_size=2)
    made.save(5, small_state(placement="S0"))
    return made


def check(run: FakeRun, *, full: bool = True, store: Any = None) -> StepReport:
    folder = list_step_folders(run.store, 1)[REF]
    return verify_step(store or run.store, run.run_id, folder, full=full)


def kinds(report: StepReport) -> dict[str, int]:
    return report.findings.kinds


def rewrite(run: FakeRun, change: Callable[[CommitRecord], CommitRecord]) -> None:
    """Write another commit record with a right digest: what a bug or a forger would leave."""
    record = change(read_commit(run.store, REF))
    (run.folder(5) / "commit.json").write_bytes(encode_record(record, writer=WRITER))


def with_table(change: Callable[[LayoutTable], LayoutTable]) -> Callable[[CommitRecord], CommitRecord]:
    def apply(record: CommitRecord) -> CommitRecord:
        table = change(record.facts.layout)
        facts: Facts = msgspec.structs.replace(record.facts, layout=table)
        return msgspec.structs.replace(record, facts=facts, plan=digest_table(table, record.world_size))

    return apply


def with_tensor(**fields: Any) -> Callable[[CommitRecord], CommitRecord]:
    def change(table: LayoutTable) -> LayoutTable:
        tensor: TensorRecord = msgspec.structs.replace(table.tensors["model/embed.weight"], **fields)
        return msgspec.structs.replace(table, tensors={**table.tensors, "model/embed.weight": tensor})

    return with_table(change)


def test_a_clean_checkpoint_counts_its_bytes(run: FakeRun) -> None:
    seen: list[int] = []
    folder = list_step_folders(run.store, 1)[REF]
    report = verify_step(run.store, run.run_id, folder, full=True, progress=seen.append)
    size = sum(path.stat().st_size for path in run.folder(5).glob("*.safetensors"))
    assert (report.findings.count, report.checked_bytes, sum(seen)) == (0, size, size)
    assert (report.shard_count, report.tensor_count) == (4, 5)


@pytest.mark.parametrize(
    "change",
    [
        with_table(lambda table: msgspec.structs.replace(table, meshes=())),
        with_table(lambda table: msgspec.structs.replace(table, meshes=(Mesh((2,), (0, 9)),))),
        with_table(lambda table: msgspec.structs.replace(table, meshes=(Mesh((2,), (0,)),))),
        with_table(lambda table: msgspec.structs.replace(table, aliases={"model/t": "model/none"})),
        with_tensor(shape=(256, 301)),
        with_tensor(shape=(1 << 40, 1 << 20)),
        with_tensor(dtype="int8"),
        with_tensor(split=1 << 40),
        with_tensor(owner=1),
    ],
)
def test_a_layout_that_the_parts_do_not_follow_is_damage(
    run: FakeRun, change: Callable[[CommitRecord], CommitRecord]
) -> None:
    rewrite(run, change)
    report = check(run, full=False)
    assert report.findings.count
    assert set(kinds(report)) <= {"commit", "layout", "part", "header"}


def test_an_unknown_dtype_is_no_damage(run: FakeRun) -> None:
    rewrite(run, with_tensor(dtype="float2"))
    assert kinds(check(run)) == {"incompatible": 1}


def rewrite_part(run: FakeRun, rank: int, change: Callable[[PartRecord], PartRecord]) -> None:
    import hashlib

    path = run.folder(5) / f"part-r{rank:05d}.json"
    data = encode_record(change(decode_record(PartRecord, path.read_bytes(), where="")), writer=WRITER)
    path.write_bytes(data)

    def commit(record: CommitRecord) -> CommitRecord:
        parts = list(record.parts)
        old = parts[rank]
        parts[rank] = PartSummary(len(data), hashlib.sha256(data).hexdigest(), old.shard_bytes, old.shard_count)
        return msgspec.structs.replace(record, parts=tuple(parts))

    rewrite(run, commit)


def _shift(part: PartRecord) -> PartRecord:
    chunks = part.tensors["model/embed.weight"]
    moved = msgspec.structs.replace(chunks[0], begin=chunks[0].begin - 4, end=chunks[0].end - 4)
    return msgspec.structs.replace(part, tensors={**part.tensors, "model/embed.weight": (moved,)})


def _shrink(part: PartRecord) -> PartRecord:
    chunks = part.tensors["model/embed.weight"]
    cut = msgspec.structs.replace(chunks[0], end=chunks[0].end - 4)
    return msgspec.structs.replace(part, tensors={**part.tensors, "model/embed.weight": (cut,)})


def _lose(part: PartRecord) -> PartRecord:
    return msgspec.structs.replace(part, tensors={k: v for k, v in part.tensors.items() if "wq" not in k})


def _other_chunk(part: PartRecord) -> PartRecord:
    chunks = part.tensors["model/embed.weight"]
    wrong = msgspec.structs.replace(chunks[0], chunk=Chunk((0, 0), (128, 300)))
    return msgspec.structs.replace(part, tensors={**part.tensors, "model/embed.weight": (wrong,)})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_shift, "the header"),
        (_shrink, "takes 153600 bytes"),
        (_lose, "the layout says that chunk"),
        (_other_chunk, "is not of this rank"),
        (lambda part: msgspec.structs.replace(part, rank=0), "is of rank 0"),
        (lambda part: msgspec.structs.replace(part, plan="f" * 64), "is of plan"),
        (lambda part: msgspec.structs.replace(part, shards=part.shards[:1]), "lies at bytes"),
    ],
)
def test_a_part_that_says_other_things_than_the_layout(
    run: FakeRun, change: Callable[[PartRecord], PartRecord], text: str
) -> None:
    """torch's distributed checkpoints load such metadata without a word."""
    rewrite_part(run, 1, change)
    report = check(run, full=False)
    assert report.findings.count
    assert any(text in finding.text for finding in report.findings.listed), report.findings.listed
    assert {finding.rank for finding in report.findings.listed} <= {1, None}


class Flaky:
    """A store whose reads go wrong: a wrong bit the first time, or an error every time."""

    def __init__(self, inner: Any, *, error: bool = False) -> None:
        self._inner = inner
        self._seen: set[tuple[str, int]] = set()
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(key, offset, buffer)
        if len(buffer) > 60_000:
            if self._error:
                raise StorageError(f"cannot read {key}: EIO", key=key)
            if (key, offset) not in self._seen:
                self._seen.add((key, offset))
                buffer[5] ^= 1


def test_a_slip_of_the_transport_is_not_damage(run: FakeRun) -> None:
    assert check(run, store=Flaky(run.store)).findings.count == 0


class Wandering(Flaky):
    """Each read of the large file has a wrong bit in another leaf."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(key, offset, buffer)
        if len(buffer) > 500_000:
            buffer[(len(self._seen) % 2) * 262144] ^= 1
            self._seen.add((key, len(self._seen)))


def test_slips_in_two_places_are_not_damage(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.save(5, {"model/w": FakeTensor(dtype="uint8", shape=(600_000,), data=pattern(600_000, 1))})
    assert check(run, store=Wandering(run.store)).findings.count == 0


def test_bytes_that_cannot_be_read_are_not_called_damaged(run: FakeRun) -> None:
    report = check(run, store=Flaky(run.store, error=True))
    assert kinds(report) == {"unreadable": 4}
    assert all(finding.tensors for finding in report.findings.listed)


class Vanishing(Flaky):
    """A checkpoint that a prune removes right after its commit record was read."""

    def __init__(self, run: FakeRun) -> None:
        super().__init__(run.store)
        self._folder = run.folder(5)

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        data: bytes = self._inner.get(key, limit_bytes=limit_bytes)
        if key.endswith("commit.json"):
            shutil.rmtree(self._folder)
        return data


def test_a_removal_meanwhile_is_not_damage(run: FakeRun) -> None:
    with pytest.raises(NotCommitted, match="removed while it was being checked"):
        check(run, store=Vanishing(run))


def test_a_damaged_commit_record_does_not_hide_other_damage(run: FakeRun) -> None:
    flip(run.folder(5) / "commit.json", 400)
    flip(run.folder(5) / "model-r00001-00001.safetensors", 9000)
    report = check(run)
    assert kinds(report) == {"block": 1, "commit": 1}
    assert "what the damaged commit record said" in report.findings.notes[0]


def test_every_bad_leaf_is_named_once(tmp_path: Path) -> None:
    leaf = 256 * 1024
    run = FakeRun(tmp_path)
    run.save(5, {"model/w": FakeTensor(dtype="uint8", shape=(20 << 20,), data=pattern(20 << 20, 1))})
    shard = run.folder(5) / "model-r00000-00001.safetensors"
    for number in (0, 31, 32, 33, 79):
        flip(shard, number * leaf + 5000)
    found = [(f.first_leaf, f.leaf_count) for f in check(run).findings.listed if f.kind == "block"]
    assert found == [(0, 1), (31, 3), (79, 1)]


def test_a_cut_shard_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    leaf = 256 * 1024
    run = FakeRun(tmp_path)
    run.save(5, {"model/w": FakeTensor(dtype="uint8", shape=(1 << 20,), data=pattern(1 << 20, 1))})
    shard = run.folder(5) / "model-r00000-00001.safetensors"
    flip(shard, leaf + 7)
    with shard.open("r+b") as file:
        file.truncate(3 * leaf + 100)
    found = [(f.kind, f.first_leaf) for f in check(run).findings.listed]
    assert found == [("size", None), ("block", 1)]


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.save(
        5,
        {
            "model/none": make_tensor(numpy.zeros((0, 4), dtype=numpy.float32)),
            "model/one": make_tensor(numpy.float64(3.0)),
        },
    )
    assert check(run).findings.listed == ()


def test_verify_run_reads_every_generation_and_mark(run: FakeRun) -> None:
    run.claim(REF)
    (run.root / "g0009").mkdir()
    (run.root / "marks").mkdir()
    (run.root / "marks/odd.json").write_text("{}")
    findings = verify_run(run.store)
    assert findings.count == 0
    assert sorted(findings.notes) == [
        "generation 9: nobody claimed it; its start died early",
        "marks/odd.json: not a mark's name; nothing reads it",
    ]
    flip(run.root / "g0002/generation.json", 90)
    assert verify_run(run.store).kinds == {"run": 1}


def test_findings_are_bounded_and_counted() -> None:
    findings = Findings()
    for number in range(MAX_LISTED + 5):
        findings.add(Finding(kind="block", key=str(number), text=""))
    findings.add(Finding(kind="part", key="x", text=""))
    assert findings.kinds == {"block": MAX_LISTED + 5, "part": 1}
    assert findings.count == MAX_LISTED + 6
    assert len(findings.listed) == MAX_LISTED
