"""SHA-256 of everything a rank holds, taken from the live objects and not through any code that saves them."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from shardkeep.demo.digest import digest_tensor
from shardkeep.demo.records import Moment, StateRecord

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def hash_state(step: int, moment: Moment, state: dict[str, Any], *, rank: int) -> StateRecord:
    """Return the record of a state; collective, as whole tensors are gathered. Draws no random number."""
    digests: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, tensor in _list_tensors(state["model"], state["optimizer"]):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if rank == 0:
            digests[name], sizes[name] = _hash_tensor(whole)
    return StateRecord(
        step=step,
        moment=moment,
        tensors=digests,
        tensor_bytes=sizes,
        rng=_hash_rng(),
        scheduler=_hash_plain(state["scheduler"].state_dict()),
        loader=_hash_plain(state["loader"].state_dict()),
    )


def _list_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    named = sorted(model.named_parameters(), key=lambda entry: entry[0])
    found = [(f"weights/{name}", parameter.detach()) for name, parameter in named]
    for field in MOMENTS:
        for name, parameter in named:
            fields = optimizer.state.get(parameter, {})
            if field in fields:
                found.append((f"{field}/{name}", fields[field].detach()))
    return found


def _hash_tensor(tensor: torch.Tensor) -> tuple[str, int]:
    data = tensor.contiguous().numpy().tobytes()
    return digest_tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data), len(data)


def _hash_rng() -> dict[str, str]:
    name, keys, *rest = np.random.get_state()
    streams = {
        "python": repr(random.getstate()).encode(),
        "numpy": f"{name}{rest}".encode() + np.asarray(keys).tobytes(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    return {stream: hashlib.sha256(data).hexdigest() for stream, data in sorted(streams.items())}


def _hash_plain(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()
