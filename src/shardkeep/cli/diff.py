"""`shardkeep diff`: what differs between two checkpoints or files of tensors."""

from __future__ import annotations

import os
from typing import Any

import click

from shardkeep.cli.output import escape, format_count, format_table, write, write_json
from shardkeep.cli.progress import show_progress
from shardkeep.cli.target import choose_selection, find_ref, open_run, parse_target, require_local
from shardkeep.engine.diff import DiffReport, TensorChange, diff_sources
from shardkeep.engine.run import read_commit, read_run_id
from shardkeep.engine.sources import CheckpointSource, Source, TensorInfo, find_files
from shardkeep.errors import NotFound, UsageError

EXIT_DIFFERENT = 1


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--step-a", help="The step of A, where A is a run.")
@click.option("--step-b", help="The step of B, where B is a run.")
@click.option("--values", "every_value", is_flag=True, help="List every plain value that differs.")
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="How many tensors to list.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, with everything.")
def command(
    a: str, b: str, step_a: str | None, step_b: str | None, every_value: bool, top: int, as_json: bool
) -> int:
    """Compare A and B: runs (RUN@STEP), safetensors files, or folders of them, in any combination.

    Exits with 0 when they are identical, 1 when they differ.
    """
    left = open_source(a, step_a, option="--step-a")
    right = open_source(b, step_b, option="--step-b")
    total = sum(info.size_bytes for info in left.tensors.values())
    with show_progress("comparing", total) as progress:
        report = diff_sources(left, right, progress=progress)
    if as_json:
        write_json(_describe(left, right, report))
    else:
        write(*_format(left, right, report, top, every_value))
    return 0 if report.same else EXIT_DIFFERENT


def open_source(text: str, step: str | None, *, option: str) -> Source:
    """Return the tensors that an argument names.

    Raises:
        NotFound: there is neither a run nor a safetensors file.
    """
    target = parse_target(text)
    if target.selection is None and step is None and "://" not in text:
        require_local(os.path.expanduser(text))
    local = os.path.expanduser(target.url)
    if os.path.isfile(local):
        _refuse_step(text, step or target.selection, option)
        source = find_files(local)
        assert source is not None
        return source
    store = open_run(target.url)
    if read_run_id(store) is None:
        files = find_files(local)
        if files is not None:
            _refuse_step(text, step or target.selection, option)
            return files
        raise NotFound(
            f"{text}: neither a run nor a folder with safetensors files", advice="check the path of the run"
        )
    ref = find_ref(store, choose_selection(target, step, name=option))
    return CheckpointSource(store, read_commit(store, ref))


def _refuse_step(text: str, step: object, option: str) -> None:
    if step is not None:
        raise UsageError(f"{text}: is no run, so it has no steps", advice=f"leave {option} and @STEP out")


def _describe(a: Source, b: Source, report: DiffReport) -> dict[str, Any]:
    return {
        "a": a.url,
        "b": b.url,
        "identical": report.same,
        "identical_count": report.identical_count,
        "proved_by_digests_count": report.proved_count,
        "tensors": [_describe_change(change) for change in report.changes],
        "values": [{"path": change.path, "a": change.a, "b": change.b} for change in report.values],
        "value_count": report.value_count,
        "not_compared": list(report.left_out),
    }


def _describe_change(change: TensorChange) -> dict[str, Any]:
    found: dict[str, Any] = {
        "key": change.key,
        "what": change.what,
        "a": _describe_info(change.a),
        "b": _describe_info(change.b),
        "difference": None,
    }
    if change.difference is not None:
        d = change.difference
        found["difference"] = {
            "element_count": d.element_count,
            "differing_count": d.differing_count,
            "identical_count": d.element_count - d.differing_count,
            "nonfinite_count": d.nonfinite_count,
            "max_abs": d.max_abs,
            "mean_abs": d.mean_abs,
            "relative_l2": d.relative_l2,
        }
    return found


def _describe_info(info: TensorInfo | None) -> dict[str, Any] | None:
    return None if info is None else {"dtype": info.dtype, "shape": list(info.shape)}


def _format(a: Source, b: Source, report: DiffReport, top: int, every_value: bool) -> list[str]:
    lines = [f"a: {escape(a.url)}", f"b: {escape(b.url)}"]
    for change in [c for c in report.changes if c.what in ("added", "removed", "shape")][:top]:
        lines.append(f"{_WORDS[change.what]}  {escape(change.key)}  {_format_infos(change)}")
    numeric = [c for c in report.changes if c.difference is not None]
    numeric.sort(key=lambda change: (-_severity(change), change.key))
    if numeric:
        titles = ["TENSOR", "DTYPE", "DIFFERING", "MAX ABS", "MEAN ABS", "REL L2"]
        rows = [_format_row(change) for change in numeric[:top]]
        lines += format_table(titles, rows, right="DIFFERING")
    hidden = len(report.changes) - min(len(report.changes) - len(numeric), top) - min(len(numeric), top)
    if hidden:
        lines.append(f"... and {format_count(hidden, 'tensor')} more (--top, --json)")
    values = report.values if every_value else report.values[:5]
    lines += [f"value  {escape(v.path)}: {_side(v.a)} -> {_side(v.b)}" for v in values]
    if report.value_count > len(values):
        lines.append(f"... and {format_count(report.value_count - len(values), 'value')} more (--values, --json)")
    lines += [f"not compared: {escape(text)}" for text in report.left_out]
    return [*lines, _summarize(report)]


_WORDS = {"added": "only in b", "removed": "only in a", "shape": "reshaped "}


def _severity(change: TensorChange) -> float:
    difference = change.difference
    return difference.relative_l2 or 0.0 if difference is not None else 0.0


def _format_infos(change: TensorChange) -> str:
    sides = [f"{info.dtype}{list(info.shape)}" for info in (change.a, change.b) if info is not None]
    return " -> ".join(sides)


def _format_row(change: TensorChange) -> list[str]:
    d = change.difference
    assert d is not None
    assert change.a is not None
    assert change.b is not None
    dtype = change.a.dtype if change.a.dtype == change.b.dtype else f"{change.a.dtype} -> {change.b.dtype}"
    numbers = ["-" if n is None else f"{n:.4g}" for n in (d.max_abs, d.mean_abs, d.relative_l2)]
    return [change.key, dtype, f"{d.differing_count}/{d.element_count}", *numbers]


def _side(text: str | None) -> str:
    return "nothing" if text is None else escape(text)


def _summarize(report: DiffReport) -> str:
    same = format_count(report.identical_count, "identical tensor")
    if report.same:
        return f"identical: {same}"
    tally: dict[str, int] = {}
    for change in report.changes:
        tally[change.what] = tally.get(change.what, 0) + 1
    names = {"added": "only in b", "removed": "only in a", "shape": "reshaped", "dtype": "of another dtype"}
    parts = [f"{count} {names.get(what, what)}" for what, count in sorted(tally.items())]
    if report.value_count:
        parts.append(f"{format_count(report.value_count, 'value')} changed")
    return f"different: {', '.join(parts)}; {same}"
