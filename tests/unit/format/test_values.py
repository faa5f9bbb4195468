"""Python state as JSON: exact, canonical, and nothing that cannot be rebuilt."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import math
import random
import struct
import sys
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from shardkeep.errors import StateMismatch, UnsupportedState, UsageError
from shardkeep.format.value_encoder import MAX_DEPTH
from shardkeep.format.values import TypeRegistry, decode_value, encode_value
from shardkeep.spec.tensors import TensorRef
from shardkeep.types import TorchValue


class Color(enum.Enum):
    RED = "r"
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    HI = "hi"


class Bits(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: float
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    rates: tuple[float, ...] = ()
    derived: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass
class Loud:
    """Its code must not run when it is restored."""

    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise RuntimeError("ran __post_init__")

    @functools.cached_property
    def double(self) -> int:
        return self.value * 2


@pytest.fixture
def registry() -> TypeRegistry:
    made = TypeRegistry()
    for cls in (Color, Level, Word, Bits, Point, Frozen, Loud):
        made.register(cls)
    return made


def through_text(value: Any, registry: TypeRegistry | None = None) -> Any:
    """Encode, write as JSON text, read the text, decode; the second encoding must be the first."""
    used = TypeRegistry() if registry is None else registry
    json = encode_value(value, "v", registry=used)
    text = msgspec.json.encode(json)
    back = decode_value(msgspec.json.decode(text), "v", registry=used)
    assert msgspec.json.encode(encode_value(back, "v", registry=used)) == text
    return back


def assert_same(a: Any, b: Any) -> None:
    """Same type, same content, same order, same bits."""
    assert type(a) is type(b)
    if isinstance(a, float):
        assert struct.pack(">d", a) == struct.pack(">d", b)
    elif isinstance(a, complex):
        assert_same([a.real, a.imag], [b.real, b.imag])
    elif isinstance(a, dict):
        assert len(a) == len(b)
        for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True):
            assert_same(ka, kb)
            assert_same(va, vb)
    elif isinstance(a, list | tuple | collections.deque):
        assert len(a) == len(b)
        for va, vb in zip(a, b, strict=True):
            assert_same(va, vb)
    else:
        assert a == b


SNAN = struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0]
NEGATIVE_NAN = struct.unpack(">d", bytes.fromhex("fff8dead0000beef"))[0]

PLAIN = [
    None,
    True,
    False,
    0,
    1,
    -1,
    "text",
    "é€😀",
    "",
    2**53 - 1,
    1.0,
    -0.0,
    0.1,
    1e16,
    1e22,
    5e-324,
    sys.float_info.max,
    [],
    [1, 1.0, True],
    {},
    {"a": {"b": [None]}, "": 1, "z": 0, "b": 2},
]

TAGGED = [
    2**53,
    -(2**53),
    2**64,
    -(2**300) + 1,
    math.inf,
    -math.inf,
    SNAN,
    NEGATIVE_NAN,
    "\ud800",
    "a\udfff\x00",
    "\ud83d\ude00",
    complex(-0.0, math.inf),
    complex(1, NEGATIVE_NAN),
    b"",
    b"\x00\xff",
    bytearray(b"abc"),
    (),
    (0.9, 0.999),
    set(),
    {1, "a", (2, 3), None, 2**70},
    frozenset({frozenset({1}), 2.5}),
    {1: "int", "1": "str", 1.5: "f", None: 0, (1, 2): [], True and "t": 2},
    {"$tuple": [1]},
    {"$": 1, "a": 2},
    {"\udc80": 1},
    collections.OrderedDict([("b", 1), ("a", {2: 3})]),
    collections.OrderedDict(),
    collections.defaultdict(dict, {"p": {"step": 1}}),
    collections.defaultdict(None, {1: 2}),
    collections.Counter({"a": 3, "b": -1}),
    collections.deque([1, [2]], maxlen=5),
    collections.deque([1]),
    collections.deque(maxlen=0),
    range(0),
    range(1, 1),
    range(10**30, -5, -7),
    slice(None, 3, None),
    slice("a", 1.5, [1]),
    TorchValue("dtype", "float32"),
    TorchValue("device", "cuda:0"),
    TensorRef("optimizer/exp_avg/w"),
]


@pytest.mark.parametrize("value", PLAIN + TAGGED, ids=lambda value: type(value).__name__)
def test_values_return_exactly(value: Any) -> None:
    assert_same(through_text(value), value)
    nested = {"a": [value, (value,)], 1: {"k": value}}
    assert_same(through_text(nested), nested)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_common_values_are_plain_json(value: Any) -> None:
    assert encode_value(value, "v") == value
    assert "$" not in msgspec.json.encode(encode_value(value, "v")).decode()


def test_documented_examples() -> None:
    assert encode_value((0.9, 1), "v") == {"$tuple": [0.9, 1]}
    assert encode_value(2**64, "v") == {"$int": "0x10000000000000000"}
    assert encode_value(-(2**53), "v") == {"$int": "-0x20000000000000"}
    assert encode_value(-math.inf, "v") == {"$float": "fff0000000000000"}
    assert encode_value("\ud800", "v") == {"$str": "7aCA"}
    assert encode_value({1: "a"}, "v") == {"$dict": [[1, "a"]]}
    assert encode_value(b"\x00\xff", "v") == {"$bytes": "AP8="}
    assert encode_value(complex(1, -2), "v") == {"$complex": [1.0, -2.0]}
    assert encode_value({"b", "a", 10, 9}, "v") == {"$set": ["a", "b", 10, 9]}
    assert encode_value(collections.deque([1], 3), "v") == {"$deque": [3, [1]]}
    assert encode_value(range(0, 6, 2), "v") == {"$range": [0, 6, 2]}
    assert encode_value(collections.defaultdict(list, a=[1]), "v") == {"$defaultdict": ["list", [["a", [1]]]]}
    assert encode_value(np.float32(1), "v") == {"$npscalar": ["<f4", "AACAPw=="]}
    assert encode_value(np.array([[1], [2]], ">i2"), "v") == {"$ndarray": [">i2", "C", [2, 1], "AAEAAg=="]}
    assert encode_value(TorchValue("size", "2,3"), "v") == {"$torch": ["size", "2,3"]}


def test_equal_sets_and_copies_give_equal_json() -> None:
    words = [f"w{i}" for i in range(50)]
    # Another order of insertion, and a table that has grown: another order of iteration.
    other = {*words[::-1], *range(1000)} - {*range(1000)}
    assert list(other) != list(set(words))
    assert encode_value(set(words), "v") == encode_value(other, "v")


def test_the_result_shares_nothing_with_the_value() -> None:
    value = {"list": [1], "bytes": bytearray(b"a")}
    json = encode_value(value, "v")
    before = msgspec.json.encode(json)
    value["list"].append(2)
    value["bytes"][0] = 0
    assert msgspec.json.encode(json) == before


def test_ordered_dict_keeps_its_attributes() -> None:
    # nn.Module.state_dict() hangs the versions of its buffers on the dict as `_metadata`.
    value = collections.OrderedDict(w=TensorRef("w"))
    value._metadata = collections.OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    back = through_text(value)
    assert_same(back, value)
    assert vars(back) == {"_metadata": {"": {"version": 2}}}
    assert vars(through_text(collections.OrderedDict(a=1))) == {}


def test_python_and_numpy_generator_states_return_exactly() -> None:
    for state in (
        random.Random(3).getstate(),
        np.random.RandomState(3).get_state(),
        np.random.RandomState(3).get_state(legacy=False),
        np.random.default_rng(3).bit_generator.state,
        np.random.Generator(np.random.Philox(3)).bit_generator.state,
    ):
        back = through_text(state)
        assert repr(back) == repr(state)
    generator = np.random.default_rng(3)
    other = np.random.default_rng(4)
    other.bit_generator.state = through_text(generator.bit_generator.state)
    assert other.random(100).tobytes() == generator.random(100).tobytes()
    restored = random.Random()
    restored.setstate(through_text(random.Random(9).getstate()))
    assert restored.random() == random.Random(9).random()


# NumPy


@pytest.mark.parametrize(
    "dtype",
    [
        *("?", "b", "B", "<i2", ">i2", "<u4", ">u8", "<i8", "<f2", "<f4", ">f8", "<c8", ">c16"),
        *("<M8[ns]", "<m8[25s]", ">M8", "S3", "<U2", ">U2"),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3, 2), (2, 0, 4)])
def test_arrays_keep_dtype_byte_order_shape_and_bits(dtype: str, shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).integers(0, 2, 8192, np.uint8).tobytes()
    item = np.dtype(dtype)
    array = np.frombuffer(data[: math.prod(shape) * item.itemsize], item).reshape(shape)
    if item.kind == "U":
        array = np.full(shape, "é", item)
    back = through_text(array)
    assert type(back) is np.ndarray
    assert (back.dtype.str, back.shape, back.tobytes()) == (array.dtype.str, array.shape, array.tobytes())
    assert back.flags.writeable
    assert back.flags.owndata


def test_arrays_of_any_strides() -> None:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for array in (
        base[:, ::2],
        base[::-1],
        base[..., 1],
        np.broadcast_to(base[0], (5, 3, 4)),
        base.transpose(1, 0, 2),
    ):
        np.testing.assert_array_equal(through_text(array), array)
    column_major = np.asfortranarray(np.random.default_rng(0).random((50, 7)))
    back = through_text(column_major)
    assert back.flags.f_contiguous
    assert back.strides == column_major.strides
    assert back.sum() == column_major.sum()


@pytest.mark.parametrize(
    "value",
    [
        np.float64(-0.0),
        np.float32(0.1),
        np.float16(3),
        np.int64(-5),
        np.uint8(255),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.datetime64("2026-01-01T00:00", "m"),
        np.timedelta64(3, "ms"),
        np.datetime64("NaT"),
        np.str_("a\x00"),
        np.str_("\ud800"),
        np.bytes_(b"a\x00"),
        np.bytes_(b""),
        np.frombuffer(bytes.fromhex("0100f07f"), "<f4")[0],
    ],
)
def test_numpy_scalars_stay_numpy_scalars(value: Any) -> None:
    back = through_text({"x": value})["x"]
    assert type(back) is type(value)
    assert back.tobytes() == value.tobytes()
    assert back.dtype == value.dtype
    if value.dtype.kind in "SU":
        assert len(back) == len(value)


def test_numpy_values_as_keys_and_members() -> None:
    value = {np.int32(1): {np.str_("a"), np.float64(2)}}
    back = through_text(value)
    assert back == value
    assert type(next(iter(back))) is np.int32
    assert type(next(iter(through_text({np.str_("a"): 1})))) is np.str_


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, [("a", "<i4")]),
        np.array([None, 1], object),
        np.zeros(2, np.longdouble),
        np.longdouble(1),
        np.ma.masked_array([1]),
        np.zeros(2).view(np.recarray),
        np.zeros(2, "V4"),
        np.void(b"1234"),
        np.zeros(1, [("a", "<i4")])[0],
        np.zeros(2, np.dtype("<i4", metadata={"unit": "m"})),
        np.dtype("f4"),
        np.float32,
        np.random.default_rng(0),
        np.recarray((2,), [("a", "<i4")]),
    ],
    ids=lambda value: str(type(value)),
)
def test_numpy_values_that_are_not_plain_are_refused(value: Any) -> None:
    with pytest.raises(UnsupportedState, match=r"^s/x\[0\] is a ") as caught:
        encode_value({"x": [value]}, "s")
    assert caught.value.key == "s/x[0]"


# Refusals


class MyDict(dict):  # type: ignore[type-arg]
    pass


class MyFloat(float):
    pass


class Plain:
    pass


def some_function() -> None:
    pass


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (lambda step: 1, "leave it out of the state"),
        (some_function, "leave it out of the state"),
        (functools.partial(some_function), "leave it out of the state"),
        (len, "leave it out of the state"),
        (Plain(), "state_dict"),
        (Plain, "state_dict"),
        (sys, "state_dict"),
        (..., "state_dict"),
        (object(), "state_dict"),
        (MyDict(a=1), r"dict\(\.\.\.\)"),
        (MyFloat(1), r"float\(\.\.\.\)"),
        (type("S", (str,), {})("a"), r"str\(\.\.\.\)"),
        (type("I", (int,), {})(1), r"int\(\.\.\.\)"),
        (Color.RED, r"register_type\(Color\)"),
        (Level.LOW, r"register_type\(Level\)"),
        (Word.HI, r"register_type\(Word\)"),
        (Bits.A | Bits.B, r"register_type\(Bits\)"),
        (Point(1, 2), r"register_type\(Point\)"),
        (Frozen("a"), r"register_type\(Frozen\)"),
        (collections.defaultdict(lambda: 1), "one of the factories"),
        (sys.version_info, "tuple"),
        (memoryview(b"a"), "plain values"),
        (iter([]), "plain values"),
        (collections.UserDict(), "plain values"),
        ({}.keys(), "plain values"),
    ],
    ids=lambda value: str(type(value)),
)
def test_what_cannot_be_saved_names_its_place_its_type_and_what_to_do(value: Any, advice: str) -> None:
    with pytest.raises(UnsupportedState, match=rf"(?s)^scheduler/lr_lambdas\[1\] is a .*next: .*{advice}") as caught:
        encode_value({"lr_lambdas": [None, value]}, "scheduler", registry=TypeRegistry())
    assert caught.value.key == "scheduler/lr_lambdas[1]"
    if not isinstance(value, type):
        assert type(value).__qualname__ in str(caught.value)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": ({1: [Plain()]},)}, "s/a[0]/1[0]"),
        ({("k", 1): Plain()}, "s/('k', 1)"),
        ({Plain(): 1}, "s(key)"),
        ([{Plain()}], "s[0]{...}"),
        (collections.OrderedDict(a=Plain()), "s/a"),
        (collections.deque([1, Plain()]), "s[1]"),
        (slice(Plain()), "s[1]"),
        (Point(Plain(), 1), "s.x"),
        (Frozen(Plain()), "s.name"),  # type: ignore[arg-type]
    ],
)
def test_paths(value: Any, path: str, registry: TypeRegistry) -> None:
    with pytest.raises(UnsupportedState) as caught:
        encode_value(value, "s", registry=registry)
    assert caught.value.key == path


def test_names_that_json_cannot_hold_are_refused() -> None:
    for value in (TensorRef("\ud800"), TorchValue("device", "\ud800")):
        with pytest.raises(UnsupportedState, match=r"^s\[0\] is called '\\ud800'"):
            encode_value([value], "s")


def test_attributes_that_would_be_lost_are_refused(registry: TypeRegistry) -> None:
    counter = collections.Counter(a=1)
    counter.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedState, match="extra"):
        encode_value(counter, "s")
    loud = Loud(1)
    loud.extra = 2  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedState, match="'extra', which is not a field"):
        encode_value(loud, "s", registry=registry)
    del loud.extra  # type: ignore[attr-defined]
    del loud.value
    with pytest.raises(UnsupportedState, match="no value for its field 'value'"):
        encode_value(loud, "s", registry=registry)


def test_slots_beside_the_fields_are_refused() -> None:
    class Base:
        __slots__ = ("__hidden", "seen")

        def hide(self) -> None:
            self.__hidden = 1

    @dataclasses.dataclass(slots=True)
    class Child(Base):
        value: int

    registry = TypeRegistry()
    registry.register(Child)
    child = Child(1)
    assert through_text(child, registry).value == 1
    child.hide()
    with pytest.raises(UnsupportedState, match="_Base__hidden"):
        encode_value(child, "s", registry=registry)


def test_cycles_are_refused(registry: TypeRegistry) -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(UnsupportedState, match=r"^s\[1\]/again contains itself"):
        encode_value(loop, "s")
    loud = Loud(1)
    loud.value = [loud]  # type: ignore[assignment]
    with pytest.raises(UnsupportedState, match="contains itself"):
        encode_value(loud, "s", registry=registry)


def test_a_list_reached_twice_is_no_cycle() -> None:
    shared = [1]
    assert through_text([shared, shared, {"x": shared}]) == [[1], [1], {"x": [1]}]


@pytest.mark.parametrize("leaf", [1, math.nan, 2**80, "\ud800", None])
@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}, Point])
def test_depth_has_one_limit_on_both_ways(leaf: Any, wrap: Any, registry: TypeRegistry) -> None:
    def nest(levels: int) -> Any:
        value = leaf
        for _ in range(levels):
            value = Point(1, value) if wrap is Point else wrap(value)
        return value

    json = encode_value(nest(MAX_DEPTH), "s", registry=registry)
    decode_value(msgspec.json.decode(msgspec.json.encode(json)), "s", registry=registry)
    with pytest.raises(UnsupportedState, match="nested deeper than 100"):
        encode_value(nest(MAX_DEPTH + 1), "s", registry=registry)
    with pytest.raises(UnsupportedState, match="nested deeper than 100"):
        encode_value(nest(5000), "s", registry=registry)


def test_a_used_up_call_stack_is_a_typed_error() -> None:
    def call_deep(levels: int) -> Any:
        return call_deep(levels - 1) if levels else encode_value(value, "s")

    value: Any = 1
    for _ in range(90):
        value = [value]
    frames = len(inspect.stack())
    with pytest.raises(UnsupportedState, match="call stack"):
        call_deep(sys.getrecursionlimit() - frames - 60)


# Registered types


def test_registered_objects_return_exactly(registry: TypeRegistry) -> None:
    value = [Color.RED, Level.LOW, Word.HI, Bits.A | Bits.B, Bits(0), Point(0.5, [1]), Frozen("n", (1.0,))]
    back = through_text(value, registry)
    assert back == value
    assert [type(item) for item in back] == [type(item) for item in value]
    assert back[0] is Color.RED
    assert back[6].derived == 7
    assert encode_value(Color.BLUE, "v", registry=registry) == {"$enum": ["Color", "BLUE"]}
    assert encode_value(Bits.A | Bits.B, "v", registry=registry) == {"$flag": ["Bits", 3]}
    assert encode_value(Point(1.0, 2), "v", registry=registry) == {"$object": ["Point", {"x": 1.0, "y": 2}]}
    assert through_text({Color.RED: {Point(1, 2)}}, registry) == {Color.RED: {Point(1, 2)}}


def test_restoring_runs_no_code_of_the_class(registry: TypeRegistry) -> None:
    loud = Loud(1)
    loud.value = -1
    assert loud.double == -2  # cached in __dict__, computed again when asked for
    back = through_text(loud, registry)
    assert type(back) is Loud
    assert vars(back) == {"value": -1}


def test_subclasses_of_registered_classes_are_not_registered(registry: TypeRegistry) -> None:
    class Sub(Loud):
        pass

    with pytest.raises(UnsupportedState, match="Sub"):
        encode_value(Sub(1), "s", registry=registry)


def test_changed_and_unknown_classes_are_named(registry: TypeRegistry) -> None:
    for json, problem in (
        ({"$object": ["Gone", {}]}, "'Gone'.*register_type"),
        ({"$enum": ["Color", "GREEN"]}, "'GREEN' of 'Color'"),
        ({"$flag": ["Bits", 64]}, "0x40 of 'Bits'"),
        ({"$flag": ["Bits", -1]}, "-0x1 of 'Bits'"),
        ({"$flag": ["Bits", {"$int": "0x1" + "0" * 5000}]}, "0x1000.* of 'Bits'"),
        ({"$object": ["Point", {"x": 1}]}, "field 'y' of the class is not stored"),
        ({"$object": ["Point", {"x": 1, "y": 1, "z": 1}]}, "stored field 'z' is not in the class"),
        ({"$object": ["Loud", {}]}, "field 'value' of the class is not stored"),
    ):
        with pytest.raises(StateMismatch, match=f"(?s){problem}"):
            decode_value(json, "s", registry=registry)


def test_a_class_that_lets_no_field_be_set_any_more_is_named() -> None:
    @dataclasses.dataclass
    class Config:
        a: int = 1

    registry = TypeRegistry()
    registry.register(Config)
    json = encode_value(Config(2), "s", registry=registry)
    Config.a = property(lambda self: 3)  # type: ignore[assignment,method-assign]
    with pytest.raises(StateMismatch, match="Config cannot be filled"):
        decode_value(json, "s", registry=registry)


def test_registration_refuses_what_it_cannot_rebuild() -> None:
    @dataclasses.dataclass
    class Heavy(dict):  # type: ignore[type-arg]
        a: int = 0

    registry = TypeRegistry()
    for cls, problem in (
        (Heavy, "derives from dict"),
        (Plain, "expected an enum, a dataclass or a namedtuple"),
        (MyDict, "expected an enum"),
        (type(sys.version_info), "expected an enum"),
        (3, "expected a class"),
    ):
        with pytest.raises(UsageError, match=problem):
            registry.register(cls)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="non-empty name"):
        registry.register(Color, "")


def test_names_belong_to_one_class() -> None:
    registry = TypeRegistry()
    registry.register(Color)
    registry.register(Color)
    with pytest.raises(UsageError, match=r"registered for .*Color, so not for .*Level"):
        registry.register(Level, "Color")
    with pytest.raises(UsageError, match="registered as 'Color', so not as 'Other'"):
        registry.register(Color, "Other")

    def define() -> type:
        @dataclasses.dataclass
        class Config:
            a: int = 1

        return Config

    old, new = define(), define()
    registry.register(old)
    registry.register(new)  # a notebook cell run twice
    assert type(through_text(new(), registry)) is new
    with pytest.raises(UnsupportedState):
        encode_value(old(), "s", registry=registry)
