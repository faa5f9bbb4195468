"""`shardkeep rollback`: makes the next resume go on from an earlier step. Removes nothing, can be undone."""

from __future__ import annotations

import shlex
from typing import Any

import click

from shardkeep.cli.output import escape, write, write_json
from shardkeep.cli.target import find_ref, get_view, open_run, parse_selection, parse_target
from shardkeep.engine.environment import describe_environment
from shardkeep.engine.recover import confirm_commit
from shardkeep.engine.run import RunView, claim_generation
from shardkeep.errors import NotFound, UsageError
from shardkeep.format.names import StepRef, format_generation


@click.command("rollback")
@click.argument("run")
@click.argument("step")
@click.option("--yes", is_flag=True, help="Do it; without it nothing is changed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(run: str, step: str, yes: bool, as_json: bool) -> int:
    """Make the next resume of RUN go on from STEP: later steps stop counting, and stay where they are.

    STEP is a step of the timeline, or gNNNN/STEP for one on a branch that was left ('shardkeep ls --all' lists
    them). A job that is saving into RUN stops with an error at its next save.
    """
    target = parse_target(run)
    if target.selection is not None:
        raise UsageError("the step was given twice, with the run and after it", advice=f"shardkeep rollback {run}")
    if step == "latest":
        raise UsageError("a rollback needs a step's number", advice=f"shardkeep ls --all {target.url}")
    store = open_run(target.url)
    view = get_view(store)
    ref = find_ref(store, parse_selection(step))
    confirm_commit(store, view, ref)
    before = view.timeline[-1] if view.timeline else None
    generation: int | None = None
    if yes:
        record = claim_generation(
            store, view.run_id, ref, world_size=0, environment={**describe_environment(), "command": "rollback"}
        )
        if record is None:
            raise NotFound(
                f"{ref} was removed by a prune at this moment; the timeline is as it was",
                advice=f"shardkeep ls {store.url}, then choose another step",
            )
        generation = record.generation
    if as_json:
        write_json(_describe(store.url, view, ref, before, generation))
    else:
        write(*_format(store.url, view, ref, before, generation))
    return 0


def name_step(ref: StepRef) -> str:
    """Return a step as `gNNNN/STEP`, which names it wherever the timeline goes."""
    return f"{format_generation(ref.generation)}/{ref.step}" + (f".{ref.attempt}" if ref.attempt > 1 else "")


def _left(view: RunView, ref: StepRef) -> list[StepRef]:
    """Return the steps that count now and will not any more."""
    return [other for other in view.timeline if other.step > ref.step or (other.step == ref.step and other != ref)]


def _describe(
    url: str, view: RunView, ref: StepRef, before: StepRef | None, generation: int | None
) -> dict[str, Any]:
    return {
        "run": url,
        "dry_run": generation is None,
        "step": ref.step,
        "from_generation": ref.generation,
        "new_generation": generation,
        "quarantined": ref in view.quarantined,
        "leaves": [{"step": r.step, "generation": r.generation, "attempt": r.attempt} for r in _left(view, ref)],
        "undo": None if before is None else ["shardkeep", "rollback", url, name_step(before), "--yes"],
    }


def _format(url: str, view: RunView, ref: StepRef, before: StepRef | None, generation: int | None) -> list[str]:
    done = generation is not None
    number = generation if generation is not None else view.head + 1
    left = _left(view, ref)
    lines = [
        f"generation {number} {'goes' if done else 'would go'} on from {ref}",
        f"steps that {'stop' if done else 'would stop'} counting: "
        + (", ".join(str(other.step) for other in left) or "none")
        + " (nothing is removed)",
    ]
    if ref in view.quarantined:
        lines.append(f"note: {ref} is quarantined as damaged: a resume passes it over for an older step")
    if before is not None:
        lines.append(f"to undo: shardkeep rollback {escape(shlex.quote(url))} {name_step(before)} --yes")
    if not done:
        lines.append("nothing was changed: add --yes to do it (a job saving into the run stops at its next save)")
    return lines
