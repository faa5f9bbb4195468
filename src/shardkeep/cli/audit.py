"""`shardkeep audit`: is my own training command resumed exactly? Runs it; itself needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardkeep.audit import AuditOptions, run_audit
from shardkeep.audit.compare import Loss
from shardkeep.audit.run import AuditReport
from shardkeep.cli.output import escape, escape_lines, format_count, write, write_error, write_json
from shardkeep.errors import NotBitExact, UsageError

_SHOWN = 8


@click.command(
    "audit",
    context_settings={"ignore_unknown_options": True},
    epilog="Exits with 0 when the broken run is the unbroken one, with 50 when it is not.",
)
@click.option("--kill-at", metavar="STEPS", help="Kill after these steps, as in 5,12.")
@click.option("--kills", type=click.IntRange(min=1), default=2, show_default=True, help="Kills at random steps.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random steps.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="What {ranks} stands for.")
@click.option("--ranks-then", type=click.IntRange(min=1), help="What {ranks} stands for after the first kill.")
@click.option("--ignore", multiple=True, metavar="NAME", help="A variable of the script that need not come back.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep both runs and all output in DIR.")
@click.option("--limit", type=float, default=3600.0, show_default=True, help="Seconds that one start may take.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.argument("words", nargs=-1, required=True, metavar="-- COMMAND...", type=click.UNPROCESSED)
def command(
    kill_at: str | None,
    kills: int,
    seed: int,
    ranks: int,
    ranks_then: int | None,
    ignore: tuple[str, ...],
    keep: Path | None,
    limit: float,
    as_json: bool,
    words: tuple[str, ...],
) -> int:
    """Run a training command twice, unbroken and killed, and say whether and where the two differ.

    {root} in COMMAND stands for the root of its run. The command must end by itself.
    """
    options = AuditOptions(
        command=words,
        kill_at=_parse_steps(kill_at),
        kills=kills,
        seed=seed,
        ranks=ranks,
        ranks_then=ranks_then,
        ignore=frozenset(ignore),
        keep=keep,
        limit_s=limit,
    )
    report = run_audit(options, say=lambda text: write_error(escape_lines(text)))
    if as_json:
        write_json(_describe(report))
    else:
        write(*_format(report))
    return 0 if report.exact else NotBitExact.exit_code


def _parse_steps(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() for word in words):
        raise UsageError(f"--kill-at {text!r}: expected steps, as in 5,12")
    return tuple(int(word) for word in words)


def _describe(report: AuditReport) -> dict[str, Any]:
    """Return the report as plain JSON values; keys are only ever added."""
    losses = [_describe_loss(loss) for loss in report.losses]
    return {
        "exact": report.exact,
        "command": list(report.command),
        "last_step": report.last_step,
        "ranks": report.ranks,
        "kills": [{"step": k.step, "resumed": k.resumed, "ranks": k.ranks} for k in report.kills],
        "first": losses[0] if losses else None,
        "losses": losses,
        "not_in_state": [loss.quantity for loss in report.losses if loss.kind == "variable"],
        "warnings": [{"name": name, "text": text} for name, text in report.said],
        "quantities": list(report.quantities),
        "compared_step_count": report.compared_count,
        "compared_checkpoints": list(report.checkpoints),
        "tensor_count": report.tensor_count,
        "left_out": list(report.left_out),
        "kept": None if report.kept is None else str(report.kept),
        "duration_s": round(report.elapsed_s, 3),
    }


def _describe_loss(loss: Loss) -> dict[str, Any]:
    return {
        "kind": loss.kind,
        "step": loss.step,
        "start": loss.start,
        "rank": loss.rank,
        "quantity": loss.quantity,
        "expected": loss.expected,
        "found": loss.found,
        "cause": loss.cause,
        "text": str(loss),
    }


def _format(report: AuditReport) -> list[str]:
    steps = ", ".join(f"{k.step} (resumed from {k.resumed})" for k in report.kills)
    lines = [f"killed after step {steps or 'none'}; {format_count(report.last_step, 'step')} in all"]
    names = ", ".join(report.quantities) or "nothing"
    streams = ", and random streams" if all(kill.ranks == report.ranks for kill in report.kills) else ""
    lines.append(f"compared: {format_count(report.compared_count, 'step')} by {names}{streams}")
    if report.checkpoints:
        lines.append(
            f"compared: {format_count(len(report.checkpoints), 'checkpoint')} up to step {report.checkpoints[-1]}, "
            f"bit for bit, {format_count(report.tensor_count, 'tensor')} in the last"
        )
    lines += [f"not compared: {escape(text)}" for text in report.left_out]
    lines += [f"warning: {escape(name)}: {escape(text)}" for name, text in report.said]
    if report.exact:
        limits = " in all that was compared" if report.left_out else ""
        return [*lines, f"exact: the broken run is the unbroken one{limits} ({report.elapsed_s:.1f} s)"]
    lines += [
        f"{'first lost' if at == 0 else 'then'}: {escape(str(loss))}"
        for at, loss in enumerate(report.losses[:_SHOWN])
    ]
    if len(report.losses) > _SHOWN:
        lines.append(f"... and {len(report.losses) - _SHOWN} more (--json)")
    return [*lines, f"not exact ({report.elapsed_s:.1f} s)"]
