"""The walk that builds a value from JSON. See `values` for the contract.

It accepts exactly what the encoder writes: one JSON per value, so whatever decodes encodes to the same JSON again
(the order of a set aside, which no reader needs). What it is given is unchecked, hence `Any`.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from shardkeep.errors import Corrupt, IncompatibleFormat
from shardkeep.format.value_arrays import decode_array, decode_scalar
from shardkeep.format.value_atoms import (
    MAX_PLAIN_INT,
    decode_base64,
    decode_float,
    decode_int,
    decode_str,
    is_plain_text,
)
from shardkeep.format.value_encoder import FACTORIES, MAX_DEPTH, format_path
from shardkeep.format.value_registry import TypeRegistry, find_member, put_together
from shardkeep.spec.tensors import TensorRef
from shardkeep.types import TorchValue

T = TypeVar("T")
D = TypeVar("D", bound=dict[Any, Any])


class Decoder:
    """One walk over one JSON value. `run` once, then drop it."""

    __slots__ = ("_path", "_registry", "_trail")

    def __init__(self, path: str, registry: TypeRegistry) -> None:
        self._path = path
        self._registry = registry
        self._trail: list[Any] = []

    def run(self, json: Any) -> Any:
        """Return the value of `json`."""
        try:
            return self._decode(json)
        except RecursionError:
            raise self._corrupt("nested too deeply for what is left of the call stack") from None

    def _decode(self, json: Any) -> Any:
        kind = type(json)
        if json is None or kind is bool:
            return json
        if kind is str:
            return self._text(json)
        if kind is int:
            if not -MAX_PLAIN_INT <= json <= MAX_PLAIN_INT:
                raise self._corrupt("an integer beyond 53 bits stands as a JSON number; expected $int")
            return json
        if kind is float:
            if not math.isfinite(json):
                raise self._corrupt("a float that is not finite stands as a JSON number; expected $float")
            return json
        if len(self._trail) >= MAX_DEPTH and not (kind is dict and _ATOMS.issuperset(json)):
            raise self._corrupt(f"nested deeper than {MAX_DEPTH} levels")
        if kind is list:
            return self._items(json)
        if kind is dict:
            return self._object(json)
        raise self._corrupt(f"expected a JSON value, found a {kind.__name__}")

    def _object(self, json: dict[str, Any]) -> Any:
        if any(type(key) is not str for key in json):
            raise self._corrupt("an object has a key that is not a string")
        tag = next((key for key in json if key[:1] == "$"), None)
        if tag is None:
            return {self._text(key): self._child(f"/{key}", item) for key, item in json.items()}
        if len(json) != 1:
            raise self._corrupt(f"the tag {tag[:40]!r} stands beside other keys")
        handler = _TAGS.get(tag)
        if handler is None:
            path = format_path(self._path, self._trail)
            raise IncompatibleFormat(
                f"{path}: unknown tag {tag[:40]!r} in a stored value",
                key=path,
                advice="upgrade shardkeep: a version that knows this kind of value wrote it",
            )
        return handler(self, json[tag])

    def _child(self, step: Any, json: Any) -> Any:
        self._trail.append(step)
        value = self._decode(json)
        self._trail.pop()
        return value

    def _items(self, json: Any) -> list[Any]:
        return [self._child(index, item) for index, item in enumerate(self._list(json))]

    def _pairs(self, json: Any) -> list[tuple[Any, Any]]:
        pairs = []
        for index, pair in enumerate(self._list(json)):
            key, item = self._list(pair, 2)
            pairs.append((self._child("(key)", key), self._child(index, item)))
        return pairs

    def _fill(self, target: D, json: Any) -> D:
        """Put stored pairs into an empty dict of any kind."""
        pairs = self._pairs(json)
        try:
            for key, item in pairs:
                target[key] = item
        except TypeError:
            raise self._corrupt("a key cannot be hashed") from None
        if len(target) != len(pairs):
            raise self._corrupt("two keys are equal")
        return target

    def _dict(self, json: Any) -> dict[Any, Any]:
        value: dict[Any, Any] = self._fill({}, json)
        if all(type(key) is str and key[:1] != "$" and is_plain_text(key) for key in value):
            raise self._corrupt("$dict where a plain JSON object would do")
        return value

    def _ordered_dict(self, json: Any) -> collections.OrderedDict[Any, Any]:
        empty: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        return self._fill(empty, json)

    def _ordered_dict_attrs(self, json: Any) -> Any:
        pairs, attributes = self._list(json, 2)
        value = self._ordered_dict(pairs)
        held = self._child(".__dict__", attributes)
        if type(held) is not dict or not held or any(type(name) is not str for name in held):
            raise self._corrupt("expected attributes by name")
        vars(value).update(held)
        return value

    def _default_dict(self, json: Any) -> Any:
        name, pairs = self._list(json, 2)
        if type(name) is not str or name not in FACTORIES:
            raise self._corrupt(f"unknown default factory {str(name)[:40]!r}")
        return self._fill(collections.defaultdict(FACTORIES[name]), pairs)

    def _deque(self, json: Any) -> Any:
        limit, items = self._list(json, 2)
        maxlen = None if limit is None else self._int(limit)
        values = self._items(items)
        if maxlen is not None and not len(values) <= maxlen < 1 << 63:
            raise self._corrupt(f"a deque of {len(values)} items cannot have the limit {hex(maxlen)[:40]}")
        return collections.deque(values, maxlen)

    def _set(self, json: Any, kind: type[set[Any]] | type[frozenset[Any]]) -> Any:
        members = self._items(json)
        try:
            value = kind(members)
        except TypeError:
            raise self._corrupt("a member of a set cannot be hashed") from None
        if len(value) != len(members):
            raise self._corrupt("two members of a set are equal")
        return value

    def _range(self, json: Any) -> range:
        start, stop, step = (self._int(bound) for bound in self._list(json, 3))
        if step == 0:
            raise self._corrupt("a range has the step 0")
        return range(start, stop, step)

    def _complex(self, json: Any) -> complex:
        real, imag = (self._decode(part) for part in self._list(json, 2))
        if type(real) is not float or type(imag) is not float:
            raise self._corrupt("expected two floats")
        return complex(real, imag)

    def _torch(self, json: Any) -> TorchValue:
        kind, text = self._list(json, 2)
        if kind not in ("dtype", "device", "size", "memory_format"):
            raise self._corrupt(f"unknown kind of torch value {str(kind)[:40]!r}")
        return TorchValue(kind, self._text(text))

    def _enum(self, json: Any, kind: str) -> Any:
        name, stored = self._list(json, 2)
        entry = self._registry.get(self._text(name))
        if entry.kind != kind:
            raise self._corrupt(f"{entry.name!r} is stored as {kind} and registered as {entry.kind}")
        return find_member(entry, self._text(stored) if kind == "enum" else self._int(stored))

    def _registered(self, json: Any) -> Any:
        name, fields = self._list(json, 2)
        entry = self._registry.get(self._text(name))
        if entry.kind not in ("dataclass", "namedtuple"):
            raise self._corrupt(f"{entry.name!r} is stored with fields and registered as {entry.kind}")
        if type(fields) is not dict:
            raise self._corrupt("expected an object of fields")
        return put_together(entry, {self._text(key): self._child(f".{key}", item) for key, item in fields.items()})

    def _list(self, json: Any, count: int | None = None) -> list[Any]:
        if type(json) is not list or (count is not None and len(json) != count):
            raise self._corrupt(f"expected a list{'' if count is None else f' of {count}'}")
        return json

    def _text(self, json: Any) -> str:
        if type(json) is not str or not is_plain_text(json):
            raise self._corrupt("expected a string of valid Unicode")
        return json

    def _int(self, json: Any) -> int:
        value = self._decode(json) if type(json) is int or (type(json) is dict and list(json) == ["$int"]) else None
        if type(value) is not int:
            raise self._corrupt("expected an integer")
        return value

    def atom(self, convert: Callable[[Any], T], json: Any) -> T:
        """Return `convert(json)`; its ValueError becomes Corrupt with the place."""
        try:
            return convert(json)
        except ValueError as error:
            raise self._corrupt(str(error)) from None

    def _corrupt(self, why: str) -> Corrupt:
        path = format_path(self._path, self._trail)
        return Corrupt(f"{path}: malformed stored value: {why}", key=path)


_ATOMS: Final = frozenset({"$int", "$float", "$str"})
"""Tags of values that the encoder does not count as a level."""

_TAGS: Final[Mapping[str, Callable[[Decoder, Any], Any]]] = {
    "$int": lambda self, json: self.atom(decode_int, json),
    "$float": lambda self, json: self.atom(decode_float, json),
    "$str": lambda self, json: self.atom(decode_str, json),
    "$bytes": lambda self, json: self.atom(decode_base64, json),
    "$bytearray": lambda self, json: bytearray(self.atom(decode_base64, json)),
    "$complex": Decoder._complex,
    "$tuple": lambda self, json: tuple(self._items(json)),
    "$set": lambda self, json: self._set(json, set),
    "$frozenset": lambda self, json: self._set(json, frozenset),
    "$dict": Decoder._dict,
    "$odict": Decoder._ordered_dict,
    "$odict_attrs": Decoder._ordered_dict_attrs,
    "$defaultdict": Decoder._default_dict,
    "$counter": lambda self, json: self._fill(collections.Counter(), json),
    "$deque": Decoder._deque,
    "$range": Decoder._range,
    "$slice": lambda self, json: slice(*self._items(self._list(json, 3))),
    "$npscalar": lambda self, json: self.atom(decode_scalar, json),
    "$ndarray": lambda self, json: self.atom(decode_array, json),
    "$torch": Decoder._torch,
    "$tensor": lambda self, json: TensorRef(self._text(json)),
    "$enum": lambda self, json: self._enum(json, "enum"),
    "$flag": lambda self, json: self._enum(json, "flag"),
    "$object": Decoder._registered,
}
