"""`shardkeep audit` on a real script: exact as it is, and every defect is found and named."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.audit.scripts import RANKS_SCRIPT, write_script
from tests.cli.runner import Result, shardkeep

SLOW_S = 400


def audit(folder: Path, defect: str = "", *options: str) -> Result:
    """Audit the script with one defect, killed after step 5; it saves every 3."""
    script = write_script(folder)
    given = options or ("--kill-at", "5")
    return shardkeep("audit", "--json", *given, "--", sys.executable, script, "{root}", *([defect] if defect else []))


def kinds(found: Any, kind: str) -> list[str]:
    return [loss["quantity"] for loss in found["losses"] if loss["kind"] == kind]


def test_an_exact_script_is_exact(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = audit(tmp_path, "", "--kill-at", "5,8", "--keep", str(kept))
    assert done.code == 0, done.out + done.err
    found = done.json
    assert found["exact"] is True
    assert found["losses"] == []
    assert [(kill["step"], kill["resumed"]) for kill in found["kills"]] == [(5, 3), (8, 6)]
    assert found["compared_step_count"] == 5 + 5 + 6
    assert found["compared_checkpoints"] == [3, 6, 9, 12]
    assert found["quantities"] == ["lr/optimizer", "metric/loss", "samples/loader"]
    assert found["tensor_count"] > 10
    assert found["warnings"] == []
    # Saves every 3 steps: g0001 has step 3, g0002 step 6, g0003 the rest.
    steps = sorted(path.parent.name + "/" + path.name for path in (kept / "broken").glob("g*/step-*"))
    assert steps == ["g0001/step-00000003", "g0002/step-00000006", "g0003/step-00000009", "g0003/step-00000012"]
    assert [text.partition(":")[0] for text in found["left_out"]] == ["rng/numpy, rng/python"], "it seeds torch alone"
    assert shardkeep("diff", "--json", kept / "unbroken", kept / "broken").json["tensors"] == []
    again = audit(tmp_path, "", "--keep", str(kept))
    assert (again.code, again.json["error"]["type"]) == (64, "UsageError")


def test_reseeding_after_the_resume_is_named(tmp_path: Path) -> None:
    done = audit(tmp_path, "reseed", "--kill-at", "5")
    assert done.code == 50, done.out + done.err
    found = done.json
    assert found["exact"] is False
    assert (found["first"]["kind"], found["first"]["quantity"], found["first"]["step"]) == ("stream", "rng/torch", 3)
    assert "seed" in found["first"]["cause"]
    assert kinds(found, "step") == ["metric/loss"]
    assert [warning["name"] for warning in found["warnings"]] == ["guard.reseeded"]
    assert found["compared_checkpoints"] == [3, 6]
    assert any(name.startswith("model/") for name in kinds(found, "checkpoint"))


@pytest.mark.slow
@pytest.mark.timeout(SLOW_S)
@pytest.mark.parametrize(
    ("defect", "named", "lost"),
    [
        ("ema", "main.ema", []),
        ("progress", "main.samples_seen", []),
        ("scheduler", "main.scheduler", ["lr/optimizer"]),
        ("optimizer", "main.optimizer", ["metric/loss"]),
    ],
)
def test_what_is_not_in_the_state_is_named(defect: str, named: str, lost: list[str], tmp_path: Path) -> None:
    done = audit(tmp_path, defect)
    assert done.code == 50, done.out + done.err
    found = done.json
    assert named in found["not_in_state"]
    assert (found["first"]["kind"], found["first"]["step"], found["first"]["start"]) == ("variable", 3, 2)
    assert set(lost) <= set(kinds(found, "step"))


@pytest.mark.slow
@pytest.mark.timeout(SLOW_S)
def test_an_order_that_is_not_restored_is_named(tmp_path: Path) -> None:
    done = audit(tmp_path, "loader")
    assert done.code == 50, done.out + done.err
    found = done.json
    assert found["first"]["step"] in (3, 4)
    assert kinds(found, "step") == ["metric/loss"]
    causes = " ".join(loss["cause"] for loss in found["losses"])
    assert "main.loader (DataLoader) is not in the state" in causes
    assert "guard.loader_missing" in [warning["name"] for warning in found["warnings"]]


@pytest.mark.slow
@pytest.mark.timeout(SLOW_S)
def test_a_script_that_does_not_repeat_itself_is_said_to_be_so(tmp_path: Path) -> None:
    done = audit(tmp_path, "unseeded")
    assert done.code == 50, done.out + done.err
    assert (done.json["first"]["kind"], done.json["first"]["start"]) == ("unrepeatable", 1)
    assert done.json["first"]["step"] <= 2


@pytest.mark.slow
@pytest.mark.timeout(SLOW_S)
def test_random_kills_are_those_of_the_seed_and_names_can_be_ignored(tmp_path: Path) -> None:
    options = ("--kills", "2", "--seed", "4", "--ignore", "main.samples_seen", "--ignore", "main.progress['seen']")
    done = audit(tmp_path, "progress", *options)
    assert done.code == 0, done.out
    assert done.json["not_in_state"] == []
    again = audit(tmp_path, "", *options)
    assert again.code == 0
    assert again.json["kills"] == done.json["kills"]
    assert len(again.json["kills"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(SLOW_S)
@pytest.mark.parametrize("then", [2, 1])
def test_a_launcher_and_its_workers_are_killed_and_started_again(then: int, tmp_path: Path) -> None:
    script = write_script(tmp_path, RANKS_SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}"]
    quiet = ["env", "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1", f"TMPDIR={tmp_path}"]
    options = ["--ranks", "2", "--ranks-then", str(then), "--kill-at", "5"]
    done = shardkeep("audit", "--json", *options, "--", *quiet, *launcher, script, "{root}")
    assert done.code == 0, done.out + done.err
    assert done.json["kills"] == [{"step": 5, "resumed": 3, "ranks": then}]
    assert done.json["compared_checkpoints"] == ([3, 6] if then == 2 else [])
    assert ("metric/loss" in done.json["quantities"]) == (then == 2)
    assert str(script).encode() not in b" ".join(path.read_bytes() for path in _command_lines())


@pytest.mark.slow
@pytest.mark.timeout(SLOW_S)
def test_a_command_that_fails_by_itself_is_an_error(tmp_path: Path) -> None:
    done = audit(tmp_path, "fails")
    assert done.code == 2
    assert "failed with exit code 3" in done.json["error"]["message"]


@pytest.mark.parametrize(
    ("options", "words", "code", "text"),
    [
        ((), ("python", "train.py"), 64, "no {root}"),
        (("--ranks", "2"), ("python", "{root}"), 64, "no {ranks}"),
        (("--kill-at", "5,x"), ("python", "{root}"), 64, "expected steps"),
        (("--kill-at", "5,2"), ("python", "{root}"), 64, "ascending"),
        ((), ("true", "{root}"), 2, "without a step"),
        ((), ("./nothing-of-this-name", "{root}"), 10, "cannot be started"),
        (("--limit", "0.3"), ("sh", "-c", "sleep 60 & sleep 60", "{root}"), 2, "did not end within 0.3 s"),
    ],
)
def test_commands_that_cannot_be_audited(
    options: tuple[str, ...], words: tuple[str, ...], code: int, text: str
) -> None:
    done = shardkeep("audit", "--json", *options, "--", *words)
    assert done.code == code, done.out
    assert text in done.json["error"]["message"]


def test_no_process_of_the_command_is_left(tmp_path: Path) -> None:
    """Also one that made a session of its own, as launchers do for their workers."""
    mark = f"sleep 61.{os.getpid()}"
    done = shardkeep("audit", "--limit", "0.5", "--", "sh", "-c", f"setsid {mark} & {mark}", "{root}")
    assert done.code == 2
    listed = [path.read_bytes().replace(b"\0", b" ").decode() for path in _command_lines()]
    assert not [line for line in listed if line.strip() == mark]


def _command_lines() -> list[Path]:
    return [
        path for entry in os.listdir("/proc") if entry.isdigit() and (path := Path(f"/proc/{entry}/cmdline")).exists()
    ]
