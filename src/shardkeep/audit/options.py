"""What an audit is asked for: the command with its placeholders, and when it is killed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardkeep.errors import UsageError

ROOT: Final = "{root}"
RANKS: Final = "{ranks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """One audit.

    Attributes:
        command: the program and its arguments; `{root}` stands for the run's root, `{ranks}` for the number of ranks.
        kill_at: the steps after which it is killed, before they are saved; empty: `kills` random ones, by `seed`.
        ranks, ranks_then: what `{ranks}` stands for up to the first kill, and after it (None: the same).
        ignore: variables of the script that need not come back, by name.
        keep: a folder for everything that is written; None: a temporary one.
        limit_s: how long one start may take.
    """

    command: tuple[str, ...]
    kill_at: tuple[int, ...] = ()
    kills: int = 2
    ranks: int = 1
    ranks_then: int | None = None
    seed: int = 0
    ignore: frozenset[str] = frozenset()
    keep: Path | None = None
    limit_s: float = 3600.0

    def __post_init__(self) -> None:
        text = " ".join(self.command)
        if ROOT not in text:
            raise UsageError(
                f"the command has no {ROOT}, so both runs would write to one root",
                advice=f"pass the root to the script, as in: shardkeep audit -- python train.py --root {ROOT}; or by "
                f"its environment: -- env RUN_ROOT={ROOT} python train.py",
            )
        wants_ranks = self.ranks != 1 or self.ranks_then is not None
        if wants_ranks and RANKS not in text:
            raise UsageError(
                f"a number of ranks was given, and the command has no {RANKS}",
                advice=f"as in: shardkeep audit --ranks 2 -- torchrun --nproc-per-node {RANKS} train.py {ROOT}",
            )
        if min(self.ranks, self.ranks_then or 1, self.kills) < 1:
            raise UsageError("ranks and kills: expected 1 or more")
        if any(step < 1 for step in self.kill_at) or list(self.kill_at) != sorted(set(self.kill_at)):
            raise UsageError(f"kill steps {list(self.kill_at)}: expected distinct steps from 1 on, ascending")
        if not self.limit_s > 0:
            raise UsageError(f"a limit of {self.limit_s:g} s: expected more than 0")

    def fill(self, root: Path, ranks: int) -> list[str]:
        """Return the command with its placeholders replaced."""
        return [word.replace(ROOT, str(root)).replace(RANKS, str(ranks)) for word in self.command]


def plan_kills(options: AuditOptions, last_step: int) -> tuple[int, ...]:
    """Return the steps to kill at, ascending, for a run of `last_step` steps.

    Raises:
        UsageError: a step that was asked for does not occur, or the run is too short.
    """
    if options.kill_at:
        if options.kill_at[-1] > last_step:
            raise UsageError(f"a kill at step {options.kill_at[-1]}, and the command takes only {last_step} steps")
        return options.kill_at
    if last_step < 2:
        raise UsageError(
            f"the command takes {last_step} step, which leaves none to be killed at", advice="let it run longer"
        )
    steps = range(1, last_step)
    return tuple(sorted(random.Random(options.seed).sample(steps, min(options.kills, len(steps)))))
