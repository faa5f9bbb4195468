"""Run Python code under strace: watch its system calls, or make chosen ones fail or kill it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

_LINE = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+|\?)")


WATCHED = "fallocate,fsync,pwrite64,linkat,renameat,unlinkat,mkdirat"


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemCall:
    name: str
    arguments: str
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the code: `status` is -9 after a kill."""

    status: int
    output: str
    calls: list[SystemCall]

    def find(self, name: str, *parts: str, after: int = -1) -> int:
        """Return the index of the first call after `after` whose arguments hold all parts."""
        for index, call in enumerate(self.calls):
            if index > after and call.name == name and all(part in call.arguments for part in parts):
                return index
        found = "\n".join(f"{call.name}({call.arguments})" for call in self.calls)
        raise AssertionError(f"no {name} with {parts} after call {after} of:\n{found}")


@cache
def why_no_strace() -> str | None:
    """Return why strace cannot be used here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    done = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"strace does not work here: {done.stderr.strip()[:100]}"


def run_traced(code: str, root: Path, *, inject: Sequence[str] = (), watch: str = WATCHED) -> Outcome:
    """Run `code` with `root` as its only argument.

    The watched calls are those that a starting Python does not make, so `when=` of an `inject` rule counts the
    calls of the code under test.
    """
    reason = why_no_strace()
    if reason is not None:
        pytest.skip(reason)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as log:
        command = ["strace", "-f", "-qq", "-y", "-s", "32", "-o", log.name, "-e", f"trace={watch}"]
        for rule in inject:
            command += ["-e", f"inject={rule}"]
        command += [sys.executable, "-c", code, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        matches = [_LINE.match(line) for line in log]
    calls = [SystemCall(name=match[1], arguments=match[2], result=match[3]) for match in matches if match is not None]
    return Outcome(status=done.returncode, output=done.stdout + done.stderr, calls=calls)
