"""The state as live tensors over memory that all workers share, so that none of them needs a copy of its own.

Imports torch: only worker processes load it.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import xxhash

from shardkeep.bench.gpt import StateShape

_FILL_BYTES: Final = 64 << 20
_SEED: Final = 20
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, which the mmap module does not name


class BenchAdamW(torch.optim.AdamW):
    """AdamW whose step does no more than change everything in place: what a checkpoint has to be safe from.

    `entered_s` is when the last step began its own work, after every hook that may have held it.
    """

    entered_s = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss comes back
        self.entered_s = time.monotonic()
        with torch.no_grad():
            torch._foreach_neg_(list_tensors(self))


def list_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return every parameter and moment of an optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
    return [*(parameter.detach() for parameter in parameters), *moments]


@dataclass(slots=True, kw_only=True)
class FlatState:
    """A model, its optimizer, and the same tensors by flat names."""

    model: torch.nn.Module
    optimizer: BenchAdamW
    flat: dict[str, torch.Tensor]

    @property
    def ours(self) -> dict[str, Any]:
        """What shardkeep is given."""
        return {"model": self.model, "optimizer": self.optimizer}


@dataclass(slots=True, kw_only=True)
class LiveState(FlatState):
    """A state over one piece of memory, which is all its bytes."""

    shape: StateShape
    memory: mmap.mmap

    def fill(self) -> None:
        """Write random numbers everywhere, the same at each call."""
        view = np.frombuffer(self.memory, np.float32)
        block = np.random.Generator(np.random.PCG64(_SEED)).standard_normal(_FILL_BYTES // 4, dtype=np.float32)
        for number, start in enumerate(range(0, len(view), len(block))):
            part = view[start : start + len(block)]
            np.multiply(block[: len(part)], np.float32(1 + number / 1024), out=part)
        for piece in self.shape.pieces:
            if piece.role == "step":
                self.flat[piece.key].fill_(1000.0)

    def scramble(self) -> None:
        """Overwrite everything, so that a load has something to do."""
        np.frombuffer(self.memory, np.uint8)[:] = 0x3F

    def digest(self) -> str:
        """Return a digest of all tensors."""
        state = xxhash.xxh3_128()
        view = memoryview(self.memory)
        for piece in self.shape.pieces:
            state.update(view[piece.offset : piece.offset + piece.size_bytes])
        return state.hexdigest()


def open_state(fd: int, shape: StateShape) -> LiveState:
    """Map the shared memory and lay the model and the optimizer over it; its content stays what it is."""
    memory = mmap.mmap(fd, shape.memory_bytes)
    _populate(memory)
    flat = {
        piece.key: torch.frombuffer(
            memory, dtype=torch.float32, count=piece.size_bytes // 4, offset=piece.offset
        ).reshape(piece.shape)
        for piece in shape.pieces
    }
    model, optimizer = build_training({k.removeprefix("model."): t for k, t in flat.items() if k[:6] == "model."})
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {role: flat[f"{role}.{name}"] for role in ("step", "exp_avg", "exp_avg_sq")}
    return LiveState(shape=shape, memory=memory, model=model, optimizer=optimizer, flat=flat)


def make_tiny() -> FlatState:
    """Return a state that costs nothing to save, but for what a library imports at its first save."""
    model, optimizer = build_training({"a": torch.zeros(8)})
    flat: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        moments = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8)}
        optimizer.state[parameter] = moments
        flat |= {f"model.{name}": parameter.detach(), **{f"{role}.{name}": t for role, t in moments.items()}}
    return FlatState(model=model, optimizer=optimizer, flat=flat)


def _populate(memory: mmap.mmap) -> None:
    """Map every page now: later its first use would be measured, and count as memory of whoever used it."""
    try:
        memory.madvise(_POPULATE_WRITE)
    except OSError:  # before Linux 5.14
        view = np.frombuffer(memory, np.uint8)
        view[::4096] = view[::4096]


def build_training(parameters: dict[str, torch.Tensor]) -> tuple[torch.nn.Module, BenchAdamW]:
    """Return a model that holds `parameters` (name -> tensor, not copied) and an optimizer without moments."""
    model = torch.nn.Module()
    for name, tensor in parameters.items():
        *path, last = name.split(".")
        module = model
        for word in path:
            if word not in module._modules:
                module.add_module(word, torch.nn.Module())
            module = module.get_submodule(word)
        module.register_parameter(last, torch.nn.Parameter(tensor))
    return model, BenchAdamW(model.parameters(), lr=1e-4)
