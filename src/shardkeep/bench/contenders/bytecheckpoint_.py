"""ByteCheckpoint: save and load of its DDP framework."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardkeep.bench.contenders.base import Contender, State
from shardkeep.bench.contenders.dcp import start_single_group

_library: Any = importlib.import_module("bytecheckpoint")


class Bytecheckpoint(Contender):
    """It wants a process group, and a model and an optimizer rather than tensors."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            start_single_group()
        self._folder = Path()

    def save(self, state: State, folder: Path) -> None:
        _library.save(str(folder), state.ours, framework="ddp", fast_saving=False)

    def load(self, state: State, folder: Path) -> None:
        _library.load(str(folder), state.ours, framework="ddp")

    def start_async(self, state: State, folder: Path) -> None:
        self._folder = folder
        _library.save(str(folder), state.ours, framework="ddp", fast_saving=True)

    def finish_async(self) -> None:
        """Its fast saving returns after the data was written; what is left is the benchmark's fsync."""
