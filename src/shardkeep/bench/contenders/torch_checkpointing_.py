"""torch_checkpointing: its manager as documented, with the settings that it wants where there is no GPU."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkeep.bench.contenders.base import Contender, State

_library: Any = importlib.import_module("torch_checkpointing")
_storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
_resharder: Any = importlib.import_module("torch_checkpointing.default_resharder")
_WAIT_S = 600


class TorchCheckpointing(Contender):
    """One item that is the whole state; with ranks it has the default resharder, where that works."""

    def __init__(self, *, prewarm: bool) -> None:
        self._prewarm = prewarm
        self._pending: Any = None
        self._saver = self._make(_library.CheckpointManager.Config.with_sync_save())
        self._async: Any = None

    @property
    def can_reshard(self) -> bool:  # type: ignore[override]  # depends on the machine
        """Its metadata goes from rank to rank through CUDA tensors."""
        return torch.cuda.is_available()

    def _make(self, config: Any) -> Any:
        if dist.is_initialized() and self.can_reshard:
            config.items = {"state": _library.ItemSpec(resharder=_resharder.DefaultResharder())}
        # O_DIRECT is its default, and ext4 and XFS refuse it, since it writes odd lengths from odd addresses.
        config.storage_config = _storage.LocalFileSystemStorageConfig(use_direct_io=False)
        return _library.CheckpointManager(config)

    def save(self, state: State, folder: Path) -> None:
        self._saver.save(str(folder), {"state": state.flat})

    def load(self, state: State, folder: Path) -> None:
        self._saver.load(str(folder), into={"state": state.flat}, strict=True)

    def prepare_async(self, state: State, folder: Path) -> None:
        self._async = self._make(_library.CheckpointManager.Config.with_async_save())
        if self._prewarm:
            self._async.prewarm_staging({"state": state.flat})

    def start_async(self, state: State, folder: Path) -> None:
        self._pending = self._async.save(str(folder), {"state": state.flat})

    def guard(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._async.lock()
        return found

    def finish_async(self) -> None:
        self._pending.result(timeout=_WAIT_S)

    def close(self) -> None:
        for manager in (self._async, self._saver):
            if manager is not None:
                manager.close()
        self._async = None
