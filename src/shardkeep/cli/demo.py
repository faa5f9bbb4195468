"""`shardkeep demo`: a small training run that is killed and resumed before your eyes. Needs torch."""

from __future__ import annotations

import importlib

import click

from shardkeep.errors import CheckpointError


@click.command("demo")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(as_json: bool) -> int:
    """Train a small model, kill it, resume it, and compare with a run that was never killed."""
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise CheckpointError(
            "the demo trains a model and needs torch, which is not installed", advice="pip install 'shardkeep[torch]'"
        ) from None
    demo = importlib.import_module("shardkeep.demo")
    code: int = demo.run_demo(json=as_json)
    return code
