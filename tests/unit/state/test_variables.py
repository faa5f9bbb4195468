"""What of a script's variables is seen beside its state: the user's own, by name, and nothing that is in it."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch

from shardkeep.state.variables import VariableReader


class Trainer:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.seen, self.best = 0, 0.5
        self.history: list[float] = []
        self.noise = torch.Generator()
        self.me = self

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def look(trainer: Trainer, state: dict[str, Any]) -> VariableReader:
    reader = VariableReader(state)
    reader.read(sys._getframe())
    return reader


def own_values(trainer: Trainer) -> dict[str, str]:
    found = look(trainer, trainer.state()).values
    return {name: value for name, value in found.items() if name.startswith("look.trainer.")}


def test_attributes_and_containers_are_found_by_name_and_what_is_saved_is_not() -> None:
    trainer = Trainer()
    streams = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    reader = look(trainer, trainer.state())
    own = own_values(trainer)
    assert own["look.trainer.seen"] == "0"
    assert own["look.trainer.best"] == "0x1.0000000000000p-1"
    assert {"look.trainer.average[0]", "look.trainer.average[1]", "look.trainer.history (list)"} <= own.keys()
    assert not [name for name in own if ".model" in name or ".optimizer" in name]
    assert "look.trainer.noise" in reader.unsaved
    assert streams[0] == random.getstate()
    assert torch.equal(streams[1], torch.get_rng_state())
    assert streams[2] == np.random.get_state()[1].tolist()  # type: ignore[union-attr]


def test_every_change_shows_and_nothing_else_does() -> None:
    trainer = Trainer()
    before = own_values(trainer)
    assert own_values(trainer) == before
    trainer.seen += 1
    trainer.average[1] += 1
    trainer.history.append(0.1)
    trainer.noise.manual_seed(5)
    after = look(trainer, trainer.state()).values
    changed = {
        name.removeprefix("look.trainer.") for name in before if before[name] != after[name] and "look" in name
    }
    assert changed == {"seen", "average[1]", "history (list)", "noise"}


def test_an_optimizer_that_is_not_in_the_state_is_named() -> None:
    trainer = Trainer()
    reader = look(trainer, {"model": trainer.model})
    name = "look.trainer.optimizer"
    assert reader.unsaved[name] == "SGD"
    trainer.optimizer.param_groups[0]["lr"] = 0.2
    assert look(trainer, {"model": trainer.model}).values[name] != reader.values[name]
