"""`shardkeep demo`: a small training run that is killed and resumed before your eyes. Needs torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from shardkeep.errors import CheckpointError, UsageError


@click.command("demo", epilog="Exits with 0 if everything was bit-identical, with 50 if anything was not.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Keep everything it writes in DIR.")
@click.option("--small", is_flag=True, hidden=True, help="A tiny model and few steps, for tests.")
@click.option("--spot", is_flag=True, help="Evict it three times instead, from a node with tiers that is wiped.")
@click.option(
    "--leave-out",
    type=click.Choice(["rng", "moment", "loader", "scheduler"]),
    help="Undo one part of the restore, to see that the comparison notices.",
)
def command(as_json: bool, keep: Path | None, small: bool, spot: bool, leave_out: str | None) -> int:
    """Train a small model, kill it, resume it, and compare with a run that was never killed."""
    if not _has_torch():
        raise CheckpointError(
            "the demo trains a model and needs torch, which is not installed", advice="pip install torch"
        )
    from shardkeep.demo import run_demo
    from shardkeep.demo.options import DemoOptions
    from shardkeep.demo.records import SMALL, SPOT, SPOT_SMALL, STANDARD

    if spot:
        from shardkeep.demo.spot import run_spot

        if leave_out is not None:
            raise UsageError("--leave-out belongs to the demo without --spot")
        return run_spot(DemoOptions(shape=SPOT_SMALL if small else SPOT, keep=keep), json=as_json)
    options = DemoOptions(shape=SMALL if small else STANDARD, leave_out=leave_out, keep=keep)  # type: ignore[arg-type]  # click.Choice holds it
    return run_demo(options, json=as_json)


def _has_torch() -> bool:
    """Look for torch without the second or two that importing it takes; the demo's ranks import it."""
    try:
        return importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:
        return False
