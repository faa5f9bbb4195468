"""Checkpoints made by an enemy: each digest is right, the content cannot be. Typed errors at a bounded cost."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardkeep.cli.main import main
from shardkeep.engine.checkpoint import Checkpoint
from shardkeep.engine.locate import find_checkpoint
from shardkeep.engine.restore import restore
from shardkeep.engine.run import WRITER, scan_run
from shardkeep.errors import CheckpointError, Corrupt, IncompatibleFormat, StateMismatch
from shardkeep.format.names import COMMIT_RECORD, StepRef
from shardkeep.format.records import CommitRecord, PartRecord, ValueHolder, decode_record, encode_record
from shardkeep.plan.retention import Keep
from shardkeep.ranks.single import SingleGroup
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Mesh
from shardkeep.storage.posix import PosixStore
from tests.crash.jobs import make_state, manage, save_at
from tests.support.memory import watch_peak

REF = StepRef(20, 1)
PART, COMMIT, DIGESTS = "part-r00000.json", COMMIT_RECORD, "digests-r00000.bin"
KEY = "model/0.weight"
replace: Any = msgspec.structs.replace


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("museum") / "run"
    manager = manage(PosixStore(root), assets={"config.json": b"{}"})
    manager.resume(make_state(1))
    save_at(manager, 10)
    save_at(manager, 20)
    return root


@dataclass(frozen=True)
class Forge:
    """The step folder of a run, and ways to write records into it that hang together."""

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / REF.folder

    def commit(self, **fields: Any) -> None:
        record = decode_record(CommitRecord, (self.folder / COMMIT).read_bytes(), where="")
        (self.folder / COMMIT).write_bytes(encode_record(replace(record, **fields), writer=WRITER))

    def facts(self, **fields: Any) -> None:
        record = decode_record(CommitRecord, (self.folder / COMMIT).read_bytes(), where="")
        self.commit(facts=replace(record.facts, **fields))

    def table(self, **fields: Any) -> None:
        record = decode_record(CommitRecord, (self.folder / COMMIT).read_bytes(), where="")
        self.facts(layout=replace(record.facts.layout, **fields))

    def tensor(self, **fields: Any) -> None:
        record = decode_record(CommitRecord, (self.folder / COMMIT).read_bytes(), where="")
        tensors = dict(record.facts.layout.tensors)
        tensors[KEY] = replace(tensors[KEY], **fields)
        self.table(tensors=tensors)

    def part(self, change: Callable[[PartRecord], PartRecord]) -> None:
        record = decode_record(PartRecord, (self.folder / PART).read_bytes(), where="")
        self.part_bytes(encode_record(change(record), writer=WRITER))

    def part_bytes(self, data: bytes) -> None:
        """Write a part, and a commit record that names it."""
        import hashlib

        (self.folder / PART).write_bytes(data)
        record = decode_record(CommitRecord, (self.folder / COMMIT).read_bytes(), where="")
        summary = replace(record.parts[0], size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        self.commit(parts=(summary,))

    def body(self, name: str, text: bytes) -> None:
        """Write any JSON text as a record with a right digest."""
        import hashlib

        data = b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'","body":' + text + b"}\n"
        if name == PART:
            self.part_bytes(data)
        else:
            (self.folder / name).write_bytes(data)

    def chunks(self, **fields: Any) -> None:
        def change(part: PartRecord) -> PartRecord:
            stored = replace(part.tensors[KEY][0], **fields)
            return replace(part, tensors={**part.tensors, KEY: (stored,)})

        self.part(change)

    def shards(self, **fields: Any) -> None:
        self.part(lambda part: replace(part, shards=(replace(part.shards[0], **fields), *part.shards[1:])))


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def bomb(root: Path) -> bytes:
    return pickle.dumps(Bomb(str(root.parent / "it-ran")))


def deep(count: int, head: str) -> bytes:
    return b'{"head":{"format":1,"kind":"%s"},"values":' % head.encode() + b"[" * count + b"]" * count + b"}"


def with_values(forge: Forge, value: str) -> None:
    forge.part(lambda part: replace(part, values={**part.values, "note": msgspec.Raw(value.encode())}))


def with_optimizer(forge: Forge, value: str) -> None:
    name = "optimizer/param/0.weight"
    forge.part(lambda part: replace(part, values={**part.values, name: msgspec.Raw(value.encode())}))


def copied_step(forge: Forge) -> None:
    shutil.copytree(forge.root / StepRef(10, 1).folder, forge.folder, dirs_exist_ok=True)


def another_run(forge: Forge) -> None:
    forge.part(lambda part: replace(part, run_id="ab" * 16))
    forge.commit(run_id="ab" * 16)


def huge_header(forge: Forge) -> None:
    path = next(forge.folder.glob("model-*.safetensors"))
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 62))


def swapped_part(forge: Forge) -> None:
    """A part with a right digest of its own that the commit record does not know."""
    before = (forge.folder / COMMIT).read_bytes()
    with_values(forge, '{"step":21}')
    (forge.folder / COMMIT).write_bytes(before)


EXHIBITS: dict[str, Callable[[Forge], object]] = {
    "shard name climbs out": lambda f: f.shards(name="../../../../etc/passwd"),
    "shard name absolute": lambda f: f.shards(name="/etc/passwd"),
    "shard name another file": lambda f: f.shards(name=PART),
    "shard name with nul": lambda f: f.shards(name="model-r00000-00001.safetensors\x00"),
    "shard name of dots": lambda f: f.shards(name=".."),
    "shard section of another": lambda f: f.shards(name="..-r00000-00001.safetensors"),
    "asset climbs out": lambda f: f.facts(assets={"../../evil": {"size_bytes": 1, "sha256": "0" * 64}}),
    "asset is ours": lambda f: f.facts(assets={"part-r00000.json": {"size_bytes": 1, "sha256": "0" * 64}}),
    "huge header": huge_header,
    "shard size huge": lambda f: f.shards(size_bytes=1 << 62),
    "shard size zero": lambda f: f.shards(size_bytes=0),
    "range negative": lambda f: f.chunks(begin=-8),
    "range reversed": lambda f: f.chunks(begin=5000, end=4100),
    "range beyond the file": lambda f: f.chunks(end=1 << 40),
    "range of another length": lambda f: f.chunks(end=4100, begin=4096),
    "shard number out of range": lambda f: f.chunks(shard=99),
    "chunk beyond the tensor": lambda f: f.chunks(chunk=Chunk((0, 0), (1 << 40, 6))),
    "chunk negative": lambda f: f.chunks(chunk=Chunk((-1, 0), (5, 6))),
    "chunk of other dimensions": lambda f: f.chunks(chunk=Chunk((0,), (30,))),
    "tensor huge": lambda f: f.tensor(shape=(1 << 40, 1 << 20)),
    "tensor negative": lambda f: f.tensor(shape=(-5, 6)),
    "tensor of many dimensions": lambda f: f.tensor(shape=(1,) * 100_000),
    "split huge": lambda f: f.tensor(split=1 << 40),
    "split zero": lambda f: f.tensor(split=0),
    "owner negative": lambda f: f.tensor(owner=-1),
    "dtype unknown": lambda f: f.tensor(dtype="object"),
    "section climbs out": lambda f: f.tensor(section="../x"),
    "mesh of no ranks": lambda f: f.table(meshes=(Mesh((0,), ()),)),
    "mesh of ranks that are not": lambda f: f.table(meshes=(Mesh((1,), (10**9,)),)),
    "mesh of twice one rank": lambda f: f.table(meshes=(Mesh((2,), (0, 0)),)),
    "mesh huge": lambda f: f.table(meshes=(Mesh((1 << 40,), (0,)),)),
    "alias of nothing": lambda f: f.table(aliases={"model/x": "model/y"}),
    "alias of itself": lambda f: f.table(aliases={"model/x": "model/x"}),
    "holder that is not": lambda f: f.facts(holders=(ValueHolder(0, ()), ValueHolder(77, ()))),
    "no tensors": lambda f: f.table(tensors={}),
    "parts missing": lambda f: f.commit(parts=()),
    "world size grown": lambda f: f.commit(world_size=2),
    "world size huge": lambda f: f.commit(world_size=10**6),
    "commit of another step": lambda f: f.commit(ref=StepRef(10, 1)),
    "commit of another generation": lambda f: f.commit(ref=StepRef(20, 7)),
    "commit of another run": lambda f: f.commit(run_id="ab" * 16),
    "part and commit of another run": another_run,
    "part of another save": swapped_part,
    "copied step": copied_step,
    "part is deep": lambda f: f.body(PART, deep(100_000, "part")),
    "commit is deep": lambda f: f.body(COMMIT, deep(100_000, "commit")),
    "commit is a list": lambda f: f.body(COMMIT, b"[1]"),
    "commit repeats its head": lambda f: f.body(COMMIT, b'{"head":{"format":1,"kind":"commit"},"head":3}'),
    "values are deep": lambda f: with_values(f, "[" * 5000 + "]" * 5000),
    "values refer to themselves": lambda f: with_values(f, '{"$ref":"note"}'),
    "values of an unknown type": lambda f: with_values(f, '{"$type":"os.system","value":"true"}'),
    "optimizer state of a number's name": lambda f: with_optimizer(f, '{"group":0,"tensors":[1.5]}'),
    "optimizer state is a number": lambda f: with_optimizer(f, '{"group":0,"tensors":3}'),
    "optimizer state is a text": lambda f: with_optimizer(f, '"x"'),
    "commit is a pickle": lambda f: (f.folder / COMMIT).write_bytes(bomb(f.root)),
    "part is a pickle": lambda f: f.part_bytes(bomb(f.root)),
    "digests are a pickle": lambda f: (f.folder / DIGESTS).write_bytes(bomb(f.root)),
    "shard is a pickle": lambda f: next(f.folder.glob("model-*.safetensors")).write_bytes(bomb(f.root)),
    "run record is a pickle": lambda f: (f.root / "run.json").write_bytes(bomb(f.root)),
    "generation is a pickle": lambda f: (f.root / "g0001/generation.json").write_bytes(bomb(f.root)),
    "commit is empty": lambda f: (f.folder / COMMIT).write_bytes(b""),
}

UNLIKE_THE_LIVE_STATE = {
    "tensor huge",
    "no tensors",
    "optimizer state of a number's name",
    "optimizer state is a number",
}
"""Records that hang together: that the live state does not fit them is what a load sees first."""


def load(root: Path) -> None:
    """Restore step 20 and then read every tensor of it."""
    from shardkeep.state.restore import plan_restore

    store = PosixStore(root)
    commit = find_checkpoint(store, 20)
    state = make_state(1)
    restore(
        store,
        SingleGroup(),
        commit,
        lambda catalog: plan_restore(state, catalog, strict=False),
        lambda plan: plan.finish(),
        strict=False,
    )
    with Checkpoint(store, commit) as opened:
        opened.values()
        for key in opened:
            opened[key].tensor()


@pytest.mark.parametrize("name", EXHIBITS)
def test_exhibit(whole: Path, tmp_path: Path, name: str) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    EXHIBITS[name](Forge(root))
    began_s = time.monotonic()
    with watch_peak() as peak, pytest.raises(CheckpointError) as caught:
        load(root)
    wanted = StateMismatch if name in UNLIKE_THE_LIVE_STATE else (Corrupt, IncompatibleFormat)
    assert isinstance(caught.value, wanted)
    assert len(str(caught.value)) < 20_000
    assert peak.extra_bytes < 64 << 20
    assert time.monotonic() - began_s < 20
    assert not (root.parent / "it-ran").exists()
    # A start passes it over for step 10, or refuses: it takes nothing from it, and never begins anew.
    state = make_state(1)
    try:
        report = manage(PosixStore(root), keep=Keep(last=5)).resume(state)
    except CheckpointError:
        return
    assert report.step == 10, report
    assert not (root.parent / "it-ran").exists()


@pytest.mark.parametrize("depth", [300, 450, 900])
def test_values_deeper_than_any_value_are_not_walked_by_the_commands(whole: Path, tmp_path: Path, depth: int) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    with_values(Forge(root), "[" * depth + "]" * depth)
    for arguments in (
        ["show", "--values", str(root)],
        ["show", "--json", "--values", str(root)],
        ["diff", "--json", "--values", f"{root}@10", f"{root}@20"],
    ):
        code = main(arguments)
        assert code == (20 if depth > 404 else code)
        assert code in (0, 1, 20), arguments


def test_a_huge_tensor_takes_no_memory_when_it_is_indexed(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    Forge(root).tensor(shape=(1 << 40, 1 << 20))
    with Checkpoint(PosixStore(root), find_checkpoint(PosixStore(root), 20)) as opened:
        with pytest.raises(Corrupt, match=KEY):
            opened[KEY].tensor()


def test_what_was_not_forged_loads(whole: Path) -> None:
    load(whole)


def test_a_forged_part_is_never_rolled_forward(whole: Path, tmp_path: Path) -> None:
    """Without a commit record the parts alone decide: those of another run, step or place are not taken."""
    for change in (
        lambda part: replace(part, run_id="ab" * 16),
        lambda part: replace(part, ref=StepRef(10, 1)),
        lambda part: replace(part, rank=3),
        lambda part: replace(part, world_size=2),
        lambda part: replace(part, facts=None),
    ):
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(whole, root)
        forge = Forge(root)
        forge.part(change)
        (forge.folder / COMMIT).unlink()
        assert manage(PosixStore(root)).resume(make_state(1)).step == 10


def test_a_step_moved_to_another_place_is_refused(whole: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root)
    shutil.copytree(root / REF.folder, root / StepRef(30, 1).folder)
    with pytest.raises(Corrupt, match="moved or copied"):
        find_checkpoint(PosixStore(root), 30)
    state = make_state(1)
    assert manage(PosixStore(root)).resume(state).step == 20
    view = scan_run(PosixStore(root))
    assert view is not None
    assert StepRef(30, 1) in view.quarantined


def test_the_records_here_are_what_the_library_writes(whole: Path) -> None:
    """The exhibits are forged from real records; one that only fails for its envelope would show nothing."""
    data = (whole / REF.key(COMMIT)).read_bytes()
    assert encode_record(decode_record(CommitRecord, data, where=""), writer=WRITER) == data
    assert json.loads(data)["body"]["head"]["kind"] == "commit"
