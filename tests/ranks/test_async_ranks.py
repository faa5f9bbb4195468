"""Saving while real ranks go on training: exact under every layout, alike on all ranks, and no rank waits in vain."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep.engine.run import scan_run
from shardkeep.engine.verify import verify_run
from shardkeep.errors import CheckpointError, PeerFailure, StorageError
from shardkeep.state.overlap import WatchedBytes
from shardkeep.storage.posix import PosixStore
from shardkeep.testing.faults import Call, Fault, FaultStore
from tests.support.held import Held, Sink
from tests.support.ranks import mark, run_ranks, start_ranks
from tests.support.training import Arrays, Step, build, find_differences, gather, step_once, to_array, train

ENV = {"SHARDKEEP_PEER_SILENCE_S": "1", "SHARDKEEP_RETRY_BASE_S": "0", "SHARDKEEP_BARRIER_TIMEOUT_S": "40"}
slow = pytest.mark.slow
CASES = [
    pytest.param("ddp", 2, marks=slow),
    ("fsdp", 2),
    pytest.param("fsdp", 4, marks=slow),
    pytest.param("tp", 2, marks=slow),
    pytest.param("fsdp_tp", 4, marks=slow),
    pytest.param("hsdp", 4, marks=slow),
    pytest.param("ddp", 3, marks=slow),
]


def steps_of(root: str) -> list[int]:
    view = scan_run(PosixStore(root))
    return [ref.step for ref in view.timeline] if view is not None else []


def slow_copies(pause_s: float) -> None:
    """Copies of live tensors in the background take their time from now on, as large ones do."""
    plain = WatchedBytes.copy_out

    def copy_out(data: Any, start: int, out: memoryview) -> None:
        if threading.current_thread().name.startswith(("shardkeep-save", "shardkeep-stage")):
            time.sleep(pause_s)
        plain(data, start, out)

    WatchedBytes.copy_out = copy_out  # type: ignore[method-assign]  # a process of this test's own


def batch() -> Any:
    return torch.randn(3, 5), torch.randn(3, 2)


def train_on(state: dict[str, Any]) -> None:
    """Forward and backward (all-gathers, reshards) and an evaluation while the copy goes on, then steps."""
    model = state["model"]
    model(batch()[0]).sum().backward()
    with torch.no_grad():
        model.eval()
        model(batch()[0])
        model.train()
    for buffer in model.buffers():
        buffer.add_(5)
    for _ in range(2):
        step_once(state, batch())


def save_and_go_on(rank: int, world_size: int, layout: str, root: str, mode: str) -> tuple[list[Arrays], list[str]]:
    state, sink, wanted = build(layout, world_size, rank=rank), Sink(), []
    slow_copies(0.003)
    held = Held(PosixStore(root))
    with sk.CheckpointManager(root, store=held.store, mode=mode, save_every=9, events=sink) as manager:  # type: ignore[arg-type]
        manager.resume(state)
        step_once(state, batch())
        manager.after_step(1, state)
        for step in (2, 3):
            step_once(state, batch())
            manager.wait()
            held.hold()
            wanted.append(gather(state))
            if layout == "fsdp" and step == 3:
                with torch.no_grad():
                    state["model"].eval()(batch()[0])  # FSDP2 leaves the root unsharded after it
                wanted[-1]["model/seen"] = to_array(state["model"].get_buffer("seen"))
            manager.save(step, state)
            train_on(state)
            assert step not in steps_of(root)
            held.let_go()
    return wanted, sink.names()


def load_at(rank: int, world_size: int, layout: str, root: str, step: int) -> Arrays:
    state = build(layout, world_size, rank=rank, seed=9)
    with sk.CheckpointManager(root) as manager:
        assert manager.resume(state, step=step).step == step
    return gather(state)


@pytest.mark.parametrize("mode", ["async", "overlap"])
@pytest.mark.parametrize(("layout", "world_size"), CASES)
def test_exact_under_every_layout(layout: str, world_size: int, mode: str, tmp_path: Path) -> None:
    root = str(tmp_path)
    saved = run_ranks(save_and_go_on, world_size, layout, root, mode, env=ENV)
    assert not verify_run(PosixStore(root)).listed
    for number, step in enumerate((3, 2)):
        loaded = run_ranks(load_at, world_size, layout, root, step, env=ENV)
        for rank in range(world_size):
            assert find_differences(loaded[rank], saved[rank][0][1 - number]) == []
    assert "save.not_overlapped" not in saved[0][1]
    assert "save.failed" not in saved[0][1]


def change_parameters(state: dict[str, Any], how: str) -> None:
    parameters = list(state["model"].parameters())
    with torch.no_grad():
        if how == "operation":
            for parameter in parameters:
                parameter.add_(1)
        elif how == "foreach":
            torch._foreach_add_(parameters, 1.0)
        else:
            for parameter in parameters:
                getattr(parameter, "_local_tensor", parameter).data.add_(1)


def change_on_rank_1(
    rank: int, world_size: int, root: str, layout: str, how: str
) -> tuple[str, list[str], list[bool]]:
    state, sink = build(layout, world_size, rank=rank), Sink()
    slow_copies(0.01)
    with sk.CheckpointManager(root, mode="overlap", save_every=1, events=sink) as manager:
        manager.resume(state)
        step_once(state, batch())
        begun = [manager.after_step(1, state)]
        if rank == 1:
            change_parameters(state, how)
        raised = ""
        try:
            manager.wait()
        except CheckpointError as error:
            raised = type(error).__name__
        if rank == 1:
            change_parameters(state, "data")
        for step in (2, 3):
            step_once(state, batch())
            begun.append(manager.after_step(step, state))
            if layout == "fsdp":
                change_parameters(state, how)
    return raised, sink.names(), begun


@pytest.mark.parametrize(("layout", "how"), [("fsdp", "operation"), ("fsdp", "foreach"), ("fsdp", "data")])
def test_a_change_on_one_rank_ends_the_overlap_on_all(layout: str, how: str, tmp_path: Path) -> None:
    found = run_ranks(change_on_rank_1, 2, str(tmp_path), layout, how, env=ENV)
    assert [raised for raised, _, _ in found] == ["PeerFailure", "StateChanged"]
    for _, names, begun in found:
        assert begun == [True, True, True]
        assert names.count("save.not_overlapped") == 1
        assert names.count("save.failed") == 1
    assert steps_of(str(tmp_path)) == [2, 3]
    assert not verify_run(PosixStore(str(tmp_path))).listed


def skip_alike(rank: int, world_size: int, root: str) -> tuple[list[bool], int]:
    """Rank 0 ends late (it removes old checkpoints), rank 1 early, at every save."""

    def when(call: Call) -> bool:
        return rank == 0 and call.verb == "delete" and "step-" in call.key

    store = FaultStore(PosixStore(root), [Fault(kind="delay", when=when, delay_s=0.08, times=None)])
    state, sink = build("ddp", world_size, rank=rank), Sink()
    options: dict[str, Any] = {"mode": "async", "busy": "skip", "save_every": 1, "keep": sk.Keep(last=1)}
    with sk.CheckpointManager(root, store=store, events=sink, **options) as manager:
        manager.resume(state)
        begun = []
        for step in range(1, 25):
            time.sleep(0.01 * (rank + 1))
            begun.append(manager.after_step(step, state))
    return begun, sink.names().count("save.skipped")


def test_a_busy_save_is_skipped_on_all_ranks_alike(tmp_path: Path) -> None:
    found = run_ranks(skip_alike, 2, str(tmp_path), env=ENV)
    assert found[0][0] == found[1][0]
    begun = found[0][0]
    assert 2 <= sum(begun) < 24
    assert found[0][1] == 24 - sum(begun)
    assert len(steps_of(str(tmp_path))) == 1
    assert not verify_run(PosixStore(str(tmp_path))).listed


def fail_in_the_background(rank: int, world_size: int, root: str, where: str) -> list[tuple[str, float]]:
    def when(call: Call) -> bool:
        return rank == 1 and call.verb == "writer" and "step-00000002" in call.key

    plan = [Fault(kind="no_space", when=when)] if where == "storage" else []
    state, sink, told = build("fsdp", world_size, rank=rank), Sink(), []
    store = FaultStore(PosixStore(root), plan)
    with sk.CheckpointManager(root, store=store, mode="async", events=sink) as manager:
        manager.resume(state)
        step_once(state, batch())
        for step in (1, 2, 2, 3):
            with contextlib.ExitStack() as stack:
                if where == "staging" and rank == 1 and step == 2 and "PeerFailure" not in told and len(told) == 1:
                    stack.enter_context(broken_arena())
                manager.save(step, state)
            began_s = time.monotonic()
            try:
                manager.wait()
                told.append(("saved", time.monotonic() - began_s))
            except (StorageError, PeerFailure) as error:
                told.append((type(error).__name__, time.monotonic() - began_s))
    return told


@contextlib.contextmanager
def broken_arena() -> Any:
    """The host has no memory for an arena."""
    from shardkeep.engine.arena import Arena

    def take(arena: Arena, size_bytes: int) -> memoryview:
        raise StorageError("no memory to stage")

    plain = Arena.take
    Arena.take = take  # type: ignore[method-assign]
    try:
        yield
    finally:
        Arena.take = plain  # type: ignore[method-assign]


@pytest.mark.parametrize("where", ["storage", "staging"])
def test_a_rank_that_fails_in_the_background_reaches_all_ranks_soon(where: str, tmp_path: Path) -> None:
    found = run_ranks(fail_in_the_background, 2, str(tmp_path), where, env=ENV)
    own = "OutOfSpace" if where == "storage" else "StorageError"
    assert [[name for name, _ in told] for told in found] == [
        ["saved", "PeerFailure", "saved", "saved"],
        ["saved", own, "saved", "saved"],
    ]
    assert max(seconds for told in found for _, seconds in told) < 5
    assert steps_of(str(tmp_path)) == [1, 2, 3]
    assert not verify_run(PosixStore(str(tmp_path))).listed


def die_in_the_background(rank: int, world_size: int, root: str, layout: str) -> tuple[str, float, list[str]]:
    state, sink = build(layout, world_size, rank=rank), Sink()
    held = Held(PosixStore(root))
    manager = sk.CheckpointManager(root, store=held.store, mode="async", save_every=1, tolerate=0, events=sink)
    manager.resume(state)
    for step in (1, 2):
        step_once(state, batch())
        manager.after_step(step, state)
        if step == 1:
            manager.wait()
            held.hold()
    assert held.reached.wait(10)
    mark("in flight")
    if rank == 1:
        time.sleep(60)
    time.sleep(0.5)
    held.let_go()
    began_s = time.monotonic()
    try:
        manager.after_step(3, state)
    except PeerFailure as error:
        return str(error), time.monotonic() - began_s, sink.names()
    return "", 0.0, sink.names()


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=slow)])
def test_a_rank_killed_in_flight_is_noticed_and_the_run_resumes(layout: str, tmp_path: Path) -> None:
    root = str(tmp_path)
    with start_ranks(die_in_the_background, 2, root, layout, env=ENV) as ranks:
        for rank in (0, 1):
            ranks.wait_for_mark(rank, "in flight")
        ranks.kill(1)
        outcome = ranks.collect()[0]
    text, seconds, names = outcome.value
    assert "rank 1" in text
    assert seconds < 6
    assert names.count("save.failed") == 1
    assert steps_of(root) == [1]
    loaded = run_ranks(load_at, 2, layout, root, 1, env=ENV)
    assert loaded[0].keys() == loaded[1].keys()
    assert not verify_run(PosixStore(root)).listed


def leave_without_close(rank: int, world_size: int, root: str) -> Arrays:
    state = build("ddp", world_size, rank=rank)
    held = Held(PosixStore(root))
    manager = sk.CheckpointManager(root, store=held.store, mode="overlap")
    manager.resume(state)
    step_once(state, batch())
    slow_copies(0.01)
    held.hold()
    wanted = gather(state)
    manager.save(1, state)
    threading.Timer(0.5 + 0.3 * rank, held.let_go).start()
    return wanted


@pytest.mark.parametrize("store", ["parent", "rank0"])
def test_ranks_that_leave_without_close_complete_the_save(store: Any, tmp_path: Path) -> None:
    """The process group is destroyed, the main thread ends, and with it, on rank 0, torch's store would."""
    with start_ranks(leave_without_close, 2, str(tmp_path), env=ENV, store=store) as ranks:
        wanted = ranks.results()
        began_s = time.monotonic()
        for process in ranks._processes:
            process.join(20)
        assert [process.exitcode for process in ranks._processes] == [0, 0]
        assert time.monotonic() - began_s < 6
    assert steps_of(str(tmp_path)) == [1]
    assert not verify_run(PosixStore(str(tmp_path))).listed
    loaded = run_ranks(load_at, 2, "ddp", str(tmp_path), 1, env=ENV)
    assert find_differences(loaded[0], wanted[0]) == []


def prepared(rank: int, world_size: int, root: str) -> tuple[bool, int]:
    state = build("fsdp", world_size, rank=rank)
    with sk.CheckpointManager(root, mode="async", save_every=2) as manager:
        manager.resume(state)
        for step in range(1, 5):
            step_once(state, batch())
            before = (torch.get_rng_state(), [p.grad.to_local().clone() for p in state["model"].parameters()])
            manager.after_step(step, state)
            after = (torch.get_rng_state(), [p.grad.to_local().clone() for p in state["model"].parameters()])
            assert torch.equal(before[0], after[0])
            assert all(map(torch.equal, before[1], after[1]))
        assert manager._saver is not None
        return True, manager._saver._arena.size_bytes


def test_ahead_of_the_first_save_all_ranks_make_ready(tmp_path: Path) -> None:
    found = run_ranks(prepared, 2, str(tmp_path), env=ENV)
    assert all(size > 0 for _, size in found)
    assert steps_of(str(tmp_path)) == [2, 4]


def interrupt_one(rank: int, world_size: int, root: str) -> tuple[str, float]:
    """Ctrl-C reaches one rank while it copies: the others learn of it at once, not after a timeout."""
    from shardkeep.engine import staging

    state = build("fsdp", world_size, rank=rank)
    with sk.CheckpointManager(root, mode="async") as manager:
        manager.resume(state)
        step_once(state, batch())
        manager.save(1, state)
        manager.wait()
        plain = staging.copy_tensors

        def copy_tensors(*_: Any) -> int:
            raise KeyboardInterrupt

        began_s, raised = time.monotonic(), ""
        try:
            if rank == 1:
                staging.copy_tensors = copy_tensors
            manager.save(2, state)
            manager.wait()
        except (KeyboardInterrupt, CheckpointError) as error:
            raised = type(error).__name__
        finally:
            staging.copy_tensors = plain
        seconds = time.monotonic() - began_s
        manager.save(2, state)
    return raised, seconds


def test_an_interrupt_of_one_rank_reaches_the_others(tmp_path: Path) -> None:
    found = run_ranks(interrupt_one, 2, str(tmp_path), env=ENV)
    assert [name for name, _ in found] == ["PeerFailure", "KeyboardInterrupt"]
    assert max(seconds for _, seconds in found) < 5
    assert steps_of(str(tmp_path)) == [1, 2]


# Killed in flight, resumed exactly

STEPS = 7


def train_some(
    rank: int, world_size: int, layout: str, root: str, stop: int, stall: int
) -> tuple[list[Step], Arrays]:
    """Train with a save at every second step; at step `stall` the save before is held on its way, to be killed."""
    state = build(layout, world_size, rank=rank)
    held = Held(PosixStore(root))

    def at(step: int) -> None:
        if stall and step == stall - 1:
            manager.wait()
            held.hold()
        if step == stall:
            assert held.reached.wait(10)
            mark("in flight")
            time.sleep(60)

    with sk.CheckpointManager(root, store=held.store, mode="overlap", save_every=2) as manager:
        manager.resume(state)
        log = train(state, manager, stop=stop, at=at)
        return log, gather(state)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("fsdp", 2),
        pytest.param("plain", 1, marks=slow),
        pytest.param("ddp", 2, marks=slow),
        pytest.param("ddp", 3, marks=slow),
        pytest.param("fsdp", 4, marks=slow),
        pytest.param("tp", 2, marks=slow),
    ],
)
def test_a_run_killed_in_flight_goes_on_bit_for_bit(layout: str, world_size: int, tmp_path: Path) -> None:
    straight = run_ranks(train_some, world_size, layout, str(tmp_path / "straight"), STEPS, 0, env=ENV)
    root = str(tmp_path / "killed")
    with start_ranks(train_some, world_size, layout, root, STEPS, 5, env=ENV) as ranks:
        for rank in range(world_size):
            ranks.wait_for_mark(rank, "in flight")
        for rank in range(world_size):
            ranks.kill(rank)
    assert steps_of(root) == [2]
    resumed = run_ranks(train_some, world_size, layout, root, STEPS, 0, env=ENV)
    for rank in range(world_size):
        assert resumed[rank][0] == straight[rank][0][2:]
        assert find_differences(resumed[rank][1], straight[rank][1]) == []
    assert not verify_run(PosixStore(root)).listed
