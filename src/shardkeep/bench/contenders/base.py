"""What a contender can do. Each call is what its library's documentation tells a user to write.

The benchmark, not the contender, makes files durable where the library does not; that is within what is timed.
"""

from __future__ import annotations

import contextlib
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch


class State(Protocol):
    """What contenders save and fill: `live.LiveState`, or a rank's part of a sharded one."""

    flat: dict[str, torch.Tensor]

    @property
    def ours(self) -> dict[str, Any]: ...


class Contender:
    """A library under measurement. Subclasses have those methods that their registry entry names.

    `is_durable` says that `save` and `finish_async` return with everything on the disk, `has_runs` that asynchronous
    saves are steps of one run rather than folders of their own, `can_reshard` that other ranks than those that saved
    can load.
    """

    is_durable = False
    has_runs = False
    can_reshard = True

    def save(self, state: State, folder: Path) -> None:
        """Save into a folder that does not exist yet."""
        raise NotImplementedError

    def load(self, state: State, folder: Path) -> None:
        """Fill the live tensors in place, and let go of the files."""
        raise NotImplementedError

    def load_part(self, folder: Path, key: str, rows: int | None) -> None:
        """Read one tensor, or its first rows."""
        raise NotImplementedError

    def import_all(self, folder: Path) -> None:
        """Save and load something tiny: modules that a library imports then are no memory of a save."""
        from shardkeep.bench.live import make_tiny

        tiny = make_tiny()
        # What is wrong, the real save will tell.
        with contextlib.suppress(Exception):
            self.save(tiny, folder)
            self.load(tiny, folder)
        shutil.rmtree(folder, ignore_errors=True)

    def prepare_async(self, state: State, folder: Path) -> None:
        """Do what a training script does long before its first asynchronous save."""

    def is_prepared(self) -> bool:
        """Return whether what `prepare_async` began in the background is done."""
        return True

    def start_async(self, state: State, folder: Path) -> None:
        """Begin a save; the caller trains on when this returns."""
        raise NotImplementedError

    def guard(self) -> AbstractContextManager[Any]:
        """Return what the library wants around `optimizer.step()`."""
        return contextlib.nullcontext()

    def finish_async(self) -> None:
        """Wait until the save that was begun last is complete."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back processes and memory."""


def copy_into(state: State, found: dict[str, Any]) -> None:
    """Copy loaded tensors into the live ones, by name."""
    with torch.no_grad():
        for key, tensor in state.flat.items():
            tensor.copy_(found[key])
