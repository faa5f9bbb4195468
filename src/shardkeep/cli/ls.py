"""`shardkeep ls`: a run's checkpoints."""

from __future__ import annotations

from typing import Any

import click

from shardkeep.cli.output import (
    escape,
    format_age,
    format_count,
    format_metrics,
    format_table,
    write,
    write_json,
)
from shardkeep.engine.listing import Entry, Listing, list_everything, list_timeline
from shardkeep.errors import StorageError
from shardkeep.format.records import decode_metrics
from shardkeep.storage.resolve import open_store
from shardkeep.types import format_bytes


@click.command("ls")
@click.argument("run")
@click.option("--all", "everything", is_flag=True, help="Also what does not count, and why.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(run: str, everything: bool, as_json: bool) -> int:
    """List RUN's committed checkpoints, the oldest step first.

    A resume takes the one marked 'latest'.
    """
    read = list_everything if everything else list_timeline
    store = open_store(run)
    try:
        listing = read(store)
    except StorageError as error:
        if not error.retryable:
            raise
        from shardkeep.storage.retry import RetryingStore  # with logging and random, which a quick list goes without

        listing = read(RetryingStore(store))
    if as_json:
        write_json(_describe_listing(store.url, listing))
    else:
        write(*_format_listing(store.url, listing, everything))
    return 0


def _describe_listing(url: str, listing: Listing) -> dict[str, Any]:
    return {
        "run": url,
        "run_id": listing.run_id,
        "generation": listing.head,
        "steps": [_describe_entry(entry) for entry in listing.entries],
    }


def _describe_entry(entry: Entry) -> dict[str, Any]:
    brief = entry.brief
    return {
        "step": entry.ref.step,
        "generation": entry.ref.generation,
        "attempt": entry.ref.attempt,
        "folder": entry.ref.folder,
        "state": entry.state,
        "reason": entry.reason,
        "created_at": brief.facts.created_at if brief else None,
        "size_bytes": entry.size_bytes,
        "ranks": brief.world_size if brief else None,
        "metrics": decode_metrics(brief.facts.metrics) if brief else {},
        "marks": list(entry.marks),
        "problem": entry.problem,
    }


def _format_listing(url: str, listing: Listing, everything: bool) -> list[str]:
    if not listing.entries:
        return [f"{escape(url)}: no checkpoints yet"]
    titles = ["STEP", "GEN", "AGE", "SIZE", "RANKS", "METRICS", "STATE"]
    lines = format_table(titles, [_format_entry(entry) for entry in listing.entries], right="STEP GEN AGE SIZE RANKS")
    counted = [entry for entry in listing.entries if entry.state == "committed"]
    total = format_bytes(sum(entry.size_bytes for entry in counted))
    summary = f"{format_count(len(counted), 'checkpoint')}, {total}, generation {listing.head}"
    others = len(listing.entries) - len(counted)
    if everything and others:
        summary += f"; {others} more that do not count"
    return [*lines, summary]


def _format_entry(entry: Entry) -> list[str]:
    brief = entry.brief
    words = list(entry.marks)
    if entry.state != "committed":
        words.append(f"{entry.state}: {entry.reason}")
    if entry.problem:
        words.append(f"damaged: {entry.problem}")
    attempt = f".{entry.ref.attempt}" if entry.ref.attempt > 1 else ""
    return [
        f"{entry.ref.step}{attempt}",
        str(entry.ref.generation),
        format_age(brief.facts.created_at) if brief else "",
        format_bytes(entry.size_bytes),
        str(brief.world_size) if brief else "",
        format_metrics(decode_metrics(brief.facts.metrics)) if brief else "",
        ", ".join(words),
    ]
