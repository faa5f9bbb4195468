"""When to save: a pure function of the step, so that all ranks decide alike without talking."""

from __future__ import annotations

from dataclasses import dataclass

from shardkeep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Steps:
    """Save at every step that is a multiple of `count`."""

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise UsageError(
                f"Steps({self.count!r}): expected an integer of 1 or more",
                advice="save_every=None saves only when save() is called",
            )

    def is_due(self, step: int) -> bool:
        """Say whether to save when `step` optimizer steps are done."""
        return step % self.count == 0
