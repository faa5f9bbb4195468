"""The audit's course: the unbroken run, the broken one, and what both left behind compared."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardkeep.audit.compare import Loss, Start, find_length_loss, find_losses, make_start
from shardkeep.audit.launch import run_start
from shardkeep.audit.options import AuditOptions, plan_kills
from shardkeep.engine.diff import DiffReport, diff_sources
from shardkeep.engine.run import RunView, read_commit, scan_run
from shardkeep.engine.sources import CheckpointSource
from shardkeep.errors import CheckpointError, UsageError
from shardkeep.format.names import StepRef
from shardkeep.manager.watch import read_watch
from shardkeep.plan.replay import METRIC
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_store

_NAMES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill: the step it came after, what it was resumed from, and on how many ranks."""

    step: int
    resumed: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit found.

    Attributes:
        command: with its placeholders.
        last_step: of the unbroken run. ranks: its ranks.
        losses: causes first; empty: exact.
        quantities: what steps were compared in. compared_count: steps of the broken run, those done twice included.
        checkpoints: steps whose checkpoints were compared bit for bit. tensor_count: tensors of the last of them.
        said: warnings of guards and of the replay proof in the broken run, `(name, text)`.
        left_out: why something was not compared.
        kept: where everything lies, or None.
    """

    command: tuple[str, ...]
    last_step: int
    ranks: int
    kills: tuple[Kill, ...]
    losses: tuple[Loss, ...]
    quantities: tuple[str, ...]
    compared_count: int
    checkpoints: tuple[int, ...]
    tensor_count: int
    said: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    kept: Path | None
    elapsed_s: float

    @property
    def exact(self) -> bool:
        return not self.losses


def run_audit(options: AuditOptions, *, say: Callable[[str], None] = lambda text: None) -> AuditReport:
    """Run the command unbroken and broken and compare; no process of either is left on return.

    Args:
        say: told what goes on.

    Raises:
        UsageError: options that the command does not fit. CheckpointError: the command fails by itself, or saves or
            steps nothing that could be compared. Corrupt, StorageError: what it saved cannot be read.
    """
    with _open_folder(options.keep) as folder:
        return _Course(options, folder, say).run()


@contextlib.contextmanager
def _open_folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="shardkeep-audit-", ignore_cleanup_errors=True) as name:
            yield Path(name).resolve()
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise UsageError(f"{keep} is not empty", advice="give --keep a folder that is new or empty")
    yield keep.resolve()


class _Course:
    """One audit in `folder`."""

    def __init__(self, options: AuditOptions, folder: Path, say: Callable[[str], None]) -> None:
        self._options = options
        self._folder = folder
        self._say = say
        self._begin_s = time.monotonic()
        self._left_out: list[str] = []

    def run(self) -> AuditReport:
        options = self._options
        unbroken, _ = self._start("unbroken", 0, options.ranks, None)
        last_step = max(start.last for start in unbroken.values())
        kills = plan_kills(options, last_step)
        self._say(f"unbroken: {last_step} steps on {len(unbroken)} ranks; kills after {', '.join(map(str, kills))}")
        starts, done = self._run_broken(kills)
        losses = find_losses(unbroken, starts, ignore=options.ignore)
        length = find_length_loss(unbroken, starts)
        checkpoints, last, found = self._compare_checkpoints(len(unbroken), len(starts[-1]))
        losses += [loss for loss in (length, *found) if loss is not None]
        if len(unbroken) != len(starts[-1]):
            self._left_out.append(
                f"{len(unbroken)} ranks and then {len(starts[-1])}: sums round differently, so results, streams "
                "and final bits were not compared; samples and rates were"
            )
        return AuditReport(
            command=options.command,
            last_step=last_step,
            ranks=len(unbroken),
            kills=done,
            losses=tuple(sorted(losses, key=lambda loss: loss.order)),
            quantities=self._list_quantities(unbroken[0], starts),
            compared_count=sum(len(start[0].steps) for start in starts if 0 in start),
            checkpoints=checkpoints,
            tensor_count=last.identical_count + len(last.changes) if last is not None else 0,
            said=tuple(dict.fromkeys(pair for start in starts for one in start.values() for pair in one.said)),
            left_out=tuple(self._left_out),
            kept=options.keep,
            elapsed_s=time.monotonic() - self._begin_s,
        )

    def _start(self, name: str, number: int, ranks: int, kill: int | None) -> tuple[dict[int, Start], bool]:
        what = f"{name} run" + (f", start {number}" if number else "")
        records = self._folder / "records" / (f"{name}-{number}" if number else name)
        records.mkdir(parents=True)
        killed = run_start(
            self._options.fill(self._folder / name, ranks),
            records=records,
            output=self._folder / f"{records.name}.txt",
            kill_step=kill,
            limit_s=self._options.limit_s,
            name=what,
        )
        found = {rank: make_start(lines) for rank, lines in read_watch(records).items()}
        if 0 not in found or not (found[0].steps or number):
            raise CheckpointError(
                f"{what}: the command ended without a step that shardkeep saw",
                advice="the loop must use a CheckpointManager on {root}, resume() and after_step()",
            )
        return found, killed

    def _run_broken(self, kills: tuple[int, ...]) -> tuple[list[dict[int, Start]], tuple[Kill, ...]]:
        options = self._options
        starts: list[dict[int, Start]] = []
        done: list[Kill] = []
        for number, kill in enumerate((*kills, None), 1):
            ranks = options.ranks if number == 1 else options.ranks_then or options.ranks
            found, killed = self._start("broken", number, ranks, kill)
            starts.append(found)
            if number > 1:
                done.append(Kill(step=kills[number - 2], resumed=found[0].resumed, ranks=len(found)))
                self._say(f"killed after step {done[-1].step}, resumed from step {done[-1].resumed}")
            if not killed:
                break
        return starts, tuple(done)

    @staticmethod
    def _list_quantities(unbroken: Start, starts: list[dict[int, Start]]) -> tuple[str, ...]:
        then = starts[-1].get(0)
        if then is None or not then.steps or not unbroken.steps:
            return ()
        names = unbroken.steps[max(unbroken.steps)].values.keys() & then.steps[then.last].values.keys()
        same = then.world_size == unbroken.world_size
        return tuple(sorted(name for name in names if same or not name.startswith(METRIC)))

    def _compare_checkpoints(
        self, ranks: int, ranks_then: int
    ) -> tuple[tuple[int, ...], DiffReport | None, tuple[Loss, ...]]:
        """Return the steps compared, the last report, and what differs first (and at the end)."""
        sides = [(open_store(self._folder / name), name) for name in ("unbroken", "broken")]
        views = [self._scan(store, name) for store, name in sides]
        by_step = [{ref.step: ref for ref in view.timeline} for view in views]
        if ranks != ranks_then:
            return (), None, ()
        common = sorted(by_step[0].keys() & by_step[1].keys())
        if not common:
            self._left_out.append("no step was saved by both runs, so final tensors were not compared")
            return (), None, ()
        compared: list[int] = []
        report: DiffReport | None = None
        for step in common:
            report = self._diff(sides[0][0], by_step[0][step], sides[1][0], by_step[1][step])
            compared.append(step)
            if not report.same:
                return tuple(compared), report, tuple(_name_changes(report, step))
        return tuple(compared), report, ()

    @staticmethod
    def _scan(store: Store, name: str) -> RunView:
        view = scan_run(store)
        if view is None or not view.timeline:
            raise CheckpointError(
                f"the {name} run saved nothing under {{root}}", advice="the command must save at least once"
            )
        return view

    @staticmethod
    def _diff(one: Store, a: StepRef, two: Store, b: StepRef) -> DiffReport:
        return diff_sources(CheckpointSource(one, read_commit(one, a)), CheckpointSource(two, read_commit(two, b)))


def _name_changes(report: DiffReport, step: int) -> Iterator[Loss]:
    """Yield the first tensors and values in which two checkpoints of one step differ."""
    for change in report.changes[:_NAMES]:
        difference = change.difference
        what = (
            f"{difference.differing_count} of {difference.element_count} elements are others"
            if difference is not None
            else change.what
        )
        yield Loss(
            kind="checkpoint",
            step=step,
            quantity=change.key,
            expected="the same bytes",
            found=what,
            cause=f"{len(report.changes)} tensors of this checkpoint differ, {report.identical_count} are identical",
        )
    for value in report.values[:_NAMES]:
        yield Loss(
            kind="checkpoint",
            step=step,
            quantity=value.path,
            expected=value.a or "nothing",
            found=value.b or "nothing",
            cause=f"{report.value_count} plain values of this checkpoint differ",
        )
