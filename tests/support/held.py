"""A store whose writes wait until the test lets them go, and a state of every kind of thing with its picture."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardkeep as sk
from shardkeep.events import Event
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faults import Call, Fault, FaultStore


class Sink:
    """Collects events, from any thread."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


class Held:
    """`store` waits at each write of a shard while it is held."""

    def __init__(self, inner: Store | None = None, plan: list[Fault] | None = None) -> None:
        self.inner = inner if inner is not None else MemoryStore()
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()
        self.store = FaultStore(self.inner, [Fault(kind="delay", when=self._wait, times=None), *(plan or [])])

    def _wait(self, call: Call) -> bool:
        if call.verb == "writer" and "step-" in call.key:
            self.reached.set()
            if not self._open.wait(60):
                raise TimeoutError("the test never let the writes go")
        return False

    def hold(self) -> None:
        self.reached.clear()
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.best = {"loss": 1.5}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.best = state["seen"], state["best"]


class Net(nn.Module):
    """Parameters of odd sizes, one large enough for several blocks of work, transposed ones, a norm's buffers."""

    def __init__(self, width: int, *, transposed: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Linear(width, 3, bias=False)
        if transposed:
            self.down.weight = nn.Parameter(torch.randn(width, 3).t())
        self.tied = nn.Linear(width, 3, bias=False)
        self.tied.weight = self.down.weight
        self.register_buffer("table", torch.arange(40).reshape(5, 8).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(x)).relu()
        out: torch.Tensor = self.down(hidden) + self.tied(hidden)
        return out


def make_job(width: int = 33, *, seed: int = 0, optimizer: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    """Return the state of a job after two steps: model, optimizer, schedule, EMA, loader, values, a user's object."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = Net(width, transposed=optimizer is not torch.optim.LBFGS)  # which takes flat ones only
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer(model.parameters(), **{"lr": 1e-2, **options}),
        "ema": torch.optim.swa_utils.AveragedModel(model),
        "counter": Counter(),
        "note": {"names": ["a", "b"], "count": 3},
        "noise": torch.randn(7, generator=torch.Generator().manual_seed(seed)),
        "loader": sk.ResumableLoader(TensorDataset(torch.randn(64, 5)), global_batch_size=8, seed=seed),
    }
    state["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], 50)
    for _ in range(2):
        forward_backward(state)
        change_by_step(state)
    return state


def forward_backward(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 5)).pow(2).mean().backward()


def change_by_step(state: dict[str, Any]) -> None:
    """Change everything as a training step does: the optimizer's tensors in `step()`, the rest anywhere."""
    if isinstance(state["optimizer"], torch.optim.LBFGS):

        def closure() -> torch.Tensor:
            forward_backward(state)
            return torch.tensor(1.0)

        state["optimizer"].step(closure)
    else:
        state["optimizer"].step()
    change_the_rest(state)


def change_the_rest(state: dict[str, Any]) -> None:
    """Change all that no optimizer owns."""
    state["scheduler"].step()
    state["ema"].update_parameters(state["model"])
    for buffer in state["model"].buffers():
        buffer.add_(1)
    state["counter"].seen.append(len(state["counter"].seen))
    state["counter"].best["loss"] -= 0.25
    state["note"]["count"] += 1
    state["note"]["names"].append("x")
    state["noise"].mul_(-1.5)
    next(iter(state["loader"]))
    torch.rand(3), random.random(), np.random.rand()


def change_all(state: dict[str, Any]) -> None:
    """Change everything at once, the optimizer's tensors behind its back too."""
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.mul_(0.5).add_(0.125)
        for slots in state["optimizer"].state.values():
            for value in slots.values():
                if isinstance(value, torch.Tensor):
                    value.add_(1)
    for group in state["optimizer"].param_groups:
        group["lr"] = 77.0
    change_the_rest(state)


def picture(state: dict[str, Any]) -> dict[str, Any]:
    """Return all that a checkpoint must bring back, in full, comparable by `==`."""
    found: dict[str, Any] = {}

    def put(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = (str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key, child in value.items():
                put(f"{name}/{key}", child)
        elif isinstance(value, list | tuple):
            found[f"{name}#"] = len(value)
            for at, child in enumerate(value):
                put(f"{name}/{at}", child)
        else:
            found[name] = repr(value)

    for key in ("model", "ema", "optimizer", "scheduler", "counter", "loader"):
        put(key, state[key].state_dict())
    put("note", state["note"])
    put("noise", state["noise"])
    put("torch", torch.get_rng_state())
    put("python", random.getstate())
    put("numpy", [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()])
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def resumed(store: Store, make: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    """Return the newest step and the picture of what a new process would resume from there."""
    state = make()
    change_the_rest(state)
    with sk.CheckpointManager("unused", store=store, events=Sink(), **options) as manager:
        report = manager.resume(state)
    return report.step, picture(state)
