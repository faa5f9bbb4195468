"""shardkeep itself: digests, fsync, commit record and verification are always on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import shardkeep as sk
from shardkeep.bench.contenders.base import Contender, State


class Shardkeep(Contender):
    """`save` and `load` for one checkpoint; `CheckpointManager` for asynchronous saves."""

    is_durable = True
    has_runs = True

    def __init__(self, *, mode: str = "async") -> None:
        self._mode = mode
        self._manager: Any = None
        self._step = 0

    def save(self, state: State, folder: Path) -> None:
        sk.save(folder, state.ours)

    def load(self, state: State, folder: Path) -> None:
        sk.load(folder, state.ours)

    def load_part(self, folder: Path, key: str, rows: int | None) -> None:
        role, _, parameter = key.partition(".")
        name = f"model/{parameter}" if role == "model" else f"optimizer/{role}/{parameter}"
        with sk.open(folder) as checkpoint:
            stored = checkpoint[name]
            stored.tensor() if rows is None else stored[:rows]

    def save_in_tier(self, state: State, folder: Path, tier: Path) -> None:
        """Save step 1 into a tier, and nowhere else."""
        with sk.CheckpointManager(folder, tiers=[sk.Tier(tier, every=1)]) as manager:
            manager.resume(state.ours, fresh=True)
            manager.save(1, state.ours)

    def restart(self, state: State, folder: Path, tier: Path) -> float:
        """Resume what the tier holds, as a new start does; return the seconds until training could go on."""
        begin = time.monotonic()
        with sk.CheckpointManager(folder, tiers=[sk.Tier(tier, every=1)]) as manager:
            manager.resume(state.ours)
            return time.monotonic() - begin

    def prepare_async(self, state: State, folder: Path) -> None:
        options: dict[str, Any] = {"mode": self._mode}
        self._manager = sk.CheckpointManager(folder, **options)
        self._manager.resume(state.ours, fresh=True)
        # The arena is made ready in the background from here on, while the loop trains.
        self._step = 1
        self._manager.after_step(self._step, state.ours)

    def is_prepared(self) -> bool:
        return all(thread.name != "shardkeep-arena" for thread in threading.enumerate())

    def start_async(self, state: State, folder: Path) -> None:
        self._step += 1
        self._manager.save(self._step, state.ours)

    def finish_async(self) -> None:
        self._manager.wait()

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None
