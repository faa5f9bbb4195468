"""When and where to save: by the step, which all ranks decide alike without talking, or by the clock; metrics."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Literal

from shardkeep.errors import UsageError
from shardkeep.format.value_atoms import is_plain_text
from shardkeep.plan.retention import Keep
from shardkeep.storage.base import Store


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
    """Save when `count` minutes, or a fraction, have passed since the last such save to the place in question.

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


@dataclass(frozen=True, slots=True)
class Tier:
    """A faster place for checkpoints, before the root.

    Attributes:
        url: a folder (`/dev/shm/run` is host memory), an object store's URL or a `Store`, with nothing of another run
            in it.
        every: at which steps a checkpoint goes there; an int stands for `Steps`, `Minutes` goes by the clock.
        keep: which ones stay there; an int keeps the newest so many. A checkpoint that is still to be copied to a
            slower place stays in any case.
        scope: `"node"`: each node has its own (host memory, a local disk); it goes with its node. `"shared"`: all
            ranks see the same objects.
        rate_mib_s: what one rank copies into it at most, in MiB/s; None: as fast as it goes.
    """

    url: str | os.PathLike[str] | Store
    every: Steps | Minutes | int
    keep: Keep | int = 1
    scope: Literal["node", "shared"] = "node"
    rate_mib_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.every, Steps | Minutes | int):
            raise UsageError(
                f"Tier({self.url!r}, every={self.every!r}): expected a number of steps or Minutes(...)",
                advice="every=10 saves every ten steps, every=shardkeep.Minutes(1) every minute",
            )
        _ = self.rule  # refuses a count that is none
        if not isinstance(self.keep, Keep) and (isinstance(self.keep, bool) or self.keep < 1):
            raise UsageError(f"Tier({self.url!r}, keep={self.keep!r}): expected a count of 1 or more, or Keep(...)")
        if self.scope not in ("node", "shared"):
            raise UsageError(f"Tier({self.url!r}, scope={self.scope!r}): expected 'node' or 'shared'")
        if self.rate_mib_s is not None and not self.rate_mib_s > 0:
            raise UsageError(f"Tier({self.url!r}, rate_mib_s={self.rate_mib_s!r}): expected a positive number")

    @property
    def rule(self) -> Steps | Minutes:
        return self.every if isinstance(self.every, Steps | Minutes) else Steps(self.every)

    @property
    def retention(self) -> Keep:
        return self.keep if isinstance(self.keep, Keep) else Keep(last=self.keep)


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
