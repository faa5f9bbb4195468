"""How long the command takes, start to answer, over many checkpoints or a big one; as a user calls it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

from shardkeep.engine.run import WRITER, claim_generation, create_run, now
from shardkeep.errors import CheckpointError
from shardkeep.format.names import COMMIT_RECORD, StepRef
from shardkeep.format.records import CommitRecord, Facts, LayoutTable, PartSummary, ValueHolder, encode_record
from shardkeep.storage.posix import PosixStore

_ROUNDS: Final = 5


def measure_ls_ms(count: int = 1000) -> float:
    """Return the milliseconds of `shardkeep ls` on a folder of `count` committed checkpoints, the median of 5."""
    with tempfile.TemporaryDirectory(prefix="shardkeep-bench-") as folder:
        run_id = start_run(Path(folder))
        facts = Facts(
            layout=LayoutTable(meshes=(), tensors={}),
            holders=(ValueHolder(0, ()),),
            metrics={"loss": 2.5},
            created_at=now(),
        )
        for step in range(1, count + 1):
            ref = StepRef(step=step, generation=1)
            parts = (PartSummary(1000, "0" * 64, 100_000, 1),)
            write_commit(
                Path(folder),
                CommitRecord(run_id=run_id, ref=ref, world_size=1, plan="0" * 64, parts=parts, facts=facts),
            )
        return measure_command_ms("ls", folder)


def start_run(root: Path) -> str:
    """Make a run with one generation; return its id."""
    store = PosixStore(root)
    run_id = create_run(store)
    if claim_generation(store, run_id, None, world_size=1, environment={}) is None:
        raise CheckpointError(f"{root}: could not be claimed")
    return run_id


def write_commit(root: Path, commit: CommitRecord) -> None:
    """Write a commit record without its shards, and not durably: it is to be listed only."""
    path = root / commit.ref.key(COMMIT_RECORD)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_record(commit, writer=WRITER))


def measure_command_ms(*arguments: str) -> float:
    """Return the milliseconds from the start of `shardkeep ARGUMENTS` to its end, the median of 5."""
    program = [sys.executable, "-m", "shardkeep.cli.main", *arguments]
    taken: list[float] = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        taken.append((time.perf_counter() - start) * 1000)
        if done.returncode != 0:
            raise CheckpointError(f"shardkeep {' '.join(arguments)} failed: {done.stderr[-500:]}")
    return median(taken[1:])  # the first one may compile modules, and brings them into the page cache
