"""Safetensors headers: laid out by us, read strictly from anybody; what is broken is named."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from shardkeep.errors import Corrupt, IncompatibleFormat, UsageError
from shardkeep.format.shard import (
    ALIGNMENT_BYTES,
    MAX_HEADER_BYTES,
    ShardHeader,
    header_length,
    parse_shard_header,
    plan_shard,
)
from shardkeep.spec.dtypes import DTYPES

ENTRIES = [
    ("w", "float32", (3, 5)),
    ("b", "bfloat16", (7,)),
    ("flag", "bool", (3,)),
    ("step", "int64", ()),
    ("empty", "float32", (0, 4)),
    ("a", "float32", (2,)),
    ("z", "complex128", (2,)),
    ("e8", "float8_e8m0fnu", (2, 3)),
    ("scalar", "complex32", ()),
]


# Laid out by us


def test_layout_is_back_to_back_aligned_and_independent_of_the_order_given() -> None:
    header = plan_shard(ENTRIES, {"shardkeep.rank": "3"})
    names = [tensor.name for tensor in header.tensors]
    assert names == ["z", "step", "a", "empty", "scalar", "w", "b", "e8", "flag"]
    at = 0
    for tensor in header.tensors:
        itemsize = DTYPES[tensor.dtype].itemsize_bytes
        assert tensor.begin == at
        assert tensor.begin % itemsize == 0
        assert tensor.end - tensor.begin == math.prod(tensor.shape) * itemsize
        at = tensor.end
    assert header.data_start == len(header.data)
    assert header.data_start % ALIGNMENT_BYTES == 0
    assert header.size_bytes == header.data_start + at
    assert list(header.metadata.items()) == [
        ("format", "pt"),
        ("shardkeep.dtypes", '{"e8":"float8_e8m0fnu","scalar":"complex32","z":"complex128"}'),
        ("shardkeep.rank", "3"),
    ]
    for seed in range(5):
        shuffled = random.Random(seed).sample(ENTRIES, len(ENTRIES))
        assert plan_shard(shuffled, {"shardkeep.rank": "3"}) == header


def test_documented_example() -> None:
    header = plan_shard([("b", "bfloat16", (2,)), ("c", "complex128", ()), ("a", "float32", (1, 2))], {})
    text = (
        b'{"__metadata__":{"format":"pt","shardkeep.dtypes":"{\\"c\\":\\"complex128\\"}"},'
        b'"c":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},'
        b'"a":{"dtype":"F32","shape":[1,2],"data_offsets":[16,24]},'
        b'"b":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]}}'
    )
    assert header.data == b"\xf8\x0f\0\0\0\0\0\0" + text + b" " * (4088 - len(text))
    assert header.size_bytes == 4096 + 28


def test_what_is_planned_parses_to_the_same() -> None:
    for entries in (ENTRIES, [], [("é/😀", "uint8", (0,))], [(f"t{i}", "float16", (i,)) for i in range(300)]):
        header = plan_shard(entries, {"k": "v"})
        assert parse_shard_header(header.data, header.size_bytes) == header
        assert parse_shard_header(header.data + b"more of the file", header.size_bytes) == header


def test_header_grows_by_whole_pages() -> None:
    sizes = {plan_shard([("n" * length, "uint8", (1,))]).data_start for length in range(3900, 4100)}
    assert sizes == {4096, 8192}


@pytest.mark.parametrize(
    ("entries", "metadata", "problem"),
    [
        ([("a", "uint8", (1,)), ("a", "int8", (1,))], {}, "'a' stands twice"),
        ([("__metadata__", "uint8", (1,))], {}, "__metadata__"),
        ([("", "uint8", (1,))], {}, "non-empty"),
        ([("\ud800", "uint8", (1,))], {}, "valid Unicode"),
        ([("a", "uint8", (-1, -1))], {}, "negative"),
        ([("a", "uint8", (1,) * 65)], {}, "65 dimensions"),
        ([("a", "complex128", (1,) * 64)], {}, "64 dimensions"),
        ([], {"format": "np"}, "always 'pt'"),
        ([], {"shardkeep.dtypes": "{}"}, "derived"),
        ([], {"a": 1}, "strings"),
        ([], {"\ud800": "a"}, "valid Unicode"),
    ],
)
def test_wrong_plans_are_usage_errors(entries: Any, metadata: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        plan_shard(entries, metadata)


def test_unknown_dtypes_cannot_be_planned() -> None:
    with pytest.raises(IncompatibleFormat, match="float7"):
        plan_shard([("a", "float7", (1,))])


def test_a_header_over_the_cap_is_refused_before_it_is_written() -> None:
    with pytest.raises(UsageError, match=r"over more shards"):
        plan_shard([("n" * MAX_HEADER_BYTES, "uint8", (1,))])


def test_64_dimensions_are_fine() -> None:
    header = plan_shard([("a", "float32", (1,) * 64)])
    assert parse_shard_header(header.data, header.size_bytes).tensors[0].shape == (1,) * 64


# Written by others


def parse_file(data: bytes) -> ShardHeader:
    length = header_length(data[:8], len(data))
    return parse_shard_header(data[: 8 + length], len(data))


def make(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(**fields: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}


def without(field: str) -> dict[str, Any]:
    header = one()
    del header["t"][field]
    return header


def two(a: list[int], b: list[int]) -> dict[str, Any]:
    return {
        "a": {"dtype": "U8", "shape": [a[1] - a[0]], "data_offsets": a},
        "b": {"dtype": "U8", "shape": [b[1] - b[0]], "data_offsets": b},
    }


def with_dtypes(text: str, **fields: Any) -> dict[str, Any]:
    return {"__metadata__": {"shardkeep.dtypes": text}, **one(**fields)}


EIGHT = b"12345678"

MUSEUM: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "of 0 bytes: expected at least 8"),
    "seven bytes": (b"\0" * 7, "of 7 bytes: expected at least 8"),
    "header of no bytes": (b"\0" * 8, "expected at least an empty JSON object"),
    "header over the cap": (make(b"{}", EIGHT, MAX_HEADER_BYTES + 1), "allows 100000000"),
    "header of 2^64-1": (b"\xff" * 8 + b"{}", "allows 100000000"),
    "header longer than the file": (make(one(), EIGHT, 5000), "cut short"),
    "not json": (make(b"{nope}"), "expected JSON"),
    "json cut short": (make(b'{"a":'), "expected JSON"),
    "text after the json": (make(b"{}{}"), "expected JSON"),
    "nul after the json": (make(b"{}\0\0"), "expected JSON"),
    "not utf-8": (make(b'{"\xff":1}'), "expected UTF-8, found byte 0xff at 2"),
    "byte order mark": (make(b"\xef\xbb\xbf{}"), "begin with"),
    "space before the json": (make(b" {}"), "begin with"),
    "a list": (make(b"[]"), "begin with"),
    "nan": (make(b'{"t":NaN}'), "NaN is not JSON"),
    "deep": (make(b'{"a":' * 100_000), "nested too deeply"),
    "deep list": (make(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "control character": (make(b'{"a\n":1}'), "expected JSON"),
    "tensor twice": (
        make(b'{"t":%b,"t":%b}' % ((json.dumps(one()["t"]).encode(),) * 2), EIGHT),
        "key 't' stands twice",
    ),
    "metadata twice": (make(b'{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' stands twice"),
    "metadata key twice": (make(b'{"__metadata__":{"a":"1","a":"2"}}'), "__metadata__: the key 'a' stands twice"),
    "metadata a list": (make({"__metadata__": []}), "__metadata__: expected a JSON object, found a list"),
    "metadata null": (make({"__metadata__": None}), "__metadata__: expected a JSON object, found None"),
    "metadata number": (make({"__metadata__": {"a": 1}}), "__metadata__ 'a': expected a string, found 1"),
    "metadata surrogate": (make(b'{"__metadata__":{"a":"\\ud800"}}'), "__metadata__ 'a': expected valid Unicode"),
    "tensor a number": (make({"t": 1}), "tensor 't': expected a JSON object, found 1"),
    "tensor a list": (make({"t": ["F32", [2], [0, 8]]}, EIGHT), "tensor 't': expected a JSON object, found a list"),
    "field twice": (
        make(b'{"t":{"dtype":"F32","dtype":"U8","shape":[2],"data_offsets":[0,8]}}', EIGHT),
        "tensor 't': the key 'dtype' stands twice",
    ),
    "no dtype": (make(without("dtype"), EIGHT), "tensor 't': expected the fields"),
    "no shape": (make(without("shape"), EIGHT), "tensor 't': expected the fields"),
    "no offsets": (make(without("data_offsets"), EIGHT), "tensor 't': expected the fields"),
    "one field more": (make(one(strides=[1]), EIGHT), "tensor 't': expected the fields .* strides"),
    "dtype a number": (make(one(dtype=4), EIGHT), "tensor 't': expected a dtype, found 4"),
    "dtype null": (make(one(dtype=None), EIGHT), "tensor 't': expected a dtype, found None"),
    "shape a number": (make(one(shape=2), EIGHT), "tensor 't': shape: expected a list, found 2"),
    "shape negative": (make(one(shape=[-2, -1]), EIGHT), "tensor 't': shape: expected integers .* found -2"),
    "shape float": (make(one(shape=[2.0]), EIGHT), "tensor 't': shape: expected integers .* found 2.0"),
    "shape bool": (make(one(shape=[True, 2]), EIGHT), "tensor 't': shape: expected integers .* found True"),
    "shape text": (make(one(shape=["2"]), EIGHT), "tensor 't': shape: expected integers .* found '2'"),
    "shape of 2^63": (make(one(shape=[2**63]), EIGHT), "tensor 't': shape: expected integers"),
    "number of 5000 digits": (
        make(b'{"t":{"dtype":"U8","shape":[%b],"data_offsets":[0,8]}}' % (b"1" * 5000), EIGHT),
        "expected JSON: Exceeds the limit",
    ),
    "shape of 65 dimensions": (make(one(shape=[1] * 64 + [2]), EIGHT), "tensor 't': 65 dimensions"),
    "shape wraps to 8 bytes": (make(one(shape=[2**32, 2**31, 2]), EIGHT), "tensor 't': .*overflows 64 bits"),
    "overflow behind a zero": (
        make(one(shape=[0, 2**62, 2**62], data_offsets=[0, 0])),
        "tensor 't': .*overflows 64 bits",
    ),
    "offsets a number": (make(one(data_offsets=8), EIGHT), "tensor 't': data_offsets: expected a list"),
    "offsets negative": (make(one(data_offsets=[-8, 0]), EIGHT), "tensor 't': data_offsets: .* found -8"),
    "offsets float": (make(one(data_offsets=[0, 8.0]), EIGHT), "tensor 't': data_offsets: .* found 8.0"),
    "one offset": (make(one(data_offsets=[8]), EIGHT), r"tensor 't': expected data_offsets \[begin, end\]"),
    "three offsets": (make(one(data_offsets=[0, 4, 8]), EIGHT), r"tensor 't': expected data_offsets \[begin, end\]"),
    "offsets reversed": (make(one(data_offsets=[8, 0]), EIGHT), r"tensor 't': expected data_offsets \[begin, end\]"),
    "size too small": (make(one(shape=[1]), EIGHT), "tensor 't': F32 of shape .* needs 4 bytes, .* hold 8"),
    "size too large": (make(one(shape=[3]), EIGHT), "tensor 't': F32 of shape .* needs 12 bytes, .* hold 8"),
    "scalar of 8 bytes": (make(one(shape=[]), EIGHT), "tensor 't': F32 of shape .* needs 4 bytes"),
    "half a byte": (make(one(dtype="F4", shape=[], data_offsets=[0, 1]), b"1"), "tensor 't': F4 .* needs 0.5 bytes"),
    "no name": (make({"": one()["t"]}, EIGHT), "tensor '': expected a name"),
    "surrogate name": (make({"\ud800": one()["t"]}, EIGHT), r"tensor '\\ud800': expected a name of valid Unicode"),
    "hole before the first": (
        make(one(data_offsets=[4, 12]), bytes(12)),
        "hole of 4 bytes between the header and tensor 't'",
    ),
    "hole": (make(two([0, 4], [6, 8]), EIGHT), "hole of 2 bytes between tensor 'a' and tensor 'b'"),
    "overlap": (make(two([0, 6], [4, 8]), EIGHT), "tensor 'b' overlaps tensor 'a'"),
    "same bytes": (make(two([0, 8], [0, 8]), EIGHT), "tensor 'b' overlaps tensor 'a'"),
    "empty one within another": (make(two([0, 8], [4, 4]), EIGHT), "tensor 'b' overlaps tensor 'a'"),
    "empty one behind the end": (make(two([0, 8], [9, 9]), EIGHT), "tensor 'b' ends at byte 9"),
    "file cut short": (make(one(), EIGHT[:7]), "tensor 't' ends at byte 8 of the data, and the file has 7"),
    "file longer": (make(one(), EIGHT + b"x"), "1 bytes after tensor 't' belong to no tensor"),
    "data without tensors": (make({}, EIGHT), "8 bytes after the header belong to no tensor"),
    "dtypes not json": (make(with_dtypes("nope"), EIGHT), "'shardkeep.dtypes': expected JSON"),
    "dtypes a list": (make(with_dtypes("[]"), EIGHT), "'shardkeep.dtypes': expected a JSON object"),
    "dtypes key twice": (make(with_dtypes('{"t":"bits8","t":"bits8"}'), EIGHT), "'shardkeep.dtypes': the key 't'"),
    "dtypes number": (make(with_dtypes('{"t":1}'), EIGHT), "'shardkeep.dtypes': tensor 't': expected a dtype"),
    "dtypes of no tensor": (make(with_dtypes('{"x":"bits8"}'), EIGHT), "names 'x', which is not in the file"),
    "dtypes with a tag": (make(with_dtypes('{"t":"float32"}'), EIGHT), "tensor 't': safetensors has a tag"),
    "dtypes on floats": (make(with_dtypes('{"t":"bits8"}'), EIGHT), "tensor 't': .* expected U8 .* found F32"),
    "dtypes on signed bytes": (
        make(with_dtypes('{"t":"bits8"}', dtype="I8", shape=[8, 1]), EIGHT),
        "tensor 't': .* expected U8 .* found I8",
    ),
    "dtypes of another size": (
        make(with_dtypes('{"t":"bits16"}', dtype="U8", shape=[8]), EIGHT),
        "tensor 't': .* last dimension of 2",
    ),
    "dtypes on a scalar": (
        make(with_dtypes('{"t":"bits8"}', dtype="U8", shape=[], data_offsets=[0, 1]), b"1"),
        "tensor 't': .* last dimension of 1",
    ),
}


@pytest.mark.parametrize("name", MUSEUM)
def test_museum_of_broken_files(name: str) -> None:
    data, problem = MUSEUM[name]
    with pytest.raises(Corrupt, match=f"(?s){problem}") as caught:
        parse_file(data)
    if problem.startswith("tensor 't': "):
        assert caught.value.key == "t"
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (one(dtype="F128"), "tensor 't': unknown safetensors dtype 'F128'.*upgrade"),
        (one(dtype=""), "tensor 't': unknown safetensors dtype ''"),
        (one(dtype="f32"), "tensor 't': unknown safetensors dtype 'f32'"),
        (one(dtype="F6_E2M3"), "tensor 't': F6_E2M3 has elements of 6 bits"),
        (one(dtype="F6_E3M2"), "tensor 't': F6_E3M2 has elements of 6 bits"),
        (one(dtype="F4", shape=[4, 4, 1]), "tensor 't': F4 .* rows of half bytes"),
        (with_dtypes('{"t":"float7"}'), "unknown dtype 'float7'"),
    ],
)
def test_dtypes_from_the_future_or_without_a_torch_dtype(header: Any, problem: str) -> None:
    with pytest.raises(IncompatibleFormat, match=f"(?s){problem}"):
        parse_file(make(header, EIGHT))


def test_header_length_needs_only_8_bytes() -> None:
    first8 = (100).to_bytes(8, "little")
    assert header_length(first8, 108) == 100
    assert header_length(first8 + b"more", 10**15) == 100
    assert header_length(MAX_HEADER_BYTES.to_bytes(8, "little"), 10**15) == MAX_HEADER_BYTES
    with pytest.raises(Corrupt, match="its header alone needs 108"):
        header_length(first8, 107)
    with pytest.raises(Corrupt, match="of 7 bytes"):
        header_length(first8[:7], 10**15)


def test_the_header_must_be_there() -> None:
    data = make(one(), EIGHT)
    with pytest.raises(Corrupt, match=r"expected .* bytes, found 20"):
        parse_shard_header(data[:20], len(data))


def test_what_the_format_allows_parses() -> None:
    assert parse_file(make(b"{}")).tensors == ()
    assert parse_file(make(b"{}   \n")).tensors == ()
    assert parse_file(make({"__metadata__": {}})).metadata == {}
    zero = {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}
    header = parse_file(make({"z": zero, **two([0, 4], [4, 8]), "y": zero}, EIGHT))
    assert [tensor.name for tensor in header.tensors] == ["a", "z", "y", "b"]


def test_every_cut_of_a_file_is_noticed() -> None:
    header = plan_shard(ENTRIES)
    whole = header.data + bytes(header.size_bytes - header.data_start)
    for size in [*range(64), *range(4000, len(whole))]:
        with pytest.raises(Corrupt):
            parse_file(whole[:size])


def test_twenty_thousand_tensors() -> None:
    entries = [(f"layers.{i}.weight", "bfloat16", (4, 4)) for i in range(20_000)]
    header = plan_shard(entries)
    assert parse_shard_header(header.data, header.size_bytes) == header
