"""The names of tensors within shard files: what a piece is called, and that no two pieces can share a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from shardkeep.format.records import TensorRecord
from shardkeep.plan.coverage import format_chunk
from shardkeep.spec.chunks import Chunk, whole

RANK_SECTION: Final = "rank"
"""The section of tensors that each rank keeps for itself, there named by their keys."""

_PIECE = re.compile(r"(.+)\[\d+:\d+(?:,\d+:\d+)*\]", re.ASCII | re.DOTALL)


def format_piece(name: str, shape: tuple[int, ...], chunk: Chunk) -> str:
    """Return what a chunk of a tensor is called in its shard: the tensor's name, alone where it is whole."""
    return name if chunk == whole(shape) else name + format_chunk(chunk)


def find_name_clashes(records: Mapping[str, TensorRecord], per_rank: Iterable[str] = ()) -> list[str]:
    """Return one line for each tensor whose pieces may be called like another's.

    Args:
        per_rank: keys that ranks keep for themselves.
    """
    names: dict[tuple[str, str], str] = {(RANK_SECTION, key): f"{key}, kept per rank" for key in per_rank}
    problems: list[str] = []
    for key, record in records.items():
        other = names.setdefault((record.section, record.name), key)
        if other != key:
            problems.append(f"{key}: the same name {record.name!r} in section {record.section!r} as {other}")
    for key, record in records.items():
        match = _PIECE.fullmatch(record.name)
        base = names.get((record.section, match[1])) if match else None
        cut = records.get(base) if base is not None else None
        if cut is not None and (cut.layout.is_cut or cut.split > 1 or cut.role == "state"):
            problems.append(f"{key}: its name {record.name!r} could be that of a piece of {base}")
    return problems
