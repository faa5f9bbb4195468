"""The job scripts of the launchers page, run with stand-ins for SLURM's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, iter_blocks

PAGE = ROOT / "docs" / "guides" / "launchers.md"

# Takes a while to end after a SIGTERM, as a save does, and exits as torchrun or a rank would.
SRUN = """#!/bin/bash
echo $$ > "$NOTES/step"
trap 'sleep 0.3; echo saved >> "$NOTES/log"; exit "$EXIT"' TERM
for _ in $(seq 200); do sleep 0.02; [ -e "$NOTES/finish" ] && exit "$FINISH"; done
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> "$NOTES/log"
kill -TERM "$(cat "$NOTES/step")"
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo node1 && exit
echo "scontrol $*" >> "$NOTES/log"
"""


def start(tmp_path: Path, number: int, *, exits: int, finishes: int = 0) -> subprocess.Popen[str]:
    scripts = [block.text for block in iter_blocks(PAGE.read_text()) if block.language == "bash"]
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "job").write_text(scripts[number])
    env = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "NOTES": str(tmp_path),
        "EXIT": str(exits),
        "FINISH": str(finishes),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[1-4]",
        "SLURM_NNODES": "4",
    }
    return subprocess.Popen(["bash", str(tmp_path / "job")], env=env, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    until_s = time.monotonic() + 10
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def read_log(tmp_path: Path) -> list[str]:
    log = tmp_path / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_at_the_time_limit_the_job_saves_and_is_put_back(tmp_path: Path) -> None:
    job = start(tmp_path, 0, exits=1)
    wait_for(tmp_path / "step")
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=20)
    assert job.returncode == 1
    assert read_log(tmp_path) == ["scancel --signal=TERM 77.0", "saved", "scontrol requeue 77"]


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_that_ends_by_itself_is_not_put_back(code: int, tmp_path: Path) -> None:
    job = start(tmp_path, 0, exits=1, finishes=code)
    wait_for(tmp_path / "step")
    (tmp_path / "finish").touch()
    job.communicate(timeout=20)
    assert job.returncode == code
    assert read_log(tmp_path) == []


def test_the_exit_code_of_ranks_puts_the_job_back(tmp_path: Path) -> None:
    job = start(tmp_path, 1, exits=75)
    wait_for(tmp_path / "step")
    os.kill(int((tmp_path / "step").read_text()), signal.SIGTERM)
    job.communicate(timeout=20)
    assert job.returncode == 75
    assert read_log(tmp_path) == ["saved", "scontrol requeue 77"]


@pytest.mark.parametrize("code", [0, 1])
def test_other_exit_codes_do_not(code: int, tmp_path: Path) -> None:
    job = start(tmp_path, 1, exits=75, finishes=code)
    wait_for(tmp_path / "step")
    (tmp_path / "finish").touch()
    job.communicate(timeout=20)
    assert job.returncode == code
    assert read_log(tmp_path) == []
