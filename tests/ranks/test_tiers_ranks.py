"""Tiers with several ranks: all of them go to the same place, and a copy counts for all of them or for none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import shardkeep as sk
from shardkeep import knobs
from shardkeep.engine.run import list_generations, list_step_folders
from shardkeep.engine.verify import verify_run
from shardkeep.ranks.base import Group
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.posix import PosixStore
from shardkeep.testing.faults import Call, Fault, FaultStore
from tests.crash.jobs import digest, get_all, make_state, run_world
from tests.support.held import Sink
from tests.support.ranks import run_ranks
from tests.support.training import build, find_differences, gather, train

MODES = ["blocking", "async"]


@pytest.fixture(autouse=True)
def _no_pauses() -> Any:
    with knobs.override(RETRY_BASE_S=0.0, RETRIES=1, BARRIER_TIMEOUT_S=30.0):
        yield


def steps_in(store: Store) -> list[int]:
    folders = [f for n in list_generations(store) for f in list_step_folders(store, n).values()]
    return sorted(folder.ref.step for folder in folders if folder.committed and not folder.pruning)


def run(
    root: Store | Sequence[Store],
    tiers: Callable[[int], list[sk.Tier]],
    last: int,
    *,
    world_size: int = 2,
    **options: Any,
) -> tuple[int, list[Sink]]:
    """Start on several ranks, check what is resumed, save up to `last`; return the step resumed, and the events."""
    sinks = [Sink() for _ in range(world_size)]
    roots = [root] * world_size if not isinstance(root, Sequence) else root

    def body(store: Store, group: Group) -> int:
        state = make_state(999, group.rank)
        with sk.CheckpointManager(
            "unused",
            store=store,
            group=group,
            tiers=tiers(group.rank),
            events=sinks[group.rank],
            **{"save_every": 4, **options},
        ) as manager:
            step = manager.resume(state).step
            if world_size == 2:
                assert not step or digest(state) == digest(make_state(step, group.rank))
            for at in range(step + 1, last + 1):
                manager.after_step(at, make_state(at, group.rank))
        return step

    found = get_all(run_world(roots, body))
    assert len(set(found)) == 1
    return found[0], sinks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_tier_that_is_full_for_one_rank_is_passed_over_by_all_and_comes_back(mode: str, victim: int) -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")

    def is_full(call: Call) -> bool:
        return call.verb == "writer" and ("step-00000002" in call.key or "step-00000004" in call.key)

    full = [Fault(kind="no_space", when=is_full, times=None)]
    stores = [FaultStore(ram, full if rank == victim else []) for rank in range(2)]
    _, sinks = run(root, lambda rank: [sk.Tier(stores[rank], every=2)], 8, mode=mode, tolerate=0)
    assert (steps_in(ram)[-1], steps_in(root)) == (8, [4, 8])
    assert not verify_run(ram).listed
    assert [event.fields["rank"] for event in sinks[victim].named("tier.degraded")][-1] == victim
    assert not any(sink.named("tier.behind") for sink in sinks)


def test_a_copy_that_fails_on_one_rank_is_tried_again_by_all() -> None:
    ram, root, failed = MemoryStore(name="ram"), MemoryStore(name="root"), []

    def fails(call: Call) -> bool:
        if call.verb == "writer" and "step-00000004" in call.key and len(failed) < 3:
            failed.append(call)
            return True
        return False

    roots = [root, FaultStore(root, [Fault(kind="io_error", when=fails, times=None)])]
    _, sinks = run(roots, lambda rank: [sk.Tier(ram, every=1)], 9)
    assert failed
    assert (steps_in(ram), steps_in(root)) == ([9], [4, 8])
    assert not verify_run(root).listed
    assert not any(sink.named("tier.behind") for sink in sinks)


@pytest.mark.parametrize("mode", MODES)
def test_on_two_nodes_each_tier_holds_its_part_and_the_root_gets_all(mode: str) -> None:
    nodes, root = [MemoryStore(name="node0"), MemoryStore(name="node1")], MemoryStore(name="root")
    disks = [MemoryStore(name="disk0"), MemoryStore(name="disk1")]

    def tiers(rank: int) -> list[sk.Tier]:
        return [sk.Tier(nodes[rank], every=1), sk.Tier(disks[rank], every=2)]

    _, sinks = run(root, tiers, 9, mode=mode)
    assert [steps_in(node) for node in nodes] == [[9], [9]]
    assert [steps_in(disk) for disk in disks] == [[8], [8]]
    assert steps_in(root) == [4, 8]
    assert not verify_run(root).listed
    assert not any(sink.named("tier.degraded") for sink in sinks)
    # No rank of the one node finds the values that all share, which lie on the other.
    assert run(root, tiers, 9, mode=mode)[0] == 8


def test_a_copy_that_one_rank_lost_counts_for_nobody() -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")
    run(root, lambda rank: [sk.Tier(ram, every=1)], 7)
    lost = MemoryStore(name="new")
    assert run(root, lambda rank: [sk.Tier(ram if rank == 0 else lost, every=1)], 4)[0] == 4


def test_the_same_node_resumes_from_its_tier_and_brings_it_home() -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")
    run(root, lambda rank: [sk.Tier(ram, every=1)], 7)
    assert run(root, lambda rank: [sk.Tier(ram, every=1)], 7)[0] == 7
    assert steps_in(root) == [4, 7]
    assert run(root, lambda rank: [], 7)[0] == 7


@pytest.mark.parametrize("scope", ["node", "shared"])
def test_another_number_of_ranks_resumes_from_a_tier_that_all_see(scope: Any) -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")

    def body(store: Store, group: Group) -> int:
        state = make_state(999)
        state.pop("own")
        tiers = [sk.Tier(ram, every=1, scope=scope)]
        with sk.CheckpointManager(
            "unused", store=store, group=group, tiers=tiers, save_every=100, events=Sink()
        ) as manager:
            step = manager.resume(state).step
            wanted = make_state(step)
            if step:
                for one, two in zip(state["model"].parameters(), wanted["model"].parameters(), strict=True):
                    assert one.equal(two)
            after = make_state(step + 1)
            after.pop("own")
            manager.after_step(step + 1, after)
        return step

    for number, world_size in enumerate((2, 1, 3, 2)):
        found = get_all(run_world([root] * world_size, body))
        assert set(found) == {number}
    assert steps_in(ram)[-1] == 4


def train_in_tiers(rank: int, world_size: int, layout: str, folder: str, mode: str, stop: int) -> Any:
    state = build(layout, world_size, rank=rank)
    tiers = [sk.Tier(f"{folder}/ram", every=1), sk.Tier(f"{folder}/disk", every=2)]
    with sk.CheckpointManager(f"{folder}/root", save_every=5, mode=mode, tiers=tiers, events=Sink()) as manager:  # type: ignore[arg-type]
        manager.resume(state)
        log = train(state, manager, stop=stop)
    return gather(state), log


@pytest.mark.parametrize(
    ("layout", "mode"), [("fsdp", "async"), pytest.param("ddp", "overlap", marks=pytest.mark.slow)]
)
def test_training_goes_on_exactly_from_the_memory_tier(layout: str, mode: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run_ranks(train_in_tiers, 2, layout, str(whole), mode, 9)
    run_ranks(train_in_tiers, 2, layout, str(broken), mode, 7)
    assert steps_in(PosixStore(str(broken / "ram"))) == [7]
    assert steps_in(PosixStore(str(broken / "root"))) == [5]
    found = run_ranks(train_in_tiers, 2, layout, str(broken), mode, 9)
    for rank in range(2):
        assert find_differences(found[rank][0], expected[rank][0]) == []
        assert len(found[rank][1]) == 2
    assert steps_in(PosixStore(str(broken / "root"))) == [5, 7]
