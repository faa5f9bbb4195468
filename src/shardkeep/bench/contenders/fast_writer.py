"""DeepSpeed's FastFileWriter under torch.save: asynchronous O_DIRECT through two buffers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from shardkeep.bench.contenders.base import Contender, State

_io: Any = importlib.import_module("deepspeed.io")
_module: Any = importlib.import_module("deepspeed.io.fast_file_writer")
_builders: Any = importlib.import_module("deepspeed.ops.op_builder")
_BUFFER_BYTES = 128 << 20
_BLOCK_BYTES = 8 << 20
_QUEUE_DEPTH = 8


class _ByteCast:
    """Stands for the compiled op that DeepSpeed does not offer without a GPU."""

    def load(self) -> _ByteCast:
        return self

    @staticmethod
    def cast_to_byte_tensor(tensor: Any) -> Any:
        if isinstance(tensor, list):
            return [_ByteCast.cast_to_byte_tensor(one) for one in tensor]
        return tensor.contiguous().view(-1).view(torch.uint8)


class FastWriter(Contender):
    """Its buffers are allocated once, as its engine does."""

    def __init__(self) -> None:
        self._handle = _builders.AsyncIOBuilder().load().aio_handle(_BLOCK_BYTES, _QUEUE_DEPTH, False, True, 2)
        self._buffer = self._handle.new_cpu_locked_tensor(_BUFFER_BYTES, torch.empty(0, dtype=torch.uint8))
        _module.UtilsBuilder = _ByteCast

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir()
        writer = _io.FastFileWriter(
            file_path=str(folder / "state.pt"),
            config=_io.FastFileWriterConfig(
                dnvme_handle=self._handle, pinned_tensor=self._buffer, double_buffer=True
            ),
        )
        torch.save(state.flat, writer, _use_new_zipfile_serialization=False)
        writer.close()
