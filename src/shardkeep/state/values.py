"""Plain Python trees, both ways: live values <-> copies that records can hold, free of torch.

Packing copies every container (the loop may change it the moment a save returns), turns torch's dtypes, devices,
sizes and memory formats into `TorchValue`s and takes tensors out: each becomes a `TensorRef` and is handed to the
caller with its path. Which other types can be stored is decided by `format.values`; what it cannot store is refused
here already, while the caller of `save` is still listening. Parts of a path are joined with `/`; a `/` or `%` within
a key is escaped.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from shardkeep.errors import Corrupt, UnsupportedState
from shardkeep.format.value_encoder import MAX_DEPTH
from shardkeep.format.value_registry import DEFAULT_REGISTRY, Registered, find_stray_content, put_together
from shardkeep.format.values import decode_value, encode_value
from shardkeep.spec.tensors import TensorRef
from shardkeep.types import TorchValue

_FORMATS: Final = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_ATOMS: Final = (type(None), bool, int, float, complex, str, bytes)
_MAPPINGS: Final = (dict, OrderedDict, Counter, defaultdict)

Leaf = Callable[[Any, str], Any]
_KEEP: Final = object()


def escape(part: str) -> str:
    """Return one part of a path, with `/` and `%` escaped so that joined parts stay apart."""
    return part.replace("%", "%25").replace("/", "%2F")


def format_section(key: str) -> str:
    """Return the section (a file name's beginning) of a top-level state key; distinct keys give distinct ones."""
    section = _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), key)
    return f"%2E{section[1:]}" if section.startswith(".") else section


def pack_tree(node: Any, path: str, take_tensor: Callable[[torch.Tensor, str], Any]) -> Any:
    """Return a copy of a live tree that shares nothing mutable with it and holds no torch object.

    Args:
        path: the tree's name, for tensors' paths and messages.
        take_tensor: called with each tensor and its path; what it returns stands in the copy.

    Raises:
        UnsupportedState: something that cannot be stored without pickle, or a container within itself.
    """

    def leaf(item: Any, at: str) -> Any:
        if isinstance(item, torch.Tensor):
            return take_tensor(item, at)
        packed = _pack_torch(item)
        return _KEEP if packed is None else packed

    return _copy(node, path, leaf, frozenset())


def unpack_tree(node: Any, give_tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return a new live tree from a stored one; `give_tensor` returns the tensor of a stored key.

    Raises:
        Corrupt: names something of torch that does not exist.
    """

    def leaf(item: Any, _at: str) -> Any:
        if isinstance(item, TensorRef):
            return give_tensor(item.key)
        return _unpack_torch(item) if isinstance(item, TorchValue) else _KEEP

    return _copy(node, "value", leaf, frozenset())


def iter_refs(node: Any) -> Iterator[str]:
    """Yield the key of every tensor that a stored tree refers to, in its order."""
    found: list[str] = []
    unpack_tree(node, lambda key: found.append(key) or torch.empty(0))  # type: ignore[func-returns-value]
    yield from found


def find_tensors(node: Any, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a live tree by their paths (none where the tree cannot be packed)."""
    found: dict[str, torch.Tensor] = {}

    def take(tensor: torch.Tensor, at: str) -> TensorRef:
        found[at] = tensor
        return TensorRef(at)

    try:
        pack_tree(node, path, take)
    except UnsupportedState:
        return {}
    return found


def _copy(node: Any, path: str, leaf: Leaf, above: frozenset[int]) -> Any:
    """Copy a tree of the same types; `leaf` replaces an item or returns `_KEEP`."""
    kind = type(node)
    if kind in _ATOMS:
        return node
    if (replaced := leaf(node, path)) is not _KEEP:
        return replaced
    if kind is np.ndarray or kind is bytearray:
        return node.copy() if kind is bytearray or not node.dtype.hasobject else _refuse(node, path)
    if isinstance(node, np.generic):
        return node
    registered = DEFAULT_REGISTRY.find(kind)
    if kind not in (*_MAPPINGS, list, tuple, set, frozenset, deque) and registered is None:
        return _copy_rare(node, path)
    if id(node) in above:
        raise UnsupportedState(f"{path}: a {kind.__name__} that contains itself cannot be stored", key=path)
    if len(above) > MAX_DEPTH:
        raise UnsupportedState(f"{path}: nested deeper than {MAX_DEPTH} levels", key=path, advice="flatten it")
    above |= {id(node)}
    if registered is not None:
        return _copy_registered(node, path, leaf, above, registered)
    if kind in _MAPPINGS:
        return _copy_mapping(node, path, leaf, above)
    items = [_copy(child, f"{path}/{index}", leaf, above) for index, child in enumerate(node)]
    return deque(items, node.maxlen) if kind is deque else kind(items)


def _copy_mapping(node: Any, path: str, leaf: Leaf, above: frozenset[int]) -> Any:
    kind = type(node)
    if kind is defaultdict:
        encode_value(defaultdict(node.default_factory), path)  # refuses factories that cannot be stored
    copied = defaultdict(node.default_factory) if kind is defaultdict else kind()
    if kind is OrderedDict and vars(node):
        # A module's state_dict hangs its versions on the table as an attribute.
        vars(copied).update(_copy(vars(node), f"{path}.__dict__", leaf, above))
    texts = sum(type(key) is str for key in node)
    for index, (key, child) in enumerate(node.items()):
        # Keys that are not text may read like ones that are (1 and "1"): where both occur, they go by position.
        part = escape(key) if type(key) is str else (f"%item{index}" if texts else escape(str(key)))
        copied[_copy(key, f"{path}/{part}:key", leaf, above)] = _copy(child, f"{path}/{part}", leaf, above)
    return copied


def _copy_registered(node: Any, path: str, leaf: Leaf, above: frozenset[int], entry: Registered) -> Any:
    if entry.kind in ("enum", "flag"):
        return node
    if find_stray_content(node, entry) is not None:
        return _refuse(node, path)
    fields = {name: _copy(getattr(node, name), f"{path}/{name}", leaf, above) for name in entry.fields}
    return put_together(entry, fields)


def _copy_rare(node: Any, path: str) -> Any:
    """Copy what only `format.values` knows by its own round trip; it refuses everything else by name."""
    return decode_value(encode_value(node, path), path)


def _refuse(node: Any, path: str) -> Any:
    encode_value(node, path)
    raise UnsupportedState(f"{path}: a {type(node).__name__} with this content cannot be stored", key=path)


def _pack_torch(node: Any) -> TorchValue | None:
    if isinstance(node, torch.dtype):
        return TorchValue("dtype", str(node).removeprefix("torch."))
    if isinstance(node, torch.device):
        return TorchValue("device", str(node))
    if isinstance(node, torch.Size):
        return TorchValue("size", ",".join(str(int(size)) for size in node))
    if isinstance(node, torch.memory_format):
        return TorchValue("memory_format", str(node).removeprefix("torch."))
    return None


def _unpack_torch(value: TorchValue) -> Any:
    """Return the live object; an attribute of torch is taken only when it is of the kind that is stored."""
    try:
        if value.kind == "device":
            return torch.device(value.text)
        if value.kind == "size":
            return torch.Size(int(size) for size in value.text.split(",") if size)
    except (RuntimeError, ValueError) as error:
        raise Corrupt(f"stored {value.kind} {value.text!r}: {error}") from None
    found = getattr(torch, value.text, None)
    wanted = torch.dtype if value.kind == "dtype" else torch.memory_format
    if not isinstance(found, wanted) or (wanted is torch.memory_format and value.text not in _FORMATS):
        raise Corrupt(f"the installed torch {torch.__version__} has no {value.kind} called {value.text!r}")
    return found


def as_mapping(node: Any, path: str) -> Mapping[str, Any]:
    """Return a stored value that must be a table.

    Raises:
        Corrupt: it is something else.
    """
    if not isinstance(node, Mapping):
        raise Corrupt(f"the stored value {path} is a {type(node).__name__}; expected a table")
    return node
