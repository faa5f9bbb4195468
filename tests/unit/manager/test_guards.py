"""What a script does around a resume, and must not, is said once with its fix; an exact start is silent."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep.events import Event
from shardkeep.ranks.single import SingleGroup
from shardkeep.storage.memory import MemoryStore
from tests.support.training import build, step_once

Action = Callable[[dict[str, Any]], None]


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def start(
    store: MemoryStore,
    stop: int,
    *,
    before: Action = lambda state: None,
    after: Action = lambda state: None,
    use_steps: bool = True,
    loader: Any = None,
) -> list[tuple[str, str]]:
    """One start; returns the guards' events as (name, text)."""
    state, sink = build("plain", 1), Sink()
    manager = sk.CheckpointManager("unused", store=store, group=SingleGroup(), events=sink, save_every=2)
    before(state)
    step = manager.resume(state).step
    after(state)
    if use_steps:
        for step, batch in manager.steps(loader or state["loader"], stop=stop):
            manager.after_step(step, state, loss=step_once(state, batch))
    else:
        while step < stop:
            for batch in state["loader"]:
                step += 1
                manager.after_step(step, state, loss=step_once(state, batch))
                if step == stop:
                    break
    found = [event for event in sink.events if event.name.startswith("guard.")]
    assert all(event.level == "warning" for event in found)
    return [(event.name, event.text) for event in found]


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    assert start(made, 2) == []
    return made


@pytest.mark.parametrize("use_steps", [True, False])
def test_an_exact_start_is_silent(store: MemoryStore, use_steps: bool) -> None:
    assert start(store, 6, use_steps=use_steps) == []


@pytest.mark.parametrize(
    ("seed", "stream"),
    [
        (lambda state: torch.manual_seed(100), "rng/torch"),
        (lambda state: torch.manual_seed(7), "rng/torch"),
        (lambda state: random.seed(201), "rng/python"),
        (lambda state: np.random.seed(301), "rng/numpy"),
        (lambda state: torch.rand(1), "rng/torch"),
    ],
)
def test_reseeding_between_resume_and_the_first_batch(store: MemoryStore, seed: Action, stream: str) -> None:
    ((name, text),) = start(store, 6, after=seed)
    assert name == "guard.reseeded"
    assert stream in text
    assert "before resume()" in text


def test_a_fresh_start_may_seed_when_it_likes() -> None:
    assert start(MemoryStore(), 2, after=lambda state: torch.manual_seed(1)) == []


def test_reseeding_is_seen_without_steps_too_when_the_seed_is_another(store: MemoryStore) -> None:
    ((name, _),) = start(store, 6, after=lambda state: torch.manual_seed(7), use_steps=False)
    assert name == "guard.reseeded"


def test_a_loader_that_was_used_before_the_resume(store: MemoryStore) -> None:
    ((name, text),) = start(store, 6, before=lambda state: next(iter(state["loader"])))
    assert name == "guard.loader_consumed"
    assert "before resume()" in text


def test_a_loader_that_was_used_before_the_loop(store: MemoryStore) -> None:
    ((name, text),) = start(store, 6, after=lambda state: next(iter(state["loader"])))
    assert name == "guard.loader_consumed"
    assert "between resume() and the loop" in text


def test_a_loader_that_is_not_in_the_state(store: MemoryStore) -> None:
    other = build("plain", 1)["loader"]
    ((name, text),) = start(store, 6, loader=other)
    assert name == "guard.loader_missing"
    assert "ResumableLoader" in text


def test_state_that_comes_after_the_restore(store: MemoryStore) -> None:
    def change(state: dict[str, Any]) -> None:
        state["ema"] = {"decay": 0.9}

    ((name, text),) = start(store, 6, after=change)
    assert (name, text[:4]) == ("guard.state_added", "ema:")


def test_state_that_is_not_saved_any_more() -> None:
    made = MemoryStore()
    state, sink = build("plain", 1), Sink()
    manager = sk.CheckpointManager("unused", store=made, group=SingleGroup(), events=sink)
    manager.resume(state)
    manager.save(1, state)
    again, sink = build("plain", 1), Sink()
    manager = sk.CheckpointManager("unused", store=made, group=SingleGroup(), events=sink)
    manager.resume(again)
    manager.save(2, {name: value for name, value in again.items() if name != "scheduler"})
    (event,) = [event for event in sink.events if event.name.startswith("guard")]
    assert event.name == "guard.state_missing"
    assert event.fields["key"] == "scheduler"


def test_an_optimizer_that_lacks_parameters_of_its_model() -> None:
    def narrow(state: dict[str, Any]) -> None:
        model = state["model"]
        state["optimizer"] = torch.optim.AdamW(model.first.parameters(), lr=1e-2)
        state["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], 50)
        model.head.requires_grad_(False)

    ((name, text),) = start(MemoryStore(), 1, before=narrow)
    assert name == "guard.optimizer_incomplete"
    assert "blocks.0.up.weight" in text
    assert "head" not in text


def test_a_model_that_no_optimizer_trains_is_meant_to_be_so() -> None:
    def add(state: dict[str, Any]) -> None:
        state["teacher"] = torch.nn.Linear(2, 2)

    assert start(MemoryStore(), 1, before=add) == []
