"""The state that is measured: a GPT of 19 layers with Adam's moments, 928 tensors in fp32. Names and places. Pure.

At the reference size the width is 1,024 and the embedding has 102.4 MB; other sizes change the width, not the number
of tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

LAYERS: Final = 19
VOCABULARY: Final = 25_000
ROLES: Final = ("model", "exp_avg", "exp_avg_sq")
EMBEDDING: Final = "embed.weight"
_ALIGN_BYTES: Final = 64  # as torch places tensors
_PER_SQUARE: Final = 12 * LAYERS + VOCABULARY / 1024 + 1
"""Parameters divided by the square of the width, where the vocabulary grows with the width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of the state: of which parameter, what it is for, and where it lies in memory."""

    parameter: str
    role: str
    shape: tuple[int, ...]
    offset: int

    @property
    def key(self) -> str:
        return f"{self.role}.{self.parameter}"

    @property
    def size_bytes(self) -> int:
        return 4 * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """All tensors, and the memory that they take."""

    pieces: tuple[Piece, ...]
    memory_bytes: int

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


def choose_width(size_bytes: int) -> int:
    """Return the width, a multiple of 8, at which model and moments take about `size_bytes`."""
    exact = math.sqrt(size_bytes / 12 / _PER_SQUARE)
    # The reference size shall be the one whose figures are known: 1,024 wide.
    step = 64 if exact >= 512 else 8
    return max(8, round(exact / step) * step)


def list_parameters(width: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the parameters of the model by name."""
    vocabulary = max(8, VOCABULARY * width // 1024)
    found: list[tuple[str, tuple[int, ...]]] = [(EMBEDDING, (vocabulary, width)), ("position.weight", (1024, width))]
    if width < 1024:
        found[1] = ("position.weight", (width, width))
    for layer in range(LAYERS):
        shapes: dict[str, tuple[int, ...]] = {
            "norm1.weight": (width,),
            "norm1.bias": (width,),
            "attention.weight": (3 * width, width),
            "attention.bias": (3 * width,),
            "project.weight": (width, width),
            "project.bias": (width,),
            "norm2.weight": (width,),
            "norm2.bias": (width,),
            "expand.weight": (4 * width, width),
            "expand.bias": (4 * width,),
            "shrink.weight": (width, 4 * width),
            "shrink.bias": (width,),
        }
        found += [(f"layers.{layer}.{name}", shape) for name, shape in shapes.items()]
    return [*found, ("norm.weight", (width,)), ("norm.bias", (width,))]


def plan_state(size_bytes: int) -> StateShape:
    """Return where every tensor lies in one stretch of memory, in the order of the parameters."""
    pieces = []
    offset = 0
    for parameter, shape in list_parameters(choose_width(size_bytes)):
        for role in (*ROLES, "step"):
            piece = Piece(parameter=parameter, role=role, shape=shape if role != "step" else (), offset=offset)
            pieces.append(piece)
            offset += -(-piece.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return StateShape(pieces=tuple(pieces), memory_bytes=-(-offset // 4096) * 4096)
