"""A process that measures one contender: reads commands as JSON lines, answers with one line each.

Started by `channel.Worker`. One contender for a process, so that no library's threads and buffers are in another's
way. What libraries print goes to the log that standard error is; answers go where standard output went.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardkeep.bench.channel import WorkerConfig
from shardkeep.bench.device import count_bytes, evict, make_durable, warm
from shardkeep.bench.memory import count_read, read_io, sample_peak
from shardkeep.bench.registry import EVERYONE
from shardkeep.knobs import override


class Job:
    """What a worker holds: the live state and its contender. Each public method is a command."""

    def __init__(self, config: WorkerConfig) -> None:
        import torch

        from shardkeep.bench.gpt import plan_state

        torch.set_num_threads(config.threads)
        self._stack = contextlib.ExitStack()
        self._entry = EVERYONE[config.contender]
        module = importlib.import_module(f"shardkeep.bench.contenders.{self._entry.module}")
        self.contender = getattr(module, self._entry.factory)(**{**self._entry.arguments, **config.arguments})
        if config.memory_fd is not None:
            from shardkeep.bench.live import open_state

            self.state: Any = open_state(config.memory_fd, plan_state(config.size_bytes))

    def fill(self) -> str:
        """Write the state's content; return its digest."""
        self.state.fill()
        return str(self.state.digest())

    def save(self, folder: str, *, sample: bool = False) -> dict[str, float]:
        """Save, durable on return; seconds, bytes on disk and, if asked for, extra memory."""
        path = Path(folder)
        if sample:
            self.contender.import_all(path.with_name(f"{path.name}-tiny"))

        def work() -> None:
            self.contender.save(self.state, path)
            if not self.contender.is_durable:
                make_durable(path)

        found = _measure(work, sample=sample)
        return {**found, "disk_bytes": count_bytes(path)}

    def load(self, folder: str, *, cold: bool = True, sample: bool = False, digest: str = "") -> dict[str, Any]:
        """Load from a cold or a warm page cache; with `digest` into a scrambled state that is checked afterwards."""
        path = Path(folder)
        if sample:
            self.contender.import_all(path.with_name(f"{path.name}-tiny"))
        if digest:
            self.state.scramble()
        (evict if cold else warm)(path)

        def work() -> None:
            self.contender.load(self.state, path)
            gc.collect()  # mappings of files must not keep their pages for the next contender

        found: dict[str, Any] = _measure(work, sample=sample)
        if digest:
            found["is_exact"] = self.state.digest() == digest
            if not found["is_exact"]:
                self.state.fill()
        return found

    def load_part(self, folder: str, key: str, rows: int | None) -> dict[str, float]:
        """Read one tensor or its first rows from a cold page cache; seconds, and bytes really read."""
        evict(Path(folder))
        before = read_io()
        found = _measure(lambda: self.contender.load_part(Path(folder), key, rows))
        return {**found, "read_bytes": count_read(before, read_io())}

    def save_in_tier(self, folder: str, tier: str) -> None:
        """Save into a tier, the root being at `folder`."""
        self.contender.save_in_tier(self.state, Path(folder), Path(tier))

    def restart(self, folder: str, tier: str, *, digest: str = "") -> dict[str, Any]:
        """Resume from a tier; with `digest` into a scrambled state that is checked afterwards."""
        if digest:
            self.state.scramble()
        gc.collect()
        found: dict[str, Any] = {"took_s": self.contender.restart(self.state, Path(folder), Path(tier))}
        if digest:
            found["is_exact"] = self.state.digest() == digest
            if not found["is_exact"]:
                self.state.fill()
        return found

    def measure_async(self, folder: str, **options: Any) -> dict[str, Any]:
        """Train beside asynchronous saves; see `training`."""
        from shardkeep.bench.training import measure_async

        return measure_async(self.contender, self.state, Path(folder), **options)

    def measure_overlap(self, folder: str, **options: Any) -> dict[str, Any]:
        """Train beside overlapped saves; see `training`."""
        from shardkeep.bench.training import measure_overlap

        return measure_overlap(self.contender, self.state, Path(folder), **options)

    def write_raw(self, path: str, size_bytes: int) -> float:
        """Write a raw file; return the seconds."""
        return float(self.contender.write(Path(path), size_bytes))

    def copy(self) -> float:
        """Copy the state with one thread into touched memory; return the seconds."""
        return float(self.contender.copy(memoryview(self.state.memory)))

    def digest(self) -> float:
        """Digest the state with one thread; return the seconds."""
        return float(self.contender.digest(memoryview(self.state.memory)))

    def set_knobs(self, **values: float) -> None:
        """Set knobs for the rest of this process."""
        self._stack.close()
        self._stack.enter_context(override(**values))

    def measure_scale(self, ranks: int, params: int) -> dict[str, float]:
        """Time the metadata of a large job, without tensors."""
        from shardkeep.bench.scale import measure_scale

        return dict(measure_scale(ranks=ranks, params=params))

    def measure_ls(self, count: int) -> float:
        """Time `shardkeep ls` over many checkpoints, in milliseconds."""
        from shardkeep.bench.scale import measure_ls_ms

        return float(measure_ls_ms(count))

    def close(self) -> None:
        self.contender.close()


def _measure(work: Callable[[], object], *, sample: bool = False) -> dict[str, float]:
    if sample:
        with sample_peak() as sampler:
            took_s = _time(work)
        return {"took_s": took_s, "extra_bytes": sampler.extra_bytes}
    return {"took_s": _time(work)}


def _time(work: Callable[[], object]) -> float:
    gc.collect()
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def serve(config: WorkerConfig, make: Callable[[WorkerConfig], Any]) -> int:
    """Answer commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    job: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if job is None:
                job = make(config)
            name = command.pop("do")
            value = None if name == "begin" else getattr(job, name)(**command)
            answer = {"value": value}
        except NotImplementedError as error:
            answer = {"error": f"cannot: {error}" if str(error) else "cannot"}
        except Exception as error:  # noqa: BLE001  # whatever a library raises is its result
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if job is not None:
        job.close()
    return 0


def main() -> int:
    """Run as `python -m shardkeep.bench.worker CONFIG`."""
    config = WorkerConfig.parse(sys.argv[1])
    if config.world_size:
        from shardkeep.bench.sharded import RankJob

        return serve(config, RankJob)
    return serve(config, Job)


if __name__ == "__main__":
    sys.exit(main())
