"""Putting a state back: everything compared first, then one fixed order, RNG last."""

from __future__ import annotations

import copy
import types
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardkeep.errors import StateMismatch
from shardkeep.state.restore import plan_restore
from shardkeep.state.wrappers import PerRank, Sharded
from tests.support.roundtrip import Saved, load, make_catalog, merge, save
from tests.unit.state.test_optimizers import assert_same, make_net, train


class Halving:
    """A schedule with a state of its own."""

    def __init__(self) -> None:
        self.pace = 0.5

    def __call__(self, epoch: int) -> float:
        return float(self.pace**epoch)


SCHEDULERS: dict[str, Any] = {
    "step": lambda o: schedulers.StepLR(o, 2, gamma=0.3),
    "multistep": lambda o: schedulers.MultiStepLR(o, [1, 3], gamma=0.3),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 7),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "onecycle": lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=9, cycle_momentum=False),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, step_size_up=3, cycle_momentum=False),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "callable": lambda o: schedulers.LambdaLR(o, Halving()),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.8)], milestones=[2]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
}


def build(kind: str, *, late: bool = False) -> dict[str, Any]:
    net = make_net(seed=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    state = {"model": net, "optimizer": optimizer}
    return state if late else {**state, "scheduler": SCHEDULERS[kind](optimizer)}


@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
def test_schedules_go_on(kind: str) -> None:
    """SCHED-2, pytorch/torchtitan#4598: lr in the groups and last_lr equal the straight run after each step."""
    straight = build(kind)
    train(straight["model"], straight["optimizer"], range(5), straight["scheduler"])
    state = build(kind)
    train(state["model"], state["optimizer"], range(2), state["scheduler"])
    saved = save(state)
    state = build(kind)
    train(state["model"], state["optimizer"], range(4), state["scheduler"])  # a stale state, further on
    load(saved, state)
    train(state["model"], state["optimizer"], range(2, 5), state["scheduler"])
    assert_same(straight["optimizer"].state_dict(), state["optimizer"].state_dict())
    assert straight["scheduler"].get_last_lr() == state["scheduler"].get_last_lr()
    assert_same(list(straight["model"].parameters()), list(state["model"].parameters()))


def test_plateau() -> None:
    def make(metrics: list[float], saved: Saved | None = None) -> tuple[dict[str, Any], Saved]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        state = {"m": net, "o": optimizer, "s": schedulers.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)}
        if saved is not None:
            load(saved, state)
        for value in metrics:
            state["s"].step(value)
        return state, save(state)

    straight, _ = make([3.0, 3.0, 3.0, 3.0, 2.0, 3.0, 3.0])
    _, half = make([3.0, 3.0])
    state, _ = make([3.0, 3.0, 2.0, 3.0, 3.0], half)
    assert state["o"].param_groups[0]["lr"] == straight["o"].param_groups[0]["lr"] < 1.0
    assert state["s"].state_dict() == straight["s"].state_dict()


class Meddler:
    """Sets the learning rate while it is restored."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(123.0)
            else:
                group["lr"] = 123.0


@pytest.mark.parametrize("name", ["a", "z"])
@pytest.mark.parametrize("tensor", [False, True])
def test_lr_is_the_saved_one_whatever_the_order(name: str, tensor: bool) -> None:
    """SCHED-2: an object that changes the lr while it loads, before and after the optimizer by name."""

    def state(rate: float) -> dict[str, Any]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(rate) if tensor else rate)
        return {"m": net, "opt": optimizer, name: Meddler(optimizer)}

    saved = save(state(0.25))
    live = state(0.5)
    lines = load(saved, live)
    assert float(live["opt"].param_groups[0]["lr"]) == 0.25
    assert any("another object changed lr of group 0" in line for line in lines)


def test_scheduler_built_after_the_restore() -> None:
    """SCHED-1 and SCHED-2: `initial_lr` is there, so a scheduler can go on from the last epoch."""
    straight = build("cosine")
    train(straight["model"], straight["optimizer"], range(5), straight["scheduler"])
    state = build("cosine")
    train(state["model"], state["optimizer"], range(2), state["scheduler"])
    saved = save({"model": state["model"], "optimizer": state["optimizer"]})
    state = build("cosine", late=True)
    load(saved, state)
    scheduler = schedulers.CosineAnnealingLR(state["optimizer"], 7, last_epoch=2)
    assert scheduler.base_lrs == [0.05]
    train(state["model"], state["optimizer"], range(3), None)
    assert state["optimizer"].param_groups[0]["initial_lr"] == 0.05


class CountingScaler:
    """Like a gradient scaler; counts what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.scale, self.tracker = 65536.0, 0

    def step(self, _optimizer: Any) -> None:
        self.calls.append("step")

    def update(self) -> None:
        self.calls.append("update")

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "_growth_tracker": self.tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.tracker = state["scale"], state["_growth_tracker"]


def test_scaler_is_exact_and_never_called() -> None:
    """SCHED-4, huggingface/accelerate#4289."""
    scaler, real = CountingScaler(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale, scaler.tracker = 0.1 + 0.2, 17
    real.load_state_dict({**real.state_dict(), "scale": 512.0, "_growth_tracker": 5})
    saved = save({"scaler": scaler, "real": real})
    state = {"scaler": CountingScaler(), "real": torch.amp.GradScaler("cpu")}
    load(saved, state)
    assert state["scaler"].calls == []
    assert (state["scaler"].scale, state["scaler"].tracker) == (0.1 + 0.2, 17)
    assert_same(real.state_dict(), state["real"].state_dict())


class Patience:
    """Stops after three evaluations without a better value."""

    def __init__(self) -> None:
        self.best, self.bad = float("inf"), 0

    def see(self, value: float) -> bool:
        self.best, self.bad = (value, 0) if value < self.best else (self.best, self.bad + 1)
        return self.bad >= 3

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_early_stopping_across_restarts() -> None:
    """SCHED-6, huggingface/transformers#28544: a restart after every evaluation stops at the same step."""
    losses = [3.0, 2.0, 2.5, 2.6, 2.1, 1.0, 1.5]
    whole = Patience()
    stop = next(i for i, loss in enumerate(losses) if whole.see(loss))
    counter = Patience()
    for index, loss in enumerate(losses):
        stopped = counter.see(loss)
        assert stopped == (index == stop)
        if stopped:
            break
        saved = save({"counter": counter})
        counter = Patience()
        load(saved, {"counter": counter})


def test_ema_is_a_set_of_its_own() -> None:
    """SCHED-5, atomistic-machine-learning/schnetpack#785: raw and averaged weights both return."""

    def make() -> dict[str, Any]:
        net = make_net(seed=4)
        ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return {"model": net, "ema": ema, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}

    state = make()
    for step in range(3):
        train(state["model"], state["optimizer"], range(step, step + 1))
        state["ema"].update_parameters(state["model"])
    saved = save(state)
    other = make()
    load(saved, other)
    assert_same(dict(state["ema"].state_dict()), dict(other["ema"].state_dict()))
    assert_same(dict(state["model"].state_dict()), dict(other["model"].state_dict()))
    assert not torch.equal(other["model"][0].weight, other["ema"].module[0].weight)


def test_plain_values() -> None:
    history, queue, table = [1, 2], deque([1], maxlen=3), {"a": 1}
    tensor = torch.arange(3.0)
    saved = save({"step": 7, "history": [1, 2], "queue": queue, "table": table, "t": tensor, "none": None, "s": {4}})
    live_list, live_queue, live_table, live_tensor = [9], deque([8], maxlen=3), {"b": 2}, torch.zeros(3)
    live_set = {1}
    state: dict[str, Any] = {"step": 0, "history": live_list, "queue": live_queue, "table": live_table}
    state |= {"t": live_tensor, "none": 5, "s": live_set}
    load(saved, state)
    assert (state["step"], state["none"]) == (7, None)
    assert state["history"] is live_list
    assert state["queue"] is live_queue
    assert state["table"] is live_table
    assert state["t"] is live_tensor
    assert (live_list, list(live_queue), live_table, live_set) == (history, [1], {"a": 1}, {4})
    assert torch.equal(live_tensor, tensor)


def test_tensors_in_plain_values_are_filled_in_place_or_replaced() -> None:
    saved = save({"box": {"same": torch.ones(2), "grown": torch.ones(3), "deep": [torch.full((), 2.0)]}})
    same, grown = torch.zeros(2), torch.zeros(1)
    state = {"box": {"same": same, "grown": grown}}
    load(saved, state)
    assert state["box"]["same"] is same
    assert torch.equal(same, torch.ones(2))
    assert torch.equal(grown, torch.zeros(1))
    assert torch.equal(state["box"]["grown"], torch.ones(3))
    assert state["box"]["deep"][0].item() == 2.0


def test_plain_values_in_what_cannot_be_changed() -> None:
    saved = save({"step": 1, "pair": (Patience(), 3)})
    with pytest.raises(StateMismatch, match="step: a int in a mappingproxy") as caught:
        load(saved, types.MappingProxyType({"step": 0, "pair": (Patience(), 0)}))
    assert any(problem.startswith("pair/1: a int in a tuple") for problem in caught.value.problems)


def test_differences_are_all_listed_and_nothing_is_touched() -> None:
    net = make_net()
    saved = save(
        {"model": net, "optimizer": torch.optim.Adam(net.parameters()), "gone": Patience(), "t": torch.ones(2)}
    )
    other = nn.Sequential(nn.Linear(4, 6), nn.Linear(5, 5).double(), nn.Linear(5, 3), nn.Linear(1, 1))
    optimizer = torch.optim.Adam(other.parameters())
    state = {"model": other, "optimizer": optimizer, "novel": Patience(), "t": torch.zeros(2, dtype=torch.int32)}
    before, streams = copy.deepcopy(other.state_dict()), torch.get_rng_state()
    with pytest.raises(StateMismatch) as caught:
        load(saved, state, cast=True)
    text = str(caught.value)
    for expected in (
        "model/0.weight: shape (5, 4) stored, (6, 4) live",
        "model/3.weight: in the state, not in the checkpoint",
        "optimizer/param/3.weight: in the state, not in the checkpoint",
        "novel: in the state, not in the checkpoint",
        "gone: unread value",
        "t: dtype float32 stored, int32 live; it cannot be converted",
    ):
        assert expected in text
    assert "model/1.weight" not in text  # cast was asked for
    assert_same(dict(before), dict(other.state_dict()))
    assert torch.equal(streams, torch.get_rng_state())


def test_dtype_without_cast_and_with() -> None:
    """FMT-8, pytorch/pytorch#187138: a typed error, or exact rounding that is reported."""
    net = make_net(seed=9)
    saved = save({"model": net})
    other = make_net().bfloat16()
    with pytest.raises(StateMismatch, match=r"model/0\.weight: dtype float32 stored, bfloat16 live; pass cast=True"):
        load(saved, {"model": other})
    lines = load(saved, {"model": other}, cast=True)
    assert "model/0.weight: rounded from float32 to bfloat16" in lines
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_relaxed_restore_keeps_what_is_missing() -> None:
    saved = save({"model": make_net()})
    patience = Patience()
    patience.bad = 2
    lines = load(saved, {"model": make_net(seed=1), "novel": patience, "x": torch.ones(2)}, strict=False)
    assert patience.bad == 2
    assert "novel: in the state, not in the checkpoint" in lines
    assert "x: in the state, not in the checkpoint" in lines


class Drawing:
    """A loader that draws while it is put in place."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def __iter__(self) -> Any:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        torch.rand(3)
        np.random.rand()
        self.log.append(self.name)


class Plain(Drawing):
    __iter__ = None  # type: ignore[assignment]


def test_rng_comes_last_and_loaders_before_it() -> None:
    """RNG-1, huggingface/transformers#46628: draws during the restore leave no trace; the order is fixed."""
    log: list[str] = []

    def make() -> dict[str, Any]:
        plain = Drawing(log, "object")
        plain.__class__ = type(
            "Object", (), {k: v for k, v in vars(Drawing).items() if k not in ("__iter__", "__dict__", "__weakref__")}
        )
        return {"a-loader": Drawing(log, "loader"), "b-object": plain, "gen": torch.Generator().manual_seed(1)}

    state = make()
    saved = save(state)
    expected = torch.rand(4), np.random.rand(3), torch.rand(2, generator=state["gen"])
    fresh = make()
    load(saved, fresh)
    assert log == ["object", "loader"]
    assert torch.equal(torch.rand(4), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1])
    assert torch.equal(torch.rand(2, generator=fresh["gen"]), expected[2])


def test_an_object_that_refuses_is_named() -> None:
    class Strict(Patience):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("other")

    saved = save({"x": Patience()})
    with pytest.raises(StateMismatch, match=r"x: its load_state_dict\(\) raised KeyError"):
        load(saved, {"x": Strict()})


def test_objects_are_not_asked_for_their_state_during_a_restore() -> None:
    class Costly(Patience):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("starts workers")

    saved = save({"x": Patience()})
    load(saved, {"x": Costly()})


def test_values_per_rank() -> None:
    """DATA-11, PrimeIntellect-ai/prime-rl#1035: each rank gets its own; another world size merges."""
    parts = [save({"n": PerRank(value), "same": 1, "obj": {"c": [value]}}) for value in (223, 220)]
    whole = merge(parts)
    for rank, value in enumerate((223, 220)):
        state: dict[str, Any] = {"n": PerRank(0), "same": 0, "obj": {"c": []}}
        load(whole, state, rank=rank, world_size=2)
        assert state["n"].value == value
        assert state["obj"] == {"c": [value]}
    with pytest.raises(StateMismatch, match=r"n: its 2 saving ranks hold different values") as caught:
        load(whole, {"n": PerRank(0), "same": 0, "obj": {"c": []}}, world_size=3)
    assert any(problem.startswith("obj: its 2 saving ranks") for problem in caught.value.problems)
    merged: dict[str, Any] = {"n": PerRank(0, merge=sum), "same": 0}
    load(whole, merged, world_size=3)
    assert merged["n"].value == 443
    assert merged["n"].merge is sum


def test_tensors_per_rank_on_another_world_size() -> None:
    parts = [save({"t": PerRank(torch.full((2,), float(rank)))}) for rank in range(2)]
    whole = merge(parts)
    state = {"t": PerRank(torch.zeros(2))}
    load(whole, state, rank=1, world_size=2)
    assert torch.equal(state["t"].value, torch.ones(2))
    with pytest.raises(StateMismatch, match="t: a tensor per rank, saved by 2 ranks"):
        load(whole, state, world_size=1)


def test_sharded_boxes() -> None:
    whole = torch.arange(24.0).reshape(8, 3)
    saved = save(
        {
            "w": Sharded(
                [(whole[4:6].clone(), (4, 0)), (whole[0:4].clone(), (0, 0)), (whole[6:].clone(), (6, 0))], (8, 3)
            )
        }
    )
    a, b = torch.zeros(3, 3), torch.zeros(2, 1)
    load(saved, {"w": Sharded([(a, (3, 0)), (b, (0, 2))], (8, 3))})
    assert torch.equal(a, whole[3:6])
    assert torch.equal(b, whole[:2, 2:])


def test_pipeline_stages_add_up() -> None:
    """Two ranks with different parameters make one optimizer; each asks for its own half."""
    net = make_net()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), range(1))

    def stage(indexes: tuple[int, ...], source: nn.Sequential) -> dict[str, Any]:
        part = nn.ModuleDict({str(index): source[index] for index in indexes})
        return {"model": part, "optimizer": torch.optim.Adam(part.parameters())}

    stages = [stage((0,), net), stage((1, 2), net)]
    for state in stages:
        state["optimizer"].step()
    whole = merge([save(state, rng=False) for state in stages])
    other = make_net(seed=8)
    swapped = [stage((0, 1), other), stage((2,), other)]
    consumed: set[str] = set()
    for rank, state in enumerate(swapped):
        load(whole, state, rank=rank, world_size=2)
        plan = plan_restore(state, make_catalog(whole, rank=rank, world_size=2))
        consumed |= plan.consumed_values | plan.consumed_tensors
    assert consumed == {*whole.tensors, *whole.values}
    assert_same(list(net.parameters()), list(other.parameters()))
    assert torch.equal(
        stages[1]["optimizer"].state[net[1].weight]["exp_avg"],
        swapped[0]["optimizer"].state[other[1].weight]["exp_avg"],
    )


class WithExtra(nn.Linear):
    """A module with state that is no tensor of it."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "scale": torch.tensor(float(self.calls))}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]
        assert state["scale"].item() == self.calls


def test_extra_state_of_modules() -> None:
    module = WithExtra(2, 2)
    module.calls = 4
    saved = save({"model": nn.Sequential(module)})
    other = nn.Sequential(WithExtra(2, 2))
    load(saved, {"model": other})
    assert other[0].calls == 4
    with pytest.raises(StateMismatch, match="model/extra/0: in the checkpoint, the live model has no such state"):
        load(saved, {"model": nn.Sequential(nn.Linear(2, 2))})
    with pytest.raises(StateMismatch, match="model/extra/0: in the live model, not in the checkpoint"):
        load(save({"model": nn.Sequential(nn.Linear(2, 2))}), {"model": nn.Sequential(WithExtra(2, 2))})


class Rotary(nn.Module):
    """A module with a table that is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def test_meta_modules() -> None:
    """META-1, huggingface/transformers#48892: filled, or refused by the name of what gets no value."""
    saved = save({"model": make_net(seed=5)})
    with torch.device("meta"):
        other = make_net()
    load(saved, {"model": other})
    assert_same(list(make_net(seed=5).parameters()), list(other.parameters()))
    saved = save({"model": Rotary()})
    with torch.device("meta"):
        rotary = Rotary()
    with pytest.raises(StateMismatch, match=r"model: non-persistent buffers on the meta device .*: table"):
        load(saved, {"model": rotary})
    assert rotary.weight.is_meta
    lines = load(saved, {"model": rotary}, strict=False)
    assert any(line.startswith("model/table: a non-persistent buffer without a value") for line in lines)
    assert torch.equal(rotary.weight, torch.ones(3))


def test_shared_storage_is_restored_shared() -> None:
    """FMT-1, safetensors/safetensors#202: tied weights and overlapping views, with an optimizer over them."""
    net = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    net["head"].weight = net["embed"].weight
    flat = torch.arange(6.0)
    state = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "a": flat[:4], "b": flat[2:]}
    saved = save(state)
    other = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    other["head"].weight = other["embed"].weight
    memory = torch.zeros(6)
    fresh = {
        "model": other,
        "optimizer": torch.optim.SGD(other.parameters(), lr=0.2),
        "a": memory[:4],
        "b": memory[2:],
    }
    load(saved, fresh)
    assert other["head"].weight is other["embed"].weight
    assert torch.equal(other["head"].weight, net["head"].weight)
    assert torch.equal(memory, flat)
    apart = {"model": other, "optimizer": fresh["optimizer"], "a": torch.zeros(4), "b": torch.zeros(4)}
    load(saved, apart)
    assert torch.equal(apart["a"], flat[:4])
    assert torch.equal(apart["b"], flat[2:])


def test_a_plain_tensor_on_the_meta_device_is_a_problem_before_anything_is_read() -> None:
    saved = save({"a": torch.ones(3), "b": torch.ones(2)})
    state = {"a": torch.zeros(3), "b": torch.zeros(2, device="meta")}
    with pytest.raises(StateMismatch, match="b: on the meta device"):
        load(saved, state)
    assert state["a"].tolist() == [0.0, 0.0, 0.0]
