"""The limit: as many bytes, moved with O_DIRECT between the disk and blocks that were touched before."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from shardkeep.bench.contenders.base import Contender, State
from shardkeep.bench.device import BLOCK_BYTES, RawMover, list_files
from shardkeep.format.digests import digest_leaves


class Raw(Contender):
    """Writes one file of the state's size; reads any files."""

    is_durable = True

    def __init__(self, *, threads: int = 2, direct: bool = True) -> None:
        self._mover = RawMover(threads=threads, direct=direct)
        self._copy: np.ndarray | None = None

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.write(folder / "raw", sum(tensor.nbytes for tensor in state.flat.values()))

    def write(self, path: Path, size_bytes: int) -> float:
        return self._mover.write(path, size_bytes)

    def load(self, state: State, folder: Path) -> None:
        self._mover.read([path for path in list_files(folder) if path.stat().st_size > 0])

    def copy(self, memory: memoryview) -> float:
        """Copy memory with one thread to a place that was written before; return the seconds."""
        source = np.frombuffer(memory, np.uint8)
        if self._copy is None:
            self._copy = np.ones(len(source), np.uint8)
        begin = time.monotonic()
        np.copyto(self._copy, source)
        return time.monotonic() - begin

    def digest(self, memory: memoryview) -> float:
        """Digest memory with one thread, leaf by leaf as shards are; return the seconds."""
        begin = time.monotonic()
        for start in range(0, len(memory), BLOCK_BYTES):
            digest_leaves(memory[start : start + BLOCK_BYTES])
        return time.monotonic() - begin

    def close(self) -> None:
        self._copy = None
