"""torchsnapshot: Snapshot.take, async_take and restore."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from shardkeep.bench.contenders.base import Contender, State

_library: Any = importlib.import_module("torchsnapshot")


class Torchsnapshot(Contender):
    """The whole state as one StateDict."""

    def __init__(self) -> None:
        self._pending: Any = None

    def save(self, state: State, folder: Path) -> None:
        _library.Snapshot.take(str(folder), {"state": _library.StateDict(**state.flat)})

    def load(self, state: State, folder: Path) -> None:
        _library.Snapshot(str(folder)).restore({"state": _library.StateDict(**state.flat)})

    def start_async(self, state: State, folder: Path) -> None:
        self._pending = _library.Snapshot.async_take(str(folder), {"state": _library.StateDict(**state.flat)})

    def finish_async(self) -> None:
        self._pending.wait()
