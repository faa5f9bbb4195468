"""Overrides name something that is there, change that alone, and are refused before anything is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep.errors import StateMismatch, UsageError
from shardkeep.manager.resume import ResumeReport
from shardkeep.ranks.single import SingleGroup
from shardkeep.storage.memory import MemoryStore


class Silent:
    def emit(self, event: Any) -> None:
        pass


def make_state(lr: float = 0.1) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": lr}, {"params": [model.bias], "lr": lr / 2}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "note": "first", "data": {"shards": 3}}


def manage(store: MemoryStore) -> sk.CheckpointManager:
    return sk.CheckpointManager("unused", store=store, group=SingleGroup(), events=Silent())


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    state = make_state()
    state["model"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()
    state["scheduler"].step()
    manager = manage(made)
    manager.resume(state)
    manager.save(1, state)
    return made


def resume(store: MemoryStore, override: dict[str, Any]) -> tuple[dict[str, Any], ResumeReport]:
    state = make_state(0.7)
    report = manage(store).resume(state, override=override)
    return state, report


def test_an_option_in_all_groups_or_in_one(store: MemoryStore) -> None:
    state, report = resume(store, {"optimizer/lr": 0.01, "optimizer/1/weight_decay": 0.5})
    groups = state["optimizer"].param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.01, 0.01), (0.01, 0.5)]
    assert all(float(table["step"]) == 1 and table["exp_avg"].any() for table in state["optimizer"].state.values())
    assert report.overrides == {"optimizer/lr": "0.1, 0.05 -> 0.01", "optimizer/1/weight_decay": "0.01 -> 0.5"}
    assert any(line.startswith("optimizer/lr was overridden: ") for line in report.lines)


def test_a_field_of_an_object_and_a_plain_value(store: MemoryStore) -> None:
    state, report = resume(store, {"scheduler/step_size": 9, "note": "second"})
    assert (state["scheduler"].step_size, state["scheduler"].last_epoch) == (9, 1)
    assert state["note"] == "second"
    assert report.overrides["scheduler/step_size"] == "3 -> 9"


def test_a_whole_schedule_keeps_the_rates_it_began_with(store: MemoryStore) -> None:
    state = make_state(0.7)
    report = manage(store).resume(state, override={"scheduler": state["scheduler"]})
    assert state["scheduler"].last_epoch == 0
    assert [group["lr"] for group in state["optimizer"].param_groups] == [0.7, 0.35]
    assert "not taken" in report.overrides["scheduler"]


def test_a_fresh_start_is_overridden_too() -> None:
    state, report = resume(MemoryStore(), {"optimizer/lr": 0.01})
    assert report.fresh
    assert state["optimizer"].param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    "override",
    [
        {"optimizer/rate": 1.0},
        {"optimizer/params": []},
        {"optimizer/2/lr": 1.0},
        {"optimizer/x/lr": 1.0},
        {"lr": 1.0},
        {"model": None},
        {"model/weight": 1.0},
        {"scheduler": None},
        {"optimizer": None},
    ],
)
def test_what_cannot_be_overridden_is_refused_at_once(store: MemoryStore, override: dict[str, Any]) -> None:
    before = [info.key for info in store.list_objects("")]
    with pytest.raises(UsageError, match="override"):
        resume(store, override)
    assert [info.key for info in store.list_objects("")] == before


def test_a_field_that_is_not_stored_is_a_mismatch_and_nothing_is_restored(store: MemoryStore) -> None:
    state = make_state(0.7)
    with pytest.raises(StateMismatch, match="scheduler has no field 'stride'"):
        manage(store).resume(state, override={"scheduler/stride": 1})
    assert state["optimizer"].param_groups[0]["lr"] == 0.7
    assert not state["optimizer"].state


@pytest.mark.parametrize("override", [{}, {"optimizer/lr": 0.01}, {"scheduler": "live"}, {"data": {"shards": 4}}])
def test_plain_values_come_back_in_the_callers_own_table(store: MemoryStore, override: dict[str, Any]) -> None:
    """What is set anew is set in the table that was given, whatever else is overridden."""
    state = make_state(0.7)
    state["note"] = "third"
    if "scheduler" in override:
        override = {"scheduler": state["scheduler"]}
    data = state["data"]
    manage(store).resume(state, override=override)
    assert state["note"] == "first"
    assert state["data"] is data or "data" in override
