"""What a trainer holds beside model and loader: open accumulation windows, masters, averages, counters, many models.

Each job is cut and started again, and must be, bit for bit, the job that was not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardkeep as sk
from tests.support.ranks import run_ranks

State = dict[str, Any]


def make_net(seed: int, *sizes: int) -> nn.Sequential:
    """Build a net without a word to the global stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes or (5, 7, 3))))


def batch_of(step: int, rank: int = 0, width: int = 5) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * rank + step))


def content(node: Any) -> Any:
    """Return a tree with tensors as bytes, for `==`."""
    if isinstance(node, torch.Tensor):
        local: Any = node.to_local() if hasattr(node, "to_local") else node
        return str(node.dtype), tuple(node.shape), local.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(node, dict):
        return {key: content(value) for key, value in node.items()}
    return [content(child) for child in node] if isinstance(node, list | tuple) else node


def restart(root: Path, make: Callable[[int], State], step: Callable[[State, int], None], cuts: list[int]) -> State:
    """Take steps up to the last cut, saving and starting anew at each; return the last state."""
    state: State = {}
    for start, cut in enumerate(cuts):
        state = make(start)
        with sk.CheckpointManager(root) as manager:
            done = manager.resume(state).step
            for number in range(done + 1, cut + 1):
                step(state, number)
            manager.save(cut, state)
    return state


# Gradient accumulation


def make_accumulating(seed: int) -> State:
    net = make_net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    return {"model": net, "optimizer": optimizer, "gradients": sk.Gradients(net), "micro": 0}


def micro_step(state: State, number: int) -> None:
    """Four micro-steps make a step; each is a step of the manager's."""
    state["model"](batch_of(number)).pow(2).mean().div(4).backward()
    state["micro"] = (state["micro"] + 1) % 4
    if state["micro"] == 0:
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def test_a_window_that_is_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    straight = restart(tmp_path / "a", make_accumulating, micro_step, [14])
    cut = restart(tmp_path / "b", make_accumulating, micro_step, [2, 3, 4, 7, 14])
    assert straight["micro"] == cut["micro"] == 2
    assert content(straight["model"].state_dict()) == content(cut["model"].state_dict())
    gradients = [[p.grad for p in state["model"].parameters()] for state in (straight, cut)]
    assert all(gradient is not None for gradient in gradients[0])
    assert content(gradients[0]) == content(gradients[1])


def test_without_the_gradients_the_window_is_lost(tmp_path: Path) -> None:
    """The test above can see: what it does, but for the wrapper."""

    def make(seed: int) -> State:
        state = make_accumulating(seed)
        del state["gradients"]
        return state

    straight = restart(tmp_path / "a", make, micro_step, [14])
    cut = restart(tmp_path / "b", make, micro_step, [2, 14])
    assert content(straight["model"].state_dict()) != content(cut["model"].state_dict())


def test_absent_gradients_come_back_absent_and_a_save_changes_none(tmp_path: Path) -> None:
    state = make_accumulating(0)
    first, last = state["model"]
    first(batch_of(1)).sum().backward()
    before = first.weight.grad, content(first.weight.grad)
    sk.save(tmp_path, state)
    assert first.weight.grad is before[0]
    assert content(first.weight.grad) == before[1]
    with sk.open(tmp_path) as checkpoint:
        assert [key for key in checkpoint if key.startswith("gradients/")] == [
            "gradients/0.bias",
            "gradients/0.weight",
        ]
    live = make_accumulating(1)
    live["model"](batch_of(2)).sum().backward()
    sk.load(tmp_path, live)
    assert [p.grad is None for p in live["model"].parameters()] == [False, False, True, True]
    assert content(live["model"][0].weight.grad) == before[1]
    assert last.weight.grad is None


def test_gradients_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    state = make_accumulating(0)
    micro_step(state, 1)
    sk.save(tmp_path, {"gradients": state["gradients"]})
    with pytest.raises(sk.StateMismatch, match=r"gradients/1\.weight"):
        sk.load(tmp_path, {"gradients": sk.Gradients(make_net(0, 5, 7))})
    with pytest.raises(sk.UsageError, match=r"expected the torch\.nn\.Module"):
        sk.Gradients(state["optimizer"])  # type: ignore[arg-type]


def accumulate(rank: int, world_size: int, root: str, layout: str, cuts: list[int]) -> list[Any]:
    """Three micro-steps without synchronisation and one with; return what this rank holds in the end."""

    def make(seed: int) -> State:
        net: Any = make_net(seed)
        if layout == "ddp":
            net = sk.exact_ddp(DistributedDataParallel(net))
        else:
            fully_shard(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        return {"model": net, "optimizer": optimizer, "gradients": sk.Gradients(net)}

    def step(state: State, number: int) -> None:
        model = state["model"]
        if layout == "ddp":
            model.require_backward_grad_sync = number % 4 == 0
        model(batch_of(number, rank)).pow(2).mean().backward()
        if number % 4 == 0:
            state["optimizer"].step()
            state["optimizer"].zero_grad()

    state = restart(Path(root), make, step, cuts)
    parameters = list(state["model"].parameters())
    return [content(parameters), content([p.grad for p in parameters])]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_every_rank_gets_its_own_gradients_back(layout: str, tmp_path: Path) -> None:
    """Under DDP without synchronisation they differ between ranks; under FSDP2 they are sharded."""
    straight = run_ranks(accumulate, 2, str(tmp_path / "a"), layout, [10])
    cut = run_ranks(accumulate, 2, str(tmp_path / "b"), layout, [2, 7, 10])
    assert straight[0][1] != straight[1][1]
    assert straight == cut


def save_unreduced(rank: int, world_size: int, root: str) -> str:
    net: Any = make_net(0)
    fully_shard(net)
    net.set_requires_gradient_sync(False)
    net(batch_of(1, rank)).sum().backward()
    try:
        sk.save(root, {"model": net, "gradients": sk.Gradients(net)})
    except sk.CheckpointError as error:
        return str(error)
    return "saved"


def test_gradients_that_fsdp_has_not_reduced_are_refused(tmp_path: Path) -> None:
    texts = run_ranks(save_unreduced, 2, str(tmp_path))
    assert all("has not reduced yet" in text for text in texts), texts


# Scalers, masters, averages


def make_scaled(seed: int) -> State:
    net = make_net(seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    return {"model": net, "optimizer": optimizer, "scaler": scaler, "log": []}


def scaled_step(state: State, number: int) -> None:
    scaler, optimizer = state["scaler"], state["optimizer"]
    optimizer.zero_grad()
    factor = float("inf") if number % 5 == 4 else 1.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = state["model"](batch_of(number)).float().pow(2).mean() * factor
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    state["log"].append((scaler.get_scale(), scaler._get_growth_tracker()))


class MasterAdam(torch.optim.Optimizer):
    """Adam for bf16 parameters that keeps fp32 masters in its state; the parameters are only rounded copies."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                table = self.state[p]
                if not table:
                    table["master"] = p.detach().float().clone()
                    table["m"], table["v"] = torch.zeros_like(table["master"]), torch.zeros_like(table["master"])
                gradient = p.grad.float()
                table["m"].lerp_(gradient, 0.1)
                table["v"].lerp_(gradient.square(), 0.01)
                table["master"].sub_(group["lr"] * table["m"] / (table["v"].sqrt() + 1e-8))
                p.copy_(table["master"])


def make_mastered(seed: int) -> State:
    net = make_net(seed).to(torch.bfloat16)
    return {"model": net, "optimizer": MasterAdam(net.parameters(), lr=1e-4)}


def mastered_step(state: State, number: int) -> None:
    state["optimizer"].zero_grad()
    state["model"](batch_of(number).to(torch.bfloat16)).pow(2).mean().backward()
    state["optimizer"].step()


def make_listed(seed: int) -> State:
    """Keep the masters in a list of their own, which an ordinary optimizer updates."""
    net = make_net(seed).to(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    return {"model": net, "masters": masters, "optimizer": torch.optim.AdamW(masters, lr=1e-4)}


def listed_step(state: State, number: int) -> None:
    net = state["model"]
    net.zero_grad()
    net(batch_of(number).to(torch.bfloat16)).pow(2).mean().backward()
    for master, p in zip(state["masters"], net.parameters(), strict=True):
        master.grad = p.grad.float()
    state["optimizer"].step()
    with torch.no_grad():
        for master, p in zip(state["masters"], net.parameters(), strict=True):
            p.copy_(master)


def make_averaged(seed: int) -> State:
    net = make_net(seed)
    state = {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=0.05)}
    state["ema"] = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    state["swa"] = AveragedModel(net, use_buffers=True)
    return state


def averaged_step(state: State, number: int) -> None:
    plain_step(state, number)
    state["ema"].update_parameters(state["model"])
    if number % 2 == 0:
        state["swa"].update_parameters(state["model"])


def plain_step(state: State, number: int) -> None:
    state["optimizer"].zero_grad()
    state["model"](batch_of(number)).pow(2).mean().backward()
    state["optimizer"].step()


def make_adversaries(seed: int) -> State:
    nets = {"generator": make_net(seed, 5, 7), "critic": make_net(seed + 1, 7, 1)}
    both = torch.optim.SGD([*nets["generator"].parameters(), *nets["critic"].parameters()], lr=1e-3, momentum=0.5)
    optimizers: State = {name: torch.optim.AdamW(net.parameters(), lr=0.01) for name, net in nets.items()}
    return {"models": nets, "optimizers": {**optimizers, "both": both}}


def adversaries_step(state: State, number: int) -> None:
    nets, optimizers = state["models"], state["optimizers"]
    score = nets["critic"](nets["generator"](batch_of(number))).mean()
    for net in nets.values():
        net.zero_grad()
    (score if number % 2 else -score).backward()
    optimizers["critic" if number % 2 else "generator"].step()
    optimizers["both"].step()


@pytest.mark.parametrize(
    ("make", "step"),
    [
        pytest.param(make_scaled, scaled_step, id="scaler"),
        pytest.param(make_mastered, mastered_step, id="masters-in-the-optimizer"),
        pytest.param(make_listed, listed_step, id="masters-in-a-list"),
        pytest.param(make_averaged, averaged_step, id="averages"),
        pytest.param(make_adversaries, adversaries_step, id="several-models"),
    ],
)
def test_ten_resumes_are_none(
    make: Callable[[int], State], step: Callable[[State, int], None], tmp_path: Path
) -> None:
    """TensorAuto/OpenTau#185: masters made anew from bf16 lost bits with every resume."""
    straight = restart(tmp_path / "a", make, step, [22])
    cut = restart(tmp_path / "b", make, step, [*range(2, 22, 2), 22])
    with sk.open(tmp_path / "a") as one, sk.open(tmp_path / "b") as two:
        assert one.keys() == two.keys()
        assert [key for key in one if not torch.equal(one[key].tensor(), two[key].tensor())] == []
        plain = [{name: value for name, value in side.values().items() if name != "rng"} for side in (one, two)]
        assert repr(plain[0]) == repr(plain[1])
    assert straight.get("log") == cut.get("log")


def test_masters_hold_more_than_the_parameters_show() -> None:
    """The masters' test can see: rounding them on the way changes the run."""
    state = make_mastered(0)
    for number in range(1, 9):
        mastered_step(state, number)
    masters = [state["optimizer"].state[p]["master"] for p in state["model"].parameters()]
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters)


# Parameters that come and go


def grow(rank: int, world_size: int, root: str) -> list[Any]:
    """Save after each change: a layer frozen, another added, the first trained again."""
    net = make_net(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    state: State = {"model": net, "optimizer": optimizer}
    kept = []
    with sk.CheckpointManager(root) as manager:
        manager.resume(state)
        for number in range(1, 7):
            if number == 2:
                net[0].requires_grad_(False)
            if number == 4:
                net.append(make_net(9, 3, 3)[0])
                optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.01})
            if number == 6:
                net[0].requires_grad_(True)
            plain_step(state, number)
            manager.save(number, state)
            kept.append(content([net.state_dict(), [optimizer.state[p] for p in net.parameters()]]))
    return kept


def regrow(rank: int, world_size: int, root: str, step: int) -> Any:
    net = make_net(1)
    groups: list[Any] = [{"params": list(net.parameters())}]
    if step >= 4:
        net.append(make_net(8, 3, 3)[0])
        groups.append({"params": list(net[2].parameters()), "lr": 0.5})
    if 2 <= step < 6:
        net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    sk.load(root, {"model": net, "optimizer": optimizer}, step=step)
    if step >= 4:
        assert optimizer.param_groups[1]["lr"] == 0.01
    return content([net.state_dict(), [optimizer.state[p] for p in net.parameters()]])


def regrow_all(rank: int, world_size: int, root: str) -> list[Any]:
    return [regrow(rank, world_size, root, step) for step in range(1, 7)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_frozen_and_added_between_saves(world_size: int, tmp_path: Path) -> None:
    """Each save plans for what is there now, whatever the one before it was for."""
    grown = run_ranks(grow, world_size, str(tmp_path))
    again = run_ranks(regrow_all, world_size, str(tmp_path))
    assert grown == again
    net = make_net(1)
    with pytest.raises(sk.StateMismatch, match=r"model/0\.weight: requires_grad"):
        sk.load(tmp_path, {"model": net, "optimizer": torch.optim.AdamW(net.parameters())}, step=2)


# Schedules


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 30),
    "warm-up": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 9)),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=40),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1, factor=0.3),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("keys", [("a", "b"), ("b", "a")], ids=["optimizer-first", "schedule-first"])
@pytest.mark.parametrize("early", [True, False], ids=["built-before", "built-after-the-weights"])
def test_the_rate_goes_on_in_every_order(name: str, keys: tuple[str, str], early: bool, tmp_path: Path) -> None:
    """pytorch/torchtitan#4598: the rate in use and the one reported are both the saved one, and stay so."""
    optimizer_key, schedule_key = keys

    def rates(state: State, count: int) -> list[tuple[str, ...]]:
        found = []
        for number in range(count):
            plain_step({"model": state["model"], "optimizer": state[optimizer_key]}, number)
            state[schedule_key].step(*([1.0] if name == "plateau" else []))
            in_use, told = state[optimizer_key].param_groups[0]["lr"], state[schedule_key].get_last_lr()[0]
            assert in_use == told
            found.append((float(in_use).hex(), repr(sorted(state[optimizer_key].param_groups[0]))))
        return found

    def make(seed: int) -> State:
        net = make_net(seed)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * (seed + 1), momentum=0.9)
        return {"model": net, optimizer_key: optimizer}

    state = make(0)
    state[schedule_key] = SCHEDULES[name](state[optimizer_key])
    rates(state, 5)
    sk.save(tmp_path, state)
    wanted = rates(state, 10)
    state = make(0)
    if not early:
        sk.load(tmp_path, state, strict=False)
    state[schedule_key] = SCHEDULES[name](state[optimizer_key])
    sk.load(tmp_path, state)
    assert rates(state, 10) == wanted


# Early stopping


def test_patience_counts_over_restarts_also_as_plain_values(tmp_path: Path) -> None:
    """huggingface/transformers#28544, for counters that are numbers in a table."""
    losses = [5.0, 4.0, 4.5, 3.0, 3.5, 3.1, 3.2, 2.0, 1.0]

    def evaluate(progress: State, number: int) -> None:
        loss = losses[number - 1]
        progress["waited"] = 0 if loss < progress["best"] else progress["waited"] + 1
        progress["best"] = min(progress["best"], loss)

    def run(root: Path, restarts: bool) -> int:
        done, over = 0, False
        while not over:
            state: State = {"progress": {"best": float("inf"), "waited": 0}}
            with sk.CheckpointManager(root, save_every=1) as manager:
                manager.resume(state)
                for number in range(manager.step + 1, len(losses) + 1):
                    evaluate(state["progress"], number)
                    manager.after_step(number, state)
                    done, over = number, state["progress"]["waited"] >= 3
                    if over or restarts:
                        break
        return done

    assert run(tmp_path / "a", False) == run(tmp_path / "b", True) == 7
