"""A committed checkpoint opened for reading: lazy, partial, verified; metadata needs no torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any

from shardkeep.engine.restore import CheckpointReader
from shardkeep.errors import NotFound, UsageError
from shardkeep.format.records import CommitRecord, decode_metrics
from shardkeep.format.values import decode_value
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.dtypes import get_dtype
from shardkeep.storage.base import Store

if TYPE_CHECKING:
    import torch

Index = int | slice | EllipsisType


class Checkpoint:
    """Everything in one committed checkpoint, by key: `ckpt["model/layers.0.wq.weight"][:128]`.

    Opening reads the commit record only; a part is read when the first of its tensors is asked for. Every byte that
    is returned was checked against its digest. Use it as a context manager or call `close`.
    """

    def __init__(self, store: Store, commit: CommitRecord) -> None:
        self._reader = CheckpointReader(store, commit)
        self._table = commit.facts.layout
        self.commit = commit

    @property
    def step(self) -> int:
        return self.commit.ref.step

    @property
    def generation(self) -> int:
        return self.commit.ref.generation

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that were given with the save."""
        return decode_metrics(self.commit.facts.metrics)

    def keys(self) -> list[str]:
        """Return the key of every tensor, ascending; tied ones and views included."""
        table = self._table
        hidden = {view.base for view in table.views.values()}
        return sorted(({*table.tensors} - hidden) | {*table.aliases} | {*table.views})

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._table.tensors or key in self._table.aliases or key in self._table.views

    def __getitem__(self, key: str) -> StoredTensorView:
        """Return a tensor without reading it. Raises NotFound, with keys that look alike."""
        if key not in self:
            last = key.rpartition("/")[2]
            near = [other for other in self.keys() if last and last in other][:5]
            near = near or difflib.get_close_matches(key, self.keys(), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise NotFound(
                f"{self.commit.ref} holds no tensor {key!r}{hint}",
                step=self.step,
                key=key,
                advice="checkpoint.keys() lists the names, and so does shardkeep show RUN --tree",
            )
        return StoredTensorView(self._reader, self._table.aliases.get(key, key), key)

    def values(self) -> dict[str, Any]:
        """Return the plain-Python part by name (`scheduler`, `optimizer/groups`), as its first holder saved it."""
        found: dict[str, Any] = {}
        for rank, encoded in self._reader.read_value_parts(0).items():
            for name, value in encoded.items():
                found.setdefault(name, decode_value(value, f"part {rank}: {name}"))
        return found

    def close(self) -> None:
        """Give up the parts read so far; harmless twice."""
        self._reader = CheckpointReader(self._reader.store, self.commit)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.commit.ref}, {len(self)} tensors>"


class StoredTensorView:
    """One stored tensor: shape and dtype at once, elements when indexed."""

    def __init__(self, reader: CheckpointReader, stored_key: str, key: str) -> None:
        self._reader = reader
        self._stored_key = stored_key
        self.key = key
        record = reader.table.views.get(stored_key) or reader.table.tensors[stored_key]
        self.dtype: str = record.dtype
        self.shape: tuple[int, ...] = record.shape
        self._is_view = stored_key in reader.table.views

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * get_dtype(self.dtype).itemsize_bytes

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Return the elements as a torch tensor on the CPU; reads only the blocks that hold them.

        Takes integers, slices and `...`, as torch does. Raises Corrupt where the stored bytes are damaged.
        """
        from shardkeep.state.hostbytes import TensorBytes, torch_dtype  # torch only where tensors are asked for

        boxes, after = _normalize(index if isinstance(index, tuple) else (index,), self.shape)
        if self._is_view:
            chunk = Chunk((0,) * len(self.shape), self.shape)
        else:
            chunk = Chunk(tuple(start for start, _ in boxes), tuple(stop - start for start, stop in boxes))
        import torch

        if not self._is_view:
            # Memory is taken only for what is there: a record can name any shape.
            for _ in self._reader.find_stored(self._stored_key, chunk):
                continue
        tensor = torch.empty(chunk.sizes, dtype=torch_dtype(self.dtype))
        self._reader.read([(self._stored_key, chunk, TensorBytes(tensor))])
        if self._is_view:
            tensor = tensor[tuple(slice(start, stop) for start, stop in boxes)]
        return tensor[after] if after else tensor

    def tensor(self) -> torch.Tensor:
        """Return all elements."""
        return self[...]

    def __repr__(self) -> str:
        return f"<{self.key}: {self.dtype}{list(self.shape)}>"


def _normalize(
    index: Sequence[Index], shape: tuple[int, ...]
) -> tuple[list[tuple[int, int]], tuple[int | slice, ...]]:
    """Return the box `[(start, stop)]` that holds what is asked for, and the index to apply to it."""
    given = [i for i in index if not isinstance(i, EllipsisType)]
    if len(given) > len(shape) or len(index) - len(given) > 1:
        raise UsageError(f"index {tuple(index)!r} does not fit the shape {shape}")
    at = next((n for n, i in enumerate(index) if isinstance(i, EllipsisType)), len(index))
    fill = [slice(None)] * (len(shape) - len(given))
    full = [*index[:at], *fill, *index[at + 1 :]]
    boxes: list[tuple[int, int]] = []
    after: list[int | slice] = []
    for item, size in zip(full, shape, strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 1:
                raise UsageError(f"index {item!r}: a step of {step}; expected 1 or more")
            boxes.append((start, max(start, stop)))
            after.append(slice(None, None, step))
        elif isinstance(item, int) and not isinstance(item, bool) and -size <= item < size:
            boxes.append((item % size, item % size + 1))
            after.append(0)
        else:
            raise UsageError(f"index {item!r}: expected an integer within {size}, a slice or ...")
    plain = all(isinstance(i, slice) and i.step in (None, 1) for i in after)
    return boxes, () if plain else tuple(after)
