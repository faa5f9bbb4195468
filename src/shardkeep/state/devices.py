"""What a program has asked of accelerators and that may not be done yet."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardkeep.spec.tensors import LocalTensor
from shardkeep.state.hostbytes import TensorBytes


def wait_for_queued(tensors: Iterable[LocalTensor]) -> None:
    """Wait until what this thread has queued on the streams in use is done, on every accelerator that holds a tensor.

    Bytes are moved by other threads, on streams that do not wait for this thread's: a loop that runs on a stream of
    its own would be saved in the middle of its step.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return
    pieces = (piece for tensor in tensors for piece in tensor.pieces)
    devices = {piece.data.tensor.device for piece in pieces if isinstance(piece.data, TensorBytes)}
    for device in sorted(devices, key=str):
        if device.type == accelerator.type:
            torch.accelerator.current_stream(device).synchronize()
