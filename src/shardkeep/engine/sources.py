"""Tensors by key from anywhere: a committed checkpoint of a run, a safetensors file, a folder in Hugging Face's form.

No torch, no numpy: bytes only. Reads of our own checkpoints are verified; a plain file has nothing to verify against.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from shardkeep.engine.reader import PartReader
from shardkeep.engine.restore import CheckpointReader
from shardkeep.errors import Corrupt, NotFound
from shardkeep.format.digests import LEAF_BYTES
from shardkeep.format.hf_index import INDEX_NAME, parse_hf_index
from shardkeep.format.records import CommitRecord
from shardkeep.format.shard import ShardHeader, header_length, parse_shard_header
from shardkeep.format.value_encoder import MAX_DEPTH
from shardkeep.spec.chunks import Chunk, iter_runs, whole
from shardkeep.spec.dtypes import get_dtype
from shardkeep.storage.base import Store
from shardkeep.storage.oserrors import mapped

_INDEX_LIMIT_BYTES: Final = 1 << 28
# Arrays and objects that one level of a value takes at most: {"$defaultdict": [factory, [[key, value]]]}.
_JSON_PER_VALUE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What a tensor is, without its bytes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * get_dtype(self.dtype).itemsize_bytes


Wanted = tuple[str, Chunk, memoryview]
"""A key, a box of its tensor, and the memory for the box's row-major bytes."""


class Source(Protocol):
    """Tensors that can be compared."""

    @property
    def url(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Keys in `tensors` whose elements are those of another key."""

    @property
    def whole_only(self) -> frozenset[str]:
        """Keys that can be read as a whole only."""

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill every memory. Raises Corrupt, NotFound, StorageError."""


class _Sink:
    """`HostBytes` to fill, over memory."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    def copy_out(self, start: int, out: memoryview) -> None:
        out[:] = self._memory[start : start + len(out)]

    def copy_in(self, start: int, data: memoryview) -> None:
        self._memory[start : start + len(data)] = data


class CheckpointSource:
    """A committed checkpoint. Per-rank tensors stand under `<key>@rank<N>`; storages behind views are left out.

    Raises, when made and when read: Corrupt, StorageError.
    """

    def __init__(self, store: Store, commit: CommitRecord) -> None:
        self.commit = commit
        self.url = f"{store.url}@{commit.ref.step}"
        self._reader = CheckpointReader(store, commit)
        table = self._reader.table
        self.aliases: dict[str, str] = dict(table.aliases)
        self.whole_only = frozenset(table.views)
        self._own: dict[str, tuple[str, int]] = {}
        hidden = {view.base for view in table.views.values()}
        found = {key: (r.dtype, r.shape) for key, r in table.tensors.items() if key not in hidden}
        found |= {key: (view.dtype, view.shape) for key, view in table.views.items()}
        found |= {alias: found[target] for alias, target in table.aliases.items() if target in found}
        for rank in range(commit.world_size) if table.per_rank else ():
            for key, own in self._reader.part(rank).record.per_rank.items():
                name = f"{key}@rank{rank}"
                self._own[name] = key, rank
                found[name] = own.dtype, own.shape
        self.tensors: dict[str, TensorInfo] = {
            key: TensorInfo(dtype=dtype, shape=shape) for key, (dtype, shape) in sorted(found.items())
        }

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill every memory, each leaf verified."""
        by_rank: dict[int | None, list[tuple[str, Chunk, _Sink]]] = {}
        for name, chunk, memory in wanted:
            key, rank = self._own.get(name, (self.aliases.get(name, name), None))
            by_rank.setdefault(rank, []).append((key, chunk, _Sink(memory)))
        for rank, items in by_rank.items():
            self._reader.read(items, own_rank=rank)

    def values(self) -> dict[str, Any]:
        """Return the encoded plain values; those that differ by rank as `<name>@rank<N>`."""
        facts = self.commit.facts
        alike = {name: holder.rank for holder in facts.holders for name in holder.names}
        found: dict[str, Any] = {}
        for rank in range(self.commit.world_size):
            for name, value in self._reader.part(rank).record.values.items():
                _check_depth(value, f"{self.commit.ref}, part {rank}: {name}")
                if name not in alike or name in facts.differing:
                    found[f"{name}@rank{rank}"] = value
                elif alike[name] == rank:
                    found[name] = value
        return dict(sorted(found.items()))

    def fingerprint(self, name: str) -> list[tuple[Any, ...]] | None:
        """Return where a tensor's bytes lie and the digests of the leaves there; None where that says nothing.

        Two equal fingerprints prove equal bytes as written; unequal ones prove nothing.
        """
        table = self._reader.table
        key, rank = self._own.get(name, (self.aliases.get(name, name), None))
        if rank is not None:
            part = self._reader.part(rank)
            own = part.record.per_rank[key]
            return [(own.begin, own.end, _leaves(part, own.shard, own.begin, own.end))]
        if key in table.views:
            return None
        size = get_dtype(table.tensors[key].dtype).itemsize_bytes
        return [
            (chunk, begin, _leaves(part, shard, begin, begin + chunk.numel * size))
            for part, chunk, shard, begin in self._reader.find_stored(key, whole(table.tensors[key].shape))
        ]


class FileSource:
    """One or several safetensors files as one set of tensors."""

    aliases: Mapping[str, str]

    def __init__(self, url: str, headers: Mapping[str, ShardHeader]) -> None:
        self.url = url
        self.aliases = {}
        self.whole_only: frozenset[str] = frozenset()
        self.headers = dict(headers)
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[str, int]] = {}
        for path, header in sorted(headers.items()):
            for tensor in header.tensors:
                if tensor.name in self.tensors:
                    raise Corrupt(f"{path}: tensor {tensor.name!r} stands in {self._places[tensor.name][0]} too")
                self.tensors[tensor.name] = TensorInfo(dtype=tensor.dtype, shape=tensor.shape)
                self._places[tensor.name] = path, header.data_start + tensor.begin
        self.tensors = dict(sorted(self.tensors.items()))

    def path_of(self, key: str) -> str:
        """Return the file that holds a tensor."""
        return self._places[key][0]

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill every memory."""
        for key, chunk, memory in wanted:
            path, begin = self._places[key]
            info = self.tensors[key]
            size = get_dtype(info.dtype).itemsize_bytes
            at = 0
            with mapped("read", path, key=path, missing_ok=True), open(path, "rb") as file:
                for start, count in iter_runs(chunk, whole(info.shape)) if chunk.numel else ():
                    file.seek(begin + start * size)
                    into = memory[at : at + count * size]
                    if _read_fully(file, into) != len(into):
                        raise Corrupt(f"{path}: was cut short while it was read: tensor {key!r} is not all there")
                    at += len(into)


def _read_fully(file: Any, into: memoryview) -> int:
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])
        if not count:
            break
        done += count
    return done


def read_file_header(path: str) -> ShardHeader:
    """Read the header of a safetensors file. Raises Corrupt, IncompatibleFormat, NotFound, StorageError."""
    with mapped("read", path, key=path, missing_ok=True), open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        first = file.read(8)
        try:
            data = first + file.read(header_length(first, size_bytes))
            return parse_shard_header(data, size_bytes)
        except Corrupt as error:
            raise Corrupt(f"{path}: {error.message}", key=error.key) from None


def find_files(path: str) -> FileSource | None:
    """Return the tensors of a safetensors file, or of a folder in Hugging Face's form; None where it is neither.

    A folder's index decides which files count; without one all its `.safetensors` files do.
    """
    if os.path.isfile(path):
        return FileSource(path, {path: read_file_header(path)})
    index_path = os.path.join(path, INDEX_NAME)
    if os.path.isfile(index_path):
        return _open_indexed(path, index_path)
    files = sorted(glob.glob(os.path.join(glob.escape(path), "*.safetensors")))
    return FileSource(path, {name: read_file_header(name) for name in files}) if files else None


def _open_indexed(path: str, index_path: str) -> FileSource:
    with mapped("read", index_path, key=index_path, missing_ok=True), open(index_path, "rb") as file:
        index = parse_hf_index(file.read(_INDEX_LIMIT_BYTES), index_path)
    names = sorted(set(index.weight_map.values()))
    missing = [name for name in names if not os.path.isfile(os.path.join(path, name))]
    if missing:
        raise NotFound(f"{index_path} names {missing[0]}, which is not there ({len(missing)} files missing)")
    source = FileSource(
        path, {os.path.join(path, name): read_file_header(os.path.join(path, name)) for name in names}
    )
    for key, name in sorted(index.weight_map.items()):
        if key not in source.tensors or source.path_of(key) != os.path.join(path, name):
            raise Corrupt(f"{index_path}: says that {name} holds {key!r}; it does not", key=key)
    return source


def _check_depth(value: Any, where: str) -> None:
    """Refuse what no writer makes, before anything walks through it with the call stack."""
    level, depth = [value], 0
    while level := [child for node in level if isinstance(node, dict | list) for child in _children(node)]:
        depth += 1
        if depth > _JSON_PER_VALUE * (MAX_DEPTH + 1):
            raise Corrupt(f"{where}: nested deeper than {MAX_DEPTH} values")


def _children(node: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def iter_boxes(shape: tuple[int, ...], element_count: int) -> Iterator[Chunk]:
    """Cut a tensor in boxes of at most so many elements, each contiguous in row-major order, ascending."""
    if math.prod(shape) == 0:
        return
    dim = 0
    while math.prod(shape[dim:]) > element_count and dim < len(shape) and math.prod(shape[dim + 1 :]) > element_count:
        dim += 1
    if dim >= len(shape):
        yield whole(shape)
        return
    rows = max(1, element_count // math.prod(shape[dim + 1 :]))
    for index in _iter_indexes(shape[:dim]):
        for start in range(0, shape[dim], rows):
            count = min(rows, shape[dim] - start)
            yield Chunk((*index, start, *(0,) * (len(shape) - dim - 1)), (*(1,) * dim, count, *shape[dim + 1 :]))


def _iter_indexes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _iter_indexes(shape[1:]):
            yield (first, *rest)


def _leaves(part: PartReader, shard: int, begin: int, end: int) -> bytes:
    """Return the digests of the leaves that bytes `[begin, end)` of a shard touch."""
    return bytes(part.digests.leaves(shard, begin // LEAF_BYTES, -(-end // LEAF_BYTES))) if begin < end else b""
