"""`shardkeep doctor`: will these places do for a run. Asked before it starts; changes nothing that lasts."""

from __future__ import annotations

from typing import Any

import click

from shardkeep.cli.output import escape, format_count, write, write_json
from shardkeep.engine.diagnosis import Check
from shardkeep.engine.doctor import Diagnosis, Wanted, examine
from shardkeep.errors import UsageError

EXIT_FAILED = 1


@click.command("doctor", epilog="Exits with 0 when nothing fails, warnings or not, and with 1 otherwise.")
@click.argument("root", required=False)
@click.option("--tier", "tiers", multiple=True, metavar="URL", help="A faster place; may be repeated, fastest first.")
@click.option("--size", metavar="SIZE", help="Of a checkpoint, as in 3GiB; that of ROOT's newest by default.")
@click.option("--like", type=click.IntRange(min=0), metavar="STEP", help="Take the size of this step at ROOT.")
@click.option(
    "--keep", "keeps", type=click.IntRange(min=1), multiple=True, metavar="N",
    help="How many stay in ROOT (all); given again: in each tier in turn (1).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
    root: str | None,
    tiers: tuple[str, ...],
    size: str | None,
    like: int | None,
    keeps: tuple[int, ...],
    as_json: bool,
) -> int:
    """Check that ROOT and tiers are reachable, writable and large enough, and that this machine fits.

    Small objects are written, read back and removed. What one process cannot see, it says: run it on each node.
    """
    if size is not None and like is not None:
        raise UsageError("--size and --like: one of them says how large a checkpoint is", advice="leave one out")
    if like is not None and root is None:
        raise UsageError("--like: a step of ROOT is meant", advice="shardkeep doctor ROOT --like STEP")
    places = ([] if root is None else [root]) + list(tiers)
    if len(keeps) > len(places):
        raise UsageError(f"--keep was given {len(keeps)} times for {format_count(len(places), 'place')}")
    defaults: list[int | None] = ([] if root is None else [None]) + [1] * len(tiers)
    wanted = [Wanted(url=url, keep=keep) for url, keep in zip(places, [*keeps, *defaults[len(keeps) :]], strict=True)]
    found = examine(
        wanted[0] if root is not None else None,
        wanted[1:] if root is not None else wanted,
        size_bytes=_parse_size(size),
        like=like,
    )
    urls = {"root": root, **{f"tier {number}": tier for number, tier in enumerate(tiers)}}
    if as_json:
        write_json(_describe(root, tiers, found))
    else:
        write(*_format(urls, found))
    return EXIT_FAILED if found.count("fail") else 0


def _parse_size(text: str | None) -> int | None:
    if text is None:
        return None
    from shardkeep.bench.options import parse_size  # with all of the benchmark

    size_bytes = parse_size(text)
    if size_bytes < 1:
        raise UsageError(f"--size {text}: expected more than nothing", advice="write it as in 512MiB or 3GiB")
    return size_bytes


def _describe(root: str | None, tiers: tuple[str, ...], found: Diagnosis) -> dict[str, Any]:
    return {
        "root": root,
        "tiers": list(tiers),
        "size_bytes": found.size_bytes,
        "ok_count": found.count("ok"),
        "warn_count": found.count("warn"),
        "fail_count": found.count("fail"),
        "checks": [
            {
                "place": check.place,
                "what": check.what,
                "status": check.status,
                "found": check.found,
                "advice": check.advice,
            }
            for check in found.checks
        ],
    }


def _format(urls: dict[str, str | None], found: Diagnosis) -> list[str]:
    lines: list[str] = []
    place = None
    for check in found.checks:
        if check.place != place:
            place = check.place
            lines.append(escape(f"{place} {urls[place]}") if place in urls else "this machine")
        lines += _format_check(check)
    warned, failed = found.count("warn"), found.count("fail")
    total = format_count(len(found.checks), "check")
    return [*lines, f"{total}: {format_count(failed, 'failure')}, {format_count(warned, 'warning')}"]


def _format_check(check: Check) -> list[str]:
    lines = [f"  {check.status:<4}  {check.what}: {escape(check.found)}"]
    return [*lines, f"        next: {escape(check.advice)}"] if check.advice else lines
