"""Wrappers with which users say what a value means across ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardkeep.errors import UsageError


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value that differs between ranks on purpose: every rank's is stored, every rank gets its own back.

    Attributes:
        value: a tensor or any value that a state may hold.
        merge: called when another number of ranks restores: it gets the values of all saving ranks, by
            rank, and returns the value for the restoring rank. Without it such a restore is refused by name.
    """

    value: Any
    merge: Callable[[list[Any]], Any] | None = None


@dataclass(frozen=True, slots=True, init=False)
class Sharded:
    """Plain tensors that are boxes of one global tensor.

    For layouts that DTensor does not say, such as a fused gate and up projection where each rank owns
    two separate blocks of rows: one `(tensor, offsets)` per block.

    Attributes:
        pieces: this rank's tensors, each with the offsets of its first element in the global tensor; may be empty
            where `dtype` is given.
        shape: the global shape.
        dtype: of all pieces.
    """

    pieces: tuple[tuple[torch.Tensor, tuple[int, ...]], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __init__(
        self,
        pieces: Sequence[tuple[torch.Tensor, Sequence[int]]],
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Check that every piece is a box of `shape` and that all have one dtype.

        Raises:
            UsageError: a piece leaves the shape, overlaps another one, or has another dtype.
        """
        whole = tuple(int(n) for n in shape)
        boxes = tuple((tensor, tuple(int(o) for o in offsets)) for tensor, offsets in pieces)
        dtypes = {tensor.dtype for tensor, _ in boxes} | ({dtype} if dtype is not None else set())
        if len(dtypes) != 1:
            found = ", ".join(sorted(map(str, dtypes))) or "none"
            raise UsageError(
                f"Sharded of shape {whole}: expected one dtype, found {found}",
                advice="give dtype= on ranks that hold no piece, and pieces of one dtype on the others",
            )
        for index, (tensor, offsets) in enumerate(boxes):
            _check_box(index, tensor, offsets, whole)
            for other, (earlier, at) in enumerate(boxes[:index]):
                if _overlap(tensor, offsets, earlier, at):
                    raise UsageError(f"Sharded of shape {whole}: pieces {other} and {index} overlap")
        object.__setattr__(self, "pieces", boxes)
        object.__setattr__(self, "shape", whole)
        object.__setattr__(self, "dtype", dtypes.pop())


def _check_box(index: int, tensor: torch.Tensor, offsets: tuple[int, ...], whole: tuple[int, ...]) -> None:
    sizes = tuple(tensor.shape)
    inside = len(sizes) == len(offsets) == len(whole) and all(
        o >= 0 and o + s <= n for o, s, n in zip(offsets, sizes, whole, strict=True)
    )
    if not inside:
        raise UsageError(
            f"Sharded of shape {whole}: piece {index} of shape {sizes} at {offsets} is not inside it",
            advice="offsets are those of the piece's first element in the global tensor, one per dimension",
        )


def _overlap(a: torch.Tensor, a_at: tuple[int, ...], b: torch.Tensor, b_at: tuple[int, ...]) -> bool:
    return all(
        max(ao, bo) < min(ao + an, bo + bn) for ao, an, bo, bn in zip(a_at, a.shape, b_at, b.shape, strict=True)
    )
