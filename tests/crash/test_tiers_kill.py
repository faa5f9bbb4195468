"""SIGKILL of a real process at calls of the tier's and the root's stores: what is committed anywhere stays whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import shardkeep as sk
from shardkeep import knobs
from shardkeep.engine.run import list_generations, list_step_folders, scan_run
from shardkeep.engine.verify import verify_run
from shardkeep.events import Event
from shardkeep.storage.base import Store
from shardkeep.storage.posix import PosixStore
from shardkeep.storage.resolve import open_store
from shardkeep.testing.faults import Fault, FaultKind, FaultStore
from tests.crash.jobs import digest, make_state
from tests.support.ranks import start_ranks

_ENV = {"SHARDKEEP_PEER_SILENCE_S": "0.6", "SHARDKEEP_RETRY_BASE_S": "0", "SHARDKEEP_BARRIER_TIMEOUT_S": "20"}
PLACES = ("ram", "disk", "root")


class Ignored:
    def emit(self, event: Event) -> None:
        return


def open_places(folder: str, root: str) -> dict[str, Store]:
    """Return the two tiers, and the root: a folder below `folder`, or elsewhere by its URL."""
    return {name: PosixStore(f"{folder}/{name}") for name in PLACES[:2]} | {"root": open_store(root)}


def job(
    rank: int,
    world_size: int,
    folder: str,
    root: str,
    last: int,
    victim: int,
    where: str,
    kind: FaultKind,
    at_call: int | None,
) -> tuple[int, int]:
    """Start, check what is resumed, save each step up to `last` and end; the step resumed, the calls of the place."""
    plan = [Fault(kind=kind, at_call=at_call)] if at_call is not None and rank == victim else []
    stores = open_places(folder, root)
    struck = FaultStore(stores[where], plan)
    stores[where] = struck
    tiers = [sk.Tier(stores["ram"], every=1), sk.Tier(stores["disk"], every=2, keep=2)]
    state = make_state(999, rank)
    with sk.CheckpointManager(
        "unused", store=stores["root"], save_every=3, tiers=tiers, mode="async", events=Ignored()
    ) as manager:
        report = manager.resume(state)
        if not report.fresh:
            assert digest(state) == digest(make_state(report.step, rank))
        for step in range(report.step + 1, last + 1):
            manager.after_step(step, make_state(step, rank))
    return report.step, len(struck.log)


def whole_steps(store: Store) -> list[int]:
    """Return a place's committed steps, each of which verifies byte for byte."""
    if scan_run(store) is None:
        return []
    assert not verify_run(store).listed
    folders = [f for n in list_generations(store) for f in list_step_folders(store, n).values()]
    return sorted(f.ref.step for f in folders if f.committed and not f.pruning)


def strike(
    folder: str,
    world_size: int,
    victim: int,
    where: str,
    kind: FaultKind,
    at_call: int,
    *,
    root: str = "",
    env: Mapping[str, str] | None = None,
) -> bool:
    """Save 1 to 4, kill a rank in the job that goes on to 9, and start again; say whether it died.

    Args:
        root: the root's URL, empty until now; else it is a folder beside the tiers.
        env: leads the ranks to it.
    """
    root = root or f"{folder}/root"
    places = open_places(folder, root)
    env = {**_ENV, **(env or {})}
    with start_ranks(job, world_size, folder, root, 4, victim, where, kind, None, env=env) as ranks:
        ranks.results(timeout_s=30)
    with start_ranks(job, world_size, folder, root, 9, victim, where, kind, at_call, env=env) as ranks:
        outcomes = ranks.collect(timeout_s=40)
        died = outcomes[victim].exit_code == -9
    left = {name: whole_steps(store) for name, store in places.items()}
    newest = max(max(steps, default=0) for steps in left.values())
    assert newest >= 4
    with start_ranks(job, world_size, folder, root, 10, victim, where, kind, None, env=env) as ranks:
        resumed = {step for step, _ in ranks.results(timeout_s=40)}
    assert resumed == {newest} or (max(resumed) > newest and len(resumed) == 1), (left, resumed)
    after = {name: whole_steps(store) for name, store in places.items()}
    assert after["ram"] == [10]
    assert after["disk"][-1] == 10
    assert {3, 6, 9} <= set(after["root"]), (left, after)
    return died


def sweep(tmp_path: Path, world_size: int, victim: int, where: str, kind: FaultKind, first: int, stride: int) -> None:
    at, count = first, 0
    while strike(str(tmp_path / f"{at}"), world_size, victim, where, kind, at):
        at += stride
        count += 1
    assert count


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("where", "kind", "at"), [("ram", "kill", 60), ("root", "torn", 40), ("root", "kill", 64)])
def test_one_rank_sampled(tmp_path: Path, where: str, kind: Any, at: int) -> None:
    assert strike(str(tmp_path), 1, 0, where, kind, at)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", ["kill", "torn"])
def test_one_rank_at_many_calls(tmp_path: Path, where: str, kind: Any) -> None:
    with knobs.override(RETRY_BASE_S=0.0):
        sweep(tmp_path, 1, 0, where, kind, 1, 5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("victim", "where"), [(0, "root"), (1, "root"), (1, "ram")])
def test_two_ranks_at_many_calls(tmp_path: Path, victim: int, where: str) -> None:
    with knobs.override(RETRY_BASE_S=0.0):
        sweep(tmp_path, 2, victim, where, "kill", 3, 17)
