"""The ranks of a simulated job: the coordinator runs for real, all others are played by one of each kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NoReturn

from shardkeep.bench.scale_jobs import Job
from shardkeep.engine.planning import Agreed, PlanCache, agree_plan
from shardkeep.format.names import StepRef
from shardkeep.format.records import FileRecord, LayoutTable, PartRecord
from shardkeep.format.values import encode_value
from shardkeep.plan.shards import describe_shards, plan_outgoing, plan_shards
from shardkeep.ranks.base import Group
from shardkeep.spec.tensors import Captured

_SHARD_BYTES: Final = 5_000_000_000
_VALUES: Final[dict[str, Any]] = {
    "scheduler": {"last_epoch": 1000, "base_lrs": [1e-4]},
    "optimizer/groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}],
    "loader": {"seed": 1, "epoch": 0, "samples": 4_096_000},
}
_STREAM: Final[dict[str, Any]] = {"python": list(range(625)), "torch": "0" * 5056}


class _Heard(Exception):
    """A rank's post of the phase that was asked about."""


class _OneRank:
    """The group of a rank that is asked for its post of one phase, after the verdicts of the phases before."""

    def __init__(self, rank: int, world_size: int, verdicts: list[bytes]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.post = b""
        self._verdicts = list(verdicts)

    def agree(
        self,
        name: str,
        work: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        self.post = work()
        if not self._verdicts:
            raise _Heard
        return self._verdicts.pop(0)

    def clone(self) -> Group:
        return self

    def close(self) -> None:
        return


class _Coordinator(_OneRank):
    """Rank 0's group: runs every phase as the coordinator does, and keeps the seconds of its own work in each."""

    def __init__(
        self, world_size: int, ask: Callable[[int, list[bytes]], bytes], kinds: list[tuple[int, ...]]
    ) -> None:
        super().__init__(0, world_size, [])
        self.seconds: dict[str, float] = {}
        self.outside_s = 0.0
        self._ask = ask
        self._kinds = kinds
        self._heard: list[bytes] = []

    def agree(
        self,
        name: str,
        work: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        start = time.process_time()
        own = work()
        asked = time.process_time()
        posts = [own] * self.world_size
        if name != "save.proof":
            for ranks in self._kinds:
                first = own if ranks[0] == 0 else self._ask(ranks[0], self._heard)
                # Only the lowest of a kind describes it.
                other = self._ask(ranks[1], self._heard) if name == "save.plan" and len(ranks) > 1 else first
                for rank in ranks:
                    posts[rank] = other
                posts[ranks[0]] = first
        answered = time.process_time()
        verdict = decide(posts)
        self._heard.append(verdict)
        self.seconds[name] = time.process_time() - answered + asked - start
        self.outside_s += answered - asked
        return verdict


class SimulatedJob:
    """Agrees on plans as the coordinator of a job, which remembers from one save to the next."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._cache = PlanCache()
        self._step = 0

    def agree(self) -> tuple[Agreed, dict[str, float]]:
        """Agree on the plan of the next save.

        Returns it, and the coordinator's seconds by phase and in all (`total`).
        """
        self._step += 1
        before = self._cache.table, self._cache.digest, self._cache.shard_limit_bytes
        kinds = [holding.ranks for holding in self._job.holdings]
        captured = {ranks[0]: self._capture(ranks[0]) for ranks in kinds}

        def ask(rank: int, verdicts: list[bytes]) -> bytes:
            group = _OneRank(rank, self._job.topology.ranks, verdicts)
            lowest = next(ranks[0] for ranks in kinds if rank in ranks)
            cache = PlanCache(table=before[0], digest=before[1], shard_limit_bytes=before[2])
            with suppress(_Heard):
                agree_plan(group, cache, self._step, lambda: captured[lowest], _refuse)
            return group.post

        group = _Coordinator(self._job.topology.ranks, ask, kinds)
        start = time.process_time()
        agreed = agree_plan(group, self._cache, self._step, lambda: captured[0], lambda: 1)
        return agreed, {**group.seconds, "total": time.process_time() - start - group.outside_s}

    def _capture(self, rank: int) -> Captured:
        return Captured(
            tensors=self._job.locals_of(rank),
            aliases={},
            values={**_VALUES, "rng": _STREAM},
            per_rank_values=frozenset({"rng"}),
        )


def _refuse() -> NoReturn:
    raise AssertionError("only the coordinator chooses the number of a try")


def make_part(table: LayoutTable, plan: str, ref: StepRef, rank: int, world_size: int, run_id: str) -> PartRecord:
    """Return the part that a rank writes, but for digests and facts."""
    shards, chunks, _ = describe_shards(plan_shards(plan_outgoing(table, rank), rank, limit_bytes=_SHARD_BYTES))
    return PartRecord(
        run_id=run_id,
        ref=ref,
        rank=rank,
        world_size=world_size,
        plan=plan,
        shards=shards,
        digests=FileRecord(0, "0" * 64),
        tensors=chunks,
        values={name: encode_value(value, name) for name, value in {**_VALUES, "rng": _STREAM}.items()},
    )
