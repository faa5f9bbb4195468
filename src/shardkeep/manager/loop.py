"""The loop over steps and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shardkeep.errors import UsageError


def iterate_steps(
    loader: Iterable[Any], *, start: int, stop: int, ends: Callable[[], bool]
) -> Iterator[tuple[int, Any]]:
    """Yield `(step, batch)` after `start` up to `stop`, epoch after epoch; no more once `ends()` after a step."""
    step = start
    while step < stop:
        before = step
        for batch in loader:
            step += 1
            yield step, batch
            if step >= stop or ends():
                return
        if step == before:
            raise UsageError(f"the loader gave no batch for step {step + 1}", advice="check its length and drop_last")
