"""The audit's course: the unbroken run, the broken one, and what both left behind compared."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardkeep.audit.compare import Kind, Loss, Start, find_length_loss, find_losses, find_noisy, make_start
from shardkeep.audit.launch import run_start
from shardkeep.audit.options import AuditOptions, plan_kills
from shardkeep.engine.diff import DiffReport, ValueChange, diff_sources
from shardkeep.engine.run import RunView, read_commit, scan_run
from shardkeep.engine.sources import CheckpointSource
from shardkeep.errors import CheckpointError, UsageError
from shardkeep.format.names import StepRef
from shardkeep.manager.watch import read_watch
from shardkeep.plan.replay import METRIC
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_store

_NAMES: Final = 5
_A: Final = "unbroken"
_B: Final = "broken"


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
        self._say(f"the unbroken run took {last_step} steps; now the broken one, killed after {_join(kills)}")
        starts, done = self._run_broken(kills)
        losses = find_losses(unbroken, starts, ignore=options.ignore)
        length = find_length_loss(unbroken, starts)
        unseeded = {
            name for rank in starts[0] for name in find_noisy(unbroken[rank], starts[0][rank]) if "rng/" in name
        }
        if unseeded:
            names = ", ".join(sorted(unseeded))
            self._left_out.append(f"{names}: not seeded by the command, so two runs of it never have them alike")
        checkpoints, last, found = self._compare_checkpoints(len(unbroken), len(starts[-1]), unseeded)
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
                self._say(f"start {number} resumed from step {done[-1].resumed}")
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
        self, ranks: int, ranks_then: int, unseeded: set[str]
    ) -> tuple[tuple[int, ...], DiffReport | None, tuple[Loss, ...]]:
        """Return the steps compared, the last report, and what differs in the first checkpoint that does.

        Plain values that differ in checkpoints from before the first kill (a time) are left out of all others.
        """
        one, two = (open_store(self._folder / name) for name in ("unbroken", "broken"))
        a, b = ({ref.step: ref for ref in self._scan(store, name).timeline} for store, name in ((one, _A), (two, _B)))
        if ranks != ranks_then:
            return (), None, ()
        noisy: set[str] = set()
        report: DiffReport | None = None
        compared: list[int] = []
        for step in sorted(a.keys() & b.keys()):
            report = self._diff(one, a[step], two, b[step])
            compared.append(step)
            before_kill = b[step].generation == min(ref.generation for ref in b.values()) == 1
            values = [v for v in report.values if v.path not in noisy and _find_stream(v.path) not in unseeded]
            if before_kill:
                noisy |= {value.path for value in values}
                values = []
            if report.changes or values:
                kind: Kind = "unrepeatable" if before_kill else "checkpoint"
                return tuple(compared), report, tuple(_name_changes(report, values, step, kind))
        if noisy:
            names = ", ".join(sorted(noisy)[:_NAMES])
            self._left_out.append(f"plain values that differ before any kill: {names}")
        if not compared:
            self._left_out.append("no step was saved by both runs, so tensors were not compared")
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


def _join(steps: Sequence[int]) -> str:
    return ", ".join(f"step {step}" for step in steps)


def _find_stream(path: str) -> str:
    """Return the stream that a value's path is in: `rng@rank0.python.words[3]` is in `rng/python`."""
    name, _, rest = path.partition(".")
    return f"rng/{rest.partition('.')[0]}" if name.partition("@")[0] == "rng" else ""


def _name_changes(report: DiffReport, values: Sequence[ValueChange], step: int, kind: Kind) -> Iterator[Loss]:
    """Yield the first tensors and values in which two checkpoints of one step differ."""
    for change in report.changes[:_NAMES]:
        difference = change.difference
        what = (
            f"{difference.differing_count} of {difference.element_count} elements are others"
            if difference is not None
            else change.what
        )
        yield Loss(
            kind=kind,
            step=step,
            quantity=change.key,
            expected="the same bytes",
            found=what,
            cause=f"{len(report.changes)} tensors of this checkpoint differ, {report.identical_count} are identical",
        )
    for value in values[:_NAMES]:
        yield Loss(
            kind=kind,
            step=step,
            quantity=value.path,
            expected=value.a or "nothing",
            found=value.b or "nothing",
            cause=f"{len(values)} plain values of this checkpoint differ",
        )
