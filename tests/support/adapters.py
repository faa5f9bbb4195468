"""A frozen base with a small adapter on top, as in low-rank adaptation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Adapted(nn.Module):
    """A frozen base of `rows` x 256 floats, a frozen bias, and an adapter that is trained."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.base = nn.Linear(256, rows).requires_grad_(False)
        self.adapter = nn.Linear(4, 4)


def make_adapted(step: int, *, rows: int = 10_000) -> dict[str, Any]:
    """Return a state whose adapter and moments follow from the step, and whose base never changes."""
    model = Adapted(rows)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.base.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "note": step}
    train_to(state, step)
    return state


def train_to(state: dict[str, Any], step: int) -> None:
    """Change the adapter and its moments to those of a step."""
    draw = torch.Generator().manual_seed(1000 + step)
    optimizer = state["optimizer"]
    for parameter in state["model"].adapter.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw))
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    optimizer.state.clear()
    optimizer.step()
    state["note"] = step


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Say whether two such states are the same, bit for bit."""
    tensors = [
        [
            *state["model"].state_dict().values(),
            *(
                value
                for parameter in state["model"].adapter.parameters()
                for _, value in sorted(state["optimizer"].state[parameter].items())
            ),
        ]
        for state in (one, other)
    ]
    return one["note"] == other["note"] and all(map(torch.equal, *tensors))
