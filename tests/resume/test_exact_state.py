"""One process: a save leaves no trace, a resume gives back every stream, schedule, scaler, average and counter."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import shardkeep as sk
from shardkeep.engine.save import SaveOptions, Saver
from shardkeep.events import LogSink
from shardkeep.manager.resume import claim_next
from shardkeep.ranks.single import SingleGroup
from shardkeep.spec.tensors import Captured
from shardkeep.state.capture import capture
from shardkeep.storage.resolve import open_store
from tests.support.training import build, digest_live, find_differences, gather, step_once, to_array


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    """Give the process its random streams back."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def disturb() -> None:
    """Do what a new process would have done to the streams: anything."""
    torch.manual_seed(random.randrange(1 << 30))
    random.seed(17)
    np.random.seed(18)


# No trace


@pytest.mark.parametrize("failing", [False, True])
def test_a_save_leaves_no_trace(failing: bool, tmp_path: Path) -> None:
    """Also one that fails, and also in evaluation mode, with gradients in place."""
    state = build("plain", 1)
    with sk.CheckpointManager(tmp_path) as manager:
        manager.resume(state)
        for step in range(1, 4):
            step_once(state, next(iter(state["loader"])))
            state["model"].blocks[0].eval()
            state["model"].head.requires_grad_(step % 2 == 0)
            before = digest_live(state)
            if failing:
                with pytest.raises(sk.UnsupportedState):
                    manager.save(step, {**state, "zz": object()})
            else:
                manager.save(step, state)
            after = digest_live(state)
            assert [name for name in before if before[name] != after[name]] == []


# Random streams


class Noisy(Dataset[torch.Tensor]):
    """Augments with all three streams when a sample is fetched."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


def make_noisy() -> dict[str, Any]:
    return {"loader": sk.ResumableLoader(Noisy(), global_batch_size=2, seed=3), "log": []}


@pytest.mark.parametrize("cut", range(13))
def test_all_draws_are_equal_whatever_the_step_of_the_resume(cut: int, tmp_path: Path) -> None:
    """huggingface/transformers#46628: the fetch after the restore had moved the streams already."""
    stop = 14
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)
    state = make_noisy()
    straight: list[list[list[float]]] = []
    with sk.CheckpointManager(tmp_path) as manager:
        manager.resume(state)
        if cut == 0:
            manager.save(0, state)
        for step, batch in manager.steps(state["loader"], stop=stop):
            straight.append([*batch.tolist(), [random.random(), float(np.random.rand()), float(torch.rand(()))]])
            if step == cut:
                manager.save(step, state)
    disturb()
    state = make_noisy()
    with sk.CheckpointManager(tmp_path) as manager:
        assert manager.resume(state).step == cut
        again = [
            [*batch.tolist(), [random.random(), float(np.random.rand()), float(torch.rand(()))]]
            for _, batch in manager.steps(state["loader"], stop=stop)
        ]
    assert again == straight[cut:]


def save_damaged(root: Path, state: dict[str, Any]) -> None:
    """Save a whole, sound checkpoint whose NumPy stream is nonsense."""

    def damaged() -> Captured:
        taken = capture(state)
        rng = {**taken.values["rng"], "numpy": {"bit_generator": "MT19937", "state": {"key": [1, 2], "pos": 3}}}
        return dataclasses.replace(taken, values={**taken.values, "rng": rng})

    store, group = open_store(root), SingleGroup()
    claim = claim_next(store, group, LogSink(), fresh=True, step=None)
    Saver(store, group, run_id=claim.run_id, generation=claim.generation).save(1, damaged, SaveOptions())


def test_a_stream_that_cannot_be_restored_is_named(tmp_path: Path) -> None:
    """huggingface/accelerate#4283: the error was swallowed, and the run went another way without a sign."""
    state = {"w": torch.ones(2), "generator": torch.Generator()}
    save_damaged(tmp_path, state)
    live = {"w": torch.zeros(2), "generator": torch.Generator()}
    streams = random.getstate(), torch.get_rng_state()
    with (
        sk.CheckpointManager(tmp_path) as manager,
        pytest.raises(sk.StateMismatch, match=r"rng/numpy"),
    ):
        manager.resume(live)
    assert live["w"].tolist() == [0.0, 0.0]
    assert random.getstate() == streams[0]
    assert torch.equal(torch.get_rng_state(), streams[1])
    sk.load(tmp_path, live, strict=False)
    assert live["w"].tolist() == [1.0, 1.0]


# Schedules


@pytest.mark.parametrize("names", [("a_schedule", "z_optimizer"), ("z_schedule", "a_optimizer")])
@pytest.mark.parametrize("late", [False, True])
def test_the_rate_is_the_saved_one(names: tuple[str, str], late: bool, tmp_path: Path) -> None:
    """pytorch/torchtitan#4598: in either order, and with the schedule built after the restore."""
    schedule, optimizer = names

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, adam, torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=1.0, total_steps=20)

    def rates(model: nn.Module, adam: Any, cycle: Any, steps: int) -> list[Any]:
        found = []
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            adam.step()
            cycle.step()
            group = adam.param_groups[0]
            found.append((group["lr"], group["betas"], cycle.get_last_lr()))
        return found

    model, adam, cycle = make()
    rates(model, adam, cycle, 5)
    sk.save(tmp_path, {"model": model, optimizer: adam, schedule: cycle})
    lr = adam.param_groups[0]["lr"]
    wanted = rates(model, adam, cycle, 10)

    model, adam, cycle = make()
    if late:
        # Its constructor takes a step, and its load_state_dict knows nothing of the optimizer.
        sk.load(tmp_path, {"model": model, optimizer: adam}, strict=False)
        cycle = torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=1.0, total_steps=20)
    sk.load(tmp_path, {"model": model, optimizer: adam, schedule: cycle})
    assert adam.param_groups[0]["lr"] == lr
    assert rates(model, adam, cycle, 10) == wanted


class CountingScaler(torch.amp.GradScaler):
    """Counts the calls that change it."""

    calls = 0

    def step(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return super().step(*args, **options)

    def update(self, *args: Any) -> None:
        self.calls += 1
        super().update(*args)


class CountingSGD(torch.optim.SGD):
    calls = 0

    def step(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return super().step(*args, **options)


def test_a_scaler_is_exact_and_nothing_steps(tmp_path: Path) -> None:
    """huggingface/accelerate#4289: a dummy step of the optimizer ran the scaler."""

    def make() -> tuple[nn.Module, CountingSGD, CountingScaler]:
        model = nn.Linear(2, 1)
        scaler = CountingScaler("cpu", init_scale=1024.0, growth_interval=4)
        return model, CountingSGD(model.parameters(), lr=0.1, momentum=0.9), scaler

    def train(model: nn.Module, sgd: Any, scaler: CountingScaler, steps: int) -> list[tuple[float, int]]:
        found = []
        for step in range(steps):
            sgd.zero_grad()
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
            scaler.step(sgd)
            scaler.update()
            found.append((scaler.get_scale(), scaler._get_growth_tracker()))
        return found

    model, sgd, scaler = make()
    assert train(model, sgd, scaler, 4)[-1] == (512.0, 2)
    sk.save(tmp_path, {"model": model, "optimizer": sgd, "scaler": scaler})
    wanted = train(model, sgd, scaler, 4)
    model, sgd, scaler = make()
    sk.load(tmp_path, {"model": model, "optimizer": sgd, "scaler": scaler})
    assert (scaler.calls, sgd.calls) == (0, 0)
    assert train(model, sgd, scaler, 4) == wanted


# Averages and counters


def swap(one: nn.Module, other: nn.Module) -> None:
    with torch.no_grad():
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)


@pytest.mark.parametrize("swapped", [False, True])
def test_averaged_weights_are_a_set_of_their_own(swapped: bool, tmp_path: Path) -> None:
    """atomistic-machine-learning/schnetpack#785: a save amid an evaluation kept only the average."""

    def make(seed: int) -> tuple[dict[str, Any], AveragedModel]:
        state = build("plain", 1, seed=seed)
        ema = AveragedModel(state["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return {**state, "ema": ema}, ema

    state, ema = make(0)
    for _ in range(3):
        step_once(state, next(iter(state["loader"])))
        ema.update_parameters(state["model"])
    raw, average = gather(state), gather({"model": ema})
    assert find_differences(raw, average)
    if swapped:
        swap(state["model"], ema.module)
    sk.save(tmp_path, state)
    state, ema = make(1)
    sk.load(tmp_path, state)
    if swapped:
        swap(state["model"], ema.module)
    assert find_differences(gather(state), raw) == []
    assert find_differences(gather({"model": ema}), average) == []
    assert to_array(ema.n_averaged) == 3


class Patience:
    """Stops when the loss has not improved for three evaluations."""

    def __init__(self) -> None:
        self.best, self.waited = float("inf"), 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]

    def is_over(self, loss: float) -> bool:
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        return self.waited >= 3


def test_patience_counts_over_restarts(tmp_path: Path) -> None:
    """huggingface/transformers#28544: every restart began to count anew, so that the stop never came."""
    losses = [5.0, 4.0, float("nan"), 3.0, 3.5, 3.1, 3.2, 2.0, 9.0, 9.0, 9.0, 1.0]
    patience = Patience()
    straight = next(step for step, loss in enumerate(losses) if patience.is_over(loss))
    step = 0
    while True:
        live = Patience()
        with sk.CheckpointManager(tmp_path) as manager:
            step = manager.resume({"patience": live}).step
            is_over = live.is_over(losses[step])
            manager.save(step + 1, {"patience": live})
        if is_over:
            break
    assert step == straight == 6
