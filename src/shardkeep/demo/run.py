"""The demo's course: an unbroken run, a killed and resumed one, a resume on fewer ranks, and their comparison."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from shardkeep.demo.compare import (
    PLAIN_QUANTITIES,
    TENSOR_QUANTITIES,
    Row,
    State,
    Trace,
    compare_states,
    compare_steps,
    find_first,
    make_trace,
)
from shardkeep.demo.digest import digest_tensor
from shardkeep.demo.launch import run_job
from shardkeep.demo.options import DemoOptions
from shardkeep.demo.records import Kill, RankConfig, count_steps, read_logs
from shardkeep.demo.report import Progress, Result, start_progress, write_document, write_table
from shardkeep.demo.shards import read_shards
from shardkeep.engine.run import RunView, scan_run
from shardkeep.errors import Corrupt, NotBitExact
from shardkeep.format.names import StepRef
from shardkeep.storage.resolve import open_store


def run_demo(options: DemoOptions | None = None, *, json: bool = False) -> int:
    """Run the demo, print its result, and return the exit code: 0, or that of NotBitExact.

    Args:
        json: print one JSON document instead of the table.

    Raises:
        UsageError: options. PeerFailure: a rank failed in a way that is no part of the demo.
    """
    options = options or DemoOptions()
    with end_on_sigterm(), open_folder(options.keep) as folder:
        progress = start_progress()
        result = _Course(options, folder, progress).run()
        if options.keep is not None:
            progress.say(f"kept in {folder}; look at it with: shardkeep ls {folder / 'killed'}")
    (write_document if json else write_table)(result)
    return 0 if result.bit_identical else NotBitExact.exit_code


@contextlib.contextmanager
def end_on_sigterm() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the stack, so that ranks and files go with this process."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def open_folder(keep: Path | None) -> Iterator[Path]:
    """Yield the folder for everything the demo writes; a temporary one goes at the end."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="shardkeep-demo-", ignore_cleanup_errors=True) as name:
        yield Path(name).resolve()


class _Course:
    """One course of the demo in `folder`."""

    def __init__(self, options: DemoOptions, folder: Path, progress: Progress) -> None:
        self._options = options
        self._shape = options.shape
        self._folder = folder
        self._progress = progress
        self._kill = Kill(
            rank=self._shape.world_size - 2, step=self._shape.kill_step, marker=str(folder / "the-kill-happened")
        )
        self._facts: dict[str, Any] = {}

    def run(self) -> Result:
        """Train three times over, then compare."""
        shape, say = self._shape, self._progress.say
        with self._progress.phase(
            "unbroken", f"unbroken run: {shape.world_size} ranks, {shape.stop} steps, nothing saved", shape.stop
        ) as show:
            self._job("unbroken", show, shape.world_size, save=False)
        unbroken = self._read("unbroken")
        start = unbroken.starts[1]
        first, last = (self._loss(unbroken, step) for step in (1, shape.stop))
        say(
            f"  trained a GPT of {start.parameters_count:,} parameters on Python's own sources "
            f"({start.text_bytes / 1e6:.1f} MB), loss {first:.2f} -> {last:.2f}"
        )
        self._facts["parameters"] = start.parameters_count
        self._facts["text"] = {"files": start.files_count, "bytes": start.text_bytes}
        self._run_killed()
        killed = self._read("killed")
        self._run_fewer()
        fewer = self._read("fewer")
        with self._progress.phase("compare", "comparing", 1):
            rows = (*self._compare(unbroken, killed), *self._compare_fewer(unbroken, killed, fewer))
            rows += tuple(self._compare_files(killed))
        return Result(
            shape=shape,
            facts=self._facts,
            rows=rows,
            first=find_first(rows),
            phases=tuple(self._progress.phases),
            elapsed_s=self._progress.elapsed_s,
        )

    def _job(self, name: str, show: Callable[[int], None], world_size: int, **settings: Any) -> bool:
        """Run one training command; return whether the rank that was to die did."""
        logs = self._folder / "logs" / name
        logs.mkdir(parents=True, exist_ok=True)
        config = RankConfig(
            root=str(self._folder / name), logs=str(logs), shape=self._shape, parent_pid=os.getpid(), **settings
        )
        end = run_job(
            config,
            world_size,
            self._folder / "output" / name,
            lambda: show(count_steps(logs)),
            killed_ok=config.kill.rank if config.kill else None,
        )
        return end.was_killed

    def _run_killed(self) -> None:
        shape, kill, say = self._shape, self._kill, self._progress.say
        settings: dict[str, Any] = {"kill": kill, "leave_out": self._options.leave_out}
        with self._progress.phase(
            "killed", f"the same run, saving every {shape.save_every} steps; one rank will not survive", shape.stop
        ) as show:
            if not self._job("killed", show, shape.world_size, **settings):
                raise NotBitExact(f"rank {kill.rank} was to die in the save of step {kill.step} and did not")
        self._look_at_remains()
        with self._progress.phase("resumed", "the same command again", shape.stop) as show:
            self._job("killed", show, shape.world_size, **settings)
        last = max(read_logs(self._folder / "logs" / "killed").items())[1][0]
        report = next(record.report for record in last if hasattr(record, "report"))
        say(f"  {report.splitlines()[0]}")
        if self._options.leave_out:
            say(f"  sabotage: after the resume, the restored {self._options.leave_out} was undone")
            self._facts["left_out"] = self._options.leave_out

    def _look_at_remains(self) -> None:
        """Say what the kill left: a folder without a commit record, which does not count."""
        kill = self._kill
        view = self._scan("killed")
        newest = view.timeline[-1].step if view.timeline else None
        ref = StepRef(step=kill.step, generation=1)
        left = view.folders.get(ref)
        files = left.files if left else {}
        committed = left is not None and left.committed
        self._progress.say(
            f"  rank {kill.rank} was killed (SIGKILL) while it wrote its second file of step {kill.step}"
        )
        self._progress.say(
            f"  left: {ref.folder}/ with {len(files)} files, {sum(files.values()):,} bytes, "
            f"{'committed' if committed else 'no commit record'}; the newest committed checkpoint is step {newest}"
        )
        self._facts["kill"] = {
            "rank": kill.rank,
            "step": kill.step,
            "signal": "SIGKILL",
            "left_files": len(files),
            "left_bytes": sum(files.values()),
            "committed": committed,
            "newest_committed": newest,
        }
        if committed or newest != kill.step - self._shape.save_every:
            raise NotBitExact(
                f"a save that lost rank {kill.rank} counts: expected step {kill.step - self._shape.save_every} to be "
                f"the newest checkpoint, found {newest}",
                step=kill.step,
            )

    def _run_fewer(self) -> None:
        shape = self._shape
        # A copy: the killed run stays as it is.
        shutil.copytree(self._folder / "killed", self._folder / "fewer")
        with self._progress.phase(
            "fewer", f"resume from step {shape.reshard_step} on {shape.reshard_world_size} ranks instead", shape.stop
        ) as show:
            self._job("fewer", show, shape.reshard_world_size, save=False, resume_step=shape.reshard_step)

    def _read(self, name: str) -> Trace:
        return make_trace(read_logs(self._folder / "logs" / name))

    def _scan(self, name: str) -> RunView:
        view = scan_run(open_store(self._folder / name))
        if view is None:
            raise Corrupt(f"{self._folder / name}: the demo's run is gone")
        return view

    @staticmethod
    def _loss(trace: Trace, step: int) -> float:
        by_rank = trace.steps[step]["loss"].values()
        return sum(float.fromhex(text) for text in by_rank) / len(by_rank)

    def _compare(self, unbroken: Trace, killed: Trace) -> list[Row]:
        shape = self._shape
        group = "unbroken = killed and resumed"
        steps = range(1, shape.stop + 1)
        saved = range(shape.save_every, shape.stop + 1, shape.save_every)
        back = shape.kill_step - shape.save_every
        rows = compare_steps(group, unbroken.steps, killed.steps, steps)
        rows += compare_states(
            group, [(at, "trained", unbroken.states.get(at), killed.states.get(at)) for at in saved]
        )
        again = f"restored = saved (step {back})"
        rows += compare_states(again, [(back, "restored", unbroken.states.get(back), killed.restored.get(back))])
        twice = f"steps {back + 1} to {shape.kill_step}, done twice"
        return rows + compare_steps(twice, killed.redone, killed.steps, range(back + 1, shape.kill_step + 1))

    def _compare_fewer(self, unbroken: Trace, killed: Trace, fewer: Trace) -> list[Row]:
        shape, at = self._shape, self._shape.reshard_step
        group = f"{shape.world_size} ranks = {shape.reshard_world_size} ranks (step {at})"
        expected, found = killed.states.get(at), fewer.restored.get(at)
        rows = compare_states(group, [(at, "restored", expected, found)], quantities=TENSOR_QUANTITIES)
        pair = (at, "restored", _keep_ranks(expected, 1), _keep_ranks(found, 1))
        rows += compare_states(group, [pair], quantities=PLAIN_QUANTITIES[1:])
        steps = range(at + 1, shape.stop + 1)
        return rows + compare_steps(group, unbroken.steps, fewer.steps, steps, quantities=["sample ids"])

    def _compare_files(self, killed: Trace) -> list[Row]:
        ref = self._scan("killed").timeline[-1]
        read = read_shards(self._folder / "killed" / ref.folder)
        found = State(digests={quantity: {} for quantity in TENSOR_QUANTITIES}, sizes={})
        for name, array in read.tensors.items():
            quantity, _, tensor = name.partition("/")
            data = array.tobytes()
            found.digests.setdefault(quantity, {})[tensor] = digest_tensor(array.dtype.name, array.shape, data)
        self._facts["shards"] = {"reader": read.reader, "files": read.files_count, "chunks": read.chunks_count}
        self._progress.say(
            f"  {read.files_count} shards of {ref} opened with {read.reader}: {read.chunks_count} pieces make "
            f"{len(read.tensors)} tensors"
        )
        group = f"files, by {read.reader} = live"
        pair = (ref.step, "trained", killed.states.get(ref.step), found)
        return compare_states(group, [pair], quantities=TENSOR_QUANTITIES)


def _keep_ranks(state: State | None, count: int) -> State | None:
    """Return the state with the first ranks' plain values alone, for two jobs of different sizes."""
    if state is None:
        return None
    kept = {f"rank {rank}" for rank in range(count)}
    digests = {
        quantity: {name: digest for name, digest in found.items() if name in kept}
        if quantity in PLAIN_QUANTITIES
        else found
        for quantity, found in state.digests.items()
    }
    return State(digests=digests, sizes=state.sizes)
