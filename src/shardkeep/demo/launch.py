"""Starts the ranks of a job as processes of their own, watches them, and leaves none behind.

What torchrun does for one machine: when a rank fails, the others are ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from shardkeep.demo.records import RankConfig
from shardkeep.errors import PeerFailure
from shardkeep.manager.preempt import EXIT_REQUEUE

POLL_S: Final = 0.1
JOB_LIMIT_S: Final = 900.0
_TERM_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended. `rank` and `returncode` are those of the first rank that failed, or None where none did."""

    rank: int | None = None
    returncode: int | None = None

    @property
    def was_killed(self) -> bool:
        return self.returncode == -signal.SIGKILL


def run_job(
    config: RankConfig,
    world_size: int,
    output: Path,
    watch: Callable[[], None],
    *,
    killed_ok: int | None = None,
    env: Mapping[str, str] | None = None,
) -> JobEnd:
    """Run all ranks to their end; no process of the job is left on return, however it returns.

    Args:
        output: a folder for what the ranks print, one file each.
        watch: called a few times a second while the job runs.
        killed_ok: a rank that is expected to die by SIGKILL.
        env: further variables of the ranks' environment.

    Raises:
        PeerFailure: a rank failed otherwise (with the end of what it printed), or the job took too long.
    """
    output.mkdir(parents=True, exist_ok=True)
    with _start(config, world_size, output, env or {}) as ranks:
        end = _wait(ranks, watch)
    if end.rank is not None and not (end.was_killed and end.rank == killed_ok):
        raise _failure(end, output)
    return end


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """How a job took its eviction: seconds from the notice to the end, and how many ranks had to be killed."""

    took_s: float
    killed_count: int


def run_until_evicted(
    config: RankConfig,
    world_size: int,
    output: Path,
    is_due: Callable[[], bool],
    *,
    notice_s: float,
    env: Mapping[str, str],
) -> Eviction:
    """Run all ranks until `is_due`, give them notice (SIGTERM), and kill those that are left `notice_s` later.

    Raises:
        PeerFailure: a rank ended before the notice, or otherwise than to be started again.
    """
    output.mkdir(parents=True, exist_ok=True)
    with _start(config, world_size, output, env) as ranks:
        end_s = time.monotonic() + JOB_LIMIT_S
        while not is_due():
            ended = [rank for rank, process in enumerate(ranks) if process.poll() is not None]
            if ended or time.monotonic() > end_s:
                first = ended[0] if ended else 0
                raise _failure(JobEnd(rank=first, returncode=ranks[first].returncode), output)
            time.sleep(POLL_S / 4)
        noticed_s = time.monotonic()
        for process in ranks:
            _signal(process, signal.SIGTERM)
        while time.monotonic() < noticed_s + notice_s and any(process.poll() is None for process in ranks):
            time.sleep(POLL_S / 4)
        took_s = time.monotonic() - noticed_s
        left = [process for process in ranks if process.poll() is None]
        for process in left:
            _signal(process, signal.SIGKILL)
        codes = [process.wait() for process in ranks]
    for rank, code in enumerate(codes):
        if code not in (EXIT_REQUEUE, -signal.SIGKILL):
            raise _failure(JobEnd(rank=rank, returncode=code), output)
    return Eviction(took_s=took_s, killed_count=len(left))


def _failure(end: JobEnd, output: Path) -> PeerFailure:
    assert end.rank is not None
    code = end.returncode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    return PeerFailure(
        f"a rank of the demo {how}",
        causes={end.rank: _read_tail(_output_path(output, end.rank))},
        advice="shardkeep demo --keep DIR keeps everything the ranks wrote",
    )


@contextlib.contextmanager
def _start(
    config: RankConfig, world_size: int, output: Path, env: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "shardkeep.demo.train", msgspec.json.encode(config).decode()]
    shared = [*_make_environment(world_size, output), *(f"{name}={value}" for name, value in sorted(env.items()))]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            with open(_output_path(output, rank), "ab") as sink:
                # In a session of its own: Ctrl-C reaches the command alone, which then ends all ranks in order.
                process = subprocess.Popen(
                    ["env", *shared, f"RANK={rank}", f"LOCAL_RANK={rank}", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    start_new_session=True,
                )
            ranks.append(process)
        yield ranks
    finally:
        _end(ranks)


def _make_environment(world_size: int, output: Path) -> list[str]:
    """Return what torchrun would set and what keeps the ranks to themselves, as `NAME=value` for env(1)."""
    # Nobody here looks up the names of machines: the ranks talk over the loopback device.
    loopback = [f"GLOO_SOCKET_IFNAME={name}" for _, name in socket.if_nameindex() if name.startswith("lo")]
    return [
        "RES_OPTIONS=timeout:1 attempts:1",
        *loopback[:1],
        # Torch makes folders for its compiler's cache wherever temporary files go, even where nothing is compiled.
        f"TMPDIR={output}",
        f"WORLD_SIZE={world_size}",
        f"LOCAL_WORLD_SIZE={world_size}",
        "MASTER_ADDR=127.0.0.1",
        f"MASTER_PORT={_find_port()}",
        "OMP_NUM_THREADS=1",
        "MKL_NUM_THREADS=1",
        "CUDA_VISIBLE_DEVICES=",
    ]


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(ranks: list[subprocess.Popen[bytes]], watch: Callable[[], None]) -> JobEnd:
    end_s = time.monotonic() + JOB_LIMIT_S
    while time.monotonic() < end_s:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            # A killed rank is the cause where several are found at once; the others only lost their peer.
            first = min(failed, key=lambda rank: (codes[rank] != -signal.SIGKILL, rank))
            return JobEnd(rank=first, returncode=codes[first])
        if all(code == 0 for code in codes):
            return JobEnd()
        watch()
        time.sleep(POLL_S)
    raise PeerFailure(f"the ranks of the demo did not end within {JOB_LIMIT_S:g} s", advice="try again")


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs: politely, then for good; all are waited for."""
    for process in ranks:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
    end_s = time.monotonic() + _TERM_S
    for process in ranks:
        try:
            process.wait(timeout=max(end_s - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Not yet waited for, so the id is still this process's; its group has the same number.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _output_path(output: Path, rank: int) -> Path:
    return output / f"rank-{rank:03d}.txt"


def _read_tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return "\n    ".join(lines[-12:]) or "it printed nothing"
