"""Hugging Face's index: theirs parses, ours is theirs, and no entry leads out of the folder."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardkeep.errors import Corrupt, UsageError
from shardkeep.format.hf_index import HfIndex, encode_hf_index, parse_hf_index

MAP = {"b": "model-00002.safetensors", "a": "model-00001.safetensors"}


def test_text_is_as_hugging_face_writes_it() -> None:
    assert encode_hf_index(MAP, 12).decode() == (
        '{\n  "metadata": {\n    "total_size": 12\n  },\n  "weight_map": {\n'
        '    "a": "model-00001.safetensors",\n    "b": "model-00002.safetensors"\n  }\n}\n'
    )


def test_what_is_encoded_parses() -> None:
    for weight_map in (MAP, {}, {"é": "mödel 1.safetensors"}):
        assert parse_hf_index(encode_hf_index(weight_map, 5)) == HfIndex(dict(weight_map), 5)


def test_what_others_publish_parses() -> None:
    for metadata, total in (
        ({}, None),
        ({"total_size": 28966928384.0}, 28966928384),
        ({"total_size": 0, "total_parameters": 3, "note": "x"}, 0),
    ):
        text = json.dumps({"metadata": metadata, "weight_map": MAP, "extra": [1]}).encode()
        assert parse_hf_index(text) == HfIndex(MAP, total)
    assert parse_hf_index(json.dumps({"weight_map": MAP}).encode()).total_size_bytes is None


BAD_FILES = [
    "../model.safetensors",
    "/etc/x.safetensors",
    "sub/x.safetensors",
    "sub\\x.safetensors",
    "C:x.safetensors",
    "..safetensors",
    "a..safetensors",
    ".safetensors",
    ".hidden.safetensors",
    "pytorch_model.bin",
    "model.safetensors.bin",
    "model.SAFETENSORS",
    "",
    "a\n.safetensors",
    "a\x00.safetensors",
    "a\u202e.safetensors",
    "\ud800.safetensors",
    "x" * 256 + ".safetensors",
]


@pytest.mark.parametrize("file", BAD_FILES, ids=ascii)
def test_file_names_that_must_not_be_followed(file: str) -> None:
    with pytest.raises(UsageError, match="file name"):
        encode_hf_index({"a": file}, 1)
    with pytest.raises(Corrupt, match=r"^where: tensor 'a': file name") as caught:
        parse_hf_index(json.dumps({"weight_map": {"a": file}}).encode(), "where")
    assert caught.value.key == "a"


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        (b"", "expected JSON"),
        (b"[]", "expected a JSON object, found a list"),
        (b"{}", "no 'weight_map'"),
        (b'{"weight_map":{}', "expected JSON"),
        (b'{"weight_map":{},"weight_map":{}}', "'weight_map' stands twice"),
        (b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', "weight_map: the key 'a' stands twice"),
        (b'\xff{"weight_map":{}}', "expected UTF-8"),
        ({"weight_map": []}, "weight_map: expected a JSON object"),
        ({"weight_map": {"a": 1}}, "file name 1 is not a string"),
        ({"weight_map": {"a": None}}, "file name None is not a string"),
        ({"weight_map": {"": "x.safetensors"}}, "tensor name ''"),
        ({"weight_map": {"\ud800": "x.safetensors"}}, "valid Unicode"),
        ({"weight_map": {}, "metadata": 1}, "metadata: expected a JSON object"),
        ({"weight_map": {}, "metadata": {"total_size": "1"}}, "total_size: expected a count of bytes, found '1'"),
        ({"weight_map": {}, "metadata": {"total_size": -1}}, "total_size"),
        ({"weight_map": {}, "metadata": {"total_size": 1.5}}, "total_size"),
        ({"weight_map": {}, "metadata": {"total_size": True}}, "total_size"),
        ({"weight_map": {}, "metadata": {"total_size": 2**63}}, "total_size"),
        ({"weight_map": {}, "metadata": {"total_size": 1e300}}, "total_size"),
        (b'{"weight_map":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_indexes_are_corrupt(index: Any, problem: str) -> None:
    data = index if isinstance(index, bytes) else json.dumps(index).encode()
    with pytest.raises(Corrupt, match=f"^here.*{problem}"):
        parse_hf_index(data, "here")


def test_names_of_tensors_must_be_text() -> None:
    for name in ("", "\udfff"):
        with pytest.raises(UsageError, match="valid Unicode"):
            encode_hf_index({name: "a.safetensors"}, 1)
