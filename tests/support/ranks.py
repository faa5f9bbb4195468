"""Real ranks for tests: processes with gloo, started in tenths of a second through a forkserver that holds torch.

    def body(rank: int, world_size: int, text: str) -> str: ...      # at module level of a test module

    assert run_ranks(body, 4, "hello") == [...]

`start_ranks` gives a handle to kill ranks in the middle. Ranks tell where they are with `mark`.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

_STACKS_WAIT_S = 0.5
# Imported once, before any rank exists: some of these cost seconds each.
_PRELOAD = [
    "torch",
    "torch._dynamo",  # every optimizer imports it
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "hypothesis",
    "msgspec",
    "numpy",
    "pytest",
    "shardkeep.manager.manager",
    "shardkeep.state.restore",
    "shardkeep.data.loader",
    "tests.support.ranks",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank ended: with a value, an exception, or neither (killed, or crashed with `exit_code`)."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exit_code: int | None = 0
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.error is None and self.exit_code == 0


class RanksFailed(AssertionError):
    """Ranks raised, died or hung; the text holds each one's traceback or stacks."""


class Ranks:
    """A running world. Use it in a `with` block: what still runs at the end is killed."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        *,
        env: dict[str, str],
        store: Literal["parent", "rank0"] | int,
    ) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._server, port = _serve_store(store)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._outcomes: dict[int, Outcome] = {}
        self._marks: dict[int, list[str]] = {rank: [] for rank in range(world_size)}
        self._pipes: dict[int, Connection] = {}
        self._processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            plan = _Plan(rank=rank, world_size=world_size, port=port, folder=self._folder.name, env=env)
            process = context.Process(target=_rank_main, args=(plan, theirs, fn, args), name=f"rank-{rank}")
            process.start()
            theirs.close()
            self._pipes[rank] = mine
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes.values():
            pipe.close()
        self._server = None
        self._folder.cleanup()

    def kill(self, rank: int) -> None:
        """SIGKILL one rank and wait until it is gone."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def send_signal(self, rank: int, number: int) -> None:
        """Send any other signal, e.g. SIGSTOP or SIGTERM."""
        os.kill(self._processes[rank].pid, number)

    def wait_for_mark(self, rank: int, text: str, *, timeout_s: float = 30.0) -> None:
        """Wait until the rank called `mark(text)`."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self._marks[rank]:
            if rank in self._outcomes or time.monotonic() > deadline_s:
                raise RanksFailed(f"rank {rank} never marked {text!r}\n{self._report()}")
            self._receive(deadline_s)

    def collect(self, *, timeout_s: float = 60.0) -> list[Outcome]:
        """Wait for every rank to end; return how. Raises RanksFailed with all stacks when some hang."""
        deadline_s = time.monotonic() + timeout_s
        while len(self._outcomes) < self.world_size:
            if time.monotonic() > deadline_s:
                raise RanksFailed(f"ranks still running after {timeout_s:g} s\n{self._report()}")
            self._receive(deadline_s)
        return [self._outcomes[rank] for rank in range(self.world_size)]

    def results(self, *, timeout_s: float = 60.0) -> list[Any]:
        """Return every rank's value. Raises RanksFailed when one did not return."""
        outcomes = self.collect(timeout_s=timeout_s)
        if not all(outcome.is_ok for outcome in outcomes):
            raise RanksFailed(self._report())
        return [outcome.value for outcome in outcomes]

    def _receive(self, deadline_s: float) -> None:
        waiting = {pipe: rank for rank, pipe in self._pipes.items() if rank not in self._outcomes}
        left_s = max(0.0, deadline_s - time.monotonic())
        for pipe in multiprocessing.connection.wait(list(waiting), timeout=left_s):
            rank = waiting[pipe]
            try:
                kind, content = pipe.recv()
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(10)
                code = self._processes[rank].exitcode
                trace = self._stacks(rank)  # of a crash, faulthandler's
                self._outcomes[rank] = Outcome(rank=rank, exit_code=code if code != 0 else None, trace=trace)
                continue
            if kind == "mark":
                self._marks[rank].append(content)
            else:
                self._outcomes[rank] = content

    def _stacks(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return (Path(self._folder.name) / f"stacks-{rank}").read_text()
        return ""

    def _report(self) -> str:
        hung = [rank for rank in range(self.world_size) if rank not in self._outcomes]
        for rank in hung:
            if self._processes[rank].is_alive():
                self.send_signal(rank, signal.SIGUSR2)
        if hung:
            time.sleep(_STACKS_WAIT_S)
        lines = []
        for rank in range(self.world_size):
            outcome = self._outcomes.get(rank)
            if outcome is None:
                lines.append(f"--- rank {rank} still runs, marks {self._marks[rank]}\n{self._stacks(rank)}")
            elif outcome.is_ok:
                lines.append(f"--- rank {rank} returned {outcome.value!r:.500}")
            else:
                lines.append(f"--- rank {rank} failed, exit code {outcome.exit_code}\n{outcome.trace}")
        return "\n".join(lines)


def start_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    store: Literal["parent", "rank0"] | int = "parent",
) -> Ranks:
    """Start `fn(rank, world_size, *args)` in real processes, each with the gloo default process group set up.

    `fn` is a module-level function. `env` is set in each rank. `store` says who hosts torch's TCP store: this
    process (as torchrun's agent does), rank 0 (it dies with rank 0), or whoever listens on a port of this machine.
    """
    return Ranks(fn, world_size, args, env=dict(env or {}), store=store)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    env: dict[str, str] | None = None,
    store: Literal["parent", "rank0"] | int = "parent",
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on every rank and return the results by rank; see `start_ranks`."""
    with start_ranks(fn, world_size, *args, env=env, store=store) as ranks:
        return ranks.results(timeout_s=timeout_s)


@contextlib.contextmanager
def serve_store() -> Iterator[int]:
    """Host a TCP store that outlives worlds started with `store=<port>`; give its port."""
    server, port = _serve_store("parent")
    yield port
    del server


def mark(text: str) -> None:
    """Tell the test, from inside a rank, that this point is reached."""
    _mark_pipe[0].send(("mark", text))


_mark_pipe: list[Connection] = []  # in a rank: its pipe to the test


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    rank: int
    world_size: int
    port: int
    folder: str
    env: dict[str, str]


def _serve_store(store: Literal["parent", "rank0"] | int) -> tuple[Any, int]:
    if isinstance(store, int):
        return None, store
    if store == "rank0":
        return None, 0
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return server, server.port


def _rank_main(plan: _Plan, pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with open(Path(plan.folder) / f"stacks-{plan.rank}", "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        os.environ.update(plan.env)
        _mark_pipe.append(pipe)
        began_s = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                value, error, trace = _run_in_world(plan, fn, args), None, ""
        except BaseException as caught:  # noqa: BLE001  # everything goes to the test
            value, error, trace = None, caught, traceback.format_exc()
        seconds = time.monotonic() - began_s
        outcome = Outcome(rank=plan.rank, value=value, error=error, trace=trace, seconds=seconds)
        pipe.send(("outcome", _sendable(outcome)))
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR2)


def _run_in_world(plan: _Plan, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = _rank_0_store(plan) if plan.port == 0 else dist.TCPStore("127.0.0.1", plan.port, is_master=False)
    # Gloo would meet its own keys of an earlier world on the same store.
    world = dist.PrefixStore(Path(plan.folder).name, store)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=world, rank=plan.rank, world_size=plan.world_size, timeout=timeout)
    try:
        return fn(plan.rank, plan.world_size, *args)
    finally:
        dist.destroy_process_group()


def _rank_0_store(plan: _Plan) -> Any:
    from torch.distributed import TCPStore

    note = Path(plan.folder) / "port"
    if plan.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        note.with_suffix(".new").write_text(str(store.port))
        note.with_suffix(".new").rename(note)
        return store
    deadline_s = time.monotonic() + 30
    while not note.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError("rank 0 never told the port of its store")
        time.sleep(0.01)
    return TCPStore("127.0.0.1", int(note.read_text()), is_master=False)


def _sendable(outcome: Outcome) -> Outcome:
    try:
        pickle.loads(pickle.dumps(outcome))
    except Exception:  # noqa: BLE001  # whatever pickling says, the test must learn what happened
        text = f"cannot be sent to the test: value {outcome.value!r:.200}, error {outcome.error!r:.500}"
        return Outcome(rank=outcome.rank, error=RuntimeError(text), trace=outcome.trace + text)
    return outcome
