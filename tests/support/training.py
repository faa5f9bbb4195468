"""A small training job under every layout that torch has for it, the same job whatever the layout.

    state = build("fsdp", world_size)
    log = train(state, manager, stop=8)         # one `Step` each
    full = gather(state)                        # name -> whole array: weights, moments, steps, groups

Sizes are prime to all world sizes used (7, 5) or smaller than some (2); only what tensor parallelism cuts is even.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import shardkeep as sk
from shardkeep.state.names import canonical_names

Arrays = dict[str, np.ndarray[Any, Any]]

LAYOUTS: Final = ("plain", "ddp", "fsdp", "tp", "fsdp_tp", "hsdp")
WIDTH, HIDDEN, CLASSES = 7, 12, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x + self.drop(self.down(torch.relu(self.up(x)))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class Step(NamedTuple):
    """What one step did on one rank."""

    number: int
    loss: float
    ids: tuple[int, ...]
    lr: float
    draws: tuple[float, float, float]


def make_model(layout: str, world_size: int, *, seed: int = 0) -> tuple[nn.Module, int]:
    """Return the model and the number of data-parallel ranks."""
    torch.manual_seed(seed)
    net = Net()
    if layout == "plain":
        return net, 1
    if layout == "ddp":
        return sk.exact_ddp(DistributedDataParallel(net)), world_size
    if layout == "tp":
        _cut_tensors(net, init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
        return net, 1
    if layout == "fsdp_tp":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        _cut_tensors(net, mesh["tp"])
        return _shard(net, mesh=mesh["dp"]), world_size // 2
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        return _shard(net, mesh=mesh), world_size
    assert layout == "fsdp", layout
    return _shard(net), world_size


def _cut_tensors(net: Net, mesh: Any) -> None:
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _shard(net: Net, **options: Any) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
    return net


def build(layout: str, world_size: int, *, rank: int = 0, seed: int = 0) -> dict[str, Any]:
    """Return the whole state of a fresh job; ranks that read other samples draw other random numbers."""
    model, data_size = make_model(layout, world_size, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    inputs = torch.randn(60, 5, generator=torch.Generator().manual_seed(5))
    data_rank = rank * data_size // world_size if layout != "plain" else 0
    loader = sk.ResumableLoader(
        TensorDataset(inputs, inputs[:, :CLASSES].sin()),
        global_batch_size=12,
        seed=1,
        data_rank=data_rank,
        data_size=data_size,
    )
    torch.manual_seed(100 + data_rank)
    random.seed(200 + data_rank)
    np.random.seed(300 + data_rank)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}


def step_once(state: dict[str, Any], batch: Any, *, before_update: Callable[[], None] = lambda: None) -> float:
    """Take one optimizer step; return the loss."""
    inputs, wanted = batch
    state["optimizer"].zero_grad()
    loss = (state["model"](inputs) - wanted).pow(2).mean()
    loss.backward()
    before_update()
    state["optimizer"].step()
    state["scheduler"].step()
    return float(loss.item())


def train(
    state: dict[str, Any], manager: sk.CheckpointManager, *, stop: int, at: Callable[[int], None] = lambda step: None
) -> list[Step]:
    """Train up to `stop`, saving as the manager says.

    Args:
        at: called in the middle of each step, with gradients and before the update.
    """
    log = []
    loader = state["loader"]
    for step, batch in manager.steps(loader, stop=stop):
        loss = step_once(state, batch, before_update=lambda: at(step))  # noqa: B023  # called at once
        draws = (float(torch.rand(1)), random.random(), float(np.random.rand()))
        lr = float(state["optimizer"].param_groups[0]["lr"])
        log.append(Step(step, loss, loader.last_batch_ids, lr, draws))
        manager.after_step(step, state, loss=loss)
    return log


def gather(state: dict[str, Any]) -> Arrays:
    """Return every weight, buffer and optimizer tensor whole, by canonical name, with its dtype (collective)."""
    found: Arrays = {}
    model, optimizer = state["model"], state.get("optimizer")
    for named in canonical_names(model):
        found[f"model/{named.name}"] = to_array(named.tensor)
        if optimizer is not None and named.tensor in optimizer.state:
            for part, value in sorted(optimizer.state[named.tensor].items()):
                found[f"optimizer/{part}/{named.name}"] = to_array(value)
    return found


def to_array(value: Any) -> np.ndarray[Any, Any]:
    whole = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
    # A clone: a storage that NumPy has seen cannot be resized any more, and FSDP2 does that.
    return np.array(whole.detach().cpu().clone().numpy())


def find_differences(one: Arrays, other: Arrays) -> list[str]:
    """Return the names whose bytes, shapes or dtypes differ, or that only one has."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one
        or name not in other
        or (one[name].dtype, one[name].shape) != (other[name].dtype, other[name].shape)
        or one[name].tobytes() != other[name].tobytes()
    )


def digest_live(state: dict[str, Any]) -> dict[str, Any]:
    """Return everything about this rank's live training state that a save must not touch, comparable by `==`."""
    model, optimizer = state["model"], state["optimizer"]
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [x.tobytes() if isinstance(x, np.ndarray) else x for x in np.random.get_state()],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "grad mode": torch.is_grad_enabled(),
        "groups": repr([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]),
        "group ids": [id(group) for group in optimizer.param_groups],
        "parameters": [(id(p), p.requires_grad, p._version) for p in model.parameters()],
        "state ids": [
            (id(p), id(table), sorted((part, id(value)) for part, value in table.items()))
            for p, table in optimizer.state.items()
        ],
        "scheduler": repr(sorted(state["scheduler"].state_dict().items())),
        "loader": repr(state["loader"].state_dict()),
    }
    found["bytes"] = [(name, _digest_local(tensor)) for name, tensor in _iter_live(model, optimizer)]
    return found


def _iter_live(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        yield name, parameter
        yield f"{name}.grad", parameter.grad
        for part, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}.{part}", value
    yield from model.named_buffers()


def _digest_local(tensor: Any) -> tuple[int, str] | None:
    if tensor is None:
        return None
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return id(tensor), hashlib.sha256(local.detach().contiguous().numpy().tobytes()).hexdigest()
