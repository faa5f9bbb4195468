"""Bytes of live tensors: any strided tensor, any dtype, any device, read and written in row-major order.

Owns the one way in which bytes enter and leave a tensor. Nothing here communicates, records autograd history,
draws random numbers or makes a temporary larger than `TEMPORARY_BYTES`. Copies run in C with the GIL released.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from shardkeep.errors import IncompatibleFormat, UnsupportedState
from shardkeep.spec.dtypes import DTYPES

TEMPORARY_BYTES: Final = 4 << 20

# Elements are moved as integers of their size, so that every dtype takes the same, bit-preserving path.
_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HOST_CARRIERS: Final = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return shardkeep's name of a torch dtype.

    Raises:
        UnsupportedState: quantized dtypes, whose scale is not in their bytes, and dtypes newer than this version.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedState(
            f"dtype {name} cannot be stored; this version stores {', '.join(sorted(DTYPES))}",
            advice="keep quantized tensors as integer codes with a separate scale",
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype that shardkeep calls `name`.

    Raises:
        IncompatibleFormat: the installed torch has no such dtype.
    """
    found = getattr(torch, name, None) if name in DTYPES else None
    if not isinstance(found, torch.dtype):
        raise IncompatibleFormat(
            f"dtype {name!r} is unknown to the installed torch {torch.__version__}",
            advice="install the torch version that wrote the checkpoint, or a newer one",
        )
    return found


def check_storable(path: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose content is not its strided elements; `path` names it in the message.

    Meta tensors pass: they have a shape to restore into, only no bytes yet.

    Raises:
        UnsupportedState: sparse, nested, mkldnn or quantized tensors, ones without memory, or an unknown dtype.
    """
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise UnsupportedState(
            f"{path}: a tensor of layout {kind} cannot be stored, only strided ones",
            key=path,
            advice="keep its parts (values, indices, offsets) as strided tensors in the state",
        )
    if tensor._is_zerotensor():
        raise UnsupportedState(
            f"{path}: a tensor that autograd made to stand for zeros has no memory",
            key=path,
            advice="clone() it first",
        )
    if tensor.is_quantized:
        raise UnsupportedState(
            f"{path}: a quantized tensor ({tensor.dtype}) cannot be stored, its scale is not in its bytes",
            key=path,
            advice="keep tensor.int_repr() and its scale and zero point in the state",
        )
    try:
        dtype_name(tensor.dtype)
    except UnsupportedState as error:
        raise UnsupportedState(f"{path}: {error.message}", key=path, advice=error.advice) from None


class _Memory:
    """Bytes of a tensor's storage, for numpy to look at in place: a few us less than a view that torch makes.

    The array over it keeps it, and it keeps the storage.
    """

    __slots__ = ("__array_interface__", "_storage")

    def __init__(self, tensor: torch.Tensor, address: int, size_bytes: int) -> None:
        self._storage = tensor.untyped_storage()
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size_bytes,), "data": (address, False)}


class TensorBytes:
    """The `HostBytes` of one tensor of this process.

    Nothing is copied or looked up before it is asked for, so a tensor whose `data` is exchanged is read as it is
    then. Writes do not count as in-place changes for autograd. Several threads may copy at once, as long as
    they write distinct bytes.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor, path: str = "tensor") -> None:
        check_storable(path, tensor)
        self._tensor = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor whose bytes these are."""
        return self._tensor

    @property
    def nbytes(self) -> int:
        return self._tensor.numel() * self._tensor.element_size()

    def copy_out(self, start: int, out: memoryview) -> None:
        """Write bytes `start .. start + len(out)` of the tensor into `out`.

        Raises:
            UnsupportedState: the tensor is on the meta device.
            ValueError: the range leaves the tensor.
        """
        self._move(start, np.frombuffer(out, dtype=np.uint8), outward=True)

    def copy_in(self, start: int, data: memoryview) -> None:
        """Overwrite bytes `start .. start + len(data)` of the tensor; of an expanded one, its base elements.

        Raises:
            UnsupportedState: the tensor is on the meta device.
            ValueError: the range leaves the tensor.
        """
        self._move(start, np.frombuffer(data, dtype=np.uint8), outward=False)

    def find_memory(self, start: int, stop: int) -> memoryview | None:
        """Return the tensor's own memory of bytes `start .. stop`; None for other strides or another device."""
        tensor = self._tensor
        plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if not plain or not 0 <= start <= stop <= self.nbytes:
            return None
        if start == stop:
            return memoryview(b"")
        return np.asarray(_Memory(tensor, tensor.data_ptr() + start, stop - start)).data

    def _move(self, start: int, host: np.ndarray[Any, Any], *, outward: bool) -> None:
        tensor, stop = self._tensor, start + host.size
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"bytes {start}..{stop} of a tensor of {self.nbytes} bytes")
        if tensor.is_meta:
            raise UnsupportedState(
                f"a tensor of shape {tuple(tensor.shape)} is on the meta device: it has no bytes",
                advice="materialise the module first, e.g. with to_empty(device=...)",
            )
        if host.size == 0:
            return
        if tensor.is_conj() or tensor.is_neg():
            _move_lazy(tensor.detach(), start, host, outward=outward)
        elif tensor.is_contiguous():
            offset = int(tensor.storage_offset()) * tensor.element_size()
            _move_flat(_storage_bytes(tensor), offset + start, host, outward=outward)
        else:
            _move_strided(tensor, start, host, outward=outward)


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage under a tensor as plain 1-D bytes, outside autograd."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements in place as integers; 16-byte ones as pairs in one more dimension."""
    size, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
    itemsize = tensor.element_size()
    if itemsize == 16:
        size, stride, offset, itemsize = (*size, 2), (*(2 * s for s in stride), 1), 2 * offset, 8
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=_CARRIERS[itemsize], device=storage.device)
    return empty.set_(storage, offset, size, stride)


def _move_flat(flat: torch.Tensor, start: int, host: np.ndarray[Any, Any], *, outward: bool) -> None:
    """Copy between `host` and as many bytes of `flat` (1-D uint8, any device) from `start` on."""
    part = flat[start : start + host.size]
    if part.device.type == "cpu":
        live = part.numpy()
        np.copyto(*((host, live) if outward else (live, host)))
        return
    if outward:
        torch.from_numpy(host).copy_(part)
        return
    for at in range(0, host.size, TEMPORARY_BYTES):
        piece = host[at : at + TEMPORARY_BYTES]
        # torch takes no read-only memory; a bounded copy stands in for it.
        staged = torch.from_numpy(piece if piece.flags.writeable else piece.copy())
        part[at : at + TEMPORARY_BYTES].copy_(staged)


def _move_strided(tensor: torch.Tensor, start: int, host: np.ndarray[Any, Any], *, outward: bool) -> None:
    """Copy between `host` and bytes of a non-contiguous tensor: cut elements byte by byte, whole ones by boxes."""
    itemsize = tensor.element_size()
    stop = start + host.size
    first, last = -(-start // itemsize), stop // itemsize
    edges = [(start, stop)] if first > last else [(start, first * itemsize), (last * itemsize, stop)]
    flat = _storage_bytes(tensor)
    for low, high in edges:
        if low < high:
            position = _element_position(tensor, low // itemsize) * itemsize + low % itemsize
            _move_flat(flat, position, host[low - start : high - start], outward=outward)
    if first >= last:
        return
    integers, pair = _as_integers(tensor), 2 if itemsize == 16 else 1
    at, carrier = first * itemsize - start, itemsize // pair
    for box in iter_boxes(integers, first * pair, last * pair, TEMPORARY_BYTES // carrier):
        length = box.numel() * carrier
        _move_box(box, host[at : at + length], outward=outward)
        at += length


def _move_box(box: torch.Tensor, host: np.ndarray[Any, Any], *, outward: bool) -> None:
    """Copy between a small box of integers and its row-major bytes."""
    array = host.view(_HOST_CARRIERS[box.element_size()]).reshape(tuple(box.shape))
    if box.device.type == "cpu":
        # torch copies transposed boxes several times faster, but needs aligned, writable memory.
        if array.flags.aligned and array.flags.writeable and (outward or not _is_expanded(box)):
            staged = torch.from_numpy(array)
            _ = staged.copy_(box) if outward else box.copy_(staged)
        else:
            np.copyto(*((array, box.numpy()) if outward else (box.numpy(), array)))
    elif outward:
        np.copyto(array, box.contiguous().cpu().numpy())
    else:
        base, staged = _without_expansion(box, torch.from_numpy(array.copy()))
        base.copy_(staged)


def _move_lazy(tensor: torch.Tensor, start: int, host: np.ndarray[Any, Any], *, outward: bool) -> None:
    """Copy between `host` and a conjugate or negative view, whose storage holds other bits than its elements."""
    itemsize = tensor.element_size()
    first, last = start // itemsize, -(-(start + host.size) // itemsize)
    position = first * itemsize
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        # torch makes temporaries of its own when it resolves these views, so boxes are smaller here.
        for box in iter_boxes(tensor, first, last, TEMPORARY_BYTES // 16 // itemsize):
            # A box may begin or end with an element that the range cuts.
            staged = torch.empty(box.shape, dtype=box.dtype).copy_(box)
            content = _storage_bytes(staged).numpy()
            low, high = max(start, position), min(start + host.size, position + content.size)
            inside, outside = content[low - position : high - position], host[low - start : high - start]
            np.copyto(*((outside, inside) if outward else (inside, outside)))
            if not outward:
                base, staged = _without_expansion(box, staged)
                base.copy_(staged)
            position += content.size


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _without_expansion(live: torch.Tensor, staged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut both to one element along the dimensions that repeat in `live`; torch refuses to write repeats."""
    for dim, (size, stride) in enumerate(zip(live.shape, live.stride(), strict=True)):
        if stride == 0 and size > 1:
            live, staged = live.narrow(dim, size - 1, 1), staged.narrow(dim, size - 1, 1)
    return live, staged


def _element_position(tensor: torch.Tensor, index: int) -> int:
    """Return where the `index`-th element in row-major order lies in the storage, in elements."""
    position = int(tensor.storage_offset())
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        index, at = divmod(index, size)
        position += at * int(stride)
    return position


def iter_boxes(tensor: torch.Tensor, first: int, last: int, limit_count: int) -> Iterator[torch.Tensor]:
    """Yield views of `tensor` that are its row-major elements `first .. last`, in order.

    Each view holds at most `limit_count` elements.
    """
    if first >= last:
        return
    if tensor.dim() == 0:
        yield tensor
        return
    row_count = math.prod(tensor.shape[1:])
    if row_count == 1:
        for start in range(first, last, limit_count):
            yield tensor[start : min(start + limit_count, last)]
        return
    row, within = divmod(first, row_count)
    if within or row_count > limit_count or last - first < row_count:
        # A partial or an over-long row: walk inside it, then go on behind it.
        while first < last:
            row, within = divmod(first, row_count)
            if within == 0 and row_count <= limit_count and last - first >= row_count:
                break
            end = min(row_count, within + last - first)
            yield from iter_boxes(tensor[row], within, end, limit_count)
            first += end - within
    step = max(1, limit_count // row_count)
    while last - first >= row_count:
        row = first // row_count
        rows = min(step, (last - first) // row_count)
        yield tensor[row : row + rows]
        first += rows * row_count
    if first < last:
        yield from iter_boxes(tensor[first // row_count], 0, last - first, limit_count)
