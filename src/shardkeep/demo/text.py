"""Real text that every machine has: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

import torch
from torch.utils.data import Dataset

from shardkeep.errors import NotFound

MAX_TEXT_BYTES: Final = 8 << 20


class SourceText(Dataset[tuple[torch.Tensor, int]]):
    """Windows of `context_bytes + 1` bytes, spread evenly over the standard library's top-level modules.

    Item i is `(int64[context_bytes + 1], i)`: the number goes with the text, so that the training loop sees which
    sample it was given. The same interpreter gives the same windows.

    Raises:
        NotFound: the interpreter has no sources, or too few.
    """

    def __init__(self, context_bytes: int, windows_count: int) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        paths = sorted(path for path in folder.glob("*.py") if path.is_file())
        pieces: list[bytes] = []
        for path in paths:
            if sum(map(len, pieces)) < MAX_TEXT_BYTES:
                pieces.append(path.read_bytes())
        text = b"".join(pieces)
        self.files_count, self.text_bytes = len(pieces), len(text)
        self._length = context_bytes + 1
        needed = windows_count * self._length
        if len(text) < needed:
            raise NotFound(
                f"{folder}: expected at least {needed} bytes of Python sources, found {len(text)}",
                advice="run the demo with a Python that comes with its standard library's sources",
            )
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._stride = len(text) // windows_count
        self._count = windows_count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        start = index * self._stride
        return self._text[start : start + self._length].long(), index
