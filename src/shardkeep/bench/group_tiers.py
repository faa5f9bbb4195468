"""Group `tiers`: restarts on the same node, from a checkpoint in a tier in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from shardkeep.bench.group_files import Pool
from shardkeep.bench.session import Session

_MEMORY: Final = Path("/dev/shm")
_ROOM: Final = 1.05


def measure_tiers(session: Session, pool: Pool) -> None:
    """Whole resumes from the tier, each in turn with a one-thread copy of the state."""
    needed = int(session.shape.size_bytes * _ROOM)
    if not os.access(_MEMORY, os.W_OK) or shutil.disk_usage(_MEMORY).free < needed:
        session.say(f"tiers: not measured: {_MEMORY} has no room for {needed >> 20} MiB")
        return
    root = session.place("tiers")
    pool.begin(["raw", "shardkeep"])
    with tempfile.TemporaryDirectory(prefix="shardkeep-bench-", dir=_MEMORY) as tier:
        pool.call("shardkeep", "save_in_tier", folder=str(root), tier=tier)
        for number in range(session.options.rounds + 1):
            copied_s = pool.call("raw", "copy")
            check = {"digest": session.digest} if number == 0 else {}
            found = pool.call("shardkeep", "restart", folder=str(root), tier=tier, **check)
            session.record("tiers.restart", "raw", number, copied_s)
            session.record("tiers.restart", "shardkeep", number, found["took_s"])
            if check:
                session.facts.setdefault("exact", {})["tiers"] = {"shardkeep": found["is_exact"]}
            named = "warm-up" if number == 0 else f"round {number} of {session.options.rounds}"
            session.say(f"tiers, {named}: memcpy {copied_s:.2f}  restart {found['took_s']:.2f} s")
    session.remove(root)
