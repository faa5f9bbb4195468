"""The dtype table against the installed torch and safetensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from shardkeep.errors import IncompatibleFormat
from shardkeep.format.shard import parse_shard_header
from shardkeep.spec.dtypes import BY_TAG, DTYPES, get_dtype


def torch_dtypes() -> dict[str, torch.dtype]:
    found = {
        str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
    }
    # Quantized tensors carry scales beside their bytes; they are no plain dtypes.
    return {name: dtype for name, dtype in found.items() if not name.startswith(("q", "quint"))}


def test_every_dtype_of_this_torch_is_known_with_its_size() -> None:
    """huggingface/huggingface_hub#4901: a table that was copied once lacked what torch has."""
    sizes = {name: dtype.itemsize for name, dtype in torch_dtypes().items()}
    assert {name: get_dtype(name).itemsize_bytes for name in sizes} == sizes


def test_names_are_unique_and_tags_lead_back() -> None:
    assert all(name == dtype.name for name, dtype in DTYPES.items())
    assert all(BY_TAG[dtype.tag] is dtype for dtype in DTYPES.values() if dtype.tag)
    assert len(BY_TAG) == sum(dtype.tag is not None for dtype in DTYPES.values())


def test_tags_are_those_that_safetensors_writes() -> None:
    existing = torch_dtypes()
    for dtype in BY_TAG.values():
        if dtype.name in existing:
            data = save({"x": torch.zeros(2).to(existing[dtype.name])})
            assert f'"dtype":"{dtype.tag}"'.encode() in data
            (tensor,) = parse_shard_header(data, len(data)).tensors
            assert (tensor.dtype, tensor.end - tensor.begin) == (dtype.name, 2 * dtype.itemsize_bytes)


@pytest.mark.parametrize("name", ["", "float33", "torch.float32", "F32", "Float32"])
def test_what_is_not_known_is_named(name: str) -> None:
    with pytest.raises(IncompatibleFormat, match="unknown dtype") as caught:
        get_dtype(name)
    assert repr(name) in caught.value.message
    assert "float32" in caught.value.message
    assert caught.value.advice
