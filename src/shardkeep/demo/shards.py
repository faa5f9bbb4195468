"""Reads a checkpoint's shards as anyone could: safetensors files whose tensors are named `name[0:64,0:32]`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy

from shardkeep.errors import Corrupt
from shardkeep.format.shard import parse_shard_header
from shardkeep.spec.chunks import Chunk

SECTIONS: Final = {"model": "weights/", "optimizer": ""}
"""What the shards of a section hold, as the prefix of the demo's names."""

_CHUNK: Final = re.compile(r"(.+?)\[([0-9:,]*)\]\Z", re.ASCII)
Array = numpy.ndarray[Any, numpy.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """Whole tensors put together from shards. `reader` says with whose code the files were read."""

    reader: str
    files_count: int
    chunks_count: int
    tensors: dict[str, Array] = field(default_factory=dict)


def read_shards(folder: Path) -> ReadBack:
    """Put together all tensors of a step's folder, with the package `safetensors` where it is installed.

    Raises:
        Corrupt: the chunks of a tensor do not fit together.
    """
    reader = _find_reader()
    chunks: dict[str, list[tuple[Chunk | None, Array]]] = {}
    paths = sorted(folder.glob("*.safetensors"))
    count = 0
    for path in paths:
        prefix = SECTIONS.get(path.name.partition("-")[0], "other/")
        for name, data in _iter_safetensors(path) if reader == "safetensors" else _iter_own(path):
            count += 1
            base, chunk = parse_chunk_name(name)
            chunks.setdefault(prefix + base, []).append((chunk, data))
    tensors = {name: _join(name, pieces) for name, pieces in sorted(chunks.items())}
    return ReadBack(reader=reader, files_count=len(paths), chunks_count=count, tensors=tensors)


def parse_chunk_name(name: str) -> tuple[str, Chunk | None]:
    """Return a stored tensor's name and the box `[start:stop,...]` that it ends in, or None for a whole tensor."""
    match = _CHUNK.match(name)
    if match is None:
        return name, None
    edges = [tuple(int(edge) for edge in part.split(":")) for part in match[2].split(",") if part]
    return match[1], Chunk(tuple(edge[0] for edge in edges), tuple(edge[1] - edge[0] for edge in edges))


def _find_reader() -> str:
    try:
        importlib.import_module("safetensors")
    except ImportError:
        return "shardkeep's own parser"
    return "safetensors"


def _iter_safetensors(path: Path) -> Iterator[tuple[str, Array]]:
    safetensors = importlib.import_module("safetensors")
    with safetensors.safe_open(path, framework="numpy") as opened:
        for name in opened.keys():  # noqa: SIM118  # not a mapping
            yield name, opened.get_tensor(name)


def _iter_own(path: Path) -> Iterator[tuple[str, Array]]:
    data = path.read_bytes()
    header = parse_shard_header(data, len(data))
    for tensor in header.tensors:
        raw = data[header.data_start + tensor.begin : header.data_start + tensor.end]
        yield tensor.name, numpy.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape)


def _join(name: str, pieces: list[tuple[Chunk | None, Array]]) -> Array:
    if len(pieces) == 1 and pieces[0][0] is None:
        return pieces[0][1]
    boxes = [(chunk, data) for chunk, data in pieces if chunk is not None]
    if len(boxes) != len(pieces):
        raise Corrupt(f"{name}: stored whole and in chunks", key=name)
    shape = tuple(
        max(chunk.offsets[d] + chunk.sizes[d] for chunk, _ in boxes) for d in range(len(boxes[0][0].offsets))
    )
    whole = numpy.empty(shape, dtype=boxes[0][1].dtype)
    written = numpy.zeros(shape, dtype=numpy.uint8)
    for chunk, data in boxes:
        at = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[at] = data
        written[at] += 1
    if not (written == 1).all():
        raise Corrupt(f"{name}: its chunks do not tile {list(shape)}", key=name)
    return whole
