"""Copying a committed checkpoint to another place: whole or not at all, and what is there is not copied twice."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed import HashStore

from shardkeep import knobs
from shardkeep.engine.promote import Lane, Pace, Promotion, may_pass_over, promote, spread_record
from shardkeep.engine.run import list_step_folders, scan_run
from shardkeep.engine.verify import verify_run
from shardkeep.errors import CheckpointError, OutOfSpace, PeerFailure, StateChanged, StorageError
from shardkeep.format.names import RUN_RECORD, StepRef
from shardkeep.plan.retention import Keep
from shardkeep.ranks.base import Group
from shardkeep.ranks.single import SingleGroup
from shardkeep.ranks.store_group import StoreGroup
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faults import Fault, FaultStore
from tests.crash.jobs import get_all, make_state, manage, run_world
from tests.unit.ranks.worlds import run_threads

REF = StepRef(step=11, generation=1)


@dataclass(frozen=True)
class Run:
    """A run with the steps 10 and 11, and another place that has step 10."""

    source: MemoryStore
    target: MemoryStore
    run_id: str


def make_run(world_size: int = 1) -> Run:
    source, target = MemoryStore(name="source"), MemoryStore(name="target")

    def body(store: Store, group: Group) -> None:
        with manage(store, group, assets={"config.json": b"{}"}) as manager:
            manager.resume(make_state(0, group.rank))
            for step in (10, 11):
                manager.save(step, make_state(step, group.rank))

    get_all(run_world([source] * world_size, body))
    view = scan_run(source)
    assert view is not None
    for info in source.list_objects(""):
        if "step-00000011" not in info.key:
            target.put(info.key, source.get(info.key, limit_bytes=1 << 20))
    return Run(source, target, view.run_id)


def copy(run: Run, target: Store | None = None, *, source: Store | None = None, **options: Any) -> Promotion:
    options = {"lane": Lane(Pace(None)), "run_id": run.run_id, **options}
    return promote(source or run.source, target or run.target, SingleGroup(), REF, **options)


def steps_of(store: Store) -> list[int]:
    view = scan_run(store)
    assert view is not None
    return [ref.step for ref in view.timeline]


def same_bytes(run: Run) -> bool:
    def content(store: Store) -> dict[str, bytes]:
        return {i.key: store.get(i.key, limit_bytes=1 << 20) for i in store.list_objects(f"{REF.folder}/")}

    return content(run.source) == content(run.target)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_copy_is_the_same_bytes_under_the_same_keys(world_size: int) -> None:
    run = make_run(world_size)
    done = copy(run)
    assert done.copied_bytes > 0
    assert not done.problem
    assert same_bytes(run)
    assert steps_of(run.target) == [10, 11]
    assert not verify_run(run.target).listed
    assert copy(run).copied_bytes == 0


@pytest.mark.parametrize("kind", ["kill", "torn"])
def test_a_process_that_dies_at_any_call_leaves_no_half_checkpoint_and_the_next_goes_on(kind: Any) -> None:
    whole = make_run(2)
    counted = FaultStore(whole.target)
    copy(whole, counted)
    calls_count = len(counted.log)
    assert calls_count > 15
    seen = set()
    for at in range(1, calls_count + 1):
        run = make_run(2) if at == 1 else _fresh(whole)
        off = [Fault(kind="io_error", when=lambda call, at=at: call.number > at, times=None)]
        dying = FaultStore(run.target, [Fault(kind=kind, at_call=at), *off], die=lambda: None)
        assert copy(run, dying).problem
        assert steps_of(run.target) in ([10], [10, 11])
        seen.add(tuple(steps_of(run.target)))
        assert not verify_run(run.target).listed
        assert not copy(run).problem
        assert same_bytes(run)
    # Nothing but the commit record makes it a checkpoint, and that comes last.
    assert seen == {(10,)}


def _fresh(run: Run) -> Run:
    target = MemoryStore(name="target")
    for info in run.target.list_objects(""):
        if "step-00000011" not in info.key:
            target.put(info.key, run.target.get(info.key, limit_bytes=1 << 20))
    return Run(run.source, target, run.run_id)


def test_a_part_that_is_there_is_not_copied_again_unless_it_is_another() -> None:
    run = make_run(2)
    copy(run)
    run.target.delete([REF.key("commit.json"), REF.key("part-r00001.json")])
    log = FaultStore(run.target)
    assert copy(run, log).copied_bytes > 0
    assert {key for verb, key in log.calls if verb == "writer"} == {REF.key("model-r00001-00001.safetensors")} or all(
        "-r00001-" in key for verb, key in log.calls if verb == "writer"
    )
    run.target.delete([REF.key("commit.json")])
    part = run.target.get(REF.key("part-r00000.json"), limit_bytes=1 << 20)
    run.target.put(REF.key("part-r00000.json"), part[:-2] + b" }")
    copy(run)
    assert same_bytes(run)


@pytest.mark.parametrize("name", ["model-r00000-00001.safetensors", "part-r00000.json", "digests-r00000.bin"])
def test_a_damaged_source_is_not_committed_and_no_later_try_is_asked_for(name: str) -> None:
    run = make_run()
    data = bytearray(run.source.get(REF.key(name), limit_bytes=1 << 20))
    data[-3] ^= 1
    run.source.put(REF.key(name), bytes(data))
    done = copy(run)
    assert done.lasting
    assert name in done.problem
    assert steps_of(run.target) == [10]


def test_a_slip_of_the_transport_is_no_damage() -> None:
    run = make_run()
    flip = Fault(kind="bit_flip", when=lambda call: call.verb == "read_into", times=1)
    assert not copy(run, source=FaultStore(run.source, [flip])).problem
    assert same_bytes(run)


def test_a_place_that_fails_is_tried_again_and_a_checkpoint_that_is_gone_is_not() -> None:
    run = make_run()
    full = FaultStore(run.target, [Fault(kind="no_space", when=lambda call: call.verb == "writer")])
    done = copy(run, full)
    assert (done.lasting, bool(done.problem)) == (False, True)
    assert "no space left" in done.problem
    run.source.delete([REF.key("commit.json")])
    assert copy(run).lasting


def test_trouble_of_a_source_is_no_reason_to_give_up() -> None:
    run = make_run()
    down = FaultStore(run.source, [Fault(kind="io_error", times=None)])
    done = copy(run, source=down)
    assert (done.lasting, bool(done.problem)) == (False, True)


def test_a_pace_holds_over_threads_and_lets_the_first_bytes_pass() -> None:
    pace = Pace(1000.0)
    began_s = time.monotonic()
    run_threads(lambda at: pace.spend(50), 5)
    took_s = time.monotonic() - began_s
    assert 0.19 < took_s < 2
    Pace(None).spend(10**12)


def on_ranks(world_size: int, body: Any) -> list[Any]:
    shared = HashStore()
    with knobs.override(BARRIER_TIMEOUT_S=20.0):
        groups = [StoreGroup(shared, rank, world_size, "n") for rank in range(world_size)]

        def on_rank(rank: int) -> Any:
            try:
                return body(rank, groups[rank])
            finally:
                groups[rank].close()

        return get_all(run_threads(on_rank, world_size))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(("kind", "lasting"), [("no_space", False), ("bit_flip", True)])
def test_what_one_rank_meets_is_the_outcome_on_all(at: int, kind: Any, lasting: bool) -> None:
    run = make_run(2)
    verb = "read_into" if kind == "bit_flip" else "writer"
    fault = Fault(kind=kind, when=lambda call: call.verb == verb, times=None)

    def body(rank: int, group: Group) -> list[Promotion]:
        faulty = [fault] if rank == at else []
        source = FaultStore(run.source, faulty if lasting else [])
        target = FaultStore(run.target, [] if lasting else faulty)
        first = promote(source, target, group, REF, run_id=run.run_id, lane=Lane(Pace(None)))
        return [first, promote(run.source, run.target, group, REF, run_id=run.run_id, lane=Lane(Pace(None)))]

    found = on_ranks(2, body)
    assert all(first.problem and first.lasting == lasting for first, _ in found)
    assert found[0][0].problem == found[1][0].problem
    assert not any(second.problem for _, second in found)
    assert same_bytes(run)


def test_a_commit_record_comes_to_the_nodes_that_lack_it() -> None:
    run = make_run(2)
    nodes = [run.source, MemoryStore(name="node")]
    on_ranks(2, lambda rank, group: spread_record(nodes[rank], group, REF))
    key = REF.key("commit.json")
    assert nodes[1].get(key, limit_bytes=1 << 20) == run.source.get(key, limit_bytes=1 << 20)
    full = FaultStore(MemoryStore(), [Fault(kind="no_space", when=lambda call: call.verb == "put")])

    def body(rank: int, group: Group) -> str:
        with pytest.raises(StorageError) as caught:
            spread_record([run.source, full][rank], group, REF)
        return caught.value.message

    assert "no space left" in on_ranks(2, body)[0]


@pytest.mark.parametrize(
    ("errors", "goes_on"),
    [
        ([StorageError("x", retryable=True), OutOfSpace("y")], True),
        ([OutOfSpace("x"), PeerFailure("y", causes={0: "x"}, exit_codes={0: 30})], True),
        ([OutOfSpace("x"), StateChanged("y")], False),
        ([PeerFailure("y", causes={1: "x"}, exit_codes={}), OutOfSpace("x")], False),
    ],
)
def test_a_save_goes_on_elsewhere_on_all_ranks_or_on_none(errors: list[CheckpointError], goes_on: bool) -> None:
    assert on_ranks(2, lambda rank, group: may_pass_over(group, errors[rank])) == [goes_on, goes_on]


def test_a_half_copy_that_is_waited_for_is_not_swept() -> None:
    run = make_run(2)
    half = FaultStore(run.target, [Fault(kind="io_error", when=lambda call: "part-r00001" in call.key, times=None)])
    assert copy(run, half).problem
    from shardkeep.engine.memory import RunMemory

    memory = RunMemory(run.target, run_id=run.run_id, generation=1)
    found = memory.plan(Keep(), settled=11, waiting=frozenset([REF]))
    assert found is not None
    assert found[1].all == ()
    found = memory.plan(Keep(), settled=11)
    assert found is not None
    assert found[1].orphans == (REF,)
    assert list_step_folders(run.target, 1)
    assert run.target.head(RUN_RECORD)
