"""What format version 1 wrote once, this version reads bit for bit, and writes again in the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkeep.engine.checkpoint import Checkpoint
from shardkeep.engine.locate import find_checkpoint
from shardkeep.engine.reader import read_verified
from shardkeep.engine.restore import CheckpointReader, make_catalog
from shardkeep.engine.run import list_step_folders, scan_run
from shardkeep.engine.verify import verify_run, verify_step
from shardkeep.errors import Corrupt, IncompatibleFormat
from shardkeep.format.names import StepRef
from shardkeep.format.versions import FORMAT_VERSION
from shardkeep.spec.chunks import whole
from shardkeep.storage.posix import PosixStore
from tests.golden.make import ASSETS, METRICS, STEP, VALUES, make_state, write
from tests.support.fake_state import BufferBytes, flip

GOLDEN = Path(__file__).parent / "v1"
REF = StepRef(STEP, 1)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "run")
    return tmp_path / "run"


def read_bytes(root: Path, key: str, own_rank: int | None = None) -> bytes:
    store = PosixStore(root)
    reader = CheckpointReader(store, find_checkpoint(store, STEP))
    shape = make_state()[key].shape
    data = BufferBytes(bytes(len(make_state()[key].data)))
    reader.read([(key, whole(shape), data)], own_rank=own_rank)
    return bytes(data.data)


def test_there_is_a_golden_run_of_every_format_version() -> None:
    folders = sorted(path.name for path in Path(__file__).parent.iterdir() if path.name.startswith("v"))
    assert folders == [f"v{number}" for number in range(1, FORMAT_VERSION + 1)]


def test_every_byte_comes_back() -> None:
    for key, tensor in make_state().items():
        if not tensor.per_rank:
            assert read_bytes(GOLDEN, key) == tensor.data, key
    own = make_state()["extra/own"].data
    for rank in range(2):
        assert read_bytes(GOLDEN, "extra/own", rank) == bytes((byte + rank) % 256 for byte in own)


def test_the_tensors_and_values_come_back() -> None:
    store = PosixStore(GOLDEN)
    with Checkpoint(store, find_checkpoint(store)) as opened:
        assert opened.step == STEP
        assert opened.metrics["loss"] == METRICS["loss"]
        assert opened.metrics["gone"] != opened.metrics["gone"]
        assert {name: value for name, value in opened.values().items() if name != "rng"} == VALUES
        assert str(opened.values()["special"][1]) == "-0.0"
        assert opened["model/embed.weight"].tensor().tolist() == torch.arange(36.0).reshape(9, 4).tolist()
        assert opened["both/half.weight"].tensor().dtype == torch.bfloat16
        assert opened["extra/columns"][1:3, 2].tolist() == [8, 14]
        reader = CheckpointReader(store, opened.commit)
        for rank in range(2):
            assert make_catalog(reader, rank, 2).values["rng"] == {"rank": rank, "draws": [1, 2, 3]}


def test_another_world_size_finds_what_each_rank_kept() -> None:
    """These records do not say which values are per rank, so the parts are asked."""
    reader = CheckpointReader(PosixStore(GOLDEN), find_checkpoint(PosixStore(GOLDEN), STEP))
    assert reader.commit.facts.per_rank is None
    for rank in range(3):
        catalog = make_catalog(reader, rank, 3)
        assert [table["rank"] for table in catalog.differing["rng"]] == [0, 1]
        assert catalog.values["rng"]["rank"] == (rank if rank < 2 else 0)
        assert set(catalog.values) == {*VALUES, "rng"}
        assert catalog.is_new == (rank == 2)


def test_it_verifies() -> None:
    store = PosixStore(GOLDEN)
    view = scan_run(store)
    assert view is not None
    assert not verify_run(store).listed
    report = verify_step(store, view.run_id, list_step_folders(store, 1)[REF], full=True)
    assert not report.findings.listed
    assert not report.findings.notes
    assert (GOLDEN / REF.key("config.json")).read_bytes() == ASSETS["config.json"]


def shape_of(value: Any) -> Any:
    """Return a JSON value with every text and number replaced by its type."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape_of(item) for item in value]
    return type(value).__name__


def grammar(data: bytes) -> Any:
    """Return the grammar of a record, without what the plan chose and what the machine was."""
    record = json.loads(data)
    body = record["body"]
    body.pop("shards", None)
    body["tensors"] = {key: item for key, item in body.get("tensors", {}).items() if not key.startswith("both/")}
    facts = body.get("facts") or {}
    facts.pop("per_rank", None)  # came later, and may be missing
    for holder in (body, facts):
        holder.pop("environment", None)
    for tensor in facts.get("layout", {}).get("tensors", {}).values():
        tensor.pop("owner", None)
        tensor.pop("split", None)
    return shape_of(record)


def test_the_same_state_is_written_the_same_way(tmp_path: Path) -> None:
    """A difference here is a change of the format: it needs a new version and a golden run of its own."""
    write(tmp_path / "run")
    names = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.*") if "/both-" not in str(path)}
    found = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*.*")}
    assert {name for name in found if "/both-" not in name} == names
    exact = 0
    for name in sorted(names):
        was, now = (GOLDEN / name).read_bytes(), (tmp_path / "run" / name).read_bytes()
        if name.endswith((".safetensors", "config.json")):
            assert now == was, name
            exact += 1
        elif name.endswith(".json"):
            assert grammar(now) == grammar(was), name
    assert exact >= 7


@pytest.mark.parametrize("offset", [0, 9, 200, -2])
def test_damaged_copies_are_named(copy: Path, offset: int) -> None:
    folder = copy / REF.folder
    for path in sorted(folder.iterdir()):
        if path.name.endswith("index.json") or path.name == "config.json":
            continue
        size = path.stat().st_size
        if abs(offset) >= size:
            continue
        at = offset if offset >= 0 else size + offset
        flip(path, at)
        with pytest.raises((Corrupt, IncompatibleFormat), match=path.name):
            read_all(copy)
        flip(path, at)


def read_all(root: Path) -> None:
    """Read what a load of both ranks reads, and every byte of every shard."""
    store = PosixStore(root)
    scan_run(store)
    reader = CheckpointReader(store, find_checkpoint(store, STEP))
    for rank in range(2):
        part = reader.part(rank)
        for number, shard in enumerate(part.record.shards):
            read_verified(part, number, 0, memoryview(bytearray(shard.size_bytes)))


def test_a_newer_format_is_refused_by_name(copy: Path) -> None:
    import hashlib

    path = copy / "run.json"
    body = json.loads(path.read_bytes())["body"]
    body["head"]["format"] = FORMAT_VERSION + 1
    text = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'","body":' + text + b"}\n")
    with pytest.raises(IncompatibleFormat, match=r"run\.json"):
        scan_run(PosixStore(copy))
