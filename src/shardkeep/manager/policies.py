"""When to save: by the step, which all ranks decide alike without talking, or by the clock; what a metric may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardkeep.errors import UsageError
from shardkeep.format.value_atoms import is_plain_text


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


@dataclass(frozen=True, slots=True)
class Minutes:
    """Save when `count` minutes, or a fraction, have passed since the last such save.

    Rank 0's clock decides, and all ranks save at the same step, the first or second one after that.
    """

    count: float

    def __post_init__(self) -> None:
        good = isinstance(self.count, int | float) and not isinstance(self.count, bool)
        if not good or not 0 < self.count < math.inf:
            raise UsageError(
                f"Minutes({self.count!r}): expected a number above 0",
                advice="save_every=shardkeep.Minutes(10) saves every ten minutes",
            )

    @property
    def seconds(self) -> float:
        return 60.0 * self.count

    def is_due(self, step: int) -> bool:
        """Say that no step is due by its number."""
        return False


def as_number(name: str, value: Any) -> float:
    """Return a metric as a float; a tensor of one element is read here, and only when saving."""
    if not isinstance(name, str) or not is_plain_text(name):
        raise UsageError(f"metric {name!a}: expected a text as its name", advice="rename it")
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"metric {name!r}: expected one number, found {type(value).__name__}: {error}",
            advice=f"give a number or a tensor of one element, such as {name}.mean()",
        ) from None
