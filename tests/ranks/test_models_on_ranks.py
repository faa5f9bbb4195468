"""Models as people wrap and train them, on real ranks: buffers that differ, meshes, wrappers, frozen halves."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardkeep as sk
from tests.support.ranks import run_ranks
from tests.support.training import (
    Arrays,
    Net,
    build,
    digest_live,
    find_differences,
    gather,
    step_once,
)


def make_batch(seed: int, width: int = 5, wanted: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(4, width, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :wanted]


# BatchNorm

# The option's name up to torch 2.12 and since.
SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


def build_norm(rank: int, world_size: int, *, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    if world_size > 1:
        net = sk.exact_ddp(DistributedDataParallel(net, **{SYNC_BUFFERS: False}))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        inputs, wanted = make_batch(10 * step + rank)
        optimizer.zero_grad()
        (net(inputs) - wanted).pow(2).mean().backward()
        optimizer.step()
    return {"model": net, "optimizer": optimizer}


def save_norm(rank: int, world_size: int, root: str) -> Arrays:
    state = build_norm(rank, world_size, steps=3)
    with sk.CheckpointManager(root) as manager:
        manager.resume(state)
        manager.save(3, state)
    return gather(state)


def load_norm(rank: int, world_size: int, root: str) -> tuple[Arrays, str]:
    state = build_norm(rank + 50, world_size, steps=0)
    with sk.CheckpointManager(root) as manager:
        report = manager.resume(state)
    return gather(state), str(report)


def test_norm_buffers_come_back_to_their_ranks(tmp_path: Path) -> None:
    """Statistics that DDP does not share differ from rank to rank; on another world the lowest holder's count."""
    root = str(tmp_path)
    saved = run_ranks(save_norm, 2, root)
    assert find_differences(*saved) == ["model/1.running_mean", "model/1.running_var"]
    same = run_ranks(load_norm, 2, root)
    for before, (after, _) in zip(saved, same, strict=True):
        assert find_differences(before, after) == []
    for world_size in (1, 3):
        for after, report in run_ranks(load_norm, world_size, root):
            assert find_differences(saved[0], after) == []
            assert "model/1.running_mean" in report, report


# Meshes


def build_pair(world_size: int) -> dict[str, Any]:
    """Return two blocks cut by tensor parallelism on each of two submeshes, without FSDP."""
    torch.manual_seed(world_size)
    net = Net()
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    net.eval()
    return {"model": net, "optimizer": torch.optim.AdamW(net.parameters())}


def save_pair(rank: int, world_size: int, root: str) -> Arrays:
    state = build_pair(world_size)
    train_steps(state, 2)
    sk.save(root, state)
    return gather(state)


def train_steps(state: dict[str, Any], steps: int, *, first: int = 0) -> None:
    for step in range(first, first + steps):
        inputs, wanted = make_batch(step)
        state["optimizer"].zero_grad()
        (state["model"](inputs) - wanted).pow(2).mean().backward()
        state["optimizer"].step()


def load_pair(rank: int, world_size: int, root: str) -> Arrays:
    state = build_pair(world_size)
    sk.load(root, state)
    return gather(state)


def test_tensor_parallel_replicas_are_one_tensor(tmp_path: Path) -> None:
    """The same parameter on two submeshes, each of which holds all of it."""
    for saves in (4, 2):
        root = str(tmp_path / f"{saves}")
        saved = run_ranks(save_pair, saves, root)
        for loads in (4, 2, 1):
            for loaded in run_ranks(load_pair, loads, root):
                assert find_differences(loaded, saved[0]) == []


# FSDP2 in every state


def save_unsharded(rank: int, world_size: int, root: str) -> None:
    state, other = (build("fsdp", world_size, rank=rank) for _ in range(2))
    for each in (state, other):
        torch.manual_seed(3 + rank)
        step_once(each, next(iter(each["loader"])))
    other["model"].eval()
    state["model"].eval()
    with torch.no_grad():
        for each in (state, other):
            each["model"](make_batch(1)[0])
    sk.save(f"{root}/evaluated", state, step=1)
    for each in (state, other):
        each["model"].train()
    torch.manual_seed(rank)
    state["model"](make_batch(2)[0])  # nobody goes back through this one
    torch.manual_seed(rank)
    other["model"](make_batch(2)[0])
    sk.save(f"{root}/forward", state, step=1)
    saved = gather(state)  # the save has sharded it again; its twin is not touched
    for each in (state, other):
        torch.manual_seed(7 + rank)
        step_once(each, next(iter(each["loader"])))
    assert find_differences(gather(state), gather(other)) == []
    for name in ("evaluated", "forward"):
        fresh = build("fsdp", world_size, rank=rank, seed=3)
        sk.load(f"{root}/{name}", fresh)
        skipped = {"model/seen"} if name == "evaluated" else set()
        assert set(find_differences(gather(fresh), saved)) == skipped


def test_modules_left_unsharded_are_saved_right_and_train_on(tmp_path: Path) -> None:
    """After an evaluation, and after a forward without a backward; beside a twin that is never saved."""
    run_ranks(save_unsharded, 2, str(tmp_path))


def save_and_compare(rank: int, world_size: int, root: str, layout: str) -> list[str]:
    """Save right after a step, gradients in place, in a mixture of modes; return what the save changed."""
    state = build(layout, world_size, rank=rank)
    with sk.CheckpointManager(root) as manager:
        manager.resume(state)
        for step in (1, 2):
            step_once(state, next(iter(state["loader"])))
            state["model"].train()
            for name, module in state["model"].named_modules():
                if name.endswith("drop"):
                    module.eval()
            before = digest_live(state)
            manager.save(step, state)
            after = digest_live(state)
            changed = [name for name in before if before[name] != after[name]]
            if changed:
                return changed
    return []


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_save_leaves_no_trace_on_any_rank(layout: str, tmp_path: Path) -> None:
    assert run_ranks(save_and_compare, 2, str(tmp_path), layout) == [[], []]


# Wrappers


def wrap(net: Net, how: str) -> nn.Module:
    if how == "activation checkpoint":
        for at, block in enumerate(net.blocks):
            net.blocks[at] = checkpoint_wrapper(block)
    if how == "compiled":
        return torch.compile(net, backend="eager")  # type: ignore[return-value]
    if how == "compiled inside":
        for at, block in enumerate(net.blocks):
            net.blocks[at] = torch.compile(block, backend="eager")
    if how == "all":
        for at, block in enumerate(net.blocks):
            net.blocks[at] = torch.compile(checkpoint_wrapper(block), backend="eager")
            fully_shard(net.blocks[at])
        return fully_shard(net)
    return net


WRAPS = ("plain", "activation checkpoint", "compiled", "compiled inside", "all")


def cross_wrappers(rank: int, world_size: int, root: str) -> list[str]:
    states = {}
    for how in WRAPS:
        torch.manual_seed(len(how))
        model = wrap(Net(), how)
        states[how] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        states[how]["optimizer"].step()
        sk.save(f"{root}/{how}", states[how])
    saved = {how: gather(state) for how, state in states.items()}
    wrong = []
    for source in WRAPS:
        assert "model/blocks.1.up.weight" in sk.open(f"{root}/{source}")
        for how, state in states.items():
            sk.load(f"{root}/{source}", state)
            wrong += [f"{source} -> {how}: {name}" for name in find_differences(gather(state), saved[source])]
    return wrong


def test_wrappers_do_not_show_in_names(tmp_path: Path) -> None:
    assert run_ranks(cross_wrappers, 1, str(tmp_path)) == [[]]


# Frozen halves, several optimizers


def build_rich(world_size: int, seed: int) -> dict[str, Any]:
    """Return a model frozen by half, two optimizers, two schedulers and a scaler."""
    torch.manual_seed(seed)
    net = Net()
    for parameter in [*net.first.parameters(), *net.blocks[0].parameters()]:
        parameter.requires_grad_(False)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    adam = torch.optim.AdamW(net.blocks[1].parameters(), lr=0.01, amsgrad=True)
    sgd = torch.optim.SGD(net.head.parameters(), lr=0.5, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(adam, total_iters=7)
    drop = torch.optim.lr_scheduler.StepLR(sgd, step_size=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    return {
        "model": net,
        "optimizers": {"adam": adam, "sgd": sgd},
        "schedulers": [warm, drop],
        "scaler": scaler,
    }


def step_rich(state: dict[str, Any], step: int, rank: int) -> float:
    inputs, wanted = make_batch(10 * step + rank)
    optimizers = list(state["optimizers"].values())
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = (state["model"](inputs) - wanted).pow(2).mean()
    state["scaler"].scale(loss).backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= state["scaler"].get_scale()
        optimizer.step()
    for scheduler in state["schedulers"]:
        scheduler.step()
    state["scaler"].update(64.0 + step)
    return float(loss.item())


def describe_rich(state: dict[str, Any]) -> tuple[Arrays, str]:
    arrays = gather(state)
    for name, optimizer in state["optimizers"].items():
        arrays.update({f"{name}/{k}": v for k, v in gather({**state, "optimizer": optimizer}).items()})
    rest = [
        {k: v for k, v in g.items() if k != "params"} for o in state["optimizers"].values() for g in o.param_groups
    ]
    rest += [scheduler.state_dict() for scheduler in state["schedulers"]] + [state["scaler"].state_dict()]
    return arrays, repr(rest)


def save_rich(rank: int, world_size: int, root: str) -> Any:
    state = build_rich(world_size, 0)
    with sk.CheckpointManager(root) as manager:
        manager.resume(state)
        for step in (1, 2):
            step_rich(state, step, rank)
        manager.save(2, state)
        saved = describe_rich(state)
        losses = [step_rich(state, step, rank) for step in (3, 4)]
    return saved, losses, describe_rich(state)


def load_rich(rank: int, world_size: int, root: str) -> Any:
    state = build_rich(world_size, 1)
    sk.load(root, state)
    loaded = describe_rich(state)
    frozen = [p.requires_grad for p in state["model"].parameters()]
    losses = [step_rich(state, step, rank) for step in (3, 4)]
    return loaded, losses, describe_rich(state), frozen


def test_frozen_halves_and_several_optimizers(tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#3205: frozen tensors were stored with size 0."""
    root = str(tmp_path)
    saved = run_ranks(save_rich, 2, root)
    for (at_save, losses, end), (loaded, later, last, frozen) in zip(
        saved, run_ranks(load_rich, 2, root), strict=True
    ):
        assert find_differences(loaded[0], at_save[0]) == []
        assert loaded[1] == at_save[1]
        assert later == losses
        assert find_differences(last[0], end[0]) == []
        assert last[1] == end[1]
        assert (frozen.count(False), frozen.count(True)) == (8, 8)
        assert at_save[0]["model/first.weight"].shape == (7, 5)
        assert any("max_exp_avg_sq" in name for name in at_save[0])
    (loaded, _, _, _), *_ = run_ranks(load_rich, 3, root)
    assert find_differences(loaded[0], saved[0][0][0]) == []
    assert np.isfinite(loaded[0]["model/first.weight"]).all()


# Meta


class Rotary(nn.Module):
    """A layer beside a table that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def test_a_module_on_meta_is_filled_or_refused_by_name(tmp_path: Path) -> None:
    """huggingface/transformers#48892: buffers that are not stored were left as uninitialised memory."""
    sk.save(tmp_path / "linear", {"model": nn.Linear(5, 3)})
    with torch.device("meta"):
        model = nn.Linear(5, 3)
    with sk.CheckpointManager(tmp_path / "linear") as manager:
        manager.resume({"model": model})
    stored = sk.open(tmp_path / "linear")
    assert model.weight.device.type == "cpu"
    assert model.weight.tolist() == stored["model/weight"][:].tolist()

    whole = Rotary()
    sk.save(tmp_path / "rotary", {"model": whole})
    with torch.device("meta"):
        hollow = Rotary()
    with (
        sk.CheckpointManager(tmp_path / "rotary") as manager,
        pytest.raises(sk.StateMismatch, match=r"non-persistent buffers on the meta device.*: table"),
    ):
        manager.resume({"model": hollow})
    with torch.device("meta"):
        hollow = Rotary()
    hollow.table = torch.arange(3.0)
    with sk.CheckpointManager(tmp_path / "rotary") as manager:
        manager.resume({"model": hollow})
    assert hollow.table.tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(hollow.layer.weight, whole.layer.weight)
