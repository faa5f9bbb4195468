"""`ls`, `show`, `prune`, `rollback` and `diff` on real runs."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from shardkeep.cli.contents import Row, iter_tree
from shardkeep.cli.prune import parse_best
from shardkeep.cli.target import Selection, parse_selection, parse_target
from shardkeep.engine.run import scan_run, write_mark
from shardkeep.engine.save import SaveOptions
from shardkeep.errors import UsageError
from shardkeep.format.names import StepRef
from shardkeep.format.records import PruneRecord, encode_record
from shardkeep.plan.retention import Best
from shardkeep.storage.posix import PosixStore
from tests.cli.runner import shardkeep
from tests.support.fake_state import FakeRun, make_tensor, small_state


def make_run(root: Path, *steps: int) -> FakeRun:
    run = FakeRun(root)
    for step in steps:
        run.save(step, small_state(step), options=SaveOptions(metrics={"loss": 10.0 / (step or 1)}))
    return run


def steps_of(root: Path, *options: str) -> list[tuple[int, str, list[str]]]:
    found = shardkeep("ls", root, "--json", *options).json["steps"]
    return [(entry["step"], entry["state"], entry["marks"]) for entry in found]


def test_ls_lists_the_timeline_with_marks(tmp_path: Path) -> None:
    run = make_run(tmp_path, 10, 20, 30)
    write_mark(run.store, run.run_id, "hold", StepRef(10, 1), "good")
    write_mark(run.store, run.run_id, "quarantine", StepRef(30, 1), "bad")
    run.claim(StepRef(20, 1))
    run.save(25, small_state(), options=SaveOptions(metrics={"loss": math.nan}, healthy=False))
    assert steps_of(tmp_path) == [
        (10, "committed", ["held"]),
        (20, "committed", ["parent"]),
        (25, "committed", ["latest", "unhealthy"]),
    ]
    document = shardkeep("ls", tmp_path, "--json").json
    assert document["generation"] == 2
    assert document["steps"][2]["metrics"] == {"loss": None}
    assert document["steps"][0]["metrics"] == {"loss": 1.0}
    assert document["steps"][0]["ranks"] == 1
    folder = run.folder(10, generation=1)
    stored = sum(p.stat().st_size for p in folder.iterdir() if p.suffix == ".safetensors" or p.name[:4] == "part")
    assert document["steps"][0]["size_bytes"] == stored
    text = shardkeep("ls", tmp_path).out
    assert "loss=nan" in text
    assert text.splitlines()[-1].startswith("3 checkpoints, ")


def test_ls_all_says_why_something_does_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path, 10, 20)
    shutil.copytree(run.folder(20), run.folder(30))
    (run.folder(30) / "commit.json").unlink()
    run.claim(StepRef(10, 1))
    run.save(15, small_state())
    shutil.copytree(run.folder(15), run.folder(40))
    (run.folder(40) / "commit.json").unlink()
    run.save(50, small_state())
    (run.folder(50) / "prune.json").write_bytes(b"x")
    found = {(e["step"], e["generation"]): e for e in shardkeep("ls", tmp_path, "--all", "--json").json["steps"]}
    assert {key: entry["state"] for key, entry in found.items()} == {
        (10, 1): "committed",
        (15, 2): "committed",
        (20, 1): "abandoned",
        (30, 1): "uncommitted",
        (40, 2): "uncommitted",
        (50, 2): "removing",
    }
    assert "generation 2 went on from step 10" in found[20, 1]["reason"]
    assert "never finished" in found[30, 1]["reason"]
    assert "being saved now" in found[40, 2]["reason"]
    assert [entry[0] for entry in steps_of(tmp_path)] == [10, 15]
    run.claim(StepRef(10, 1))
    again = {(e["step"], e["generation"]): e for e in shardkeep("ls", tmp_path, "--all", "--json").json["steps"]}
    assert again[15, 2]["state"] == "abandoned"
    assert "does not descend" in again[15, 2]["reason"]


def test_ls_agrees_with_the_engine_on_the_timeline(tmp_path: Path) -> None:
    run = make_run(tmp_path, 10, 20)
    shutil.copytree(run.folder(20), tmp_path / "g0001/step-00000020.2")  # a record that was copied: damaged
    (run.folder(10) / "prune.json").write_bytes(b"x")
    view = scan_run(run.store)
    assert view is not None
    listed = [(e["step"], e["attempt"]) for e in shardkeep("ls", tmp_path, "--json").json["steps"]]
    assert listed == [(ref.step, ref.attempt) for ref in view.timeline] == [(20, 2)]


def test_ls_of_an_empty_run(tmp_path: Path) -> None:
    FakeRun(tmp_path)
    assert shardkeep("ls", tmp_path).out.endswith("no checkpoints yet\n")
    assert shardkeep("ls", tmp_path, "--json").json["steps"] == []
    assert shardkeep("verify", tmp_path).code == 10
    assert shardkeep("show", tmp_path).code == 10


def test_show_lists_tensors_shards_and_values(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, world_size=2)
    state = small_state(placement="S0")
    state["model/own"] = make_tensor(numpy.zeros(2, dtype=numpy.int64), per_rank=True)
    run.save(7, state, options=SaveOptions(metrics={"loss": 0.5}, assets={"config.json": b"{}"}))
    found = shardkeep("show", tmp_path, "--json", "--shards", "--values").json
    assert (found["step"], found["ranks"], found["metrics"]) == (7, 2, {"loss": 0.5})
    by_key = {tensor["key"]: tensor for tensor in found["tensors"]}
    assert by_key["model/embed.weight"] == {
        "key": "model/embed.weight",
        "dtype": "float32",
        "shape": [256, 300],
        "size_bytes": 307200,
        "section": "model",
        "role": "parameter",
        "placement": "S0",
        "ranks": [0, 1],
    }
    assert {s["name"] for s in found["shards"]} == {p.name for p in run.folder(7).glob("*.safetensors")}
    assert found["values"]["scheduler"] == {"base_lrs": [0.1, 0.2], "last_epoch": 3}
    assert {"rng@rank0", "rng@rank1"} <= set(found["values"])
    assert found["assets"]["config.json"]["size_bytes"] == 2
    text = shardkeep("show", tmp_path, "-t", "optimizer/*wq*").out
    assert "optimizer/exp_avg/layers.0.wq.weight" in text
    assert "model/embed.weight" not in text
    assert shardkeep("show", tmp_path, "-t", "nothing").code == 10
    assert shardkeep("show", run.folder(7)).code == 0


def test_show_reads_plain_files_and_folders(tmp_path: Path) -> None:
    save_file({"a.weight": numpy.ones((2, 3), dtype=numpy.float16)}, tmp_path / "x.safetensors")
    found = shardkeep("show", tmp_path / "x.safetensors", "--json").json
    assert [(t["key"], t["dtype"], t["shape"], t["size_bytes"]) for t in found["tensors"]] == [
        ("a.weight", "float16", [2, 3], 12)
    ]
    assert "a.weight" in shardkeep("show", tmp_path, "--tree", "--shards").out
    assert shardkeep("show", tmp_path / "x.safetensors", "--step", "3").code == 64
    (tmp_path / "y.safetensors").write_bytes(b"junk")
    assert shardkeep("show", tmp_path).code == 20
    assert shardkeep("show", tmp_path / "y.safetensors").code == 20


def test_the_tree_sums_up_and_orders_layers_by_number() -> None:
    rows = [
        Row(key=key, dtype="float32", shape=(), section="", role="", placement="", size_bytes=size)
        for key, size in (("model/l.10.w", 1), ("model/l.2.w", 2), ("model/l.2", 4), ("model/top", 8))
    ]
    nodes = [(node.depth, node.name, node.tensor_count, node.size_bytes) for node in iter_tree(rows)]
    assert nodes == [
        (0, "model", 4, 15),
        (1, "l", 3, 7),
        (2, "2", 2, 6),
        (3, "(itself)", 1, 4),
        (3, "w", 1, 2),
        (2, "10.w", 1, 1),
        (1, "top", 1, 8),
    ]


def test_prune_says_first_and_does_then(tmp_path: Path) -> None:
    run = make_run(tmp_path, 10, 20, 30, 40)
    shutil.copytree(run.folder(20), run.folder(50))
    (run.folder(50) / "commit.json").unlink()
    dry = shardkeep("prune", tmp_path, "--keep-last", 1, "--keep-every", 20)
    assert dry.code == 0
    assert "add --yes" in dry.out
    assert [entry[0] for entry in steps_of(tmp_path)] == [10, 20, 30, 40]
    planned = shardkeep("prune", tmp_path, "--keep-last", 1, "--keep-every", 20, "--json").json
    assert [r["step"] for r in planned["remove"]] == [10, 30]
    assert (planned["dry_run"], planned["removed_count"]) == (True, 0)
    size = sum(p.stat().st_size for step in (10, 30) for p in run.folder(step).iterdir())
    assert planned["size_bytes"] == size
    done = shardkeep("prune", tmp_path, "--keep-last", 1, "--keep-every", 20, "--yes", "--json").json
    assert (done["dry_run"], done["removed_count"]) == (False, 2)
    assert [entry[0] for entry in steps_of(tmp_path)] == [20, 40]
    assert not run.folder(10).exists()
    assert run.folder(50).exists()  # of the live generation: it may be a save under way
    assert shardkeep("verify", tmp_path, "--step", "all").code == 0


def test_prune_without_rules_removes_only_what_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path, 10, 20)
    shutil.copytree(run.folder(20), run.folder(30))
    (run.folder(30) / "commit.json").unlink()
    shutil.copytree(run.folder(20), run.folder(15))
    (run.folder(15) / "prune.json").write_bytes(b"x")
    run.claim(StepRef(20, 1))
    removed = shardkeep("prune", tmp_path, "--yes", "--json").json["remove"]
    assert [(r["step"], r["reason"]) for r in removed] == [(15, "interrupted_removal"), (30, "unfinished_save")]
    assert [entry[0] for entry in steps_of(tmp_path)] == [10, 20]
    assert shardkeep("prune", tmp_path, "--yes").out.startswith("nothing to remove")


def test_prune_keeps_the_best(tmp_path: Path) -> None:
    make_run(tmp_path, 10, 20, 30)
    planned = shardkeep("prune", tmp_path, "--keep-best", "loss:max", "--json").json
    assert [r["step"] for r in planned["remove"]] == [20]
    assert shardkeep("prune", f"{tmp_path}@10").code == 64


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("loss", Best(metric="loss")),
        ("loss:max", Best(metric="loss", mode="max")),
        ("loss:min:3", Best(metric="loss", count=3)),
        ("eval:acc:max:2", Best(metric="eval:acc", mode="max", count=2)),
        ("eval:acc", Best(metric="eval:acc")),
    ],
)
def test_parse_best(text: str, rule: Best) -> None:
    assert parse_best(text) == rule


@pytest.mark.parametrize("text", ["loss:max:0", ":min", ""])
def test_parse_best_refuses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_best(text)


def test_rollback_and_its_undo(tmp_path: Path) -> None:
    make_run(tmp_path, 10, 20, 30)
    dry = shardkeep("rollback", tmp_path, 10)
    assert dry.code == 0
    assert "steps that would stop counting: 20, 30" in dry.out
    assert [entry[0] for entry in steps_of(tmp_path)] == [10, 20, 30]
    done = shardkeep("rollback", tmp_path, 10, "--yes", "--json").json
    assert (done["new_generation"], done["dry_run"]) == (2, False)
    assert [left["step"] for left in done["leaves"]] == [20, 30]
    assert steps_of(tmp_path) == [(10, "committed", ["latest", "parent"])]
    assert shardkeep("rollback", tmp_path, 30).code == 10
    assert done["undo"] == ["shardkeep", "rollback", str(tmp_path), "g0001/30", "--yes"]
    assert shardkeep(*done["undo"][1:]).code == 0
    assert [entry[0] for entry in steps_of(tmp_path)] == [10, 20, 30]
    view = scan_run(PosixStore(tmp_path))
    assert view is not None
    assert view.head == 3


def test_rollback_refuses_what_cannot_be_resumed_from(tmp_path: Path) -> None:
    run = make_run(tmp_path, 10, 20)
    (run.folder(10) / "part-r00000.json").unlink()
    assert shardkeep("rollback", tmp_path, 10, "--yes").code == 20
    assert shardkeep("rollback", tmp_path, 15, "--yes").code == 10
    assert shardkeep("rollback", tmp_path, "g0007/10", "--yes").code == 10
    assert shardkeep("rollback", tmp_path, "latest", "--yes").code == 64
    assert not (tmp_path / "g0002").exists()


def test_a_job_is_fenced_by_a_rollback(tmp_path: Path) -> None:
    from shardkeep.errors import Fenced

    run = make_run(tmp_path, 10, 20)
    assert shardkeep("rollback", tmp_path, 10, "--yes").code == 0
    with pytest.raises(Fenced):
        run.save(30, small_state())


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("latest", Selection()),
        ("1200", Selection(step=1200)),
        ("g0002/1200", Selection(step=1200, generation=2)),
        ("g0002/step-00001200.3", Selection(step=1200, generation=2, attempt=3)),
    ],
)
def test_parse_selection(text: str, selection: Selection) -> None:
    assert parse_selection(text) == selection


@pytest.mark.parametrize("text", ["", "-1", "1.2", "g2", "x", "1\n", "g0002/", "٣"])
def test_parse_selection_refuses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_selection(text)


def test_parse_target(tmp_path: Path) -> None:
    assert parse_target("runs/a@12").url == "runs/a"
    assert parse_target("user@host").url == "user@host"
    (tmp_path / "a@12").mkdir()
    assert parse_target(str(tmp_path / "a@12")).selection is None


def test_diff_of_runs(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    state = small_state(1)
    run.save(10, state)
    run.save(20, state)
    changed = dict(state)
    changed["model/layers.0.norm.weight"] = make_tensor(
        numpy.frombuffer(state["model/layers.0.norm.weight"].data, dtype=numpy.float32) + numpy.float32(0.5)
    )
    del changed["optimizer/exp_avg/embed.weight"]
    run.save(30, changed, values={"scheduler": {"last_epoch": 4, "base_lrs": [0.1, 0.2]}})
    same = shardkeep("diff", f"{run.root}@10", f"{run.root}@20")
    assert same.code == 0
    assert same.out.endswith("identical: 5 identical tensors\n")
    different = shardkeep("diff", run.root, run.root, "--step-a", 10, "--step-b", 30, "--json")
    assert different.code == 1
    by_key = {tensor["key"]: tensor for tensor in different.json["tensors"]}
    assert {key: tensor["what"] for key, tensor in by_key.items()} == {
        "model/layers.0.norm.weight": "changed",
        "optimizer/exp_avg/embed.weight": "removed",
    }
    difference = by_key["model/layers.0.norm.weight"]["difference"]
    assert difference["differing_count"] == difference["element_count"] == 64
    assert difference["max_abs"] == pytest.approx(0.5, abs=1e-6)
    paths = {value["path"]: (value["a"], value["b"]) for value in different.json["values"]}
    assert paths["scheduler.last_epoch"] == ("3", "4")
    assert "optimizer/groups" in paths
    text = shardkeep("diff", f"{run.root}@10", f"{run.root}@30").out
    assert "only in a  optimizer/exp_avg/embed.weight" in text
    assert "value  scheduler.last_epoch: 3 -> 4" in text


def test_diff_across_forms(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", world_size=2)
    state = small_state(1, placement="S0")
    run.save(10, state)
    model = {
        key.removeprefix("model/"): numpy.frombuffer(t.data, dtype=numpy.float32).reshape(t.shape)
        for key, t in state.items()
        if key.startswith("model/")
    }
    save_file(model, tmp_path / "model.safetensors")
    assert shardkeep("diff", tmp_path / "model.safetensors", run.root).code == 0
    model["embed.weight"] = model["embed.weight"].astype(numpy.float16)
    save_file(model, tmp_path / "half.safetensors")
    result = shardkeep("diff", run.root, tmp_path / "half.safetensors", "--json")
    assert result.code == 1
    assert [(t["key"], t["what"]) for t in result.json["tensors"]] == [("embed.weight", "dtype")]
    assert 0 < result.json["tensors"][0]["difference"]["max_abs"] < 0.01
    assert result.json["not_compared"]
    assert shardkeep("diff", tmp_path / "model.safetensors", tmp_path / "half.safetensors").code == 1
    assert shardkeep("diff", tmp_path / "model.safetensors", tmp_path / "nothing").code == 10
    assert shardkeep("diff", tmp_path / "model.safetensors", run.root, "--step-a", 3).code == 64


def test_ls_agrees_with_the_engine_on_intents_that_came_too_late(tmp_path: Path) -> None:
    run = make_run(tmp_path, 10, 20)
    run.claim(StepRef(10, 1))
    intent = encode_record(PruneRecord(run_id=run.run_id, ref=StepRef(10, 1), by_generation=1))
    (run.folder(10, generation=1) / "prune.json").write_bytes(intent)
    view = scan_run(run.store)
    assert view is not None
    assert view.timeline == (StepRef(10, 1),)
    assert [entry[0] for entry in steps_of(tmp_path)] == [10]
    assert [entry[:2] for entry in steps_of(tmp_path, "--all")] == [(10, "committed"), (20, "abandoned")]
    assert shardkeep("verify", f"{tmp_path}@g0001/10").code == 0
