"""What `exact_ddp` takes and refuses; the arithmetic is proved in tests/ranks/test_ddp_exact.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkeep.errors import UsageError
from shardkeep.state.ddp import exact_ddp, find_inexact_ddp, is_exact
from tests.support.ranks import run_ranks


def _checks(rank: int, world_size: int) -> dict[str, Any]:
    def wrap(**options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), **options)

    found: dict[str, Any] = {}
    plain = wrap()
    found["inexact"] = find_inexact_ddp({"model": plain, "parts": [nn.Sequential(plain)], "n": 1})
    streams, weights = torch.get_rng_state(), plain.module[0].weight.detach().clone()
    assert exact_ddp(plain) is plain
    assert exact_ddp(plain) is plain
    assert torch.equal(streams, torch.get_rng_state())
    assert torch.equal(weights, plain.module[0].weight)
    found["marked"] = is_exact(plain), find_inexact_ddp({"model": plain})
    plain(torch.ones(2, 3)).sum().backward()  # gradients are averaged once, not twice
    found["grad"] = plain.module[1].bias.grad.item()

    steady = wrap(find_unused_parameters=True)
    found["steady"] = find_inexact_ddp({"model": steady}), is_exact(exact_ddp(steady))

    trained = wrap()
    trained(torch.ones(2, 3)).sum().backward()
    found["trained"] = _refusal(trained)
    hooked = wrap()
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    found["hooked"] = _refusal(hooked)

    calls: list[int] = []
    own = wrap()

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and takes no texts
        calls.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    own.register_comm_hook(None, hook)
    exact_ddp(own)(torch.ones(2, 3)).sum().backward()
    found["own hook"] = bool(calls)
    plain._update_process_group(dist.group.WORLD)
    found["reset"] = is_exact(plain)
    return found


def _refusal(model: DistributedDataParallel) -> str:
    try:
        exact_ddp(model)
    except UsageError as error:
        return error.message
    return ""


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_exact_ddp(world_size: int) -> None:
    for found in run_ranks(_checks, world_size):
        assert found["inexact"] == (["model", "parts/0.0"] if world_size > 2 else [])
        assert found["marked"] == (True, [])
        assert found["grad"] == 2.0
        assert found["steady"] == ([], True)
        assert "has trained" in found["trained"]
        assert "built-in communication hook" in found["hooked"]
        assert found["own hook"]
        assert found["reset"] is False


def test_other_modules_are_refused() -> None:
    with pytest.raises(UsageError, match="exact_ddp got a Linear"):
        exact_ddp(nn.Linear(1, 1))  # type: ignore[arg-type]
    assert find_inexact_ddp({"model": nn.Linear(1, 1)}) == []
