"""The examples on real data, killed five times each, against one unbroken start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def start(name: str, run: Path, *options: str, killed: bool = False) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), str(run), *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("digits_classifier", [["--workers", str(count)] for count in (2, 0, 1, 2, 0, 2)]),
        ("stream_text", [[]] * 6),
    ],
    ids=["digits", "text"],
)
def test_killed_five_times_it_ends_with_the_same_weights(name: str, options: list[list[str]], tmp_path: Path) -> None:
    whole = start(name, tmp_path / "whole", "--steps", "60", *options[0])
    cut: dict[str, str] = {}
    for kill_at, option in zip((7, 13, 27, 41, 52), options[:5], strict=True):
        for line in start(name, tmp_path / "cut", "--steps", "60", "--kill-at", str(kill_at), *option, killed=True):
            cut.setdefault(line.split(":")[0], line)
    last = start(name, tmp_path / "cut", "--steps", "60", *options[5])
    assert last[-1] == whole[-1]
    assert "weights" in last[-1]
    losses = {line.split(":")[0]: line for line in whole if "loss" in line}
    assert len(losses) == 6
    assert {step: line for step, line in cut.items() if "loss" in line}.items() <= losses.items()
    assert any("50" in line for line in last[:1]), last
