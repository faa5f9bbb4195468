"""Values: exact through JSON text; and whatever decodes encodes to the same JSON again."""

from __future__ import annotations

import collections
import struct
from typing import Any

import msgspec
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardkeep.errors import Corrupt, IncompatibleFormat, StateMismatch
from shardkeep.format.values import TypeRegistry, decode_value, encode_value
from shardkeep.spec.tensors import TensorRef
from shardkeep.types import TorchValue

Pair = collections.namedtuple("Pair", "left right")
REGISTRY = TypeRegistry()
REGISTRY.register(Pair)

any_float = st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack(">d", bits)[0]) | st.floats()
any_text = st.text(st.characters(), max_size=8) | st.sampled_from(["$", "$tuple", "$dict", "a", ""])
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**54), 2**54)
    | any_float
    | any_text
    | st.binary(max_size=9)
    | st.builds(complex, any_float, any_float)
    | st.builds(TensorRef, st.text(max_size=4))
    | st.builds(TorchValue, st.sampled_from(["dtype", "device", "size", "memory_format"]), st.text(max_size=4))
)
numpy_scalars = hnp.from_dtype(np.dtype("f8")) | hnp.from_dtype(np.dtype("i2")) | hnp.from_dtype(np.dtype("U3"))
plain_dtypes = hnp.scalar_dtypes().filter(lambda dtype: dtype.char not in "gG" and dtype.itemsize > 0)
arrays = hnp.arrays(plain_dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
keys = st.recursive(atoms | numpy_scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=3)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    dicts = st.dictionaries(keys, inner, max_size=4)
    return (
        lists
        | lists.map(tuple)
        | dicts
        | st.dictionaries(any_text, inner, max_size=4)
        | dicts.map(collections.OrderedDict)
        | dicts.map(lambda items: collections.defaultdict(list, items))
        | dicts.map(collections.Counter)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.builds(lambda items, room: collections.deque(items, len(items) + room), lists, st.integers(0, 3))
        | st.builds(Pair, inner, inner)
    )


values = st.recursive(
    atoms
    | numpy_scalars
    | arrays
    | st.binary(max_size=5).map(bytearray)
    | st.builds(range, st.integers(), st.integers(), st.integers(1)),
    containers,
    max_leaves=12,
)


def bits(value: Any) -> Any:
    """Return a form in which equal means the same types and bits, in the same order (but for sets)."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        order = value.flags.f_contiguous and not value.flags.c_contiguous
        return kind, value.dtype.str, value.shape, value.tobytes(), order
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, float):
        return kind, struct.pack(">d", value)
    if isinstance(value, complex):
        return kind, struct.pack(">dd", value.real, value.imag)
    if isinstance(value, dict):
        extra = getattr(value, "default_factory", None)
        return kind, extra, [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted((bits(item) for item in value), key=repr)
    if isinstance(value, list | tuple | collections.deque):
        return kind, getattr(value, "maxlen", None), [bits(item) for item in value]
    if isinstance(value, range):
        return kind, value.start, value.stop, value.step
    return kind, value


@settings(max_examples=120, deadline=None)
@given(values)
def test_any_value_returns_exactly_through_text(value: Any) -> None:
    text = msgspec.json.encode(encode_value(value, "v", registry=REGISTRY))
    back = decode_value(msgspec.json.decode(text), "v", registry=REGISTRY)
    assert bits(back) == bits(value)
    assert msgspec.json.encode(encode_value(back, "v", registry=REGISTRY)) == text


@settings(max_examples=500, deadline=None)
@given(any_float)
def test_floats_keep_every_bit(value: float) -> None:
    text = msgspec.json.encode(encode_value([value], "v"))
    back = decode_value(msgspec.json.decode(text), "v")[0]
    assert struct.pack(">d", back) == struct.pack(">d", value)


TAGS = [
    *(
        "$int",
        "$float",
        "$str",
        "$bytes",
        "$bytearray",
        "$complex",
        "$tuple",
        "$set",
        "$frozenset",
        "$dict",
        "$odict",
    ),
    *("$odict_attrs", "$defaultdict", "$counter", "$deque", "$range", "$slice", "$npscalar", "$ndarray", "$torch"),
    *("$tensor", "$enum", "$flag", "$object", "$new"),
]
scraps = st.sampled_from(
    [
        "",
        "AP8=",
        "0x20000000000000",
        "7ff0000000000000",
        "list",
        "Pair",
        "left",
        "<f4",
        "|b1",
        "<U1",
        "C",
        "F",
        "dtype",
    ]
)
json_atoms = st.none() | st.booleans() | st.integers(-2, 2**53) | st.floats() | st.text(max_size=3) | scraps
json_values = st.recursive(
    json_atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(scraps | st.text(max_size=2), inner, max_size=3)
        | st.tuples(st.sampled_from(TAGS), inner | st.lists(inner, max_size=4)).map(lambda pair: {pair[0]: pair[1]})
    ),
    max_leaves=16,
)


def sort_sets(json: Any) -> Any:
    """Put the members of sets in one order: the only freedom that a writer has."""
    if isinstance(json, list):
        return [sort_sets(item) for item in json]
    if isinstance(json, dict):
        done = {key: sort_sets(item) for key, item in json.items()}
        for tag in {"$set", "$frozenset"} & done.keys():
            done[tag] = sorted(done[tag], key=msgspec.json.encode)
        return done
    return json


@settings(max_examples=300, deadline=None)
@given(json_values)
@example({"$npscalar": ["", ""]})
@example({"$set": [1, True]})
@example({"$object": ["Pair", {"right": 1, "left": 2}]})
def test_any_json_is_refused_by_type_or_is_the_one_encoding_of_its_value(json: Any) -> None:
    try:
        value = decode_value(json, "v", registry=REGISTRY)
    except (Corrupt, IncompatibleFormat, StateMismatch):
        return
    again = encode_value(value, "v", registry=REGISTRY)
    assert msgspec.json.encode(sort_sets(again), order="sorted") == msgspec.json.encode(
        sort_sets(json), order="sorted"
    )
