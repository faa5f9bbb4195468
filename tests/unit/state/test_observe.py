"""A step's record holds exact numbers, and nothing that a device or a peer would have to be waited for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from shardkeep.state.observe import Observer
from tests.support.training import build


class Subclass(torch.Tensor):
    """Reading one may be a collective."""


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.1, 0.1),
        (3, 3.0),
        (math.nan, math.nan),
        (-math.inf, -math.inf),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.array([2.5]), 2.5),
        (torch.tensor(0.1), float(torch.tensor(0.1))),
        (torch.tensor([[7]]), 7.0),
        (torch.tensor(0.5, requires_grad=True), 0.5),
    ],
)
def test_numbers_in_host_memory_are_kept_to_the_bit(value: Any, number: float) -> None:
    assert Observer().observe({}, {"loss": value}) == {"metric/loss": number.hex()}


@pytest.mark.parametrize(
    "value",
    [
        torch.empty((), device="meta"),
        torch.tensor(1.0).as_subclass(Subclass),
        torch.ones(2),
        torch.tensor(1j),
        "1.0",
        None,
        [1.0],
    ],
)
def test_everything_else_is_left_alone(value: Any) -> None:
    assert Observer().observe({}, {"loss": value}) == {}


def test_positions_and_rates_follow_the_state() -> None:
    state: dict[str, Any] = build("plain", 1)
    observer = Observer()
    assert observer.observe(state, {}) == {
        "samples/loader": "epoch 0, 0 of 60, seed 1, keyed-1",
        "lr/optimizer": (1e-2).hex(),
    }
    next(iter(state["loader"]))
    state["optimizer"].param_groups[0]["lr"] = torch.tensor(0.5)
    assert observer.observe(state, {}) == {
        "samples/loader": "epoch 0, 12 of 60, seed 1, keyed-1",
        "lr/optimizer": (0.5).hex(),
    }
    state["optimizer"].param_groups[0]["lr"] = torch.empty((), device="meta")
    state["counter"] = 1
    assert set(observer.observe(state, {})) == {"samples/loader"}
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.25)
    assert observer.observe(state, {})["lr/optimizer"] == (0.25).hex()


def test_many_different_rates_are_one_short_text() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(40)]
    for count, words in ((2, 2), (40, 3)):
        groups = [{"params": [p], "lr": 0.1 * at} for at, p in enumerate(parameters[:count])]
        text = Observer().observe({"o": torch.optim.SGD(groups)}, {})["lr/o"]
        assert len(text.split()) == words
