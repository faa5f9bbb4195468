"""The examples, killed and resumed as the tutorial says, end with the weights of a run that was never killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.session import Session

SINGLE = ROOT / "examples" / "train_single.py"
FSDP = ROOT / "examples" / "train_fsdp.py"


def _weights(printed: str) -> str:
    found = re.search(r"^step 50: weights ([0-9a-f]{16})$", printed, re.MULTILINE)
    assert found is not None, printed
    return found[1]


@pytest.mark.parametrize("step", [3, 10, 49])
def test_a_killed_run_ends_like_one_that_was_not(tmp_path: Path, step: int) -> None:
    with Session(tmp_path) as session:
        code, straight = session.run_command(f"python {SINGLE} straight")
        assert code == 0, straight
        code, printed = session.run_command(f"python {SINGLE} killed --kill-at {step}")
        assert code == 128 + signal.SIGKILL, printed
        code, resumed = session.run_command(f"python {SINGLE} killed")
        assert code == 0, resumed
    expected = f"resumed from step {step // 10 * 10} of" if step >= 10 else "fresh start"
    assert resumed.startswith(expected), resumed
    assert _weights(resumed) == _weights(straight)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_killed_under_torchrun_end_like_ranks_that_were_not(tmp_path: Path) -> None:
    code, straight = _torchrun(tmp_path, "straight")
    assert code == 0, straight
    code, killed = _torchrun(tmp_path, "killed", "--kill-at", "37")
    assert code != 0, killed
    code, resumed = _torchrun(tmp_path, "killed")
    assert code == 0, resumed
    assert "resumed from step 30 of generation 1; this is generation 2" in resumed
    assert _weights(resumed) == _weights(straight)


def _torchrun(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FSDP)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout
