"""Signals to real ranks: whatever rank gets one, and when, all ranks save the same step and stop there."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardkeep as sk
from shardkeep.engine.run import scan_run
from shardkeep.events import Event
from shardkeep.format.names import StepRef
from shardkeep.storage.posix import PosixStore
from shardkeep.storage.resolve import open_store
from shardkeep.testing.faults import Call, Fault, FaultStore
from tests.support.ranks import mark, run_ranks, start_ranks

slow = pytest.mark.slow
QUICK = {"SHARDKEEP_NOTICE_POLL_S": "0.02", "SHARDKEEP_PEER_SILENCE_S": "20"}
FOREVER = 1_000_000


class Sink:
    """Keeps events; marks those that a test waits for."""

    def __init__(self, *marked: str) -> None:
        self.events: list[Event] = []
        self._marked = marked

    def emit(self, event: Event) -> None:
        self.events.append(event)
        if event.name in self._marked:
            mark(event.name)

    def names(self) -> list[str]:
        return [event.name for event in self.events if event.name.startswith("preempt.")]


class Data(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> int:
        return index


def make_state(rank: int, world_size: int, *, width: int = 3) -> dict[str, Any]:
    model = torch.nn.Linear(width, width)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loader = sk.ResumableLoader(Data(), global_batch_size=12, seed=0, data_rank=rank, data_size=world_size)
    return {"model": model, "loader": loader, "own": 0, "micro": 0}


def train_step(state: dict[str, Any]) -> None:
    """One step that no rank can end alone; the weights count steps."""
    gradient = torch.ones(())
    if dist.is_initialized():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter += gradient
    state["own"] += 1


def slow_store(root: str, delay_s: float) -> FaultStore:
    def is_data(call: Call) -> bool:
        return call.verb == "write_at"

    return FaultStore(open_store(root), [Fault(kind="delay", when=is_data, times=None, delay_s=delay_s)])


def check_checkpoint(root: str, step: int) -> None:
    """Whether the newest checkpoint is that step and holds that step's state on all ranks."""
    with sk.open(root) as checkpoint:
        assert checkpoint.step == step
        assert set(checkpoint["model/weight"][:].ravel().tolist()) == {float(step)}


# Many signals


def stop_often(rank: int, world_size: int, root: str, trials: int, mode: str) -> list[tuple[int, int, bool]]:
    """Train until a signal, again and again; return where each time ended, the exit code, and what it was."""
    rng = random.Random(rank)
    found = []
    for trial in range(trials):
        own_root = f"{root}/{trial}"
        with sk.CheckpointManager(own_root, save_every=7, mode=mode) as manager:  # type: ignore[arg-type]
            state = make_state(rank, world_size)
            manager.resume(state)
            for step, _ in manager.steps(state["loader"], stop=FOREVER):
                train_step(state)
                time.sleep(rng.choice((0.0, 0.0, 0.003)))
                manager.after_step(step, state)
                if step == 1:
                    mark(f"trial {trial}")
            found.append((manager.step, manager.exit_code, manager.latest() == manager.step))
    return found


def check_agreed(trials: int, mode: str, root: Path) -> None:
    rng = random.Random(trials)
    with start_ranks(stop_often, 4, str(root), trials, mode, env=QUICK) as ranks:
        for trial in range(trials):
            for rank in range(4):
                ranks.wait_for_mark(rank, f"trial {trial}")
            time.sleep(rng.uniform(0, 0.2))
            ranks.send_signal(rng.randrange(4), rng.choice((signal.SIGTERM, signal.SIGUSR1)))
        ends = ranks.results(timeout_s=60 + 5 * trials)
    assert ends == [ends[0]] * 4
    assert all(code == sk.EXIT_REQUEUE and is_newest for _, code, is_newest in ends[0])
    for trial, (step, _, _) in enumerate(ends[0]):
        check_checkpoint(f"{root}/{trial}", step)


@pytest.mark.parametrize(
    ("trials", "mode"),
    [(4, "blocking"), pytest.param(30, "blocking", marks=slow), pytest.param(30, "async", marks=slow)],
)
def test_whoever_gets_the_signal_all_ranks_save_the_same_step(trials: int, mode: str, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#21406: the handler wrote the checkpoint, in the middle of a step."""
    check_agreed(trials, mode, tmp_path)


# Where it may come


def stop_in_evaluation(rank: int, world_size: int, root: str) -> tuple[int, int, list[str]]:
    sink = Sink()
    batches = 0
    with sk.CheckpointManager(root, events=sink) as manager:
        state = make_state(rank, world_size)
        manager.resume(state)
        for step, _ in manager.steps(state["loader"], stop=FOREVER):
            train_step(state)
            manager.after_step(step, state)
            if step == 3:
                mark("evaluating")
                while not manager.should_stop:  # as `for batch in ...: if manager.should_stop: break`
                    dist.all_reduce(torch.ones(1))
                    batches += 1
        assert manager.should_stop
        assert manager.preempted
        return manager.step, batches, sink.names()


def test_a_signal_in_evaluation_ends_it_on_all_ranks_at_the_same_batch(tmp_path: Path) -> None:
    with start_ranks(stop_in_evaluation, 3, str(tmp_path), env=QUICK) as ranks:
        ranks.wait_for_mark(1, "evaluating")
        time.sleep(0.1)
        ranks.send_signal(1, signal.SIGTERM)
        ends = ranks.results()
    assert {(step, batches) for step, batches, _ in ends} == {(4, ends[0][1])}
    assert ends[0][1] > 0
    assert [names for _, _, names in ends] == [["preempt.agreed", "preempt.saved"], ["preempt.requested"], []]
    check_checkpoint(str(tmp_path), 4)


def stop_in_accumulation(rank: int, world_size: int, root: str) -> tuple[int, int]:
    """Save the window where the signal came, gradients and all, with the micro-batches of it that are done."""
    with sk.CheckpointManager(root) as manager:
        state = make_state(rank, world_size)
        state["gradients"] = sk.Gradients(state["model"])
        manager.resume(state)
        step = manager.step
        while not manager.should_stop:
            while state["micro"] < 50 and not manager.should_stop:
                state["model"](torch.ones(1, 3)).sum().backward()
                dist.all_reduce(torch.ones(1))
                state["micro"] += 1
                if step == 1 and state["micro"] == 2:
                    mark("window")
            if state["micro"] < 50:
                break
            step += 1
            train_step(state)
            state["model"].zero_grad()
            state["micro"] = 0
            manager.after_step(step, state)
        if not manager.should_stop or state["micro"]:
            manager.save(step + 1, state)
        return manager.step, state["micro"]


def test_a_signal_between_micro_batches_finds_all_ranks_at_the_same_one(tmp_path: Path) -> None:
    with start_ranks(stop_in_accumulation, 2, str(tmp_path), env=QUICK) as ranks:
        ranks.wait_for_mark(0, "window")
        time.sleep(0.03)
        ranks.send_signal(0, signal.SIGUSR1)
        ends = ranks.results()
    assert ends[0] == ends[1]
    step, micro = ends[0]
    with sk.open(str(tmp_path)) as checkpoint:
        assert checkpoint.step == step
        if micro:
            assert set(checkpoint["gradients/bias"][:].tolist()) == {float(micro)}


def stop_once(
    rank: int, world_size: int, root: str, mode: str, every: int, delay_s: float, marked: str
) -> tuple[int, int | None, list[str], int]:
    """Train until a signal, on a slow store; return the last step, the newest checkpoint, events, the exit code."""
    sink = Sink(marked)
    options: Any = {"mode": mode, "save_every": every, "events": sink, "store": slow_store(root, delay_s)}
    with sk.CheckpointManager(root, **options) as manager:
        state = make_state(rank, world_size, width=40)
        manager.resume(state)
        for step, _ in manager.steps(state["loader"], stop=FOREVER):
            train_step(state)
            manager.after_step(step, state)
            if step == 3:
                mark("going")
        assert manager.should_stop
        newest = manager.latest()
    return manager.step, newest, [name for name in sink.names() if name != "preempt.requested"], manager.exit_code


def test_two_ranks_may_be_told_at_once(tmp_path: Path) -> None:
    with start_ranks(stop_once, 4, str(tmp_path), "blocking", 1000, 0.0, "", env=QUICK) as ranks:
        ranks.wait_for_mark(1, "going")
        ranks.send_signal(1, signal.SIGTERM)
        ranks.send_signal(3, signal.SIGUSR1)
        ends = ranks.results()
    assert len({(step, newest, code) for step, newest, _, code in ends}) == 1
    assert ends[0][2] == ["preempt.agreed", "preempt.saved"]
    check_checkpoint(str(tmp_path), ends[0][0])


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_more_signals_during_the_save_harm_nothing(mode: str, tmp_path: Path) -> None:
    with start_ranks(stop_once, 2, str(tmp_path), mode, 1000, 0.3, "preempt.agreed", env=QUICK) as ranks:
        ranks.wait_for_mark(0, "going")
        ranks.send_signal(1, signal.SIGTERM)
        ranks.wait_for_mark(0, "preempt.agreed")
        for _ in range(20):
            for rank in (0, 1):
                ranks.send_signal(rank, signal.SIGTERM)
            time.sleep(0.01)
        ends = ranks.results()
    assert [(step, newest, code) for step, newest, _, code in ends] == [(ends[0][0], ends[0][0], 75)] * 2
    assert ends[0][2] == ["preempt.agreed", "preempt.saved"]
    check_checkpoint(str(tmp_path), ends[0][0])


@pytest.mark.parametrize("mode", ["async", "overlap"])
def test_a_signal_while_a_save_is_under_way(mode: str, tmp_path: Path) -> None:
    with start_ranks(stop_once, 2, str(tmp_path), mode, 2, 0.2, "", env=QUICK) as ranks:
        ranks.wait_for_mark(0, "going")
        ranks.send_signal(0, signal.SIGTERM)
        ends = ranks.results()
    assert len({(step, newest) for step, newest, _, _ in ends}) == 1
    assert ends[0][0] == ends[0][1]
    check_checkpoint(str(tmp_path), ends[0][0])


def save_by_oneself(rank: int, world_size: int, root: str) -> int:
    """The program saves the very step where it is told to stop: once is enough."""
    with sk.CheckpointManager(root) as manager:
        state = make_state(rank, world_size)
        manager.resume(state)
        for step, _ in manager.steps(state["loader"], stop=FOREVER):
            train_step(state)
            manager.save(step, state)
            manager.after_step(step, state)
            if step == 2:
                mark("going")
        return manager.step


def test_a_step_that_the_program_saved_is_not_saved_again(tmp_path: Path) -> None:
    with start_ranks(save_by_oneself, 2, str(tmp_path), env=QUICK) as ranks:
        ranks.wait_for_mark(0, "going")
        ranks.send_signal(0, signal.SIGTERM)
        first, second = ranks.results()
    assert first == second
    check_checkpoint(str(tmp_path), first)


def fail_first(rank: int, world_size: int, root: str) -> tuple[int, list[str]]:
    """The store is full at the step of the signal and has room again at the next."""
    sink = Sink()
    full = Fault(kind="no_space", when=lambda call: call.verb == "write_at", times=1)
    with sk.CheckpointManager(root, events=sink, store=FaultStore(open_store(root), [full])) as manager:
        state = make_state(rank, world_size)
        manager.resume(state)
        for step, _ in manager.steps(state["loader"], stop=FOREVER):
            train_step(state)
            if step == 2 and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            manager.after_step(step, state)
        return manager.step, [event.name for event in sink.events if event.name in ("save.failed", "preempt.saved")]


def test_a_save_that_fails_is_tried_again_at_the_next_step(tmp_path: Path) -> None:
    (step, names), (other, _) = run_ranks(fail_first, 2, str(tmp_path), env=QUICK)
    assert step == other
    assert names == ["save.failed", "preempt.saved"]
    check_checkpoint(str(tmp_path), step)


# Ranks that are gone


def tick_beside_a_dead_rank(rank: int, world_size: int, root: str) -> tuple[str, float]:
    with sk.CheckpointManager(root) as manager:
        state = make_state(rank, world_size)
        manager.resume(state)
        assert not manager.should_stop
        mark("going")
        began_s = time.monotonic()
        try:
            while not manager.should_stop:
                time.sleep(0.01)
        except sk.BarrierTimeout as error:
            return str(error), time.monotonic() - began_s
    return "", 0.0


def test_a_dead_rank_is_named_in_bounded_time(tmp_path: Path) -> None:
    env = {**QUICK, "SHARDKEEP_PEER_SILENCE_S": "1"}
    with start_ranks(tick_beside_a_dead_rank, 3, str(tmp_path), env=env) as ranks:
        for rank in range(3):
            ranks.wait_for_mark(rank, "going")
        ranks.kill(2)
        ranks.send_signal(1, signal.SIGTERM)
        first, second, dead = ranks.collect(timeout_s=30)
    assert dead.exit_code == -signal.SIGKILL
    for outcome in (first, second):
        assert outcome.is_ok, outcome.trace
        text, seconds = outcome.value
        assert "rank 2 did not answer" in text
        assert seconds < 10


# The clock


def save_by_the_clock(
    rank: int, world_size: int, root: str, tier_url: str | None, every_s: float, run_s: float
) -> tuple[list[int], int, list[int]]:
    """Return the steps that this rank took for saved, the exit code, and the steps that are in the tier."""
    saved = []
    tiers = [sk.Tier(tier_url, every=sk.Minutes(0.15 / 60), keep=100, scope="shared")] if tier_url else []
    with sk.CheckpointManager(
        root, save_every=sk.Minutes(every_s / 60), keep=sk.Keep(last=3 if tiers else 1), tiers=tiers
    ) as manager:
        state = make_state(rank, world_size)
        manager.resume(state)
        began_s = time.monotonic()
        stop = torch.zeros(1)
        for step, _ in manager.steps(state["loader"], stop=FOREVER):
            train_step(state)
            time.sleep(0.002 * rank)
            if manager.after_step(step, state):
                saved.append(step)
            stop.fill_(float(rank == 1 and time.monotonic() - began_s > run_s))
            dist.all_reduce(stop)
            if stop.item():
                break
    return saved, manager.exit_code, [ref.step for ref in list_steps(tier_url)] if tier_url else []


def test_saves_by_the_clock_are_of_the_same_steps(tmp_path: Path) -> None:
    ends = run_ranks(save_by_the_clock, 3, str(tmp_path), None, 0.2, 1.5, env=QUICK)
    assert ends == [ends[0]] * 3
    saved, code, _ = ends[0]
    assert code == 0
    assert 3 <= len(saved) <= 8
    check_checkpoint(str(tmp_path), saved[-1])


def test_a_tier_by_the_clock_takes_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    ends = run_ranks(save_by_the_clock, 3, str(tmp_path / "run"), str(tmp_path / "ram"), 0.6, 2.0, env=QUICK)
    assert ends == [ends[0]] * 3
    saved, _, in_tier = ends[0]
    assert in_tier == saved
    assert len(saved) >= 4
    in_root = [ref.step for ref in list_steps(str(tmp_path / "run"))]
    assert in_root
    assert set(in_root) < set(saved)


def list_steps(url: str) -> tuple[StepRef, ...]:
    view = scan_run(PosixStore(url))
    assert view is not None
    return view.timeline


# Without ranks, and under torchrun

SCRIPT = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
import shardkeep as sk
from tests.ranks.test_preempt_ranks import make_state, train_step

if "RANK" in os.environ:
    # A restart may meet gloo addresses of the start before in torchrun's store, and gloo then waits for nobody.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
root, folder, stop = sys.argv[1], sys.argv[2], int(sys.argv[3])
manager = sk.CheckpointManager(root, save_every=1000, preemption=sk.Preemption(grace_s=20))
state = make_state(rank, world_size)
report = manager.resume(state)
print(f"a world of {world_size}", flush=True)
print(f"rank {rank} begins at {report.step}", flush=True)
for step, _ in manager.steps(state["loader"], stop=stop):
    train_step(state)
    time.sleep(0.005)
    manager.after_step(step, state)
    if step == 2 or step == report.step + 2:
        open(f"{folder}/going-{rank}-{os.getpid()}", "w").close()
print(f"rank {rank} ends at {manager.step}", flush=True)
manager.close()
if dist.is_initialized():
    dist.destroy_process_group()
sys.exit(manager.exit_code)
"""


def begin(command: list[str], tmp_path: Path, *, stop: int = 200) -> subprocess.Popen[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {
        **os.environ,
        **QUICK,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # shared, it keeps newcomers out and gloo meets old addresses
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
    }
    (tmp_path / "notes").mkdir(exist_ok=True)
    arguments = [str(tmp_path / "train.py"), str(tmp_path / "run"), str(tmp_path / "notes"), str(stop)]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )


def wait_for_notes(tmp_path: Path, count: int, process: subprocess.Popen[str]) -> list[int]:
    """Wait until so many ranks are at work; return their process ids."""
    until_s = time.monotonic() + 60
    while len(found := sorted((tmp_path / "notes").iterdir())) < count:
        if process.poll() is not None or time.monotonic() > until_s:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(process.communicate()[0])
        time.sleep(0.02)
    return [int(path.name.split("-")[2]) for path in found]


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(process.communicate()[0]) from None
    return process.returncode, output


def test_the_same_command_line_goes_on_in_one_process(tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#20347: the first start failed for lack of a checkpoint, the next ignored it."""
    steps = []
    for start in range(3):
        process = begin([sys.executable], tmp_path)
        wait_for_notes(tmp_path, start + 1, process)
        if start < 2:
            process.send_signal(signal.SIGTERM if start == 0 else signal.SIGUSR1)
        code, output = end(process)
        assert code == (sk.EXIT_REQUEUE if start < 2 else 0), output
        assert f"rank 0 begins at {steps[-1] if steps else 0}" in output
        steps.append(int(output.rpartition("ends at ")[2].split()[0]))
    assert steps == sorted(set(steps))
    assert steps[-1] == 200


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@slow
def test_torchrun_starts_again_what_a_signal_to_one_worker_ended(tmp_path: Path) -> None:
    """The exit code is a failure to torchrun, and the workers that it starts again go on."""
    process = begin([*TORCHRUN, "--max-restarts=6"], tmp_path)
    pids = wait_for_notes(tmp_path, 2, process)
    os.kill(pids[1], signal.SIGTERM)
    code, output = end(process)
    assert code == 0, output
    steps = {int(line.split()[-1]) for line in output.splitlines() if "ends at" in line}
    assert max(steps) == 200
    assert len(steps) == 2, output  # both ranks ended at the same step, then at the last
    assert output.count(f"begins at {min(steps)}") >= 2, output


@slow
def test_torchrun_hands_on_the_signal_that_it_gets_itself(tmp_path: Path) -> None:
    process = begin([*TORCHRUN, "--max-restarts=3"], tmp_path)
    wait_for_notes(tmp_path, 2, process)
    process.send_signal(signal.SIGTERM)
    code, output = end(process)
    assert code != 0
    steps = {int(line.split()[-1]) for line in output.splitlines() if "ends at" in line}
    assert len(steps) == 1, output
    check_checkpoint(str(tmp_path / "run"), steps.pop())


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@slow
def test_the_world_grows_and_shrinks_under_torchrun_without_losing_a_step(tmp_path: Path) -> None:
    """`--nnodes=1:2`: when a node joins or leaves, torchrun ends the workers by SIGTERM and starts them again."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=9",
    ]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{find_port()}", "--rdzv-id=run"]
    command += [*rendezvous, "--rdzv-conf=last_call_timeout=1", "--local-addr=127.0.0.1"]
    first = begin(command, tmp_path, stop=6000)
    wait_for_notes(tmp_path, 1, first)
    second = begin(command, tmp_path, stop=6000)
    wait_for_notes(tmp_path, 3, first)  # two more: both ranks of the world of two
    second.send_signal(signal.SIGTERM)
    _, left = end(second)
    wait_for_notes(tmp_path, 4, first)
    first.send_signal(signal.SIGTERM)
    _, stayed = end(first)
    begins = [int(line.split()[-1]) for line in stayed.splitlines() if line.startswith("rank 0 begins at")]
    ends = [int(line.split()[-1]) for line in (stayed + left).splitlines() if line.startswith("rank 0 ends at")]
    assert begins[0] == 0
    assert sorted(begins) == begins
    assert set(begins[1:]) <= set(ends), stayed + left  # each went on where the one before had ended
    assert {1, 2} <= {int(line.split()[-1]) for line in stayed.splitlines() if "world of" in line}
    check_checkpoint(str(tmp_path / "run"), max(ends))
