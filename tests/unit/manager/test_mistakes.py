"""What a newcomer gets wrong is refused in words, before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkeep as sk
from shardkeep.events import Event


class Events:
    def __init__(self) -> None:
        self.found: list[Event] = []

    def emit(self, event: Event) -> None:
        self.found.append(event)


def make(seed: int = 0) -> dict[str, Any]:
    return {"model": nn.Linear(2, 1), "loader": sk.ResumableLoader(torch.arange(8), global_batch_size=2, seed=seed)}


@pytest.mark.parametrize("options", [{"save_every": "10"}, {"save_every": 0}, {"keep": 3}])
def test_a_policy_of_another_type_is_refused_when_made(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(sk.UsageError) as caught:
        sk.CheckpointManager(tmp_path, **options)
    assert caught.value.advice


def test_a_state_without_names_is_refused(tmp_path: Path) -> None:
    with sk.CheckpointManager(tmp_path / "run") as manager, pytest.raises(sk.UsageError, match="dict of names"):
        manager.resume(nn.Linear(2, 1))  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_loader_of_another_seed_is_noticed_before_anything_is_restored(tmp_path: Path) -> None:
    with sk.CheckpointManager(tmp_path) as manager:
        state = make()
        manager.resume(state)
        manager.save(1, state)
    other = make(seed=1)
    before = other["model"].weight.detach().clone()
    with sk.CheckpointManager(tmp_path) as manager, pytest.raises(sk.StateMismatch) as caught:
        manager.resume(other)
    assert any(problem.startswith("loader: seed: stored 0, this loader 1") for problem in caught.value.problems)
    assert torch.equal(other["model"].weight, before)


def test_a_fresh_start_says_what_the_first_save_would_refuse(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters())
    state = make() | {"callback": print, "optimizer": optimizer.state_dict()}
    events = Events()
    with sk.CheckpointManager(tmp_path, events=events) as manager:
        manager.resume(state)
    said = {event.name: event.fields["key"] for event in events.found if event.name.startswith("guard.")}
    assert said == {"guard.not_saveable": "callback", "guard.state_copy": "optimizer"}
