"""A training loop beside a save, on one thread: how long the save stops it, and what it costs until it is durable.

Runs in a worker. A step of the loop is a product of matrices; what an optimizer does to a checkpoint under way is a
change of every tensor in place, right after the save returned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from shardkeep.bench.contenders.base import Contender
from shardkeep.bench.device import make_durable
from shardkeep.bench.live import LiveState, list_tensors
from shardkeep.bench.memory import sample_peak

_SIDE: Final = 384
_BASE_S: Final = 1.0
_PREPARE_S: Final = 20.0
_REST_S: Final = 0.3


class Loop:
    """Steps of compute on one thread, and their usual rate."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._left = torch.ones(_SIDE, _SIDE)
        self._right = torch.full((_SIDE, _SIDE), 0.5)
        self._out = torch.empty(_SIDE, _SIDE)

    def step(self) -> None:
        torch.mm(self._left, self._right, out=self._out)

    def run_for(self, seconds: float) -> float:
        """Run for a while; return the steps done in a second."""
        return self.run_until(lambda begin: time.monotonic() - begin >= seconds)[1]

    def run_until(self, is_over: Callable[[float], bool]) -> tuple[float, float]:
        """Run until `is_over(begin)`; return the seconds and the steps done in a second."""
        begin = time.monotonic()
        count = 0
        while not is_over(begin):
            self.step()
            count += 1
        took_s = time.monotonic() - begin
        return took_s, count / took_s if took_s > 0 else 0.0


class _Finisher:
    """Waits for a save in a thread and makes its files durable, as a script that needs them so would have to."""

    def __init__(self, contender: Contender, folder: Path, begin: float) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.durable_s = 0.0
        self._thread = threading.Thread(target=self._work, args=(contender, folder, begin))
        self._thread.start()

    def _work(self, contender: Contender, folder: Path, begin: float) -> None:
        try:
            contender.finish_async()
            if not contender.is_durable:
                make_durable(folder)
            self.durable_s = time.monotonic() - begin
        except BaseException as error:  # noqa: BLE001  # raised where the loop ends
            self.error = error
        finally:
            self.done.set()

    def join(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error


def measure_async(
    contender: Contender, state: LiveState, folder: Path, *, check: str = "", sample: bool = False
) -> dict[str, Any]:
    """Save twice beside the loop: the first time of this process, and once more.

    Args:
        folder: below it each save gets its own folder, but for shardkeep, whose run it is.
        check: a digest of the state: each checkpoint is loaded again and must have it, though everything was
            changed in place right after its save returned.

    Returns:
        `first` and `later`: see `_save_beside_loop`; `extra_bytes`, `is_exact` where asked for.
    """
    loop = Loop()
    found: dict[str, Any] = {}
    if sample:
        contender.import_all(folder.with_name(f"{folder.name}-tiny"))
        with sample_peak() as sampler:
            found.update(_measure_two(contender, state, folder, loop))
        found["extra_bytes"] = sampler.extra_bytes
    else:
        found.update(_measure_two(contender, state, folder, loop))
    if check:
        state.scramble()
        contender.load(state, _place(contender, folder, "later"))
        found["is_exact"] = state.digest() == check
        if not found["is_exact"]:
            state.fill()
    return found


def _place(contender: Contender, folder: Path, which: str) -> Path:
    return folder if contender.has_runs else folder / which


def _measure_two(contender: Contender, state: LiveState, folder: Path, loop: Loop) -> dict[str, Any]:
    if not contender.has_runs:
        folder.mkdir(parents=True)
    contender.prepare_async(state, folder)
    loop.run_until(lambda begin: _is_ready(contender, begin))
    tensors = list_tensors(state.optimizer)
    found: dict[str, Any] = {}
    for which in ("first", "later"):
        found[which] = _save_beside_loop(contender, state, _place(contender, folder, which), loop, tensors)
    return found


def _is_ready(contender: Contender, begin: float) -> bool:
    passed_s = time.monotonic() - begin
    return passed_s >= _PREPARE_S or (passed_s >= _BASE_S and contender.is_prepared())


def _save_beside_loop(
    contender: Contender, state: LiveState, folder: Path, loop: Loop, tensors: list[torch.Tensor]
) -> dict[str, float]:
    """Save once. Returns seconds.

    `stall_s` until the loop may change the state, `durable_s` until the save is durable, `lost_s` what the save cost
    the loop in all: the stall, what the change in place took longer than usual, and the steps that the loop fell
    short of, at its usual rate, until the save was durable.
    """
    usual_s = min(_change(tensors) for _ in range(2))  # twice, so that the values are what they were
    usual = loop.run_for(_BASE_S)
    begin = time.monotonic()
    contender.start_async(state, folder)
    finisher = _Finisher(contender, folder, begin)
    with contender.guard():
        stall_s = time.monotonic() - begin
        changed_s = _change(tensors)
    took_s, rate = loop.run_until(lambda _: finisher.done.is_set())
    finisher.join()
    _change(tensors)
    usual = (usual + loop.run_for(_REST_S + _BASE_S / 2)) / 2  # the machine's speed drifts
    short_s = max(0.0, took_s * (1 - rate / usual)) if took_s > 0 else 0.0
    return {
        "stall_s": stall_s,
        "durable_s": finisher.durable_s,
        "lost_s": stall_s + max(0.0, changed_s - usual_s) + short_s,
        "slowdown": max(0.0, 1 - rate / usual) if took_s > 0.05 else 0.0,
    }


def _change(tensors: list[torch.Tensor]) -> float:
    """Change every tensor in place, to its negative; return the seconds."""
    begin = time.monotonic()
    with torch.no_grad():
        torch._foreach_neg_(tensors)
    return time.monotonic() - begin


def measure_overlap(contender: Contender, state: LiveState, folder: Path, *, compute_s: float) -> dict[str, Any]:
    """Save three times with the copy overlapped by `compute_s` of forward and backward before each optimizer step.

    Returns:
        `waits_s`: for each save what the loop waited, in `save()` and at the optimizer's steps until it was durable.
    """
    loop = Loop()
    contender.prepare_async(state, folder)
    loop.run_until(lambda begin: _is_ready(contender, begin))
    waits: list[float] = []
    for _ in range(3):
        begin = time.monotonic()
        contender.start_async(state, folder)
        wait_s = time.monotonic() - begin
        finisher = _Finisher(contender, folder, begin)
        while True:
            loop.run_for(compute_s)
            asked_s = time.monotonic()
            state.optimizer.step()
            wait_s += state.optimizer.entered_s - asked_s
            state.optimizer.step()  # back to the values from before
            if finisher.done.is_set():
                break
        finisher.join()
        waits.append(wait_s)
        loop.run_for(_REST_S)
    return {"waits_s": waits}
