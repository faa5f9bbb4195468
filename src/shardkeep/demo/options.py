"""What `shardkeep demo` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from shardkeep.demo.records import STANDARD, LeaveOut, Shape
from shardkeep.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Attributes:
    shape: how large the demo is.
    leave_out: a part of the killed run's restore that is undone again, to show that the comparison sees it.
    keep: an empty or new folder for everything the demo writes; None: a temporary one, removed at the end.
    """

    shape: Shape = STANDARD
    leave_out: LeaveOut | None = None
    keep: Path | None = None

    def __post_init__(self) -> None:
        if self.leave_out is not None and self.leave_out not in get_args(LeaveOut):
            raise UsageError(f"leave_out {self.leave_out!r}: expected one of {', '.join(get_args(LeaveOut))}")
        if self.keep is not None and self.keep.exists() and (not self.keep.is_dir() or any(self.keep.iterdir())):
            raise UsageError(f"{self.keep}: expected an empty or new folder", advice="name another folder")
