"""Damaged copies of one run, each under every command: the damage is named, nothing crashes, nothing is changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardkeep.engine.save import SaveOptions
from shardkeep.format.names import StepRef, format_mark
from shardkeep.format.records import CommitRecord, MarkRecord, decode_record, encode_record
from tests.cli.runner import shardkeep
from tests.support.fake_state import FakeRun, flip, make_tensor, small_state

STEP = "g0001/step-00000020"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """Two ranks, sharded optimizer, whole model (so that there is an index), assets, per-rank tensors, a mark."""
    run = FakeRun(tmp_path_factory.mktemp("museum") / "run", world_size=2)
    for step in (10, 20):
        state = {
            key: tensor if key.startswith("model/") else make_tensor_like(tensor)
            for key, tensor in small_state(step).items()
        }
        import numpy

        state["extra/own"] = make_tensor(numpy.arange(5, dtype=numpy.int64), per_rank=True)
        run.save(step, state, options=SaveOptions(assets={"config.json": b'{"layers": 1}'}))
    mark = MarkRecord(run_id=run.run_id, kind="hold", ref=StepRef(10, 1), reason="keep", created_at="")
    run.store.put(format_mark("hold", StepRef(10, 1), "ab" * 8), encode_record(mark))
    return run


def make_tensor_like(tensor: object) -> object:
    import dataclasses

    return dataclasses.replace(tensor, placement="S0")  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A way to damage the run, and what `verify` must say: kind of finding, words in its text, in quick mode too."""

    name: str
    damage: Callable[[Path], None]
    kind: str
    words: tuple[str, ...] = ()
    quick: bool = True


def at(name: str, offset: int) -> Callable[[Path], None]:
    return lambda root: flip(root / name, offset if offset >= 0 else (root / name).stat().st_size + offset)


def gone(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


def cut(name: str, size: int) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        with (root / name).open("r+b") as file:
            file.truncate(size)

    return damage


def grown(name: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        with (root / name).open("ab") as file:
            file.write(b"x")

    return damage


def copied(source: str, target: str) -> Callable[[Path], None]:
    return lambda root: shutil.copyfile(root / source, root / target) and None


def replaced(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        data = (root / name).read_bytes()
        assert old in data
        (root / name).write_bytes(data.replace(old, new, 1))

    return damage


MODEL = f"{STEP}/model-r00000-00001.safetensors"
MOMENTS = f"{STEP}/optimizer-r00001-00001.safetensors"
EXHIBITS = (
    Exhibit("commit_bit", at(f"{STEP}/commit.json", 300), "commit", ("commit.json",)),
    Exhibit("commit_cut", cut(f"{STEP}/commit.json", 100), "commit", ("commit.json",)),
    Exhibit("commit_empty", cut(f"{STEP}/commit.json", 0), "commit", ("commit.json",)),
    Exhibit(
        "commit_of_another_step",
        copied("g0001/step-00000010/commit.json", f"{STEP}/commit.json"),
        "commit",
        ("commit record of step 10",),
    ),
    Exhibit("part_bit", at(f"{STEP}/part-r00001.json", 400), "part", ("part-r00001.json", "rank 1")),
    Exhibit("part_gone", gone(f"{STEP}/part-r00001.json"), "missing", ("part-r00001.json",)),
    Exhibit(
        "part_of_another_rank",
        copied(f"{STEP}/part-r00000.json", f"{STEP}/part-r00001.json"),
        "part",
        ("part-r00001.json",),
    ),
    Exhibit("digests_bit", at(f"{STEP}/digests-r00000.bin", 3), "digests", ("digests-r00000.bin",), quick=False),
    Exhibit("digests_gone", gone(f"{STEP}/digests-r00000.bin"), "missing", ("digests-r00000.bin",)),
    Exhibit("digests_cut", cut(f"{STEP}/digests-r00000.bin", 16), "size", ("digests-r00000.bin",)),
    Exhibit("shard_last_byte", at(MODEL, -1), "block", ("model-r00000", "rank 0"), quick=False),
    Exhibit("shard_moment_byte", at(MOMENTS, 5000), "block", ("embed.weight", "rank 1", "leaf 0"), quick=False),
    Exhibit("shard_header_length", at(MODEL, 0), "header", ("model-r00000",)),
    Exhibit("shard_header_high_length", at(MODEL, 7), "header", ("model-r00000",)),
    Exhibit("shard_header_padding", at(MODEL, 4090), "header", ("model-r00000",)),
    Exhibit("shard_gone", gone(MODEL), "missing", ("model-r00000",)),
    Exhibit("shard_cut", cut(MOMENTS, 5000), "size", ("optimizer-r00001", "embed.weight")),
    Exhibit("shard_cut_in_header", cut(MOMENTS, 5), "header", ("optimizer-r00001",)),
    Exhibit("shard_empty", cut(MODEL, 0), "size", ("model-r00000",)),
    Exhibit("shard_grown", grown(MODEL), "size", ("model-r00000",)),
    Exhibit(
        "shards_swapped",
        copied(f"{STEP}/optimizer-r00000-00001.safetensors", MOMENTS),
        "header",  # chunks are named by their boxes
        ("rank 1", "bytes 0.."),
    ),
    Exhibit(
        "shard_of_another_step",
        copied("g0001/step-00000010/optimizer-r00001-00001.safetensors", MOMENTS),
        "block",
        ("optimizer-r00001",),
        quick=False,
    ),
    Exhibit("header_renamed", replaced(MODEL, b"embed.weight", b"3mbed.weight"), "header", ("3mbed.weight",)),
    Exhibit("header_dtype", replaced(MODEL, b'"F32"', b'"I32"'), "header", ("int32",)),
    Exhibit("index_gone", gone(f"{STEP}/model.safetensors.index.json"), "missing", ("index.json",)),
    Exhibit(
        "index_old",
        replaced(f"{STEP}/model.safetensors.index.json", b"model-r00001", b"model-r00000"),
        "index",
        ("index.json", "model-r0000"),
    ),
    Exhibit("index_broken", cut(f"{STEP}/model.safetensors.index.json", 40), "index", ("index.json",)),
    Exhibit("asset_bit", at(f"{STEP}/config.json", 3), "asset", ("config.json",), quick=False),
    Exhibit("asset_gone", gone(f"{STEP}/config.json"), "missing", ("config.json",)),
    Exhibit("asset_grown", grown(f"{STEP}/config.json"), "size", ("config.json",)),
    Exhibit("generation_bit", at("g0001/generation.json", 120), "run", ("generation.json",)),
    Exhibit("generation_gone", gone("g0001/generation.json"), "run", ("generation.json",)),
    Exhibit("run_bit", at("run.json", 90), "run", ("run.json",)),
    Exhibit("run_gone", gone("run.json"), "run", ("run.json",)),
    Exhibit("mark_bit", at("marks/hold-g0001-step-00000010.1-abababababababab.json", 90), "run", ("marks/hold",)),
)


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def copy(whole: FakeRun, tmp_path: Path) -> Path:
    shutil.copytree(whole.root, tmp_path / "run")
    return tmp_path / "run"


def test_the_whole_run_is_clean(whole: FakeRun) -> None:
    for extra in ((), ("--quick",), ("--step", "all")):
        result = shardkeep("verify", whole.root, "--json", *extra)
        assert (result.code, result.json["findings"], result.json["notes"]) == (0, [], [])
        assert [step["step"] for step in result.json["steps"]] == ([10, 20] if "all" in extra else [20])


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_verify_names_the_damage(copy: Path, exhibit: Exhibit) -> None:
    exhibit.damage(copy)
    before = snapshot(copy)
    result = shardkeep("verify", copy, "--step", "all", "--json")
    assert result.code == 20, result.out
    assert result.json["ok"] is False
    findings = [finding for finding in result.json["findings"] if finding["kind"] == exhibit.kind]
    assert findings, result.json["findings"]
    text = shardkeep("verify", copy, "--step", "all").out
    for word in exhibit.words:
        assert word in text
    # Named alone or as the latest, the damaged step gives the same findings.
    assert shardkeep("verify", copy, "--json").json["finding_count"] == result.json["finding_count"]
    quick = shardkeep("verify", copy, "--step", "all", "--quick")
    assert quick.code == (20 if exhibit.quick else 0)
    assert snapshot(copy) == before
    # The other step is still checked, and clean.
    others = [step for step in result.json["steps"] if step["step"] == 10]
    assert others == [] or others[0]["ok"] is True


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_no_command_crashes_on_damage(copy: Path, exhibit: Exhibit) -> None:
    exhibit.damage(copy)
    before = snapshot(copy)
    for arguments in (
        ("ls", copy),
        ("ls", copy, "--all"),
        ("show", copy, "--shards", "--values"),
        ("diff", f"{copy}@10", f"{copy}@20"),
        ("prune", copy, "--keep-last", 1),
        ("rollback", copy, 10),
    ):
        result = shardkeep(*arguments)
        assert result.code in (0, 1, 10, 12, 20), (arguments, result)
        assert "should not" not in result.err
        assert (result.err != "") == (result.code > 1)
    assert snapshot(copy) == before


def test_ls_shows_a_damaged_record_and_goes_on(copy: Path) -> None:
    flip(copy / STEP / "commit.json", 300)
    result = shardkeep("ls", copy)
    assert result.code == 0
    assert "damaged: " in result.out
    assert [step["problem"] is None for step in shardkeep("ls", copy, "--json").json["steps"]] == [True, False]


def test_all_damage_is_listed_not_the_first_alone(copy: Path) -> None:
    flip(copy / MODEL, 200_000)
    (copy / STEP / "part-r00001.json").unlink()
    flip(copy / STEP / "config.json", 2)
    flip(copy / "g0001/step-00000010/commit.json", 200)
    found = shardkeep("verify", copy, "--step", "all", "--json").json["findings"]
    assert sorted(finding["kind"] for finding in found) == ["asset", "block", "commit", "missing"]


def test_a_block_is_named_by_shard_range_leaf_tensor_and_rank(copy: Path) -> None:
    path = copy / MODEL
    size = path.stat().st_size
    flip(path, size - 10)
    finding = shardkeep("verify", copy, "--json").json["findings"][0]
    leaf = (size - 10) // 262144
    assert finding["key"] == MODEL
    assert (finding["first_leaf"], finding["leaf_count"]) == (leaf, 1)
    assert (finding["begin"], finding["end"]) == (leaf * 262144, min((leaf + 1) * 262144, size))
    assert finding["rank"] == 0
    assert finding["tensors"]
    assert all(key.startswith("model/") for key in finding["tensors"])


def test_an_extra_file_is_a_note(copy: Path) -> None:
    shutil.copyfile(copy / MODEL, copy / STEP / "model-r00007-00001.safetensors")
    (copy / STEP / "notes.txt").write_text("mine")
    result = shardkeep("verify", copy, "--json")
    assert result.code == 0
    assert len(result.json["notes"]) == 2
    assert all("extra file" in note for note in result.json["notes"])


def test_uncommitted_tries_and_removals_are_notes(copy: Path) -> None:
    shutil.copytree(copy / STEP, copy / "g0001/step-00000030")
    (copy / "g0001/step-00000030/commit.json").unlink()
    shutil.copytree(copy / STEP, copy / f"{STEP}.2")
    (copy / f"{STEP}.2/prune.json").write_bytes(b"{}")
    result = shardkeep("verify", copy, "--step", "all", "--json")
    assert result.code == 0
    notes = "\n".join(result.json["notes"])
    assert "step-00000030: not committed" in notes
    assert "step-00000020.2: its removal is under way" in notes


def test_names_with_control_characters_are_escaped(tmp_path: Path) -> None:
    import numpy

    run = FakeRun(tmp_path / "run")
    name = "model/\x1b[2Jevil\u202e\nname"
    run.save(1, {name: make_tensor(numpy.ones(4, dtype=numpy.float32))})
    run.save(2, {name: make_tensor(numpy.zeros(4, dtype=numpy.float32))})
    shard = run.folder(1) / "model-r00000-00001.safetensors"
    flip(shard, shard.stat().st_size - 1)
    for arguments in (
        ("show", run.root),
        ("show", run.root, "--tree"),
        ("verify", f"{run.root}@1"),
        ("diff", f"{run.root}@2", f"{run.root}@2"),
        ("show", run.root, "-t", "*\x07*"),
        ("ls", str(run.root) + "\x1b[1m"),
    ):
        result = shardkeep(*arguments)
        assert not any(sign < " " and sign != "\n" for sign in result.out + result.err), arguments
        assert "\u202e" not in result.out + result.err
    assert "\\x1b[2Jevil\\u202e\\nname" in shardkeep("show", run.root).out


def test_a_newer_format_is_not_called_damage(copy: Path) -> None:
    commit = copy / STEP / "commit.json"
    record = decode_record(CommitRecord, commit.read_bytes(), where="")
    commit.write_bytes(encode_record(record, requires=("erasure",)))
    result = shardkeep("verify", copy, "--json")
    assert (result.code, result.json["exit_code"]) == (12, 12)
    assert [finding["kind"] for finding in result.json["findings"]] == ["incompatible"]
    assert "erasure" in result.json["findings"][0]["text"]
    assert shardkeep("show", copy).code == 12
    flip(copy / "g0001/step-00000010/config.json", 3)
    assert shardkeep("verify", copy, "--step", "all").code == 20
