"""What one step was, in a few microseconds: sample position, learning rates, and numbers that cost no device wait.

Also what the guards look at: random streams by digest, parameters that no optimizer has, loaders by name.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.optim import Optimizer

from shardkeep.errors import CheckpointError, UnsupportedState
from shardkeep.order.cursor import Cursor
from shardkeep.plan.replay import LR, METRIC, SAMPLES
from shardkeep.state.names import canonical_names
from shardkeep.state.objects import check_item, iter_items
from shardkeep.state.rng import capture_rng

_MAX_RATES = 8


class Observer:
    """Watches the loaders and optimizers of one state; finds them again only when the state's table changes."""

    def __init__(self) -> None:
        self._seen: tuple[tuple[str, int], ...] = ()
        self._loaders: list[tuple[str, Any]] = []
        self._optimizers: list[tuple[str, Optimizer]] = []

    def observe(self, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, str]:
        """Return quantity -> text of the step just done.

        A metric counts when it is a number, or one element in this process's own memory: reading one from a device
        would wait for all the work queued there.
        """
        # Plain values are put anew every step; only what is watched must still be there.
        seen = tuple((name, id(value)) for name, value in state.items() if not isinstance(value, _PLAIN))
        if seen != self._seen:
            self._find(state)
            self._seen = seen
        found = {f"{SAMPLES}{key}": _describe_cursor(loader.cursor) for key, loader in self._loaders}
        for key, optimizer in self._optimizers:
            rates = _describe_rates(optimizer)
            if rates is not None:
                found[f"{LR}{key}"] = rates
        for name, value in metrics.items():
            number = _read_free(value)
            if number is not None:
                found[f"{METRIC}{name}"] = number.hex()
        return found

    def _find(self, state: Mapping[str, Any]) -> None:
        self._loaders, self._optimizers = [], []
        for key, value in _iter_live(state):
            if isinstance(value, Optimizer):
                self._optimizers.append((key, value))
            elif isinstance(getattr(value, "cursor", None), Cursor):
                self._loaders.append((key, value))


_PLAIN = (type(None), bool, int, float, str, bytes)


def _iter_live(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    try:
        yield from ((item.key, item.value) for item in iter_items(state))
    except CheckpointError:
        return  # a state that cannot be saved is refused by the save, with its reason


def _describe_cursor(cursor: Cursor) -> str:
    return f"epoch {cursor.epoch}, {cursor.consumed} of {cursor.size}, seed {cursor.seed}, {cursor.algorithm}"


def _describe_rates(optimizer: Optimizer) -> str | None:
    rates: list[str] = []
    for group in optimizer.param_groups:
        rate = _read_free(group.get("lr"))
        if rate is None:
            return None
        rates.append(rate.hex())
    if len(set(rates)) <= 1:
        return rates[0] if rates else None
    text = " ".join(rates)
    return text if len(rates) <= _MAX_RATES else f"{len(rates)} rates {xxhash.xxh3_64_hexdigest(text.encode())}"


def _read_free(value: Any) -> float | None:
    """Return a number that is there without waiting for a device or a peer, else None."""
    if isinstance(value, numbers.Real):
        return float(value)
    # No subclasses: reading one may be a collective.
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        readable = value.device.type == "cpu" and value.numel() == 1 and not value.is_complex()
        return float(value.detach().item()) if readable else None
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fiub":
        return float(value.reshape(-1)[0])
    return None


def digest_streams() -> dict[str, str]:
    """Return stream -> digest of its state, of every random stream of this process; none moves."""
    return {f"rng/{name}": _digest(tree) for name, tree in capture_rng().items()}


def _digest(tree: Any) -> str:
    digest = xxhash.xxh3_64()
    _feed(digest.update, tree)
    return digest.hexdigest()


def _feed(update: Callable[[Any], object], tree: Any) -> None:
    if isinstance(tree, Mapping):
        for key in sorted(tree):
            update(f"{key}:".encode())
            _feed(update, tree[key])
    elif isinstance(tree, list | tuple):
        for child in tree:
            _feed(update, child)
    elif isinstance(tree, np.ndarray):
        update(np.ascontiguousarray(tree).tobytes())
    else:
        update(f"{tree!r};".encode())


def initial_seed() -> int:
    """Return the seed of torch's CPU stream: it changes when someone seeds it, never when someone draws."""
    return torch.default_generator.initial_seed()


def find_loaders(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> every loader in the state whose position is a cursor."""
    return {key: value for key, value in _iter_live(state) if isinstance(getattr(value, "cursor", None), Cursor)}


def list_keys(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of everything that a save would take, with its kind."""
    try:
        return {item.key: item.kind for item in iter_items(state)}
    except CheckpointError:
        return {}


def find_refused(state: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> why, of the plain values and sources of data that a save would refuse."""
    found: dict[str, str] = {}
    try:
        for item in iter_items(state):
            try:
                check_item(item)
            except UnsupportedState as error:
                found[item.key] = error.message + (f"; {error.advice}" if error.advice else "")
    except CheckpointError:
        pass  # names: `list_keys` says the same
    return found


def find_copies(state: Mapping[str, Any]) -> list[str]:
    """Return the names of what an optimizer's `state_dict()` returned: a restore would not reach the optimizer."""
    return [
        key
        for key, value in _iter_live(state)
        if isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()
    ]


def find_forgotten(state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return optimizer-less trainable parameters by model, of models of which an optimizer has others.

    A model that no optimizer in the state has any parameter of (an average, a teacher) is meant to be like that.
    """
    items = dict(_iter_live(state))
    held = {
        id(parameter)
        for optimizer in items.values()
        if isinstance(optimizer, Optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    found: dict[str, list[str]] = {}
    for key, model in items.items():
        if not isinstance(model, torch.nn.Module):
            continue
        named = [named for named in canonical_names(model) if isinstance(named.tensor, torch.nn.Parameter)]
        lost = [n.name for n in named if n.tensor.requires_grad and id(n.tensor) not in held]
        if lost and any(id(n.tensor) in held for n in named):
            found[key] = lost
    return found
