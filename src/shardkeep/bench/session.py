"""What all measurements of one run share: a folder on the disk, the state's memory, workers, and what was reported.

Everything that a run makes is gone when its session ends, however it ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from shardkeep.bench.channel import Worker, WorkerConfig, WorkerFailed, end_all
from shardkeep.bench.gpt import StateShape, plan_state
from shardkeep.bench.memory import PageWarmer, read_meminfo
from shardkeep.bench.options import BenchOptions
from shardkeep.bench.registry import EVERYONE, PEERS
from shardkeep.errors import OutOfSpace, StorageError

FOOTPRINT: Final = {
    "save": 2.1,
    "load": 5.2,
    "partial": 4.1,
    "tiers": 1.1,
    "async": 2.2,
    "ranks": 2.2,
    "scale": 0.0,
    "cli": 0.0,
}
"""The most that a group has on the disk at a time, in states."""

MEMORY_STATES: Final = 4.0
_BEGIN_S: Final = 180.0  # imports, and a library that compiles something at its first use
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Session:
    """One run of the benchmark.

    Attributes:
        folder: the run's own, below the one that was given.
        seconds: what was measured, name -> contender -> by round; the warm-up is not in it.
        facts: everything else that was found out.
        absent: contender -> why it is not measured.
        cannot: who cannot load on another number of ranks.
    """

    options: BenchOptions
    say: Callable[[str], None]
    folder: Path
    shape: StateShape
    memory_fd: int
    warmer: PageWarmer
    direct: bool
    workers: list[Worker] = field(default_factory=list)
    seconds: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    cannot: set[str] = field(default_factory=set)
    digest: str = ""

    def start(self, name: str, **arguments: Any) -> Worker:
        """Start a worker; what it imports it imports at its first command (`begin`)."""
        threads = arguments.pop("threads", min(2, os.cpu_count() or 1))
        more = {"direct": self.direct} if name == "raw" else {}
        config = WorkerConfig(
            contender=name,
            size_bytes=self.options.size_bytes,
            memory_fd=self.memory_fd,
            arguments={**more, **arguments},
            threads=threads,
        )
        return self.launch(config, name)

    def launch(self, config: WorkerConfig, log: str) -> Worker:
        """Start a worker with a config of its own."""
        worker = Worker(config, self.folder / "logs" / f"{log}.txt", temporary=self.folder / "temporary")
        self.workers.append(worker)
        return worker

    def end(self, worker: Worker) -> None:
        """End a worker."""
        end_all([worker])
        if worker in self.workers:
            self.workers.remove(worker)

    def start_many(self, names: list[str], **arguments: Any) -> dict[str, Worker]:
        """Start workers at the same time; those that cannot begin are reported and left out."""
        started = {name: self.start(name, **arguments) for name in names if name not in self.absent}
        found: dict[str, Worker] = {}
        for name, worker in started.items():
            if self.tried(name, lambda worker=worker: worker.call("begin", timeout_s=_BEGIN_S)) is not None:  # type: ignore[misc]
                found[name] = worker
            else:
                self.end(worker)
        return found

    def tried(self, name: str, work: Callable[[], Any], *, what: str = "") -> Any:
        """Return what `work` gives (True for None); None when a peer fails at it, which is reported once.

        A failure of shardkeep or of the raw limit ends the run: without them there is nothing to compare.
        """
        try:
            value = work()
        except WorkerFailed as error:
            if name not in PEERS:
                raise
            text = str(error).partition(": ")[2] or str(error)
            self.absent[f"{name} {what}".strip()] = text if text.startswith("cannot") else f"failed: {text}"
            self.say(f"{name}: {text}; the run goes on without it")
            return None
        return True if value is None else value

    def record(self, what: str, who: str, number: int, value: float | None) -> None:
        """Keep a measurement of round `number`; those of round 0, the warm-up, apart from the others."""
        if number == 0:
            self.facts.setdefault("warm_up_s", {}).setdefault(what, {}).setdefault(who, value)
            return
        times = self.seconds.setdefault(what, {}).setdefault(who, [])
        times += [None] * (number - 1 - len(times))
        times.append(value)

    def place(self, name: str) -> Path:
        """Return a folder for a contender's files."""
        return self.folder / "files" / name

    def remove(self, path: Path) -> None:
        """Remove files, and make that durable now rather than within someone's measurement."""
        shutil.rmtree(path, ignore_errors=True)
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def find_missing(names: tuple[str, ...]) -> dict[str, str]:
    """Return which contenders are not installed, without importing anything large."""
    found: dict[str, str] = {}
    for name in names:
        package = EVERYONE[name].package
        try:
            there = importlib.util.find_spec(package) is not None
        except (ImportError, ValueError):
            there = False
        if not there:
            found[name] = f"not installed (pip install {EVERYONE[name].install})"
    return found


def check_room(options: BenchOptions, size_bytes: int) -> None:
    """Raise OutOfSpace where disk or memory is too small for what is to be measured."""
    states = max(FOOTPRINT[group] for group in options.groups)
    needed = int(size_bytes * states * 1.03) + (64 << 20 if states else 0)
    folder = options.folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())  # it is made only when there is room
    free = shutil.disk_usage(there).free
    if free < needed:
        raise OutOfSpace(
            f"{options.folder}: measuring a state of {size_bytes >> 20} MiB needs {needed >> 20} MiB of disk; "
            f"{free >> 20} MiB are free; nothing was written",
            advice="give a smaller --size, fewer groups by --only, or another folder",
        )
    memory = read_meminfo("MemAvailable")
    wanted = int(size_bytes * MEMORY_STATES)
    if states and memory and memory < wanted:
        raise OutOfSpace(
            f"measuring a state of {size_bytes >> 20} MiB needs {wanted >> 20} MiB of memory; "
            f"{memory >> 20} MiB are available; nothing was written",
            advice="give a smaller --size",
        )


@contextlib.contextmanager
def open_session(options: BenchOptions, say: Callable[[str], None]) -> Iterator[Session]:
    """Make a run's folder and memory; end its workers and remove everything at the end, also after a signal.

    Raises:
        OutOfSpace: disk or memory is too small. StorageError: the folder cannot be written.
    """
    from shardkeep.bench.device import allows_direct

    shape = plan_state(options.size_bytes)
    try:
        check_room(options, shape.size_bytes)
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{options.folder}: {error.strerror}", retryable=False) from error
    with _terminable(), contextlib.ExitStack() as stack:
        stack.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, _SIGNALS)
        try:
            folder = Path(tempfile.mkdtemp(prefix="shardkeep-bench-", dir=options.folder)).absolute()
        except OSError as error:
            raise StorageError(f"{options.folder}: {error.strerror}", retryable=False) from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in ("logs", "files", "temporary"):
            (folder / name).mkdir()
        fd = os.memfd_create("shardkeep-bench")
        stack.callback(os.close, fd)
        os.ftruncate(fd, shape.memory_bytes)
        warmer = PageWarmer(folder, wanted=options.fill_memory)
        stack.callback(warmer.close)
        session = Session(
            options=options,
            say=say,
            folder=folder,
            shape=shape,
            memory_fd=fd,
            warmer=warmer,
            direct=allows_direct(folder),
            absent=find_missing(options.peers),
        )
        stack.callback(lambda: end_all(session.workers, patience_s=0))
        # From here on nothing cuts the cleaning up short: a second Ctrl-C comes after it.
        stack.callback(signal.pthread_sigmask, signal.SIG_BLOCK, _SIGNALS)
        yield session


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the run like an exception, so that its files and workers go."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
