"""`shardkeep prune`: removes checkpoints by rule; says first what it would do."""

from __future__ import annotations

from typing import Any, Final, Literal

import click

from shardkeep.cli.output import escape, format_count, write, write_json
from shardkeep.cli.target import get_view, open_run, parse_target
from shardkeep.engine.prune import PrunePlan, plan_prune, prune
from shardkeep.engine.run import RunView
from shardkeep.errors import UsageError
from shardkeep.events import Event
from shardkeep.format.names import StepRef
from shardkeep.plan.retention import Best, Keep
from shardkeep.types import format_bytes


class _Quiet:
    """An event sink for a command that prints its own report."""

    def emit(self, event: Event) -> None:
        return


@click.command("prune")
@click.argument("run")
@click.option("--keep-last", type=click.IntRange(min=0), metavar="N", help="Keep the newest N.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep steps that are multiples of N.")
@click.option(
    "--keep-best", metavar="METRIC[:min|max[:N]]", help="Keep the N with the best metric; min and 1 if left out."
)
@click.option("--yes", is_flag=True, help="Carry it out; without it nothing is removed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
    run: str, keep_last: int | None, keep_every: int | None, keep_best: str | None, yes: bool, as_json: bool
) -> int:
    """Remove the checkpoints of RUN that no rule keeps, and what interrupted removals and failed saves left behind.

    Never removed: the newest checkpoint, the newest healthy one, the one the newest generation resumed from, held
    ones. Without a rule no checkpoint is removed. Safe while a job saves into RUN.
    """
    target = parse_target(run)
    if target.selection is not None:
        raise UsageError(f"{run}: expected a run, not one of its steps", advice=f"shardkeep prune {target.url}")
    keep = Keep(last=keep_last, every=keep_every, best=parse_best(keep_best) if keep_best else None)
    store = open_run(target.url)
    view = get_view(store)
    plan = plan_prune(store, view, keep, live=None)
    removed = prune(store, plan, view, _Quiet(), by_generation=view.head) if yes else ()
    if as_json:
        write_json(_describe(store.url, view, plan, removed, yes))
    else:
        write(*_format(view, plan, yes, ruled=keep != Keep()))
    return 0


def parse_best(text: str) -> Best:
    """Return the rule that `METRIC[:min|max[:N]]` stands for; a metric's own name may hold colons.

    Raises:
        UsageError: an empty name, or a count that is none.
    """
    head, _, last = text.rpartition(":")
    count = 1
    if last.isascii() and last.isdigit() and head.endswith((":min", ":max")):
        text, count = head, int(last)
    name, _, mode = text.rpartition(":")
    for known in _MODES:
        if mode == known:
            return Best(metric=name, count=count, mode=known)
    return Best(metric=text, count=count)


_MODES: Final[tuple[Literal["min", "max"], ...]] = ("min", "max")
_GROUPS: Final = (
    ("steps", "no rule keeps it"),
    ("unfinished", "its removal was interrupted"),
    ("orphans", "its save never finished"),
)


def _size(view: RunView, ref: StepRef) -> int:
    return sum(view.folders[ref].files.values())


def _describe(url: str, view: RunView, plan: PrunePlan, removed: tuple[StepRef, ...], yes: bool) -> dict[str, Any]:
    reasons = {"steps": "rules", "unfinished": "interrupted_removal", "orphans": "unfinished_save"}
    gone = set(plan.all)
    return {
        "run": url,
        "dry_run": not yes,
        "remove": [
            {
                "step": ref.step,
                "generation": ref.generation,
                "attempt": ref.attempt,
                "folder": ref.folder,
                "reason": reasons[group],
                "size_bytes": _size(view, ref),
            }
            for group, _ in _GROUPS
            for ref in getattr(plan, group)
        ],
        "keep": [{"step": r.step, "generation": r.generation} for r in view.timeline if r not in gone],
        "size_bytes": plan.removed_bytes,
        "removed_count": len(removed),
    }


def _format(view: RunView, plan: PrunePlan, yes: bool, *, ruled: bool) -> list[str]:
    word = "removed" if yes else "would remove"
    lines = [
        f"{word} {escape(ref.folder)} ({format_bytes(_size(view, ref))}): {reason}"
        for group, reason in _GROUPS
        for ref in getattr(plan, group)
    ]
    kept = len(view.timeline) - len(plan.steps)
    if not lines:
        lines = [f"nothing to remove; {format_count(kept, 'checkpoint')} kept"]
        return lines if ruled else [*lines, "no rule was given, so every checkpoint stays: add --keep-last 3 or so"]
    lines.append(
        f"{word} {format_count(len(plan.all), 'folder')}, {format_bytes(plan.removed_bytes)}; "
        f"{format_count(kept, 'checkpoint')} kept"
    )
    if not yes:
        lines.append("nothing was removed: add --yes to do it (a job may go on saving meanwhile)")
    return lines
