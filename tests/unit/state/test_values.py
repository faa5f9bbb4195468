"""Live trees to stored ones and back, and casts."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import Corrupt, UnsupportedState
from shardkeep.format.names import is_section
from shardkeep.format.values import decode_value, encode_value
from shardkeep.spec.tensors import TensorRef
from shardkeep.state.casts import CastBytes, can_cast
from shardkeep.state.hostbytes import TensorBytes
from shardkeep.state.values import escape, find_tensors, format_section, pack_tree, unpack_tree
from shardkeep.types import TorchValue


def round_trip(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    taken: dict[str, torch.Tensor] = {}

    def take(tensor: torch.Tensor, path: str) -> TensorRef:
        assert path not in taken
        taken[path] = tensor
        return TensorRef(path)

    packed = decode_value(encode_value(pack_tree(tree, "x", take), "x"), "x")
    return unpack_tree(packed, taken.__getitem__), taken


def test_types_of_torch_return() -> None:
    tree = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 3),
        "size": torch.Size([2, 0, 3]),
        "scalar": torch.Size([]),
        "format": torch.channels_last,
        torch.float32: "as a key",
    }
    found, _ = round_trip(tree)
    assert found == tree
    assert type(found["size"]) is torch.Size
    assert found["format"] is torch.channels_last


def test_containers_keep_their_types() -> None:
    ordered = OrderedDict(b=1, a=[2])
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    tree = {
        "counter": Counter({3: 2}),
        "ordered": ordered,
        "default": defaultdict(list, {"a": [1]}),
        "deque": deque([1, 2], maxlen=4),
        "set": {1, 2},
        "frozen": frozenset("ab"),
        "tuple": (1, (2.5, None), True),
        "bytes": bytearray(b"x"),
        "array": np.arange(3, dtype=np.int16),
        "scalar": np.float64(0.1),
        "complex": 1 + 2j,
        "slice": slice(1, 2),
        "big": 1 << 90,
        "nan": math.inf,
    }
    found, _ = round_trip(tree)
    for key, value in tree.items():
        assert type(found[key]) is type(value), key
        assert np.array_equal(found[key], value) if key == "array" else found[key] == value, key
    assert found["default"].default_factory is list
    assert found["deque"].maxlen == 4
    assert found["ordered"]._metadata == {"": {"version": 1}}


def test_packing_shares_nothing_mutable() -> None:
    """ASYNC-1, Lightning-AI/pytorch-lightning#21079: what changes after the capture does not reach it."""
    tree: dict[str, Any] = {
        "a": [1, {"b": [2]}],
        "array": np.zeros(2),
        "d": deque([1]),
        "s": {1},
        "ba": bytearray(b"a"),
    }
    packed = pack_tree(tree, "x", lambda *_: None)
    tree["a"][1]["b"].append(3)
    tree["a"].append(4)
    tree["array"][0] = 9
    tree["d"].append(5)
    tree["s"].add(5)
    tree["ba"][0] = 0
    tree["new"] = 1
    assert packed["a"] == [1, {"b": [2]}]
    assert packed["array"][0] == 0
    assert list(packed["d"]) == [1]
    assert packed["s"] == {1}
    assert packed["ba"] == b"a"
    assert "new" not in packed


def test_paths_of_tensors_are_unambiguous() -> None:
    t = torch.zeros(1)
    tree = {"a/b": t, "a": {"b": t, "%2F": t, "/": t}, "l": [t, (t,)], "c": {1: t}, "m": {1: t, "1": t}}
    found = find_tensors(tree, "x")
    assert len(found) == 9
    assert {"x/a%2Fb", "x/a/b", "x/a/%252F", "x/a/%2F", "x/l/0", "x/l/1/0", "x/c/1", "x/m/1"} <= set(found)
    assert len(round_trip(tree)[1]) == 9


@given(st.lists(st.lists(st.text(max_size=4), min_size=1, max_size=3), min_size=2, max_size=2, unique_by=tuple))
@settings(max_examples=60)
def test_escaped_paths_are_injective(parts: list[list[str]]) -> None:
    assert "/".join(map(escape, parts[0])) != "/".join(map(escape, parts[1]))


@given(st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=2, unique=True))
@settings(max_examples=60)
def test_sections_are_injective_and_safe(keys: list[str]) -> None:
    a, b = (format_section(key.encode("utf-8", "replace").decode()) for key in keys)
    assert is_section(a)
    assert is_section(b)
    if keys[0].isascii() and keys[1].isascii():
        assert a != b


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"fn": [lambda: 0]}, r"x/fn/0"),
        ({"o": {"p": Opaque()}}, r"x/o/p"),
        ({"d": defaultdict(Opaque)}, r"x/d"),
        ({"a": np.array([Opaque()])}, r"x/a"),
        ({"g": random.Random(1)}, r"x/g"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_path(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedState, match=path):
        pack_tree(value, "x", lambda *_: None)


def test_cycles_are_refused() -> None:
    tree: list[Any] = [1]
    tree.append(tree)
    with pytest.raises(UnsupportedState, match="x/1: a list that contains itself"):
        pack_tree(tree, "x", lambda *_: None)
    shared = [1]
    assert pack_tree([shared, shared], "x", lambda *_: None) == [[1], [1]]


@pytest.mark.parametrize(
    "value",
    [
        TorchValue("dtype", "nn"),
        TorchValue("dtype", "os"),
        TorchValue("memory_format", "float32"),
        TorchValue("device", "no such"),
        TorchValue("size", "1,x"),
    ],
)
def test_foreign_names_of_torch_are_corrupt(value: TorchValue) -> None:
    with pytest.raises(Corrupt):
        unpack_tree(value, lambda _key: torch.zeros(0))


@given(st.data())
@settings(max_examples=40)
def test_cast_rounds_exactly_whatever_the_blocks(data: st.DataObject) -> None:
    """FMT-8, pytorch/pytorch#187138: the written values are torch's own rounding, in any order of blocks."""
    floats = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    stored = data.draw(st.sampled_from(floats))
    live = data.draw(st.sampled_from(floats))
    values = torch.tensor(data.draw(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=9)), dtype=torch.float64)
    source, target = values.to(stored), torch.zeros(len(values), dtype=live)
    sink = CastBytes(TensorBytes(target), stored, live)
    raw = source.view(torch.uint8).numpy().tobytes()
    assert sink.nbytes == len(raw)
    cuts = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=6))})
    blocks = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    for start, stop in blocks:
        sink.copy_in(start, memoryview(raw)[start:stop])
    assert torch.equal(target, source.to(live))
    out = bytearray(len(raw))
    for start, stop in blocks:
        sink.copy_out(start, memoryview(out)[start:stop])
    assert bytes(out) == target.to(stored).view(torch.uint8).numpy().tobytes()


def test_what_can_be_cast() -> None:
    assert can_cast(torch.float32, torch.bfloat16)
    assert can_cast(torch.complex128, torch.complex64)
    assert not can_cast(torch.int64, torch.int32)
    assert not can_cast(torch.float32, torch.int32)
    assert not can_cast(torch.complex64, torch.float32)
