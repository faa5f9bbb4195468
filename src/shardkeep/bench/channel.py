"""Worker processes as the benchmark sees them: started, asked, and ended with all their children."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from shardkeep.errors import CheckpointError

_CALL_S: Final = 600.0
_END_S: Final = 20.0
_TERM_S: Final = 3.0


class WorkerFailed(CheckpointError):
    """A contender raised, died or took too long; the benchmark reports it and goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker is told at its start.

    Attributes:
        memory_fd: the shared memory of the state, or None.
        arguments: for the contender, besides those of the registry.
        world_size: of its job; 0 for a process of its own.
        port: where rank 0 of the job listens.
    """

    contender: str
    size_bytes: int
    memory_fd: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    threads: int = 2
    rank: int = 0
    world_size: int = 0
    port: int = 0
    peers: tuple[str, ...] = ()

    def format(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> WorkerConfig:
        found = json.loads(text)
        return cls(**{**found, "peers": tuple(found["peers"])})


class Worker:
    """One worker process. Calls raise WorkerFailed when the contender cannot do what is asked."""

    def __init__(self, config: WorkerConfig, log: Path, *, temporary: Path) -> None:
        self.name = config.contender
        self._log = log
        self._rest = b""
        loopback = [f"GLOO_SOCKET_IFNAME={name}" for _, name in socket.if_nameindex() if name.startswith("lo")]
        keep = () if config.memory_fd is None else (config.memory_fd,)
        threads = str(config.threads)
        with open(log, "ab") as sink:
            # A session of its own: Ctrl-C reaches the command alone, which then ends every worker with its children.
            self._process = subprocess.Popen(
                [
                    "env",
                    "RES_OPTIONS=timeout:1 attempts:1",
                    *loopback[:1],
                    f"TMPDIR={temporary}",
                    f"OMP_NUM_THREADS={threads}",
                    f"MKL_NUM_THREADS={threads}",
                    "JAX_PLATFORMS=cpu",
                    sys.executable,
                    "-m",
                    "shardkeep.bench.worker",
                    config.format(),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
                pass_fds=keep,
            )

    def ask(self, do: str, **arguments: Any) -> None:
        """Send a command; its answer is for `receive`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerFailed(f"{self.name}: {self._describe_end()}") from error

    def receive(self, *, timeout_s: float = _CALL_S) -> Any:
        """Return the answer to the command sent last."""
        line = self._read_line(time.monotonic() + timeout_s)
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"{self.name}: {answer['error']}")
        return answer["value"]

    def call(self, do: str, *, timeout_s: float = _CALL_S, **arguments: Any) -> Any:
        """Send a command and return its answer."""
        self.ask(do, **arguments)
        return self.receive(timeout_s=timeout_s)

    def _read_line(self, end_s: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(end_s - time.monotonic(), 0)):
                    self.end(patience_s=0)
                    raise WorkerFailed(f"{self.name}: no answer in time")
                data = os.read(fd, 1 << 16)
                if not data:
                    raise WorkerFailed(f"{self.name}: {self._describe_end()}")
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _describe_end(self) -> str:
        self.end(patience_s=1)
        code = self._process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"the process was {how}: {lines[-1][:200]}" if lines else f"the process was {how}"

    def end(self, *, patience_s: float = _END_S) -> None:
        """End the process: by the end of its input, then politely, then for good, with all its children."""
        for pipe in (self._process.stdin,):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()
        for signal_number, wait_s in ((None, patience_s), (signal.SIGTERM, min(_TERM_S, patience_s))):
            if signal_number is not None:
                self._signal(signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=wait_s)
                break
        # Also after a good end: a library's helper processes belong to the group and may have been left.
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def end_all(workers: Sequence[Worker], *, patience_s: float = _END_S) -> None:
    """End workers, whatever state they are in."""
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.end(patience_s=patience_s)


def find_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
