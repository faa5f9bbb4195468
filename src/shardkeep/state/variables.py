"""The variables of a training script that are not in its state, by name and digest: for `shardkeep audit` alone.

The frames of the user's code that are on the stack are looked at, and the attributes of the user's own objects in
them. Reads only, calls no method of a user's object, and keeps nothing.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardkeep.errors import CheckpointError
from shardkeep.state.dtensor import local_of
from shardkeep.state.names import canonical_names
from shardkeep.state.objects import iter_items
from shardkeep.state.rng import capture_generator, is_generator

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
_DEPTH: Final = 4
_CHILDREN: Final = 256
_FRAMES: Final = 64


class VariableReader:
    """Reads what the callers hold beside `state`.

    Attributes:
        values: name -> digest (of plain values the value itself) of what can be compared.
        unsaved: name -> type of modules, optimizers, schedulers, loaders and the like that are not in the state.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.values: dict[str, str] = {}
        self.unsaved: dict[str, str] = {}
        self._state = state
        self._known = set(_iter_known(state))
        self._digests: dict[int, str] = {}
        # What is looked into right now: an object that refers to itself is named once.
        self._above: list[int] = []

    def read(self, frame: FrameType | None) -> None:
        """Look at a frame and those that called it; a variable at the top of a script goes by its bare name."""
        for _ in range(_FRAMES):
            if frame is None:
                return
            if _is_users(frame.f_code.co_filename):
                function = frame.f_code.co_name
                prefix = "" if function == "<module>" else f"{function}."
                for name, value in sorted(dict(frame.f_locals).items()):
                    if not name.startswith("__"):
                        self._take(f"{prefix}{name}", value, 0)
            frame = frame.f_back

    def _take(self, name: str, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.values.setdefault(name, value.hex() if kind is float else repr(value)[:200])
            return
        if id(value) in self._known or isinstance(value, type):
            return
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            self._digest(name, value)
        elif isinstance(value, nn.Module | Optimizer | LRScheduler | torch.amp.GradScaler) or is_generator(value):
            if self._digest(name, value):
                self.unsaved[name] = kind.__name__
        elif isinstance(value, torch.utils.data.DataLoader) or hasattr(kind, "cursor"):
            self.unsaved[name] = kind.__name__
            if hasattr(value, "cursor"):
                self.values.setdefault(name, repr(value.cursor))
            if (generator := getattr(value, "generator", None)) is not None:
                self._take(f"{name}.generator", generator, depth + 1)
        elif depth < _DEPTH and id(value) not in self._above:
            self._above.append(id(value))
            for part, child in self._children(value):
                self._take(f"{name}{part}", child, depth + 1)
            self._above.pop()

    def _children(self, value: Any) -> list[tuple[str, Any]]:
        """Return what is within a container or an object of the user's own class."""
        if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
            texts = [(f"[{key!r}]", child) for key, child in value.items() if isinstance(key, str | int)]
            return texts[:_CHILDREN]
        if isinstance(value, list | tuple | deque | set | frozenset):
            return self._read_list(value)
        if not _is_users_type(type(value)):
            return []
        return [(f".{name}", child) for name, child in list(getattr(value, "__dict__", {}).items())[:_CHILDREN]]

    def _read_list(self, value: Any) -> list[tuple[str, Any]]:
        items = list(value)
        if all(type(item) in _PLAIN for item in items):
            ordered = sorted(map(repr, items)) if isinstance(value, set | frozenset) else list(map(repr, items))
            return [(f" ({type(value).__name__})", f"{len(items)} {_hex(' '.join(ordered).encode())}")]
        return [(f"[{at}]", child) for at, child in enumerate(items[:_CHILDREN])]

    def _digest(self, name: str, value: Any) -> bool:
        """Keep the digest of a live object; False when it holds nothing that the state does not hold."""
        found = self._digests.get(id(value))
        if found is None:
            digest = xxhash.xxh3_64()
            count = 0
            for part in _iter_content(value, self._known):
                digest.update(part)
                count += 1
            found = self._digests[id(value)] = digest.hexdigest() if count else ""
        if found:
            self.values.setdefault(name, found)
        return bool(found)


def _iter_known(state: Mapping[str, Any]) -> Iterator[int]:
    """Yield the identity of everything that a save takes: objects, the containers around them, and tensors."""
    yield id(state)
    try:
        items = list(iter_items(state))
    except CheckpointError:
        return
    for item in items:
        yield from (id(item.value), id(item.holder))
        if type(item.value) in (dict, list, set, deque):
            yield from (id(child) for child in _walk(item.value))
        if isinstance(item.value, nn.Module):
            yield from (id(named.tensor) for named in canonical_names(item.value))
            yield from (id(module) for module in item.value.modules())
        elif isinstance(item.value, Optimizer):
            yield id(item.value.param_groups)
            yield from (id(tensor) for table in item.value.state.values() for tensor in _walk(table))


def _walk(node: Any) -> Iterator[Any]:
    yield node
    children: Any = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | deque) else ()
    for child in children:
        if isinstance(child, Mapping | list | deque | torch.Tensor):
            yield from _walk(child)


def _iter_content(value: Any, known: set[int]) -> Iterator[bytes]:
    """Yield the bytes of what an object holds, tensors of the state left out."""
    if isinstance(value, torch.Tensor):
        if id(value) not in known and not (value.is_meta or value.layout is not torch.strided):
            yield f"{value.dtype}{tuple(value.shape)}".encode()
            yield _bytes_of(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield value.tobytes() if not value.dtype.hasobject else b""
    elif isinstance(value, nn.Module):
        for named in canonical_names(value):
            yield from _iter_content(named.tensor, known)
    elif isinstance(value, Optimizer):
        for group in value.param_groups:
            yield repr(group.get("lr")).encode()
        for table in value.state.values():
            for part in sorted(table, key=str):
                yield from _iter_content(table[part], known)
    elif isinstance(value, LRScheduler | torch.amp.GradScaler):
        yield from _iter_tree(value.state_dict())
    elif isinstance(value, random.Random | torch.Generator) or is_generator(value):
        yield from _iter_tree(capture_generator(value))
    else:
        yield repr(value).encode() if type(value) in _PLAIN else b""


def _iter_tree(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield f"{key}:".encode()
            yield from _iter_tree(tree[key])
    elif isinstance(tree, list | tuple):
        for child in tree:
            yield from _iter_tree(child)
    elif isinstance(tree, torch.Tensor | np.ndarray):
        yield from _iter_content(tree, set())
    elif type(tree) in _PLAIN:
        yield repr(tree).encode()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    local = local_of(tensor).detach()
    if type(local) not in (torch.Tensor, nn.Parameter):
        return b""
    flat = local.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _hex(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))


def _is_users(path: str) -> bool:
    """Say whether a file is neither of this package nor installed nor of the interpreter."""
    if path.startswith("<"):
        return path in ("<string>", "<stdin>")
    full = os.path.abspath(path)
    libraries = {os.path.abspath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not full.startswith((_PACKAGE, *(f"{library}{os.sep}" for library in sorted(libraries))))


def _is_users_type(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    path = getattr(module, "__file__", None)
    return cls.__module__ == "__main__" or (path is not None and _is_users(path))
