"""What a checkpoint or a set of plain files holds, as rows: shared by the forms in which `show` prints it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardkeep.engine.sources import FileSource
from shardkeep.format.records import CommitRecord, LayoutTable, TensorRecord
from shardkeep.plan.owners import iter_pieces
from shardkeep.spec.dtypes import get_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor.

    Attributes:
        placement: how it lies over the ranks: `whole`, `S0`, `R,S1`, `boxes`, `per rank`; `tied to X`, `view of X`.
        size_bytes: of its bytes as stored; 0 for ties and views, whose bytes are another's.
        ranks: those that stored it.
        file: where it is, for plain files.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    section: str
    role: str
    placement: str
    size_bytes: int
    ranks: tuple[int, ...] = ()
    file: str | None = None


def list_checkpoint(commit: CommitRecord) -> list[Row]:
    """Return a checkpoint's tensors by key; reads nothing."""
    table = commit.facts.layout
    # Thousands of tensors share a few layouts, each over thousands of ranks.
    known: dict[tuple[object, ...], tuple[int, ...]] = {}
    rows = [_row(key, record, table, known) for key, record in table.tensors.items()]
    for alias, target in table.aliases.items():
        record = table.tensors.get(target)
        if record is not None:
            rows.append(_link(alias, record.dtype, record.shape, record, f"tied to {target}"))
    for key, view in table.views.items():
        base = table.tensors.get(view.base)
        if base is not None:
            rows.append(_link(key, view.dtype, view.shape, base, f"view of {view.base}"))
    for key in table.per_rank:
        if key not in table.tensors:
            rows.append(
                Row(key=key, dtype="", shape=(), section="rank", role="state", placement="per rank", size_bytes=0)
            )
    return sorted(rows, key=lambda row: row.key)


def _row(key: str, record: TensorRecord, table: LayoutTable, known: dict[tuple[object, ...], tuple[int, ...]]) -> Row:
    case = (record.shape, record.layout, record.owner, record.split)
    if case not in known:
        known[case] = tuple(sorted({rank for _, rank in iter_pieces(record, table)}))
    placement = "boxes" if record.layout.boxes else ",".join(record.layout.placements)
    if not record.layout.boxes and set(record.layout.placements) <= {"R"}:
        placement = "whole"
    return Row(
        key=key,
        dtype=record.dtype,
        shape=record.shape,
        section=record.section,
        role=record.role,
        placement=placement + (", and per rank" if key in table.per_rank else ""),
        size_bytes=math.prod(record.shape) * get_dtype(record.dtype).itemsize_bytes,
        ranks=known[case],
    )


def _link(key: str, dtype: str, shape: tuple[int, ...], record: TensorRecord, placement: str) -> Row:
    return Row(
        key=key,
        dtype=dtype,
        shape=shape,
        section=record.section,
        role=record.role,
        placement=placement,
        size_bytes=0,
    )


def list_files(source: FileSource) -> list[Row]:
    """Return the tensors of plain files by key."""
    return [
        Row(
            key=key,
            dtype=info.dtype,
            shape=info.shape,
            section="",
            role="",
            placement="whole",
            size_bytes=info.size_bytes,
            file=source.path_of(key),
        )
        for key, info in source.tensors.items()
    ]


def select(rows: Sequence[Row], pattern: str | None) -> list[Row]:
    """Return the rows whose key matches a shell pattern; `*` matches `/` and `.` too."""
    return [row for row in rows if pattern is None or fnmatchcase(row.key, pattern)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A level of the tree of names: everything below `name`."""

    depth: int
    name: str
    tensor_count: int
    size_bytes: int
    row: Row | None = None


def iter_tree(rows: Sequence[Row]) -> Iterator[Node]:
    """Yield the tree of name components (split at `/` and `.`), each with the sum of what is below it."""
    yield from _iter_level([(row.key.replace("/", ".").split("."), row) for row in rows], 0)


def _iter_level(items: list[tuple[list[str], Row]], depth: int) -> Iterator[Node]:
    groups: dict[str, list[tuple[list[str], Row]]] = {}
    for names, row in items:
        groups.setdefault(names[0], []).append((names[1:], row))
    for name, below in sorted(groups.items(), key=lambda item: _natural(item[0])):
        label = name
        # A chain of names with one child each is one line.
        while len({names[0] for names, _ in below if names}) == 1 and all(names for names, _ in below):
            label += f".{below[0][0][0]}"
            below = [(names[1:], row) for names, row in below]
        leaves = [row for names, row in below if not names]
        total = sum(row.size_bytes for _, row in below)
        yield Node(
            depth=depth,
            name=label,
            tensor_count=len(below),
            size_bytes=total,
            row=leaves[0] if len(below) == 1 and leaves else None,
        )
        if len(below) > 1:
            for row in leaves:
                yield Node(depth=depth + 1, name="(itself)", tensor_count=1, size_bytes=row.size_bytes, row=row)
            yield from _iter_level([item for item in below if item[0]], depth + 1)


def _natural(name: str) -> tuple[int, int, str]:
    """Order layer 2 before layer 10."""
    digits = name.isascii() and name.isdigit() and len(name) < 18
    return (0, int(name), name) if digits else (1, 0, name)
