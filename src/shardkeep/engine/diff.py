"""What differs between two sets of tensors, and between the plain values of two checkpoints.

Memory is two stretches of at most 64 MiB and what NumPy makes of a million elements, whatever the tensors' sizes; a
tensor that is a strided view into another one is read whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from shardkeep.engine.compare import Comparison, Difference
from shardkeep.engine.sources import CheckpointSource, Source, TensorInfo, iter_boxes
from shardkeep.spec.chunks import Chunk, whole
from shardkeep.spec.dtypes import get_dtype

BATCH_BYTES: Final = 64 << 20
MAX_VALUES: Final = 1000
_TEXT_LENGTH: Final = 60

What = Literal["added", "removed", "shape", "dtype", "changed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One tensor that is not the same on both sides. `a`, `b`: what it is there, None where it is not.

    `difference` is set where the shapes are equal: for `dtype` the values are compared across the dtypes.
    """

    key: str
    what: What
    a: TensorInfo | None
    b: TensorInfo | None
    difference: Difference | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueChange:
    """One plain value that differs, by its path; a side is None where it has nothing there."""

    path: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """Everything that differs.

    Attributes:
        changes: ascending by key.
        identical_count: tensors with the same bits on both sides; `proved_count` of them by their digests alone.
        values: at most MAX_VALUES of `value_count`.
        left_out: why something was not compared.
    """

    changes: tuple[TensorChange, ...]
    identical_count: int
    proved_count: int
    values: tuple[ValueChange, ...]
    value_count: int
    left_out: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not self.changes and not self.value_count


def diff_sources(
    a: Source, b: Source, *, progress: Callable[[int], None] = lambda count: None, batch_bytes: int = BATCH_BYTES
) -> DiffReport:
    """Compare everything that two sources hold.

    When one of them is a plain file, only the model's tensors of the other are compared, by their names in it.

    Args:
        progress: told of compared bytes, those of `a`.
        batch_bytes: memory for what is read at once, per side.

    Raises:
        Corrupt: bytes of a checkpoint are not what was written. NotFound, StorageError: they cannot be read.
    """
    left_out: list[str] = []
    left, right = a, b
    if isinstance(a, CheckpointSource) != isinstance(b, CheckpointSource):
        left, right = _model_only(a, left_out), _model_only(b, left_out)
    changes: list[TensorChange] = []
    common: list[str] = []
    tied = {key for key, target in left.aliases.items() if right.aliases.get(key) == target}
    for key in sorted(left.tensors.keys() | right.tensors.keys()):
        one, two = left.tensors.get(key), right.tensors.get(key)
        if one is None or two is None:
            changes.append(TensorChange(key=key, what="added" if one is None else "removed", a=one, b=two))
        elif one.shape != two.shape:
            changes.append(TensorChange(key=key, what="shape", a=one, b=two))
        elif key not in tied:
            common.append(key)
    proved = frozenset(key for key in common if _is_proved_equal(a, b, key))
    for key in proved:
        progress(left.tensors[key].size_bytes)
    compared = _compare(left, right, [key for key in common if key not in proved], progress, batch_bytes)
    found, identical_count = list(changes), len(proved) + len(tied)
    for key, difference in compared:
        one, two = left.tensors[key], right.tensors[key]
        if one.dtype != two.dtype:
            found.append(TensorChange(key=key, what="dtype", a=one, b=two, difference=difference))
        elif difference.differing_count:
            found.append(TensorChange(key=key, what="changed", a=one, b=two, difference=difference))
        else:
            identical_count += 1
    values, value_count = _diff_values(a, b)
    return DiffReport(
        changes=tuple(sorted(found, key=lambda change: change.key)),
        identical_count=identical_count,
        proved_count=len(proved),
        values=values,
        value_count=value_count,
        left_out=tuple(left_out),
    )


class _ModelOnly:
    """A checkpoint's model tensors under the names that plain files give them."""

    prefix: Final = "model/"

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self.url = source.url
        own = {key for key in source.tensors if key.startswith(self.prefix) and "@rank" not in key}
        self.tensors = {key.removeprefix(self.prefix): source.tensors[key] for key in sorted(own)}
        self.aliases: dict[str, str] = {}
        self.whole_only = frozenset(key.removeprefix(self.prefix) for key in source.whole_only if key in own)

    def read(self, wanted: Any) -> None:
        self._source.read([(self.prefix + key, chunk, memory) for key, chunk, memory in wanted])


def _model_only(source: Source, left_out: list[str]) -> Source:
    if not isinstance(source, CheckpointSource):
        return source
    model = _ModelOnly(source)
    others = len(source.tensors) - len(model.tensors)
    if others:
        left_out.append(f"{others} tensors of {source.url} beside the model: the other side is a plain file")
    return model


def _is_proved_equal(a: Source, b: Source, key: str) -> bool:
    """Say whether the digests alone prove equal bytes: the same places in files of the same leaves."""
    if not isinstance(a, CheckpointSource) or not isinstance(b, CheckpointSource):
        return False
    if a.tensors[key] != b.tensors[key]:
        return False
    one = a.fingerprint(key)
    return one is not None and one == b.fingerprint(key)


def _compare(
    a: Source, b: Source, keys: list[str], progress: Callable[[int], None], batch_bytes: int
) -> Iterator[tuple[str, Difference]]:
    """Yield the difference of every key, in order; small tensors are read many at a time."""
    comparisons = {key: Comparison(a.tensors[key].dtype, b.tensors[key].dtype) for key in keys}
    for batch in _iter_batches(a, b, keys, batch_bytes):
        memories = []
        for source in (a, b):
            sizes = [chunk.numel * get_dtype(source.tensors[key].dtype).itemsize_bytes for key, chunk in batch]
            block = memoryview(bytearray(sum(sizes)))
            edges = [0, *itertools.accumulate(sizes)]
            memories.append([block[start:stop] for start, stop in itertools.pairwise(edges)])
            source.read([(key, chunk, memories[-1][at]) for at, (key, chunk) in enumerate(batch)])
        for at, (key, _) in enumerate(batch):
            comparisons[key].add(memories[0][at], memories[1][at])
            progress(len(memories[0][at]))
    for key in keys:
        yield key, comparisons[key].finish()


def _iter_batches(a: Source, b: Source, keys: list[str], batch_bytes: int) -> Iterator[list[tuple[str, Chunk]]]:
    batch: list[tuple[str, Chunk]] = []
    filled = 0
    for key in keys:
        info = a.tensors[key]
        itemsize = max(get_dtype(side.tensors[key].dtype).itemsize_bytes for side in (a, b))
        at_once = key in a.whole_only or key in b.whole_only
        boxes = [whole(info.shape)] if at_once else iter_boxes(info.shape, max(batch_bytes // itemsize, 1))
        for box in boxes:
            size = box.numel * itemsize
            if batch and filled + size > batch_bytes:
                yield batch
                batch, filled = [], 0
            if size:
                batch.append((key, box))
                filled += size
    if batch:
        yield batch


def _diff_values(a: Source, b: Source) -> tuple[tuple[ValueChange, ...], int]:
    if not isinstance(a, CheckpointSource) or not isinstance(b, CheckpointSource):
        return (), 0
    listed: list[ValueChange] = []
    count = 0
    for change in iter_value_changes(a.values(), b.values()):
        count += 1
        if len(listed) < MAX_VALUES:
            listed.append(change)
    return tuple(listed), count


def iter_value_changes(a: Any, b: Any, path: str = "") -> Iterator[ValueChange]:
    """Yield the places where two encoded values differ, the deepest that can be named."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in sorted(a.keys() | b.keys()):
            # `$tuple` and the like say what a value is, not where.
            below = path if name[:1] == "$" else f"{path}.{name}" if path else name
            if name not in a or name not in b:
                yield ValueChange(
                    path=below,
                    a=_format(a[name]) if name in a else None,
                    b=_format(b[name]) if name in b else None,
                )
            else:
                yield from iter_value_changes(a[name], b[name], below)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (one, two) in enumerate(zip(a, b, strict=True)):
            yield from iter_value_changes(one, two, f"{path}[{at}]")
    elif type(a) is not type(b) or a != b:
        yield ValueChange(path=path, a=_format(a), b=_format(b))


def _format(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _TEXT_LENGTH else f"{text[: _TEXT_LENGTH - 3]}..."
