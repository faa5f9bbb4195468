"""The real command at a tiny size: what it answers, what peers that fail or are missing do to it, what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from shardkeep.bench.bars import BARS, list_keys
from tests.cli.runner import shardkeep
from tests.docs.pages import ROOT

TINY = ("--size", "1MiB", "--rounds", "1", "--no-fill-memory")

# The command in a process that finds no package of the names in BLOCKED.
BLOCKER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit "ignored"
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
from shardkeep.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def start(
    folder: Path, *arguments: str, packages: Path | None = None, blocked: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(packages)} if packages is not None else None
    command = [sys.executable, "-c", f"BLOCKED = {blocked!r}\n{BLOCKER}", "bench", str(folder), *TINY, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def run(folder: Path, *arguments: str, **options: Any) -> tuple[dict[str, Any], str]:
    process = start(folder, *arguments, "--json", **options)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out), err


def find_leftovers(folder: Path) -> list[str]:
    """Return processes that still have something to do with a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_files_with_a_peer_that_fails_and_one_that_is_missing(tmp_path: Path) -> None:
    """A broken library costs its own row and nothing else."""
    broken = tmp_path / "packages" / "torchsnapshot"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(
        textwrap.dedent("""
            class StateDict(dict):
                pass
            class Snapshot:
                @staticmethod
                def take(path, state):
                    raise RuntimeError("no luck today")
        """)
    )
    disk = tmp_path / "disk"
    disk.mkdir()
    found, err = run(
        disk, "--only", "save,load,partial", "--peers", "safetensors,torchsnapshot,runai",
        packages=tmp_path / "packages", blocked=("runai_model_streamer",),
    )  # fmt: skip
    assert list(found) == [*list_keys(("save", "load", "partial")), "details"]
    absent = found["details"]["not_measured"]
    assert absent["runai"] == "not installed (pip install runai-model-streamer)"
    assert "no luck today" in absent["torchsnapshot save"]
    assert "no luck today" in err
    # Everything that safetensors alone can be compared in has a value.
    without = {key for key, value in found.items() if value is None}
    assert without == {"save.durable.best_checkpointer_ratio"}
    seconds = found["details"]["seconds"]
    for what in ("save", "load.cold", "load.warm", "partial.tensor", "partial.rows"):
        assert {"shardkeep", "safetensors"} <= set(seconds[what]), what
    assert found["details"]["exact"]["load"] == {"shardkeep": True, "safetensors": True}
    ratio = seconds["save"]["raw"]["median"] / seconds["save"]["shardkeep"]["median"]
    assert found["save.durable.limit_ratio"] == pytest.approx(ratio)
    assert found["details"]["disk_bytes"]["shardkeep"] >= found["details"]["state_bytes"]
    assert found["load.partial.amplification"] >= 1.0
    assert os.listdir(disk) == []


@pytest.mark.timeout(300)
def test_one_group_without_peers(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "--only", "partial", "--peers", "none")
    assert list(found) == [*list_keys(("partial",)), "details"]
    assert found["load.partial.amplification"] >= 1.0
    assert {"shardkeep"} == set(found["details"]["seconds"]["partial.rows"])
    assert found["details"]["not_measured"] == {}
    assert os.listdir(tmp_path) == []


@pytest.mark.timeout(300)
def test_restarts_from_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    found, _ = run(tmp_path, "--only", "tiers", "--peers", "none")
    assert list(found) == [*list_keys(("tiers",)), "details"]
    seconds = found["details"]["seconds"]["tiers.restart"]
    ratio = seconds["raw"]["median"] / seconds["shardkeep"]["median"]
    assert found["tiers.restart.memcpy_ratio"] == pytest.approx(ratio)
    assert found["details"]["exact"]["tiers"] == {"shardkeep": True}
    assert os.listdir(tmp_path) == []
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if name.startswith("shardkeep-bench-")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_asynchronous_saves(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "--only", "async", "--peers", "dcp-1t")
    assert list(found) == [*list_keys(("async",)), "details"]
    assert all(isinstance(found[key], float) for key in list_keys(("async",)))
    assert found["details"]["exact"]["async"] == {"shardkeep": True, "dcp-1t": True}
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "--only", "ranks", "--peers", "dcp-1t")
    assert list(found) == [*list_keys(("ranks",)), "details"]
    assert all(isinstance(found[key], float) for key in list_keys(("ranks",)))
    for what in ("ranks4.reshard_load", "ranks4.load", "ranks2.load"):
        assert found["details"]["exact"][what] == {"shardkeep": True, "dcp-1t": True}
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tune_says_what_to_set(tmp_path: Path) -> None:
    done = shardkeep("bench", tmp_path, *TINY, "--tune", "--json")
    assert done.code == 0, done.err
    best = done.json["best"]["SHARDKEEP_IO_THREADS"]
    assert str(best) in done.json["io_threads"]
    assert done.json["environment"] in ([], [f"export SHARDKEEP_IO_THREADS={best}"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start(tmp_path, "--only", "save", "--peers", "none", "--rounds", "100000")
    assert process.stderr is not None
    for line in process.stderr:
        if "round 1 of" in line:
            break
    assert os.listdir(tmp_path)
    assert find_leftovers(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert os.listdir(tmp_path) == []
    end_s = time.monotonic() + 5
    while find_leftovers(tmp_path) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert find_leftovers(tmp_path) == []


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    done = shardkeep("bench", tmp_path / "a" / "b", "--size", "900TiB", "--only", "save", "--json")
    assert done.code == 30
    assert done.json["error"]["type"] == "OutOfSpace"
    assert "of disk" in done.json["error"]["message"]
    assert "--size" in done.json["error"]["advice"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("s3://bucket/run",), "s3:// is not measured"),
        ((".", "--only", "speed"), "--only speed"),
        ((".", "--peers", "pickle"), "--peers pickle"),
        ((".", "--size", "large"), "size 'large'"),
        ((".", "--report", "/no/such/folder/x.html"), "there is no folder"),
        ((".", "--report", "/"), "is a folder"),
        ((".", "--report", "x.html", "--tune"), "--tune makes no report"),
        (("~nobody-of-this-name/x",), "'~nobody-of-this-name/x'"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], text: str) -> None:
    done = shardkeep("bench", *arguments)
    assert done.code == 64
    assert text in done.err


@pytest.mark.parametrize("url", ["s3://KEY:hunter2@bucket/run", "gs://b/x?sig=hunter2", "file://me:hunter2@host/run"])
@pytest.mark.parametrize("name", ["bench", "ls"])
def test_what_may_be_a_secret_is_not_repeated(name: str, url: str) -> None:
    done = shardkeep(name, url)
    assert done.code == 64
    assert "hunter2" not in done.err + done.out


def test_it_says_that_it_needs_torch(tmp_path: Path) -> None:
    process = start(tmp_path, blocked=("torch",))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "pip install torch" in err
    assert os.listdir(tmp_path) == []


def test_the_guide_has_a_bar_and_a_sentence_for_every_key() -> None:
    page = (ROOT / "docs" / "guides" / "benchmark.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z0-9_]+\.[a-z0-9_.]+)` \| (.+) \|$", page, re.MULTILINE))
    assert list(rows) == list(BARS)
    for key, bar in BARS.items():
        sentence, _, said = rows[key].rpartition(" | ")
        assert said == bar.text.replace(">=", "≥").replace("<=", "≤"), key
        assert len(sentence) > 30, key
