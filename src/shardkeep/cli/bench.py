"""`shardkeep bench`: how fast this machine can save and load, and how close everyone comes. Needs torch."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any, Final

import click

from shardkeep.bench import BARS, BenchOptions, BenchResult, run_bench
from shardkeep.bench.options import PLAIN_BYTES, parse_groups, parse_peers, parse_size
from shardkeep.cli.output import escape, write, write_error, write_json
from shardkeep.errors import CheckpointError, UsageError

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_WHATS: Final = (
    "save", "load.cold", "load.warm", "partial.tensor", "partial.rows", "memcpy", "async.first_stall", "async.stall",
    "async.lost", "async.durable", "overlap.stall", "ranks2.save", "ranks2.load", "ranks4.save", "ranks4.load",
    "ranks4.reshard_load", "tiers.restart",
)  # fmt: skip


@click.command("bench", epilog="Exits with 0 whether or not the bars are met: they say, they do not judge.")
@click.argument("place", required=False, default=".", metavar="[DIR]")
@click.option("--size", default=f"{PLAIN_BYTES >> 20}MiB", show_default=True, help="Of the state, as in 3GiB.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds after a warm-up.")
@click.option("--only", multiple=True, metavar="GROUP", help="save, load, partial, tiers, async, ranks, scale, cli.")
@click.option("--peers", default="all", show_default=True, help="all, none, or names with commas between.")
@click.option("--tune", is_flag=True, help="Try the settings for this storage, and print the best.")
@click.option("--report", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML page with charts.")
@click.option(
    "--fill-memory/--no-fill-memory",
    default=True,
    help="Fill free memory with page cache first, where its first use is slow.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
    place: str,
    size: str,
    rounds: int,
    only: tuple[str, ...],
    peers: str,
    tune: bool,
    report: Path | None,
    fill_memory: bool,
    as_json: bool,
) -> int:
    """Measure the storage of DIR (here by default), shardkeep on it, and every other library that is installed.

    All it writes goes to a folder of its own in DIR, which it removes at the end.
    """
    options = BenchOptions(
        folder=_find_folder(place),
        size_bytes=parse_size(size),
        rounds=rounds,
        groups=parse_groups(only),
        peers=parse_peers(peers),
        fill_memory=fill_memory,
    )
    if not _has_torch():
        raise CheckpointError(
            "the benchmark measures live tensors and needs torch, which is not installed", advice="pip install torch"
        )
    if report is not None:
        _check_report(report, tune=tune)
    if tune:
        return _tune(options, as_json=as_json)
    result = run_bench(options, say=_say)
    if report is not None:
        from shardkeep.bench.html import format_page

        report.write_text(format_page(result), encoding="utf-8")
    if as_json:
        write_json(result.as_json())
    else:
        write(*_format(result))
    return 0


def _check_report(report: Path, *, tune: bool) -> None:
    """Refuse before anything is measured what would fail after it. Raises UsageError."""
    if tune:
        raise UsageError("--report: --tune makes no report", advice="give --json for a document of its figures")
    if report.is_dir():
        raise UsageError(f"--report {report}: is a folder", advice="name a file in it")
    if not report.absolute().parent.is_dir():
        raise UsageError(f"--report {report}: there is no folder {report.absolute().parent}")
    if not os.access(report if report.exists() else report.absolute().parent, os.W_OK):
        raise UsageError(f"--report {report}: may not be written")


def _has_torch() -> bool:
    """Look for torch without importing it, which takes seconds; the workers import it."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:
        return False


def _say(text: str) -> None:
    write_error(escape(text))


def _find_folder(place: str) -> Path:
    scheme = _SCHEME.match(place)
    if scheme is None:
        try:
            return Path(place).expanduser()
        except RuntimeError as error:  # ~nobody
            raise UsageError(f"{place!r}: {error}", advice="give the folder's whole path") from None
    if scheme[1].lower() != "file":
        raise UsageError(
            f"the benchmark measures folders; {scheme[1]}:// is not measured",  # the rest may hold a password
            advice="give the path of a folder on the storage to measure",
        )
    from shardkeep.storage.resolve import open_store

    return Path(open_store(place).url)


def _tune(options: BenchOptions, *, as_json: bool) -> int:
    from shardkeep.bench.tune import tune

    found = tune(options, say=_say)
    if as_json:
        write_json(found.as_json())
    else:
        write(*_render(("SETTING", "SAVE S", "LOAD S"), found.rows), *found.lines)
    return 0


def _format(result: BenchResult) -> list[str]:
    details = result.details
    lines = [
        f"state of {details.get('state_bytes', 0) / (1 << 30):.2f} GiB, {details['state_tensor_count']} tensors; "
        f"{details['rounds']} rounds, {details['took_s']:.0f} s",
        "limits: "
        + ", ".join(f"{name} {v / (1 << 30):.2f} GiB/s" for name, v in details["limits_bytes_per_s"].items()),
        "",
        *_render(("SECONDS", "WHO", "MEDIAN", "LEAST", "GREATEST", "/ OURS", "EXACT"), _list_seconds(details)),
        "",
        *_render(("FIGURE", "VALUE", "BAR", "", "AGAINST"), _list_figures(result)),
    ]
    lines += [f"not measured: {escape(name)}: {escape(why)}" for name, why in details["not_measured"].items()]
    return lines


def _list_seconds(details: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    exact = details.get("exact", {})
    names = {"load.cold": "load", "async.stall": "async"}
    for what in _WHATS:
        found = details["seconds"].get(what, {})
        for who, times in sorted(found.items(), key=lambda item: item[1]["median"]):
            ratio = times["ratio_to_ours"]
            times_s = tuple(f"{times[name]:.3f}" for name in ("median", "least", "greatest"))
            shown = "" if ratio is None or who == "shardkeep" else f"{ratio:.2f}"
            rows.append((what, who, *times_s, shown, _say_exact(exact.get(names.get(what, what), {}).get(who))))
        for who, once_s in sorted(details.get("warm_up_s", {}).get(what, {}).items(), key=lambda item: item[1]):
            if who not in found:
                is_exact = exact.get(names.get(what, what), {}).get(who)
                rows.append((what, f"{who} (warm-up only)", f"{once_s:.3f}", "", "", "", _say_exact(is_exact)))
    return rows


def _say_exact(is_exact: bool | None) -> str:
    return {True: "yes", False: "NO", None: ""}[is_exact]


def _list_figures(result: BenchResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, figure in result.figures.items():
        bar = BARS[key]
        met = bar.is_met(figure.value)
        value = "-" if figure.value is None else f"{figure.value:.3g}"
        rows.append((key, value, bar.text, {True: "met", False: "NOT MET", None: "-"}[met], figure.against or ""))
    return rows


def _render(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Lay a table out with rich, without colours and as wide as it needs to be."""
    import io

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    numbers = ("MEDIAN", "LEAST", "GREATEST", "/ OURS", "VALUE", "SAVE S", "LOAD S")
    for title in titles:
        table.add_column(title, justify="right" if title in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(escape(cell)) for cell in row))
    sink = io.StringIO()
    Console(file=sink, width=160, color_system=None, force_terminal=False).print(table)
    return [line.rstrip() for line in sink.getvalue().splitlines() if line.strip()]
