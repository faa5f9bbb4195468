"""Headers: planned ones parse to themselves and open in safetensors; damaged ones only ever fail."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import Corrupt, IncompatibleFormat
from shardkeep.format.shard import ALIGNMENT_BYTES, header_length, parse_shard_header, plan_shard
from shardkeep.spec.dtypes import DTYPES

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda n: n != "__metadata__"
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
entries = st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=6).map(
    lambda tensors: [(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
)


def open_file(data: bytes) -> Any:
    length = header_length(data[:8], len(data))
    return parse_shard_header(data[: 8 + length], len(data))


@settings(max_examples=80, deadline=None)
@given(entries, st.randoms(use_true_random=False))
def test_planned_headers(planned: list[Any], random: Any) -> None:
    header = plan_shard(planned, {"by": "us"})
    shuffled = random.sample(planned, len(planned))
    assert plan_shard(shuffled, {"by": "us"}) == header
    assert len(header.data) % ALIGNMENT_BYTES == 0
    assert sorted((t.name, t.dtype, t.shape) for t in header.tensors) == sorted(planned)
    at = 0
    for tensor in header.tensors:
        assert tensor.begin == at
        assert tensor.begin % DTYPES[tensor.dtype].itemsize_bytes == 0
        at = tensor.end
    whole = header.data + bytes(at)
    assert len(whole) == header.size_bytes
    assert open_file(whole) == header
    assert {name for name, _ in safetensors.deserialize(whole)} == {name for name, _, _ in planned}


def check_damaged(data: bytes) -> None:
    """What we open, safetensors opens too, with the same tensors; we may refuse more, never less."""
    try:
        header = open_file(data)
    except (Corrupt, IncompatibleFormat):
        return
    theirs = dict(safetensors.deserialize(data))
    assert set(theirs) == {tensor.name for tensor in header.tensors}
    for tensor in header.tensors:
        span = data[header.data_start + tensor.begin : header.data_start + tensor.end]
        assert bytes(theirs[tensor.name]["data"]) == span


@settings(max_examples=300, deadline=None)
@given(entries, st.data())
def test_mutated_bytes(planned: list[Any], data: st.DataObject) -> None:
    header = plan_shard(planned)
    text_bytes = len(header.data[8:].rstrip(b" "))
    whole = bytearray(header.data + bytes(header.size_bytes - header.data_start))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 7 + text_bytes))] = data.draw(st.integers(0, 255))
    check_damaged(bytes(whole))


fields = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F4", "F6_E2M3", "C64", "NEW", "BOOL", "F8_E8M0"]) | st.none(),
        "shape": st.lists(st.integers(-1, 4) | st.sampled_from([2**31, 2**62, 2**64, 1.0]), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 16), min_size=1, max_size=3),
    },
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__", ""]), fields, max_size=3), st.integers(0, 16))
def test_wrong_headers(header: dict[str, Any], data_bytes: int) -> None:
    text = json.dumps(header).encode()
    check_damaged(len(text).to_bytes(8, "little") + text + bytes(data_bytes))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=5),
    st.integers(-1, 1),
    st.randoms(use_true_random=False),
)
def test_covers(spans: list[tuple[int, bool]], slack: int, random: Any) -> None:
    """Spans in any order open exactly when they lie back to back over all of the data."""
    at, header, tiled = 0, {}, True
    for number, (size, gap) in enumerate(spans):
        at += gap
        tiled &= not gap
        header[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    size_bytes = max(at + slack, 0)
    shuffled = dict(random.sample(sorted(header.items()), len(header)))
    text = json.dumps(shuffled).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(size_bytes)
    if tiled and size_bytes == at:
        assert len(open_file(data).tensors) == len(spans)
    else:
        with contextlib.suppress(Corrupt):
            open_file(data)
            raise AssertionError("opened a file with a hole or a wrong size")
    check_damaged(data)
