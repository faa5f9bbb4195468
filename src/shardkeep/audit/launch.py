"""Starts the audited command, waits for it, and leaves none of its processes behind.

A launcher puts its workers into sessions of their own, so the processes of a start are found by a variable in their
environment, which all of them inherit.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shardkeep.errors import CheckpointError, NotFound

_POLL_S: Final = 0.05
_END_S: Final = 10.0
_TAIL_LINES: Final = 15
_VARIABLE: Final = "SHARDKEEP_AUDIT_START"


def run_start(
    command: Sequence[str], *, records: Path, output: Path, kill_step: int | None, limit_s: float, name: str
) -> bool:
    """Run the command once; return whether it was killed at its step, as it was to be.

    Args:
        records: an empty folder for what the ranks write down.
        output: a file for what the command prints.

    Raises:
        CheckpointError: it failed otherwise (with the end of what it printed), or took longer than `limit_s`.
        NotFound: there is no such program.
    """
    tag = f"{_VARIABLE}={secrets.token_hex(16)}"
    told = [f"SHARDKEEP_AUDIT={records}", f"SHARDKEEP_AUDIT_KILL_STEP={'' if kill_step is None else kill_step}", tag]
    with open(output, "ab") as sink:
        # env(1) adds to the environment without a look at it; a session of its own leaves Ctrl-C to this process.
        process = subprocess.Popen(
            ["env", *told, *command], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    end_s = time.monotonic() + limit_s
    try:
        while process.poll() is None:
            if kill_step is not None and _find_kill(records, kill_step):
                # One rank is dead: the others go the same way, at once, as when a machine is taken away.
                break
            if time.monotonic() > end_s:
                raise CheckpointError(f"{name} did not end within {limit_s:g} s", advice="raise --limit")
            time.sleep(_POLL_S)
    finally:
        _end(process, tag)
    if kill_step is not None and _find_kill(records, kill_step):
        return True
    code = process.returncode
    if code == 0:
        return False
    if code in (126, 127):
        raise NotFound(f"{command[0]}: cannot be started: {_read_tail(output)}", advice="check the command")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    raise CheckpointError(
        f"{name} {how}; it printed last:\n    {_read_tail(output)}",
        advice="the command must work by itself and end by itself; shardkeep audit --keep DIR keeps all it printed",
    )


def _find_kill(records: Path, step: int) -> bool:
    """Say whether a rank wrote down the step it dies at."""
    begin = f'{{"type":"step","step":{step},'.encode()
    return any(begin in _read_end(path) for path in sorted(records.glob("rank-*.jsonl")))


def _read_end(path: Path) -> bytes:
    """Return the last whole line of a file."""
    data = path.read_bytes().rpartition(b"\n")[0]
    return data[data.rfind(b"\n") + 1 :]


def _end(process: subprocess.Popen[bytes], tag: str) -> None:
    """End by SIGKILL whatever of this start still runs, and wait until nothing of it is left."""
    end_s = time.monotonic() + _END_S
    while time.monotonic() < end_s:
        left = [pid for pid in _find_tagged(tag) if pid != process.pid]
        if process.poll() is None:
            # Not yet waited for, so the number is still this process's.
            process.kill()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if process.poll() is not None and not left:
            return
        time.sleep(_POLL_S / 5)
    raise CheckpointError(f"processes of the command do not die: {_find_tagged(tag)}")


def _find_tagged(tag: str) -> list[int]:
    """Return the processes whose environment has the tag; one that is a zombie has none."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if tag.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return sorted(found)


def _read_tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return "\n    ".join(lines[-_TAIL_LINES:]) or "nothing"
