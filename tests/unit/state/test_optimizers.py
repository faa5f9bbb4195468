"""Optimizer state by name: nothing recast, dropped, swapped or stepped."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from shardkeep.errors import StateMismatch, UnsupportedState
from shardkeep.state.capture import capture
from shardkeep.state.subclasses import register_tensor_type
from tests.support.roundtrip import load, save


def make_net(*, seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(batch).pow(2).mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_same(a: Any, b: Any, path: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), path
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), path
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert type(a) is type(b), path
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{index}")
    else:
        assert type(a) is type(b), path
        assert a == b, path


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-bare": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3),
}


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_resume_equals_straight_run(kind: str) -> None:
    """OPT-5: five steps equal two, a new process's objects, and three; every state entry and field is equal."""
    straight = make_net()
    straight_optimizer = OPTIMIZERS[kind](straight.parameters())
    train(straight, straight_optimizer, range(5))

    net = make_net()
    optimizer = OPTIMIZERS[kind](net.parameters())
    train(net, optimizer, range(2))
    expected = copy.deepcopy(optimizer.state_dict())
    saved = save({"model": net, "optimizer": optimizer})

    net = make_net(seed=7)
    optimizer = OPTIMIZERS[kind](net.parameters())
    load(saved, {"model": net, "optimizer": optimizer})
    assert_same(expected, optimizer.state_dict())
    train(net, optimizer, range(2, 5))
    assert_same(list(straight.parameters()), list(net.parameters()))
    assert_same(straight_optimizer.state_dict(), optimizer.state_dict())
    assert all(parameter.isfinite().all() for parameter in net.parameters())


def test_follows_names_not_positions() -> None:
    """OPT-1, pytorch/pytorch#1489: two layers of one shape are registered in another order."""

    def build(order: list[str]) -> nn.ModuleDict:
        return nn.ModuleDict(OrderedDict((name, nn.Linear(3, 3)) for name in order))

    net = build(["a", "b"])
    optimizer = torch.optim.Adam(net.parameters())
    (net["a"](torch.ones(1, 3)) * 2 + net["b"](torch.ones(1, 3)) * 5).sum().backward()
    optimizer.step()
    saved = save({"model": net, "optimizer": optimizer})
    other = build(["b", "a"])
    fresh = torch.optim.Adam(other.parameters())
    load(saved, {"model": other, "optimizer": fresh})
    for name in ("a", "b"):
        for part in ("weight", "bias"):
            old, new = getattr(net[name], part), getattr(other[name], part)
            assert_same(optimizer.state[old], fresh.state[new])
    assert not torch.equal(fresh.state[other["a"].weight]["exp_avg"], fresh.state[other["b"].weight]["exp_avg"])


@pytest.mark.parametrize(
    ("weights", "moments"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=["wide", "narrow"]
)
def test_state_keeps_its_dtype(weights: torch.dtype, moments: torch.dtype) -> None:
    """OPT-2, pytorch/pytorch#43706: moments of another dtype than the parameter return bit for bit."""
    net = nn.Linear(4, 4).to(weights)
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": (torch.randn(parameter.shape) / 3).to(moments),
            "exp_avg_sq": torch.rand(parameter.shape).to(moments),
        }
    saved = save({"model": net, "optimizer": optimizer})
    other = nn.Linear(4, 4).to(weights)
    fresh = torch.optim.AdamW(other.parameters())
    load(saved, {"model": other, "optimizer": fresh})
    assert_same(list(optimizer.state.values()), list(fresh.state.values()))
    # Over live state of another dtype too: the stored dtype wins.
    fresh.state[other.weight]["exp_avg"] = fresh.state[other.weight]["exp_avg"].double()
    load(saved, {"model": other, "optimizer": fresh})
    assert fresh.state[other.weight]["exp_avg"].dtype == moments


def test_frozen_and_never_stepped_parameters() -> None:
    """OPT-3, pytorch/pytorch#192202: state of a frozen parameter returns, absent state stays absent."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    net[2].requires_grad_(False)  # never gets a gradient
    net[0](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    net[0].requires_grad_(False)  # trained, then frozen
    assert len(optimizer.state) == 2
    saved = save({"model": net, "optimizer": optimizer})

    other = make_net(seed=3)
    other[0].requires_grad_(False)
    other[2].requires_grad_(False)
    fresh = torch.optim.AdamW(other.parameters())
    load(saved, {"model": other, "optimizer": fresh})
    assert_same(optimizer.state_dict(), fresh.state_dict())
    assert set(fresh.state) == {other[0].weight, other[0].bias}


def test_live_state_that_was_not_saved_goes() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    saved = save({"model": net, "optimizer": optimizer})
    train(net, optimizer, range(2))
    load(saved, {"model": net, "optimizer": optimizer})
    assert not optimizer.state


def test_live_state_is_filled_in_place() -> None:
    """Tensors of the live state keep their identity (CUDA graphs, fused kernels), what was not saved goes."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, range(2))
    expected = copy.deepcopy(optimizer.state_dict())
    saved = save({"model": net, "optimizer": optimizer})
    train(net, optimizer, range(2, 4))
    table = optimizer.state[net[0].weight]
    held = dict(table)
    table["novel"] = torch.ones(1)
    load(saved, {"model": net, "optimizer": optimizer})
    assert optimizer.state[net[0].weight] is table
    assert {name: id(tensor) for name, tensor in table.items()} == {name: id(tensor) for name, tensor in held.items()}
    assert_same(expected, optimizer.state_dict())


def test_trainability_is_compared_by_name() -> None:
    """OPT-7, unslothai/unsloth#3108: a layer that was trainable is frozen in the live model."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, range(1))
    saved = save({"model": net, "optimizer": optimizer})
    other = make_net()
    other[1].requires_grad_(False)
    before = copy.deepcopy(other.state_dict())
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad])
    with pytest.raises(StateMismatch, match=r"model/1\.weight: requires_grad is True") as caught:
        load(saved, {"model": other, "optimizer": fresh})
    assert any("optimizer/param/1.weight: unread" in problem for problem in caught.value.problems)
    assert_same(dict(before), dict(other.state_dict()))


class Quantized(torch.Tensor):
    """Codes and scales that look like one float tensor."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Quantized:
        made: Quantized = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.scales = codes, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], {"bits": 8}

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, shape: Any, strides: Any) -> Quantized:
        assert context == {"bits": 8}
        return Quantized(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].codes, args[0].scales)
        raise NotImplementedError(str(func))


register_tensor_type(Quantized)


@pytest.mark.parametrize("over_live", [False, True])
def test_subclass_state(over_live: bool) -> None:
    """OPT-8, pytorch/ao#1185: 8-bit state with block-shaped scales."""

    def quantized(seed: int) -> Quantized:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 255, (4, 4), dtype=torch.uint8, generator=generator)
        return Quantized(codes, torch.rand(2, generator=generator))

    net = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    optimizer.state[net.weight] = {"momentum_buffer": quantized(1)}
    saved = save({"model": net, "optimizer": optimizer})
    assert "optimizer/momentum_buffer/weight#codes" in saved.tensors
    other = nn.Linear(4, 4, bias=False)
    fresh = torch.optim.SGD(other.parameters(), momentum=0.9)
    if over_live:
        fresh.state[other.weight] = {"momentum_buffer": quantized(2)}
    load(saved, {"model": other, "optimizer": fresh})
    found = fresh.state[other.weight]["momentum_buffer"]
    assert type(found) is Quantized
    assert torch.equal(found.codes, quantized(1).codes)
    assert torch.equal(found.scales, quantized(1).scales)


class MasterSGD(torch.optim.SGD):
    """Steps fp32 masters of bf16 weights; the masters are its parameters."""

    def __init__(self, net: nn.Module, masters: dict[str, torch.Tensor]) -> None:
        self.pairs = [(parameter, masters[name]) for name, parameter in net.named_parameters()]
        super().__init__([master for _, master in self.pairs], lr=0.01, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight, master in self.pairs:
            assert weight.grad is not None
            master.grad = weight.grad.float()
        super().step()
        with torch.no_grad():
            for weight, master in self.pairs:
                weight.copy_(master)


def test_master_weights() -> None:
    """OPT-9, TensorAuto/OpenTau#185: ten resumes equal none."""

    def build() -> dict[str, Any]:
        net = make_net().bfloat16()
        masters = {name: parameter.detach().float() for name, parameter in net.named_parameters()}
        return {"model": net, "masters": masters, "optimizer": MasterSGD(net, masters)}

    def run(state: dict[str, Any], steps: range) -> None:
        for step in steps:
            batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
            state["optimizer"].zero_grad()
            state["model"].zero_grad()
            state["model"](batch).float().pow(2).mean().backward()
            state["optimizer"].step()

    straight = build()
    run(straight, range(10))
    state = build()
    for step in range(10):
        run(state, range(step, step + 1))
        saved = save(state)
        state = build()
        held = dict(state["masters"])
        load(saved, state)
        assert all(state["masters"][name] is held[name] for name in held)  # the optimizer's own tensors were filled
    assert_same(straight["masters"], state["masters"])
    assert_same(list(straight["model"].parameters()), list(state["model"].parameters()))


def test_all_group_fields_return() -> None:
    """SCHED-1, pytorch/pytorch#140900: fields that the fresh optimizer lacks are set, known or not."""
    net = make_net()
    head = {"params": net[0].parameters(), "lr": 0.5, "label": "head", "spec": {"at": (1, 2), "dtype": torch.float16}}
    rest = {"params": [*net[1].parameters(), *net[2].parameters()], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([head, rest])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(net, optimizer, range(1), scheduler)
    saved = save({"model": net, "optimizer": optimizer})
    bare = torch.optim.AdamW(
        [{"params": net[0].parameters()}, {"params": [*net[1].parameters(), *net[2].parameters()]}]
    )
    tables = list(bare.param_groups)
    load(saved, {"model": net, "optimizer": bare})
    assert_same(optimizer.state_dict()["param_groups"], bare.state_dict()["param_groups"])
    assert bare.param_groups[0]["spec"]["dtype"] is torch.float16
    assert all(a is b for a, b in zip(tables, bare.param_groups, strict=True))


def test_a_field_the_checkpoint_lacks_is_kept_and_reported() -> None:
    net = make_net()
    saved = save({"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    optimizer.param_groups[0]["novel"] = 5
    lines = load(saved, {"model": net, "optimizer": optimizer})
    assert optimizer.param_groups[0]["novel"] == 5
    assert any("novel" in line for line in lines)


def test_group_membership_is_compared_by_name() -> None:
    net = make_net()
    two = torch.optim.SGD([{"params": net[0].parameters()}, {"params": [*net[1].parameters(), *net[2].parameters()]}])
    saved = save({"model": net, "optimizer": two})
    other = torch.optim.SGD(
        [{"params": [*net[1].parameters(), *net[2].parameters()]}, {"params": net[0].parameters()}]
    )
    with pytest.raises(
        StateMismatch, match=r"parameter 0\.weight is in group 0 of the checkpoint and in group 1 here"
    ):
        load(saved, {"model": net, "optimizer": other})
    one = torch.optim.SGD(net.parameters())
    with pytest.raises(StateMismatch, match="the checkpoint has 2 parameter groups, the live optimizer 1"):
        load(saved, {"model": net, "optimizer": one})


def test_tensor_lr_is_filled_in_place() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.25))
    saved = save({"model": net, "optimizer": optimizer})
    rate = torch.tensor(9.0)
    fresh = torch.optim.AdamW(net.parameters(), lr=rate)
    load(saved, {"model": net, "optimizer": fresh})
    assert fresh.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_several_models_and_optimizers() -> None:
    """Names that two models share stay apart; each optimizer of one model is named without its key."""

    def build() -> dict[str, Any]:
        gen, disc = make_net(seed=1), make_net(seed=2)
        return {
            "models": {"gen": gen, "disc": disc},
            "opts": [torch.optim.Adam(gen.parameters()), torch.optim.Adam(disc.parameters())],
            "both": torch.optim.SGD([*gen.parameters(), *disc.parameters()], lr=0.1, momentum=0.5),
        }

    state = build()
    for net in state["models"].values():
        net(torch.ones(2, 4)).sum().backward()
    for optimizer in (*state["opts"], state["both"]):
        optimizer.step()
    saved = save(state)
    assert "opts/0/exp_avg/0.weight" in saved.tensors
    assert "both/momentum_buffer/models/gen/0.weight" in saved.tensors
    other = build()
    load(saved, other)
    for key in ("gen", "disc"):
        assert_same(list(state["models"][key].parameters()), list(other["models"][key].parameters()))
    for a, b in zip((*state["opts"], state["both"]), (*other["opts"], other["both"]), strict=True):
        assert_same(a.state_dict(), b.state_dict())


def test_parameters_of_no_model_are_named() -> None:
    net, stray = make_net(), nn.Parameter(torch.ones(7))
    optimizer = torch.optim.SGD([*net.parameters(), stray], lr=0.1)
    with pytest.raises(UnsupportedState, match=r"optimizer: 1 of its parameters .* 6 of group 0, shape \(7,\)"):
        capture({"model": net, "optimizer": optimizer})
    # The tensor itself in the state gives it a name.
    optimizer = torch.optim.SGD([*net.parameters(), stray], lr=0.1, momentum=0.9)
    stray.grad = torch.ones(7)
    optimizer.step()
    saved = save({"model": net, "optimizer": optimizer, "temperature": stray})
    other = nn.Parameter(torch.zeros(7))
    fresh = torch.optim.SGD([*net.parameters(), other], lr=0.1, momentum=0.9)
    load(saved, {"model": net, "optimizer": fresh, "temperature": other})
    assert torch.equal(other, stray)
    assert torch.equal(fresh.state[other]["momentum_buffer"], torch.ones(7))


class CountingSGD(torch.optim.SGD):
    """Adds an entry of its own to its state dict, and state that belongs to no parameter."""

    calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rest = dict(state_dict)
        self.calls = rest.pop("calls")
        super().load_state_dict(rest)


def test_what_an_optimizer_adds_itself() -> None:
    net = make_net().bfloat16()
    optimizer = CountingSGD(net.parameters(), lr=0.1)
    optimizer.calls = 12
    optimizer.state["tracker"] = {"best": 1.5}  # type: ignore[index]
    optimizer.state[net[0].weight] = {"momentum_buffer": torch.randn(5, 4)}
    saved = save({"model": net, "optimizer": optimizer})
    fresh = CountingSGD(net.parameters(), lr=0.3)
    tables = list(fresh.param_groups)
    load(saved, {"model": net, "optimizer": fresh})
    assert fresh.calls == 12
    assert fresh.state["tracker"] == {"best": 1.5}  # type: ignore[index]
    assert fresh.state[net[0].weight]["momentum_buffer"].dtype == torch.float32
    assert fresh.param_groups[0] is tables[0]
    assert fresh.param_groups[0]["lr"] == 0.1


def test_nothing_steps_and_no_hook_runs() -> None:
    """SCHED-4, huggingface/accelerate#4289: a restore never runs user-visible steps."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, range(1))
    saved = save({"model": net, "optimizer": optimizer})
    calls: list[str] = []
    fresh = torch.optim.AdamW(net.parameters())
    fresh.register_step_pre_hook(lambda *_: calls.append("step"))
    fresh.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    fresh.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    state = {"model": net, "optimizer": fresh}
    load(saved, state)
    save(state)
    assert calls == []


def test_hidden_state_is_refused() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    net = make_net()
    with pytest.raises(UnsupportedState, match=r"optimizer: ZeroRedundancyOptimizer"):
        capture({"model": net, "optimizer": ZeroRedundancyOptimizer(net.parameters(), lr=0.1)})


def test_another_class_of_optimizer_is_refused_by_name() -> None:
    """AdamW's moments would lie unused beside SGD, whose momentum would start anew without a word."""
    net = nn.Linear(3, 2)
    saved = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    saved.step()
    kept = save({"model": net, "optimizer": saved})
    other = torch.optim.SGD(net.parameters(), momentum=0.9)
    with pytest.raises(StateMismatch, match="class 'AdamW', the live one of 'SGD'"):
        load(kept, {"model": net, "optimizer": other})
