"""Stored values from anywhere: one typed error per defect, in bounded time, and no code is run."""

from __future__ import annotations

import base64
import dataclasses
import enum
import inspect
import sys
import time
from typing import Any

import numpy as np
import pytest

from shardkeep.errors import Corrupt, IncompatibleFormat
from shardkeep.format.values import TypeRegistry, decode_value


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    a: Any


REGISTRY = TypeRegistry()
REGISTRY.register(Color)
REGISTRY.register(Config)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


DEFECTS: list[tuple[Any, str]] = [
    # numbers
    (2**53, "beyond 53 bits"),
    (-(2**53), "beyond 53 bits"),
    (float("inf"), "not finite"),
    (float("nan"), "not finite"),
    ({"$int": 5}, "hexadecimal"),
    ({"$int": "0x5"}, "beyond 53 bits"),
    ({"$int": "18446744073709551616"}, "expected a number beyond"),
    ({"$int": "0x0020000000000000"}, "expected a number beyond"),
    ({"$int": "0X20000000000000"}, "expected a number beyond"),
    ({"$int": "0x2000_0000000000"}, "expected a number beyond"),
    ({"$int": " 0x20000000000000"}, "expected a number beyond"),
    ({"$int": "zz"}, "hexadecimal"),
    ({"$int": ""}, "hexadecimal"),
    ({"$float": "7ff00000000000000"}, "16 lower-case"),
    ({"$float": "7FF0000000000000"}, "16 lower-case"),
    ({"$float": "7ff000000000000z"}, "hexadecimal"),
    ({"$float": "7ff0 00000000000"}, "hexadecimal"),
    ({"$float": "7ff000000000000é"}, "hexadecimal"),
    ({"$float": "3ff0000000000000"}, "finite floats are JSON"),
    ({"$float": 1.0}, "16 lower-case"),
    ({"$complex": [1, 2.0]}, "two floats"),
    ({"$complex": [1.0]}, "list of 2"),
    ({"$complex": [[], 1.0]}, "two floats"),
    # text and bytes
    ("\ud800", "valid Unicode"),
    ({"\ud800": 1}, "valid Unicode"),
    ({"$str": b64(b"plain")}, "others are JSON strings"),
    ({"$str": b64(b"\xff")}, "generalized UTF-8"),
    ({"$str": 1}, "base64 string"),
    ({"$bytes": None}, "base64 string"),
    ({"$bytes": "AP8"}, "base64"),
    ({"$bytes": "AP8=\n"}, "base64"),
    ({"$bytes": "AP9="}, "unused bits"),
    ({"$bytes": "AB=="}, "unused bits"),
    ({"$bytes": "AP8=AP8="}, "base64"),
    ({"$bytes": "é"}, "base64"),
    ({"$bytearray": "====="}, "base64"),
    # containers
    ({"$tuple": {}}, "expected a list"),
    ({"$tuple": None}, "expected a list"),
    ({"$set": [1, 1]}, "two members of a set are equal"),
    ({"$set": [1, True]}, "two members of a set are equal"),
    ({"$set": [[]]}, "cannot be hashed"),
    ({"$frozenset": [{}]}, "cannot be hashed"),
    ({"$dict": [[1, 2], [1.0, 3]]}, "two keys are equal"),
    ({"$dict": [[1]]}, "list of 2"),
    ({"$dict": [1]}, "list of 2"),
    ({"$dict": {"a": 1}}, "expected a list"),
    ({"$dict": [[[], 1]]}, "cannot be hashed"),
    ({"$dict": []}, "plain JSON object"),
    ({"$dict": [["a", 1]]}, "plain JSON object"),
    ({"$odict": [["a", 1], ["a", 2]]}, "two keys are equal"),
    ({"$odict": [[{}, 1]]}, "cannot be hashed"),
    ({"$odict_attrs": [[], {}]}, "attributes by name"),
    ({"$odict_attrs": [[], {"$dict": [[1, 2]]}]}, "attributes by name"),
    ({"$odict_attrs": [[]]}, "list of 2"),
    ({"$defaultdict": ["os.system", []]}, "unknown default factory"),
    ({"$defaultdict": [None, []]}, "unknown default factory"),
    ({"$defaultdict": ["list", [[1, 2], [1, 2]]]}, "two keys are equal"),
    ({"$counter": [[[], 1]]}, "cannot be hashed"),
    ({"$deque": [1, [1, 2]]}, "cannot have the limit"),
    ({"$deque": [-1, []]}, "cannot have the limit"),
    ({"$deque": [True, []]}, "expected an integer"),
    ({"$deque": [{"$int": "0x8000000000000000"}, []]}, "cannot have the limit"),
    ({"$deque": [{"$int": "0x1" + "0" * 5000}, []]}, "cannot have the limit 0x1000"),
    ({"$range": [0, 1, 0]}, "step 0"),
    ({"$range": [0, 1]}, "list of 3"),
    ({"$range": [0, 1.0, 1]}, "expected an integer"),
    ({"$slice": [1, 2]}, "list of 3"),
    # tags
    ({"$tuple": [], "x": 1}, "beside other keys"),
    ({"a": 1, "$b": 2}, "beside other keys"),
    ({"$set": [], "$tuple": []}, "beside other keys"),
    ({1: 2}, "not a string"),
    ((1,), "found a tuple"),
    ([b"raw"], "found a bytes"),
    # torch and tensors
    ({"$torch": ["module", "os"]}, "unknown kind of torch value"),
    ({"$torch": [[], "os"]}, "unknown kind of torch value"),
    ({"$torch": ["dtype", 3]}, "valid Unicode"),
    ({"$torch": ["dtype"]}, "list of 2"),
    ({"$tensor": ["a"]}, "valid Unicode"),
    # registered types
    ({"$object": ["Color", {}]}, "registered as enum"),
    ({"$object": ["Config", []]}, "object of fields"),
    ({"$object": ["Config", {"a": {"$int": 1}}]}, "hexadecimal"),
    ({"$enum": ["Config", "a"]}, "registered as dataclass"),
    ({"$enum": ["Color", 1]}, "valid Unicode"),
    ({"$flag": ["Color", 1]}, "stored as flag"),
    ({"$enum": [["Color"], "RED"]}, "valid Unicode"),
    # NumPy
    ({"$npscalar": ["<f4", b64(b"123")]}, "need 0x4 bytes, found 3"),
    ({"$npscalar": ["<f4", b64(b"12345678")]}, "need 0x4 bytes, found 8"),
    ({"$npscalar": [">f4", b64(b"1234")]}, "dtype of a scalar"),
    ({"$npscalar": ["<U1", b64(b"1234")]}, "dtype of a scalar"),
    ({"$npscalar": ["|S1", b64(b"1")]}, "dtype of a scalar"),
    ({"$npscalar": ["", ""]}, "plain NumPy dtype"),
    ({"$npscalar": ["U", {"$int": "0x20000000000000"}]}, "expected a string"),
    ({"$npscalar": ["U", {"$str": b64(b"a")}]}, "others are JSON strings"),
    ({"$npscalar": ["U", "\ud800"]}, "expected a string"),
    ({"$npscalar": ["S", "A"]}, "base64"),
    ({"$npscalar": [4, ""]}, "dtype, content"),
    ({"$npscalar": ["|O8", b64(b"12345678")]}, "plain NumPy dtype"),
    ({"$ndarray": ["|O", "C", [1], b64(b"12345678")]}, "plain NumPy dtype"),
    ({"$ndarray": ["<f4,<f4", "C", [1], b64(b"12345678")]}, "plain NumPy dtype"),
    ({"$ndarray": ["<f16", "C", [], b64(bytes(16))]}, "plain NumPy dtype"),
    ({"$ndarray": ["=f4", "C", [1], b64(b"1234")]}, "plain NumPy dtype"),
    ({"$ndarray": ["f4", "C", [1], b64(b"1234")]}, "plain NumPy dtype"),
    ({"$ndarray": ["|S0", "C", [1], ""]}, "plain NumPy dtype"),
    ({"$ndarray": ["<U0", "C", [10**15], ""]}, "plain NumPy dtype"),
    ({"$ndarray": ["<U999999999999", "C", [0], ""]}, "plain NumPy dtype"),
    ({"$ndarray": ["<M8[1D]", "C", [0], ""]}, "expected the dtype '<M8\\[D\\]'"),
    ({"$ndarray": ["<M8[parsec]", "C", [0], ""]}, "plain NumPy dtype"),
    ({"$ndarray": [["<f4"], "C", [0], ""]}, "plain NumPy dtype"),
    ({"$ndarray": ["<f4", "C", [2], b64(b"1234")]}, "need 0x8 bytes, found 4"),
    ({"$ndarray": ["<f4", "C", [2**52, 2**52, 4], b64(b"")]}, "need 0x1000000000000000000000000000 bytes"),
    ({"$ndarray": ["<f4", "C", [0, 2**62, 2**62], ""]}, "from 0 to"),
    ({"$ndarray": ["<f4", "C", [0, 2**52, 2**52], ""]}, "too big"),
    ({"$ndarray": ["<f4", "C", [-1, -1], b64(b"1234")]}, "from 0 to"),
    ({"$ndarray": ["<f4", "C", [2**53 - 1] * 64, b64(b"1234")]}, "need 0x"),
    ({"$ndarray": ["<f4", "C", [1 << 20_000], b64(b"1234")]}, "from 0 to"),
    ({"$ndarray": ["<f4", "C", [1.0], b64(b"1234")]}, "from 0 to"),
    ({"$ndarray": ["<f4", "C", [True], b64(b"1234")]}, "from 0 to"),
    ({"$ndarray": ["<f4", "C", [1] * 65, b64(b"1234")]}, "at most 64"),
    ({"$ndarray": ["<f4", "C", "1", b64(b"1234")]}, "shape"),
    ({"$ndarray": ["<f4", "K", [1], b64(b"1234")]}, "memory order"),
    ({"$ndarray": ["<f4", "F", [1], b64(b"1234")]}, "memory order"),
    ({"$ndarray": ["<f4", ["C"], [1], b64(b"1234")]}, "memory order"),
    ({"$ndarray": ["<f4", "C", [1]]}, "dtype, order, shape"),
    ({"$ndarray": ["<U1", "C", [1], b64(b"\x00\x00\x11\x00")]}, "code points"),
    ({"$ndarray": [">U1", "C", [1], b64(b"\xff\x00\x00\x00")]}, "code points"),
]


@pytest.mark.parametrize(("json", "problem"), DEFECTS, ids=[problem for _, problem in DEFECTS])
def test_each_defect_is_corrupt_and_names_its_place(json: Any, problem: str) -> None:
    with pytest.raises(Corrupt, match=rf"^rng/a\[1\].*: malformed stored value: .*{problem}") as caught:
        decode_value({"a": [None, json]}, "rng", registry=REGISTRY)
    assert caught.value.key is not None
    assert caught.value.key.startswith("rng/a[1]")
    assert len(str(caught.value)) < 400


def test_a_tag_of_a_newer_version_says_so() -> None:
    with pytest.raises(IncompatibleFormat, match=r"^s\[0\]: unknown tag '\$decimal'.*\n.*upgrade"):
        decode_value([{"$decimal": "1.0"}], "s")


def test_deep_json_is_refused_without_deep_recursion() -> None:
    for wrap in (lambda v: [v], lambda v: {"a": v}, lambda v: {"$tuple": [v]}, lambda v: {"$dict": [[1, v]]}):
        json: Any = 1
        for _ in range(20_000):
            json = wrap(json)
        with pytest.raises(Corrupt, match="nested deeper than 100"):
            decode_value(json, "s")
        while json != 1:  # taken apart by hand: freeing it recursively would be deep too
            json = next(iter(json.values())) if isinstance(json, dict) else json[-1]


def test_large_numbers_cost_linear_time_and_ranges_nothing() -> None:
    start = time.monotonic()
    digits = "0x1" + "0" * 4_000_000
    assert decode_value({"$int": digits}, "s") == 1 << 16_000_000
    huge = decode_value({"$range": [0, {"$int": "0x1" + "0" * 1000}, 1]}, "s")
    assert huge.stop == 1 << 4000
    assert decode_value({"$deque": [2**53 - 1, []]}, "s").maxlen == 2**53 - 1
    assert time.monotonic() - start < 5


def test_arrays_that_come_back_are_ordinary() -> None:
    array = decode_value({"$ndarray": ["<f8", "F", [2, 2], b64(np.arange(4.0).tobytes())]}, "s")
    assert array.tolist() == [[0.0, 2.0], [1.0, 3.0]]
    array[0, 0] = 9


def test_a_used_up_call_stack_is_a_typed_error() -> None:
    def call_deep(levels: int) -> Any:
        return call_deep(levels - 1) if levels else decode_value(json, "s")

    json: Any = 1
    for _ in range(90):
        json = [json]
    with pytest.raises(Corrupt, match="call stack"):
        call_deep(sys.getrecursionlimit() - len(inspect.stack()) - 60)
