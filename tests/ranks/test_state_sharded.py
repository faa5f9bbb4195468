"""Optimizer state of parameters that FSDP2 cuts: back in the same layout, in one process, and over three ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkeep.errors import StateMismatch
from tests.support.ranks import run_ranks
from tests.support.roundtrip import Saved, load, merge, save

Values = dict[str, np.ndarray[Any, Any]]


class RowScaled(torch.optim.Optimizer):
    """Keeps one number per row of a matrix: state of another shape than its parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                table = self.state[parameter]
                table["count"] = table.get("count", 0) + 1
                grad = parameter.grad
                if parameter.ndim == 2:
                    table["row"] = grad.pow(2).mean(-1, keepdim=True) + table.get("row", 0.0)
                    grad = grad / (1 + table["row"])
                parameter.add_(grad, alpha=-self.param_groups[0]["lr"])


KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "rows": RowScaled,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}


def _build(kind: str, *, sharded: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return {"model": net, "optimizer": KINDS[kind](net.parameters())}


def _train(state: dict[str, Any], steps: range) -> None:
    for step in steps:
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))  # the same on every rank
        state["optimizer"].zero_grad()
        state["model"](batch).pow(2).mean().backward()
        state["optimizer"].step()


def _full(value: Any) -> np.ndarray[Any, Any]:
    tensor = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
    return tensor.detach().numpy().copy()


def _collect(state: dict[str, Any]) -> Values:
    found: Values = {}
    for name, parameter in state["model"].named_parameters():
        found[name] = _full(parameter)
        for part, value in state["optimizer"].state[parameter].items():
            found[f"{name}/{part}"] = _full(value)
    return found


def _save_sharded(rank: int, world_size: int, kind: str) -> tuple[Saved, Values, Values]:
    state = _build(kind, sharded=True)
    _train(state, range(2))
    saved, then = save(state), _collect(state)
    _train(state, range(2, 4))
    return saved, then, _collect(state)


def _load_sharded(rank: int, world_size: int, kind: str, saved: Saved) -> tuple[Values, Values, bool]:
    state = _build(kind, sharded=True)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    load(saved, state, rank=rank, world_size=world_size)
    sharded = all(
        isinstance(value, DTensor) and value.placements == parameter.placements
        for parameter in state["model"].parameters()
        for value in state["optimizer"].state[parameter].values()
        if getattr(value, "ndim", 0)
    )
    then = _collect(state)
    _train(state, range(2, 4))
    return then, _collect(state), sharded


def _same(a: Values, b: Values) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert np.array_equal(a[name], b[name]), name


@pytest.mark.parametrize("kind", ["adamw", "rows", pytest.param("sgd", marks=pytest.mark.slow)])
def test_same_layout_is_exact(kind: str) -> None:
    """WORLD-2, NVIDIA/Megatron-LM#659: sizes that two ranks do not divide; further steps are bit-identical."""
    ranks = run_ranks(_save_sharded, 2, kind)
    whole = merge([saved for saved, _, _ in ranks])
    for then, later, sharded in run_ranks(_load_sharded, 2, kind, whole):
        _same(then, ranks[0][1])
        _same(later, ranks[0][2])
        assert sharded


@pytest.mark.parametrize("kind", ["adamw", "rows", pytest.param("sgd", marks=pytest.mark.slow)])
def test_other_world_sizes(kind: str) -> None:
    """WORLD-1, deepspeedai/DeepSpeed#2898: sharded to plain, and plain to three ranks, by value equal."""
    ranks = run_ranks(_save_sharded, 2, kind)
    whole = merge([saved for saved, _, _ in ranks])
    state = _build(kind, sharded=False)
    load(whole, state)
    _same(_collect(state), ranks[0][1])
    assert not any(isinstance(v, DTensor) for table in state["optimizer"].state.values() for v in table.values())
    plain = save(state)
    for then, _, sharded in run_ranks(_load_sharded, 3, kind, plain):
        _same(then, ranks[0][1])
        assert sharded


def _other_shapes(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))

    def build(state: dict[str, torch.Tensor]) -> dict[str, Any]:
        net = nn.Linear(6, 4, bias=False)
        net.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Shard(1)], run_check=False))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if state:
            optimizer.state[net.weight] = state
        return {"model": net, "optimizer": optimizer}

    row = DTensor.from_local(torch.arange(4.0)[:, None], mesh, [Replicate()], run_check=False)
    column = DTensor.from_local(torch.full((1, 3), float(rank)), mesh, [Shard(1)], run_check=False)
    own = torch.full((4, 6), 5.0)  # plain, of the parameter's shape, beside a sharded parameter
    live = build({"row": row, "column": column, "own": own, "step": torch.tensor(3.0)})
    parts: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(parts, save(live))
    fresh = build({})
    load(merge(parts), fresh, rank=rank, world_size=world_size)
    found = fresh["optimizer"].state[fresh["model"].weight]
    assert (found["row"].placements, found["column"].placements) == ((Replicate(),), (Shard(1),))
    assert torch.equal(found["row"].to_local(), row.to_local())
    assert torch.equal(found["column"].to_local(), column.to_local())
    assert type(found["own"]) is torch.Tensor
    assert torch.equal(found["own"], own)
    assert type(found["step"]) is torch.Tensor

    odd = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False)
    torch.distributed.all_gather_object(parts, save(build({"odd": odd})))
    try:
        load(merge(parts), build({}), rank=rank, world_size=world_size)
    except StateMismatch as error:
        return list(error.problems)
    return []


def test_state_of_other_shapes() -> None:
    """State is cut where its parameter is, replicated where reduced, plain where it was; else refused."""
    for problems in run_ranks(_other_shapes, 2):
        assert len(problems) == 1
        assert problems[0].startswith("optimizer/odd/weight: shape (6,) beside a parameter of shape (4, 6)")
