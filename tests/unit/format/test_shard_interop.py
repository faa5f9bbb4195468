"""Files we lay out open in the real safetensors with equal tensors, and its files parse here."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from shardkeep.format.shard import ShardHeader, ShardTensor, header_length, parse_shard_header, plan_shard
from shardkeep.spec.dtypes import DTYPES


def parse_file(data: bytes) -> ShardHeader:
    length = header_length(data[:8], len(data))
    return parse_shard_header(data[: 8 + length], len(data))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_safetensors_opens_every_dtype_with_equal_bytes(dtype: str, tmp_path: Path) -> None:
    info = DTYPES[dtype]
    header = plan_shard([("x", dtype, (2, 3)), ("s", dtype, ()), ("e", dtype, (0, 2))])
    content = random.Random(0).randbytes(header.size_bytes - header.data_start)
    if dtype == "bool":
        content = bytes(byte & 1 for byte in content)
    path = tmp_path / "x.safetensors"
    path.write_bytes(header.data + content)
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == header.metadata
        assert sorted(opened.keys()) == ["e", "s", "x"]
        for tensor in header.tensors:
            loaded = opened.get_tensor(tensor.name)
            assert raw_bytes(loaded) == content[tensor.begin : tensor.end]
            if info.tag:
                assert loaded.dtype == getattr(torch, dtype)
                assert tuple(loaded.shape) == tensor.shape
            else:
                assert loaded.dtype == torch.uint8
                assert tuple(loaded.shape) == (*tensor.shape, info.itemsize_bytes)


def test_safetensors_opens_a_file_of_many_tensors_with_equal_values(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "w": torch.randn(3, 5, generator=generator),
        "h": torch.randn(7, generator=generator).bfloat16(),
        "n": torch.tensor([1, -1]),
        "nan": torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
        "e": torch.zeros(0, 3),
    }
    header = plan_shard([(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()])
    path = tmp_path / "x.safetensors"
    path.write_bytes(header.data + b"".join(raw_bytes(tensors[tensor.name]) for tensor in header.tensors))
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert raw_bytes(loaded[name]) == raw_bytes(tensor)


def test_an_empty_shard_opens(tmp_path: Path) -> None:
    header = plan_shard([])
    (tmp_path / "x.safetensors").write_bytes(header.data)
    assert safetensors.torch.load_file(tmp_path / "x.safetensors") == {}


def test_files_of_safetensors_parse() -> None:
    tensors = {
        "w": torch.arange(6.0).reshape(2, 3),
        "h": torch.ones(3, dtype=torch.bfloat16),
        "s": torch.tensor(1),
        "e": torch.zeros(2, 0),
        "c": torch.zeros(2, dtype=torch.complex64),
        "u": torch.zeros(2, dtype=torch.uint64),
        "f8": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "flag": torch.tensor([True]),
    }
    data = safetensors.torch.save(tensors, {"format": "pt", "by": "them"})
    header = parse_file(data)
    assert header.metadata == {"format": "pt", "by": "them"}
    assert header.size_bytes == len(data)
    assert {tensor.name for tensor in header.tensors} == set(tensors)
    for tensor in header.tensors:
        theirs = tensors[tensor.name]
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(theirs.dtype), tuple(theirs.shape))
        assert data[header.data_start + tensor.begin : header.data_start + tensor.end] == raw_bytes(theirs)


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"])
def test_dtypes_that_newer_safetensors_tags(dtype: str) -> None:
    tensor = torch.arange(24, dtype=torch.uint8).reshape(2, 12).view(getattr(torch, dtype))
    header = parse_file(safetensors.torch.save({"x": tensor}))
    assert header.tensors == (ShardTensor("x", dtype, (2, 12), 0, 24),)
