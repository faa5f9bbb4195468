"""The demo itself: real processes, a real SIGKILL; that it says yes, that it can say no, that it leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def command(*arguments: str) -> list[str]:
    script = "import sys; from shardkeep.cli.main import main; sys.exit(main())"
    return [sys.executable, "-c", script, "demo", "--small", *arguments]


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.run(
        command(*arguments), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False
    )


def test_everything_is_bit_identical(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", "--keep", "kept")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["bit_identical"] is True
    assert result["first_difference"] is None
    assert result["kill"] == result["kill"] | {"rank": 1, "step": 6, "committed": False, "newest_committed": 3}
    assert result["kill"]["left_files"] > 0
    assert result["shards"]["reader"] == "safetensors"
    counts = {(row["group"], row["quantity"]): row["count"] for row in result["rows"]}
    assert all(row["identical"] for row in result["rows"])
    assert min(counts.values()) > 0
    assert counts["unbroken = killed and resumed", "loss"] == 12 * 3
    assert counts["3 ranks = 2 ranks (step 9)", "sample ids"] == 3 * 6
    assert "resumed from step 3 of generation 1; this is generation 2" in done.stderr
    assert (tmp_path / "kept" / "killed" / "run.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("what", "quantity"),
    [("rng", "random streams"), ("moment", "exp_avg")],
)
def test_what_is_left_out_is_named(tmp_path: Path, what: str, quantity: str) -> None:
    done = run(tmp_path, "--leave-out", what)
    assert done.returncode == 50, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "bit-identical: no"
    assert lines[-2].startswith(f"first difference: {quantity}, right after the resume at step 3, ")
    assert list(tmp_path.iterdir()) == []


def find_ranks(folder: Path) -> list[int]:
    """Return the processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if os.fsencode(folder) in line and b"shardkeep.demo.train" in line:
            found.append(int(entry.name))
    return found


def wait_for(condition: Any, limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_runs_on_when_the_command_is_ended(tmp_path: Path, number: signal.Signals, code: int) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command(), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: len(find_ranks(tmp_path)) == 3, 60)
        time.sleep(1.0)
        process.send_signal(number)
        assert process.wait(timeout=60) == code
    finally:
        process.kill()
        process.wait()
    assert wait_for(lambda: not find_ranks(tmp_path), 0.2 if number != signal.SIGKILL else 30)
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_evicted_three_times_is_bit_identical(tmp_path: Path) -> None:
    done = run(tmp_path, "--spot", "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["bit_identical"] is True
    assert all(row["identical"] and row["count"] for row in result["rows"])
    evictions = result["evictions"]
    assert [(one["run"], one["world_size"]) for one in evictions] == [
        *[("evicted", 2)] * 3,
        *[("resized", 2), ("resized", 1), ("resized", 2)],
    ]
    assert all(one["tiers_wiped"] >= 1 and one["took_s"] < 10 for one in evictions)
    assert done.stderr.count("SIGTERM after step") == 6
    assert list(tmp_path.iterdir()) == []


def test_spot_and_sabotage_do_not_go_together(tmp_path: Path) -> None:
    done = run(tmp_path, "--spot", "--leave-out", "rng")
    assert done.returncode == 64
    assert "--leave-out" in done.stderr
