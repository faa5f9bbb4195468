"""What is queued on an accelerator is done before other threads move bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep.state.capture import capture
from shardkeep.state.devices import wait_for_queued

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class _Stream:
    def __init__(self, waited: list[torch.device], device: torch.device) -> None:
        self._waited, self._device = waited, device

    def synchronize(self) -> None:
        self._waited.append(self._device)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Take the host's memory for an accelerator; give the devices whose stream was waited for."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: _Stream(found, device))
    return found


def test_a_capture_waits_once_for_each_device(waited: list[torch.device]) -> None:
    capture({"a": torch.zeros(3), "b": torch.zeros(2)})
    assert waited == [torch.device("cpu")]


def test_a_restore_waits_before_it_writes(waited: list[torch.device], tmp_path: Path) -> None:
    sk.save(tmp_path, {"a": torch.zeros(3)})
    waited.clear()
    state = {"a": torch.ones(3)}
    sk.load(tmp_path, state)
    assert waited == [torch.device("cpu")]
    assert not state["a"].any()


def test_without_tensors_or_an_accelerator_nothing_is_waited_for(
    waited: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture({"a": 1})
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    capture({"a": torch.zeros(3)})
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    wait_for_queued(capture({"a": torch.zeros(3)}).tensors)
    assert waited == []


@gpu
@needs_cuda
def test_a_step_on_a_stream_of_its_own_is_in_the_capture() -> None:
    tensor = torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(7)
        data: Any = capture({"a": tensor}).tensors[0].pieces[0].data
    out = bytearray(4)
    data.copy_out(0, memoryview(out))
    assert torch.frombuffer(out, dtype=torch.float32).item() == 7
