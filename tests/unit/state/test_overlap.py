"""What may be copied late, what is watched while it is, and the gate before the optimizers' steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkeep.errors import StateChanged
from shardkeep.state.capture import capture
from shardkeep.state.overlap import Hold, StepGate, WatchedBytes, defer, find_untrusted


def make() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(list(model[0].parameters()) + list(model[1].parameters()))
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "ema": torch.optim.swa_utils.AveragedModel(model)}


def read(data: WatchedBytes) -> bytes:
    out = bytearray(data.nbytes)
    data.copy_out(0, memoryview(out))
    return bytes(out)


def test_only_what_the_optimizers_own_is_deferred() -> None:
    state = make()
    captured, _ = defer(state, capture(state), StepGate())
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    parts = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq", "optimizer/step")
    assert captured.deferred == {f"{part}/{name}" for part in parts for name in names}
    assert {tensor.key for tensor in captured.tensors} == {tensor.key for tensor in capture(state).tensors}


def test_views_that_overlap_and_slices_of_one_memory() -> None:
    flat = torch.arange(12.0)
    model = nn.Module()
    model.one = nn.Parameter(flat[:4])
    model.two = nn.Parameter(flat[6:10])
    model.register_buffer("rest", flat[4:6])
    optimizer = torch.optim.SGD([model.one, model.two], lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    captured, _ = defer(state, capture(state), StepGate())
    assert "model/rest" not in captured.deferred
    state = {"model": model, "optimizer": optimizer, "all": flat}
    captured, _ = defer(state, capture(state), StepGate())
    assert not captured.deferred, "several views, one version counter for none of them"


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


def test_states_that_wrap_other_tensors_are_left_alone() -> None:
    state = make()
    captured = capture(state)
    for slots in state["optimizer"].state.values():
        slots["codes"] = Wrapper(torch.ones(3))
    assert defer(state, captured, StepGate())[0].deferred


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 50)])
def test_bytes_are_read_and_every_change_is_seen(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    data = WatchedBytes("model/x", tensor, tensor)
    assert read(data) == tensor.numpy().tobytes()
    if tensor.numel():
        tensor.data.mul_(2)
        with pytest.raises(StateChanged, match="model/x"):
            read(data)
    with pytest.raises(TypeError):
        data.copy_in(0, memoryview(b""))


def test_a_sample_is_compared_with_whatever_part_of_it_a_piece_has() -> None:
    tensor = torch.zeros(1000)
    data = WatchedBytes("model/x", tensor, tensor)
    tensor.numpy()[-1] = 1.0
    out = bytearray(4)
    data.copy_out(3992, memoryview(out))
    with pytest.raises(StateChanged):
        data.copy_out(3996, memoryview(out))


def test_versions_of_the_tensor_and_of_what_it_is_a_part_of_count() -> None:
    for change in ("tensor", "owner"):
        tensor, owner = torch.zeros(8), torch.zeros(8)
        data = WatchedBytes("model/x", tensor, owner)
        (tensor if change == "tensor" else owner).mul_(1)  # no byte is another
        hold = Hold([data])
        hold.release()
        with pytest.raises(StateChanged):
            hold.confirm()


def test_what_changes_after_the_release_is_nobodys_business() -> None:
    tensor = torch.zeros(8)
    hold = Hold([WatchedBytes("model/x", tensor, tensor)])
    hold.release()
    tensor.add_(1)
    hold.release()
    hold.confirm()


def test_an_exchanged_tensor_is_read_as_it_was() -> None:
    parameter = nn.Parameter(torch.ones(8))
    data = WatchedBytes("model/x", parameter, parameter)
    parameter.data = torch.zeros(8)
    assert read(data) == torch.ones(8).numpy().tobytes()


def test_the_gate_waits_once_and_stands_before_the_newest_optimizers_only() -> None:
    gate, calls = StepGate(), []
    old, new = (torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1) for _ in range(2))
    gate.watch([old])
    gate.watch([old])
    gate.shut(lambda: calls.append("waited"), Hold())
    old.step()
    old.step()
    assert calls == ["waited"]
    gate.watch([new])
    gate.shut(lambda: calls.append("again"), Hold())
    old.step()
    assert calls == ["waited"]
    new.step()
    assert calls == ["waited", "again"]
    gate.shut(lambda: calls.append("never"), Hold())
    gate.close()
    gate.close()
    new.step()
    assert calls == ["waited", "again"]


def test_a_wait_that_is_interrupted_is_waited_for_again() -> None:
    gate, calls = StepGate(), []
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)

    def wait() -> None:
        calls.append("wait")
        if len(calls) == 1:
            raise KeyboardInterrupt

    gate.watch([optimizer])
    gate.shut(wait, Hold())
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    optimizer.step()
    assert calls == ["wait", "wait"]


def test_steps_that_do_not_wait_are_found() -> None:
    state = make()
    assert find_untrusted(state) is None
    torch.optim.lr_scheduler.StepLR(state["optimizer"], 3)
    assert find_untrusted(state) is None
    state["optimizer"].step = lambda: None
    assert "does not call pre-step hooks" in (find_untrusted(state) or "")
    del state["optimizer"]
    assert "no torch.optim.Optimizer" in (find_untrusted(state) or "")
