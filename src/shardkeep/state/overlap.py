"""Copying a state while forward and backward run: which tensors only an optimizer's step changes, and its gate.

Parameters and optimizer states of `torch.optim.Optimizer`s stay as they are until `step()`, whose pre-step hook waits
for the copy. Everything else may change at once and is no matter of this module. Each tensor's version counter,
which in-place operations raise, and a few of its bytes are compared after the copy, so that a change outside of
`step()` fails the save instead of tearing it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

from shardkeep.errors import StateChanged
from shardkeep.spec.tensors import Captured, LocalTensor
from shardkeep.state.hostbytes import TensorBytes
from shardkeep.state.objects import iter_items

_SAMPLE_BYTES: Final = 64


class WatchedBytes:
    """The `HostBytes` of a tensor whose memory must not change until it is copied."""

    __slots__ = ("_data", "_key", "_samples", "_tensors", "_versions")

    def __init__(self, key: str, tensor: torch.Tensor, owner: torch.Tensor) -> None:
        """Watch `tensor`, and `owner`, which is itself or the DTensor that it is the local part of."""
        # An alias: it stays on this memory when `tensor.data` is exchanged, and shares the version counter.
        alias = tensor.detach()
        # An operation on a DTensor raises the version of that alone, not its local part's.
        self._tensors = (alias,) if owner is tensor else (alias, owner)
        self._data = TensorBytes(alias)
        self._key = key
        self._versions = [held._version for held in self._tensors]
        self._samples = _take_samples(self._tensors[0])

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def copy_out(self, start: int, out: memoryview) -> None:
        """Write bytes `start .. start + len(out)` of the tensor into `out`. Raises StateChanged."""
        self._data.copy_out(start, out)
        self.check()
        stop = start + len(out)
        for at, sample in self._samples:
            low, high = max(at, start), min(at + len(sample), stop)
            if low < high and out[low - start : high - start] != sample[low - at : high - at]:
                self._refuse()

    def check(self) -> None:
        """Raise StateChanged when an operation changed the tensor in place."""
        if [held._version for held in self._tensors] != self._versions:
            self._refuse()

    def _refuse(self) -> None:
        raise StateChanged(
            f"{self._key}: was changed outside of its optimizer's step() before its copy was done; this checkpoint "
            "was given up, earlier ones are untouched",
            key=self._key,
            advice="save with mode='async', which copies everything before it returns",
        )

    def copy_in(self, start: int, data: memoryview) -> None:
        """Refuse: these bytes are only read."""
        raise TypeError(f"{self._key}: is being saved")


def _take_samples(tensor: torch.Tensor) -> tuple[tuple[int, bytes], ...]:
    """Return a few bytes of a tensor as they are now, each with its place.

    Changes through `tensor.data`, NumPy or some operations on lists of DTensors raise no version counter. Most of
    them reach the whole tensor; a sample costs a microsecond.
    """
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or not size or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return ()
    length, address = min(size, _SAMPLE_BYTES), tensor.data_ptr()
    places = sorted({0, (size - length) // 2, size - length})
    return tuple((at, ctypes.string_at(address + at, length)) for at in places)


class Hold:
    """The tensors of one save that are copied late, and whether they stayed as they were until then."""

    def __init__(self, watched: Iterable[WatchedBytes] = ()) -> None:
        self._lock = threading.Lock()
        self._watched = list(watched)
        self._error: StateChanged | None = None

    def release(self) -> None:
        """Look for the last time, and let the tensors go; they are copied, and may change from now on.

        Called before a step that is about to change them, or, where none comes, when the save is written. A tensor's
        version rises when an operation ends: one that had begun while it was being copied is over by then.
        """
        with self._lock:
            watched, self._watched = self._watched, []
            try:
                for data in watched:
                    data.check()
            except StateChanged as error:
                self._error = error

    def confirm(self) -> None:
        """Raise StateChanged when one of the tensors was changed too early."""
        self.release()
        if self._error is not None:
            raise self._error


class StepGate:
    """Makes the steps of optimizers wait until their tensors are copied.

    Attributes:
        waited_s: seconds that steps have waited so far.
    """

    def __init__(self) -> None:
        self._pass: Callable[[], None] | None = None
        self._handles: dict[int, tuple[Optimizer, Any]] = {}
        self._pid = os.getpid()
        self.waited_s = 0.0

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Stand before the steps of these optimizers from now on, and of no others."""
        wanted = {id(optimizer): optimizer for optimizer in optimizers}
        for gone in self._handles.keys() - wanted.keys():
            self._handles.pop(gone)[1].remove()
        for identity, optimizer in wanted.items():
            if identity not in self._handles:
                # Compiled steps call it as it is, and are not compiled anew for each save.
                hook = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]  # torch's
                self._handles[identity] = optimizer, optimizer.register_step_pre_hook(hook)

    def shut(self, wait: Callable[[], None], hold: Hold) -> None:
        """Let the next step wait first, and then look whether the tensors are still what they were."""

        def let_pass() -> None:
            wait()
            hold.release()

        self._pass = let_pass

    def _before_step(self, *_: Any) -> None:
        if (let_pass := self._pass) is not None and os.getpid() == self._pid:
            begin_s = time.monotonic()
            let_pass()
            self._pass = None
            self.waited_s += time.monotonic() - begin_s

    def close(self) -> None:
        """Take the hooks away; harmless twice."""
        while self._handles:
            self._handles.popitem()[1][1].remove()


def find_untrusted(state: Mapping[str, Any]) -> str | None:
    """Say why tensors of this state cannot be copied while training goes on, or None where they can."""
    optimizers = _find_optimizers(state)
    if not optimizers:
        return "there is no torch.optim.Optimizer in the state, whose step() could wait"
    for key, optimizer in optimizers.items():
        if not getattr(type(optimizer).step, "hooked", False) or "step" in _foreign_step(optimizer):
            return f"{key}: the step() of {type(optimizer).__name__} does not call pre-step hooks"
    return None


def _foreign_step(optimizer: Optimizer) -> dict[str, Any]:
    """Return an own `step` of the instance, unless it is the wrapper that a scheduler puts there, which calls on."""
    own = optimizer.__dict__.get("step")
    return {} if own is None or hasattr(own, "_wrapped_by_lr_sched") else {"step": own}


def _find_optimizers(state: Mapping[str, Any]) -> dict[str, Optimizer]:
    return {item.key: item.value for item in iter_items(state) if item.kind == "optimizer"}


def defer(state: Mapping[str, Any], captured: Captured, gate: StepGate) -> tuple[Captured, Hold]:
    """Return the same state with those tensors named as deferred that only the optimizers' steps change."""
    optimizers = list(_find_optimizers(state).values())
    gate.watch(optimizers)
    owners: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for slots in optimizer.state.values():
            owned += [value for value in slots.values() if isinstance(value, torch.Tensor)]
        owners.update((place, tensor) for tensor in owned if (place := _find_place(tensor)) is not None)
    tensors: list[LocalTensor] = []
    watched: list[WatchedBytes] = []
    deferred: set[str] = set()
    # What several views lie on has no version counter that all of them raise.
    bases = {view.base for view in captured.views.values()}
    for tensor in captured.tensors:
        held = _hold(tensor, owners) if tensor.key not in bases else None
        if held is None:
            tensors.append(tensor)
            continue
        deferred.add(tensor.key)
        watched += held
        pieces = zip(tensor.pieces, held, strict=True)
        tensors.append(dataclasses.replace(tensor, pieces=tuple(dataclasses.replace(p, data=d) for p, d in pieces)))
    return dataclasses.replace(captured, tensors=tuple(tensors), deferred=frozenset(deferred)), Hold(watched)


def _find_place(tensor: torch.Tensor) -> int | None:
    """Return where the elements of a tensor (of a DTensor: its local part) begin; None where it has no memory."""
    local: Any = tensor
    local = getattr(local, "_local_tensor", local)
    try:
        return int(local.data_ptr()) or None
    except (RuntimeError, NotImplementedError):  # a wrapper around other tensors
        return None


def _hold(tensor: LocalTensor, owners: Mapping[int, torch.Tensor]) -> list[WatchedBytes] | None:
    """Return the watched bytes of each piece, or None where one is none of the optimizers' or cannot be watched."""
    found: list[WatchedBytes] = []
    for piece in tensor.pieces:
        live = piece.data.tensor if isinstance(piece.data, TensorBytes) else None
        if live is None or live.is_inference():
            return None
        place = _find_place(live)
        owner = owners.get(place) if place is not None else None
        if owner is None or owner.is_inference():
            return None
        found.append(WatchedBytes(tensor.key, live, owner))
    return found or None
