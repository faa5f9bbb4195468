"""The walk that takes a value apart into JSON. See `values` for the contract."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from shardkeep.errors import UnsupportedState
from shardkeep.format.value_arrays import find_numpy_json, is_numpy
from shardkeep.format.value_atoms import encode_base64, encode_float, encode_int, encode_str, is_plain_text
from shardkeep.format.value_registry import (
    Registered,
    TypeRegistry,
    find_stray_content,
    full_name,
    is_registrable,
)
from shardkeep.spec.tensors import TensorRef
from shardkeep.types import Json, TorchValue

MAX_DEPTH: Final = 100
"""How deep values may be nested; also keeps JSON text within every parser's own limit."""

FACTORIES: Final[Mapping[str, type | None]] = {
    "none": None,
    "bool": bool,
    "bytes": bytes,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "set": set,
    "str": str,
    "tuple": tuple,
}
"""The default factories of a `defaultdict` that are the same everywhere."""


class Encoder:
    """One walk over one value. `run` once, then drop it."""

    __slots__ = ("_open", "_path", "_registry", "_trail")

    def __init__(self, path: str, registry: TypeRegistry) -> None:
        self._path = path
        self._registry = registry
        self._trail: list[Any] = []
        self._open: set[int] = set()

    def run(self, value: Any) -> Json:
        """Return the JSON of `value`."""
        try:
            return self._encode(value)
        except RecursionError:
            raise self._refusal(
                "is nested too deeply for what is left of the call stack", "save from a shallower call"
            ) from None

    def _encode(self, value: Any) -> Json:
        # By exact type: a subclass (np.float64 is a float, an IntEnum an int) is never taken for its base.
        kind = type(value)
        if value is None or kind is bool:
            return value  # type: ignore[no-any-return]
        if kind is str:
            return encode_str(value)
        if kind is int:
            return encode_int(value)
        if kind is float:
            return encode_float(value)
        if id(value) in self._open:
            raise self._refusal("contains itself", "break the cycle before saving: keep a name or an index instead")
        if len(self._trail) >= MAX_DEPTH:
            raise self._refusal(f"is nested deeper than {MAX_DEPTH} levels", "flatten the state before saving")
        self._open.add(id(value))
        json = _HANDLERS.get(kind, Encoder._other)(self, value)
        self._open.discard(id(value))
        return json

    def _child(self, step: Any, value: Any) -> Json:
        # The trail is not unwound on errors: it is where the error happened.
        self._trail.append(step)
        json = self._encode(value)
        self._trail.pop()
        return json

    def _items(self, values: Iterable[Any]) -> list[Json]:
        return [self._child(index, value) for index, value in enumerate(values)]

    def _pairs(self, value: dict[Any, Any]) -> list[Json]:
        return [[self._child("(key)", key), self._child(f"/{_shorten(key)}", item)] for key, item in value.items()]

    def _dict(self, value: dict[Any, Any]) -> Json:
        if all(type(key) is str and key[:1] != "$" and is_plain_text(key) for key in value):
            return {key: self._child(f"/{key}", item) for key, item in value.items()}
        return {"$dict": self._pairs(value)}

    def _ordered_dict(self, value: collections.OrderedDict[Any, Any]) -> Json:
        pairs = self._pairs(value)
        # A module's state_dict hangs `_metadata` (versions of its buffers) on the dict as an attribute.
        attributes = vars(value)
        if not attributes:
            return {"$odict": pairs}
        return {"$odict_attrs": [pairs, self._child(".__dict__", attributes)]}

    def _default_dict(self, value: collections.defaultdict[Any, Any]) -> Json:
        for name, factory in FACTORIES.items():
            if value.default_factory is factory:
                return {"$defaultdict": [name, self._pairs(value)]}
        raise self._refusal(
            f"is a defaultdict with the factory {_shorten(value.default_factory)}",
            f"convert it with dict(...), or use one of the factories {', '.join(FACTORIES)}",
        )

    def _counter(self, value: collections.Counter[Any]) -> Json:
        if vars(value):
            raise self._refusal(
                f"is a Counter with attributes {sorted(vars(value))}", "keep them beside it in the state"
            )
        return {"$counter": self._pairs(value)}

    def _deque(self, value: collections.deque[Any]) -> Json:
        limit = None if value.maxlen is None else encode_int(value.maxlen)
        return {"$deque": [limit, self._items(value)]}

    def _set(self, value: set[Any] | frozenset[Any]) -> Json:
        texts = [(msgspec.json.encode(json), json) for json in (self._child("{...}", item) for item in value)]
        members = [json for _, json in sorted(texts, key=lambda pair: pair[0])]
        return {"$set" if type(value) is set else "$frozenset": members}

    def _slice(self, value: slice) -> Json:
        return {"$slice": self._items((value.start, value.stop, value.step))}

    def _complex(self, value: complex) -> Json:
        return {"$complex": [encode_float(value.real), encode_float(value.imag)]}

    def _range(self, value: range) -> Json:
        return {"$range": [encode_int(value.start), encode_int(value.stop), encode_int(value.step)]}

    def _torch(self, value: TorchValue) -> Json:
        return {"$torch": [value.kind, self._name(value.text)]}

    def _tensor(self, value: TensorRef) -> Json:
        return {"$tensor": self._name(value.key)}

    def _name(self, text: str) -> str:
        if not is_plain_text(text):
            raise self._refusal(f"is called {text!a}, which is not valid Unicode", "rename it before saving")
        return text

    def _other(self, value: Any) -> Json:
        kind = type(value)
        entry = self._registry.find(kind)
        if entry is not None:
            return self._registered(value, entry)
        if is_numpy(kind) and (json := find_numpy_json(value)) is not None:
            return json
        raise self._refusal(*_explain(value, kind))

    def _registered(self, value: Any, entry: Registered) -> Json:
        if entry.kind == "enum":
            return {"$enum": [entry.name, value.name]}
        if entry.kind == "flag":
            return {"$flag": [entry.name, encode_int(value.value)]}
        if (stray := find_stray_content(value, entry)) is not None:
            raise self._refusal(
                f"is a {full_name(entry.cls)} that {stray}", "make every attribute a field, and set it"
            )
        fields: dict[str, Json] = {name: self._child(f".{name}", getattr(value, name)) for name in entry.fields}
        return {"$object": [entry.name, fields]}

    def _refusal(self, what: str, advice: str) -> UnsupportedState:
        path = format_path(self._path, self._trail)
        return UnsupportedState(f"{path} {what}", key=path, advice=advice)


def format_path(root: str, trail: list[Any]) -> str:
    """Return a place in a state as text: `scheduler/lr_lambdas[0]`."""
    return root + "".join(f"[{step}]" if type(step) is int else str(step) for step in trail)


def _shorten(value: Any) -> str:
    if type(value) is str:
        return value
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _explain(value: Any, kind: type) -> tuple[str, str]:
    """Return what an object that cannot be stored is, and what its owner can do."""
    what = f"is a {full_name(kind)}, which cannot be saved exactly without pickle"
    if is_registrable(kind):
        return (
            what,
            f"register it at start-up, when saving and restoring: shardkeep.register_type({kind.__qualname__})",
        )
    if is_numpy(kind):
        dtype = getattr(value, "dtype", None)
        return (
            f"is a {full_name(kind)}{f' of dtype {dtype}' if dtype is not None else ''}, which is not a plain array",
            "convert it with numpy.asarray(...) and a plain dtype, or save the state of the generator",
        )
    if isinstance(value, enum.Enum):
        return what, "save its name or value instead"
    if kind.__name__ in ("function", "method", "builtin_function_or_method", "partial"):
        return what, "leave it out of the state, or make it an object with state_dict() and load_state_dict()"
    for base in kind.__mro__[1:]:
        if base in (str, int, float) or base in _HANDLERS:
            return f"{what} (a subclass of {base.__name__})", f"convert it before saving: {base.__name__}(...)"
    return what, "keep plain values in the state, or give the object state_dict() and load_state_dict()"


_HANDLERS: Final[Mapping[type, Callable[[Encoder, Any], Json]]] = {
    list: Encoder._items,
    dict: Encoder._dict,
    tuple: lambda self, value: {"$tuple": self._items(value)},
    bytes: lambda _, value: {"$bytes": encode_base64(value)},
    bytearray: lambda _, value: {"$bytearray": encode_base64(value)},
    complex: Encoder._complex,
    set: Encoder._set,
    frozenset: Encoder._set,
    range: Encoder._range,
    slice: Encoder._slice,
    collections.OrderedDict: Encoder._ordered_dict,
    collections.defaultdict: Encoder._default_dict,
    collections.Counter: Encoder._counter,
    collections.deque: Encoder._deque,
    TorchValue: Encoder._torch,
    TensorRef: Encoder._tensor,
}
