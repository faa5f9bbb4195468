"""`shardkeep verify`: is every byte what was written?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from shardkeep.cli.output import escape, format_count, write, write_json
from shardkeep.cli.progress import show_progress
from shardkeep.cli.target import (
    STEP_HELP,
    Selection,
    Target,
    choose_selection,
    find_ref,
    open_run,
    parse_target,
)
from shardkeep.engine.findings import Finding, Findings
from shardkeep.engine.listing import no_run
from shardkeep.engine.run import (
    RunView,
    StepFolder,
    list_generations,
    list_step_folders,
    read_run_id,
    scan_run,
)
from shardkeep.engine.verify import StepReport, verify_run, verify_step
from shardkeep.errors import CheckpointError, Corrupt, IncompatibleFormat, NotCommitted, NotFound, StorageError
from shardkeep.format.names import StepRef
from shardkeep.storage.base import Store
from shardkeep.types import format_bytes

_NOT_DAMAGE = {"unreadable": StorageError.exit_code, "incompatible": IncompatibleFormat.exit_code}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    url: str
    run: Findings
    steps: tuple[StepReport, ...]
    duration_s: float

    @property
    def findings(self) -> Iterator[Finding]:
        yield from self.run.listed
        for report in self.steps:
            yield from report.findings.listed

    @property
    def notes(self) -> Iterator[str]:
        yield from self.run.notes
        for report in self.steps:
            yield from report.findings.notes

    @property
    def count(self) -> int:
        return self.run.count + sum(report.findings.count for report in self.steps)

    @property
    def exit_code(self) -> int:
        kinds = set(self.run.kinds).union(*(report.findings.kinds for report in self.steps))
        if kinds - _NOT_DAMAGE.keys():
            return Corrupt.exit_code
        return max((_NOT_DAMAGE[kind] for kind in kinds), default=0)


@click.command("verify")
@click.argument("run")
@click.option("--step", help=f"{STEP_HELP}, or 'all' of the timeline; 'latest' by default.")
@click.option("--quick", is_flag=True, help="Records, sizes and headers only; no tensor bytes are read.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(run: str, step: str | None, quick: bool, as_json: bool) -> int:
    """Check RUN against its records and digests, and name everything that is damaged.

    Exits with 0 when all is as written, 20 on damage, 10 when there is no such step. Changes nothing.
    """
    target = parse_target(run)
    every = step == "all"
    selection = Selection() if every else choose_selection(target, step)
    if every and target.selection is not None:
        choose_selection(target, "latest")  # raises: the step was given twice
    outcome = _verify(target, selection, every=every, full=not quick)
    if as_json:
        write_json(_describe(outcome, quick))
    else:
        write(*_format(outcome, quick))
    return outcome.exit_code


def _verify(target: Target, selection: Selection, *, every: bool, full: bool) -> _Outcome:
    started = time.monotonic()
    store = open_run(target.url)
    numbers = list_generations(store)
    run_findings = _check_run(store, numbers)
    try:
        run_id = read_run_id(store)
        view = scan_run(store)
    except (Corrupt, IncompatibleFormat):
        run_id, view = None, None
    if view is None:
        refs = _without_timeline(store, numbers, selection, every, run_findings)
    else:
        refs = view.timeline if every else (find_ref(store, selection),)
        _note_others(view, run_findings, every)
        if every and not refs:
            find_ref(store, Selection())  # raises: nothing is committed
    reports: list[StepReport] = []
    folders: dict[int, dict[StepRef, StepFolder]] = {}
    for ref in refs:
        if ref.generation not in folders:
            folders[ref.generation] = list_step_folders(store, ref.generation)
        folder = folders[ref.generation].get(ref)
        report = _check_step(store, run_id, folder, full=full, run_findings=run_findings) if folder else None
        if report is not None:
            reports.append(report)
    return _Outcome(url=store.url, run=run_findings, steps=tuple(reports), duration_s=time.monotonic() - started)


def _check_run(store: Store, numbers: Sequence[int]) -> Findings:
    try:
        exists = bool(numbers) or read_run_id(store) is not None
    except CheckpointError:
        exists = True
    if not exists:
        raise no_run(store)
    return verify_run(store)


def _without_timeline(
    store: Store, numbers: Sequence[int], selection: Selection, every: bool, findings: Findings
) -> tuple[StepRef, ...]:
    """Return the steps to check where the records that make the timeline are damaged: by folder, not by ancestry."""
    done = sorted(
        ref
        for number in numbers
        for ref, folder in list_step_folders(store, number).items()
        if folder.committed and not folder.pruning
    )
    findings.note("which checkpoints count cannot be told; they were taken from the folders there are")
    if every or not done:
        return tuple(done)
    if selection.step is None:
        return (done[-1],)
    wanted = [r for r in done if r.step == selection.step and selection.generation in (None, r.generation)]
    if not wanted:
        raise NotFound(f"{store.url}: no committed step {selection.step}", step=selection.step)
    return tuple(wanted)


def _note_others(view: RunView, findings: Findings, every: bool) -> None:
    """Note what is there beside the timeline and is no damage."""
    timeline = set(view.timeline)
    for ref, folder in view.folders.items():
        if folder.pruning:
            findings.note(f"{ref.folder}: its removal is under way; the next prune finishes it")
        elif not folder.committed:
            findings.note(f"{ref.folder}: not committed: a save that is running or never finished")
        elif every and ref not in timeline:
            findings.note(f"{ref.folder}: on a branch that was left; not checked (name it as {_name(ref)})")


def _name(ref: StepRef) -> str:
    generation, _, folder = ref.folder.partition("/")
    return f"{generation}/{ref.step}" + (f".{ref.attempt}" if ref.attempt > 1 else "") if folder else ref.folder


def _check_step(
    store: Store, run_id: str | None, folder: StepFolder, *, full: bool, run_findings: Findings
) -> StepReport | None:
    total = sum(size for name, size in folder.files.items() if name.endswith(".safetensors")) if full else 0
    try:
        with show_progress(f"step {folder.ref.step}", total) as progress:
            return verify_step(store, run_id, folder, full=full, progress=progress)
    except NotCommitted:
        run_findings.note(f"{folder.ref.folder}: was removed while it was being checked")
        return None


def _describe(outcome: _Outcome, quick: bool) -> dict[str, Any]:
    return {
        "run": outcome.url,
        "mode": "quick" if quick else "full",
        "ok": outcome.count == 0,
        "exit_code": outcome.exit_code,
        "steps": [
            {
                "step": report.ref.step,
                "generation": report.ref.generation,
                "attempt": report.ref.attempt,
                "ok": report.findings.count == 0,
                "finding_count": report.findings.count,
                "checked_bytes": report.checked_bytes,
                "shard_count": report.shard_count,
                "tensor_count": report.tensor_count,
            }
            for report in outcome.steps
        ],
        "finding_count": outcome.count,
        "findings": [_describe_finding(finding) for finding in outcome.findings],
        "notes": list(outcome.notes),
        "duration_s": round(outcome.duration_s, 3),
    }


def _describe_finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "key": finding.key,
        "text": finding.text,
        "step": finding.ref.step if finding.ref else None,
        "generation": finding.ref.generation if finding.ref else None,
        "rank": finding.rank,
        "begin": finding.begin,
        "end": finding.end,
        "first_leaf": finding.first_leaf,
        "leaf_count": finding.leaf_count,
        "tensors": list(finding.tensors),
        "tensor_count": finding.tensor_count,
    }


def _format(outcome: _Outcome, quick: bool) -> list[str]:
    lines: list[str] = []
    for finding in outcome.findings:
        lines += _format_finding(finding)
    shown = len(list(outcome.findings))
    if outcome.count > shown:
        lines.append(f"... and {outcome.count - shown} more findings")
    lines += [f"note: {escape(note)}" for note in outcome.notes]
    lines += [_format_step(report, not quick) for report in outcome.steps]
    if outcome.count:
        lines.append(f"{format_count(outcome.count, 'finding')} in {outcome.duration_s:.1f} s; nothing was changed")
        if outcome.exit_code == Corrupt.exit_code:
            lines.append(
                "next: a resume passes a damaged checkpoint over; shardkeep ls --all lists what else there is"
            )
    elif outcome.steps:
        lines.append(f"all as written, in {outcome.duration_s:.1f} s")
    else:
        lines.append("no checkpoint was checked")
    return lines


def _format_finding(finding: Finding) -> list[str]:
    text = finding.text.removeprefix(f"{finding.key}: ")
    writer = "" if finding.rank is None else f" (written by rank {finding.rank})"
    lines = [f"{finding.kind}: {escape(finding.key)}: {escape(text)}{writer}"]
    if finding.tensors:
        shown = ", ".join(escape(name) for name in finding.tensors[:8])
        more = finding.tensor_count - min(len(finding.tensors), 8)
        lines.append(f"  tensors: {shown}" + (f" and {more} more" if more else ""))
    return lines


def _format_step(report: StepReport, full: bool) -> str:
    what = format_bytes(report.checked_bytes) if full else "records, sizes and headers"
    verdict = "ok" if not report.findings.count else format_count(report.findings.count, "finding")
    return (
        f"{report.ref}: {verdict} ({format_count(report.tensor_count, 'tensor')} in "
        f"{format_count(report.shard_count, 'shard')}, {what} checked)"
    )
