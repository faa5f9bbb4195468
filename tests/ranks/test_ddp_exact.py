"""Steps in one process equal steps over a restart, bit for bit, with three and four ranks of DDP."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkeep.state.ddp import exact_ddp
from tests.support.ranks import run_ranks
from tests.support.roundtrip import Saved, load, save

STEPS, CUT = 6, 3


def _build(exact: bool, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(37, 37) for _ in range(6)))
    model = DistributedDataParallel(net, bucket_cap_mb=0.02, **options)
    if exact:
        exact_ddp(model)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def _train(state: dict[str, Any], rank: int, steps: range) -> str:
    for step in steps:
        batch = torch.randn(8, 37, generator=torch.Generator().manual_seed(10 * step + rank))
        state["optimizer"].zero_grad()
        state["model"](batch).pow(2).mean().backward()
        state["optimizer"].step()
    digest = hashlib.sha256()
    for parameter in state["model"].parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _run(
    rank: int, world_size: int, exact: bool, options: dict[str, Any], first: int, last: int, saved: list[Saved]
) -> tuple[str, Saved]:
    state = _build(exact, options)
    if saved:
        load(saved[rank], state)
    digest = _train(state, rank, range(first, last))
    return digest, save(state)


def _compare(world_size: int, exact: bool, options: dict[str, Any]) -> bool:
    straight = run_ranks(_run, world_size, exact, options, 0, STEPS, [])
    before = run_ranks(_run, world_size, exact, options, 0, CUT, [])
    after = run_ranks(_run, world_size, exact, options, CUT, STEPS, [saved for _, saved in before])
    digests = {digest for digest, _ in straight}
    assert len(digests) == 1
    return digests == {digest for digest, _ in after}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (3, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(3, {"static_graph": True}, marks=pytest.mark.slow),
        pytest.param(4, {"gradient_as_bucket_view": True}, marks=pytest.mark.slow),
        pytest.param(3, {"find_unused_parameters": True}, marks=pytest.mark.slow),
    ],
)
def test_restart_is_bit_identical(world_size: int, options: dict[str, Any]) -> None:
    """The same parameters after a kill and a new process, for every way in which DDP makes its buckets."""
    assert _compare(world_size, True, options)


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_without_it_the_last_bits_differ(world_size: int) -> None:
    """The reason why it is there; if this fails, torch no longer moves its buckets."""
    assert not _compare(world_size, False, {})
