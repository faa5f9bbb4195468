"""Orbax: its checkpointers over numpy views of the tensors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from shardkeep.bench.contenders.base import Contender, State, copy_into

ocp: Any = importlib.import_module("orbax.checkpoint")


class Orbax(Contender):
    """PyTreeCheckpointHandler with OCDBT, its default."""

    def __init__(self) -> None:
        self._saver: Any = None
        self._async: Any = None

    def _tree(self, state: State) -> dict[str, Any]:
        return {key: tensor.detach().numpy() for key, tensor in state.flat.items()}

    def _checkpointer(self) -> Any:
        if self._saver is None:
            self._saver = ocp.PyTreeCheckpointer()
        return self._saver

    def save(self, state: State, folder: Path) -> None:
        self._checkpointer().save(folder, self._tree(state))

    def load(self, state: State, folder: Path) -> None:
        found = self._checkpointer().restore(folder)
        copy_into(state, {key: torch.from_numpy(value) for key, value in found.items()})

    def prepare_async(self, state: State, folder: Path) -> None:
        self._async = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def start_async(self, state: State, folder: Path) -> None:
        self._async.save(folder, self._tree(state))

    def finish_async(self) -> None:
        self._async.wait_until_finished()

    def close(self) -> None:
        for checkpointer in (self._async, self._saver):
            if checkpointer is not None:
                checkpointer.close()
        self._async = self._saver = None
