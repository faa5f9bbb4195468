"""Taking a state apart leaves no trace, refuses by name, and names things predictably."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardkeep.errors import UnsupportedState, UsageError
from shardkeep.state.capture import capture
from shardkeep.state.wrappers import PerRank, Sharded
from tests.support.roundtrip import save


class Counter:
    """A trainer-side object."""

    def __init__(self) -> None:
        self.seen = [0]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "table": {"a/b": torch.ones(2)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def build() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(net.parameters())
    return {"model": net, "optimizer": optimizer, "counter": Counter(), "step": 3, "history": [1.5], "tag": "a"}


def test_capture_leaves_no_trace() -> None:
    state = build()
    net = state["model"]
    net.train()
    net[1].eval()
    net(torch.ones(3, 2)).sum().backward()
    state["optimizer"].step()
    del state["optimizer"].state[net[0].bias]
    before = {
        "tensors": copy.deepcopy(net.state_dict()),
        "optimizer": copy.deepcopy(state["optimizer"].state_dict()),
        "modes": [m.training for m in net.modules()],
        "grads": [p.grad.clone() for p in net.parameters()],
    }
    identities = [(id(p), p.data_ptr(), p._version, p.grad.data_ptr()) for p in net.parameters()]
    streams = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    capture(state)
    assert [m.training for m in net.modules()] == before["modes"]
    assert identities == [(id(p), p.data_ptr(), p._version, p.grad.data_ptr()) for p in net.parameters()]
    for old, parameter in zip(before["grads"], net.parameters(), strict=True):
        assert torch.equal(old, parameter.grad)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before["tensors"][name])
    assert len(state["optimizer"].state) == len(before["optimizer"]["state"])
    assert torch.equal(streams[0], torch.get_rng_state())
    assert np.array_equal(streams[1], np.random.get_state()[1])  # type: ignore[index]
    assert state["step"] == 3


def test_python_values_are_those_of_the_call() -> None:
    """ASYNC-1, Lightning-AI/pytorch-lightning#21079: lists and counters that change right after do not show."""
    state = build()
    captured = capture(state)
    state["counter"].seen.append(7)
    state["history"].append(2.5)
    state["optimizer"].param_groups[0]["lr"] = 9.0
    assert captured.values["counter"]["seen"] == [0]
    assert captured.values["history"] == [1.5]
    assert captured.values["optimizer/groups"][0]["lr"] == 0.001


def test_names() -> None:
    state = build()
    state["nested"] = {"a/b": Counter(), "plain": 4, "list": [Counter(), 2]}
    state["odd key!"] = torch.ones(1)
    captured = capture(state)
    keys = [tensor.key for tensor in captured.tensors]
    assert keys == sorted(keys)
    assert {"model/0.weight", "counter/table/a%2Fb", "nested/a%2Fb/table/a%2Fb", "odd key!"} <= set(keys)
    assert {"nested/a%2Fb", "nested/list/0", "nested/list/1", "nested/plain", "step", "tag", "rng"} <= set(
        captured.values
    )
    sections = {tensor.key: (tensor.section, tensor.name) for tensor in captured.tensors}
    assert sections["odd key!"] == ("odd%20key%21", "odd key!")
    assert sections["model/0.weight"] == ("model", "0.weight")
    assert sections["counter/table/a%2Fb"] == ("counter", "table/a%2Fb")
    assert len(set(sections.values())) == len(sections)
    assert captured.per_rank_values == {"rng"}
    assert "rng" not in capture(state, rng=False).values


def test_nested_models_have_a_file_safe_section() -> None:
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    captured = capture({"models": {"gen": net}, "m x": nn.Linear(1, 1)})
    found = {tensor.key: (tensor.section, tensor.name) for tensor in captured.tensors}
    assert found["models/gen/weight"] == ("models", "gen/weight")
    assert found["models/gen/bias"] == ("models-frozen", "gen/bias")
    assert found["m x/weight"] == ("m%20x", "weight")


@pytest.mark.parametrize("key", ["", "a/b", "$x", ".x", "rng", "rank", 3, "x" * 200, "\ud800"])
def test_names_that_cannot_be(key: Any) -> None:
    with pytest.raises(UsageError, match="the name"):
        capture({key: 1})


def test_names_that_clash() -> None:
    net = nn.Linear(2, 2)
    net.weight.requires_grad_(False)
    other = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"frozen/weight|model/weight"):
        capture({"model": net, "frozen": other})


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"loss": {"fn": print}}, "loss/fn"),
        ({"loader": torch.utils.data.DataLoader([1])}, "loader"),
        ({"a": [Counter(), {"b": object()}]}, "a/1/b"),
        ({"a": {"b": torch.ones(2, device="meta")}}, "a/b: a tensor on the meta device"),
        ({"a": torch._efficientzerotensor(3)}, "a: a tensor .* has no memory"),
        ({"a": functools.reduce(lambda inner, _: [inner], range(5000), 1)}, "nested deeper than 100"),
        ({"a": functools.reduce(lambda inner, _: {"x": inner}, range(5000), nn.ReLU())}, "nested deeper than 100"),
    ],
)
def test_unsupported_things_are_named(state: dict[str, Any], path: str) -> None:
    with pytest.raises(UnsupportedState, match=path):
        capture(state)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_nested_tensor_is_named() -> None:
    with pytest.raises(UnsupportedState, match="a/b: a tensor of layout nested"):
        capture({"a": {"b": torch.nested.nested_tensor([torch.ones(2)])}})


def test_a_state_dict_that_fails_is_named() -> None:
    class Broken(Counter):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not now")

    with pytest.raises(UnsupportedState, match=r"extra/0: its state_dict\(\) raised RuntimeError\('not now'\)"):
        capture({"extra": [Broken()]})


def test_an_optimizer_in_a_wrapper_by_position_is_refused() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> dict[str, Any]:
            return self.optimizer.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.optimizer.load_state_dict(state)

    net = nn.Linear(1, 1)
    wrapper = Wrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(UnsupportedState, match=r"opt: a Wrapper around an optimizer") as caught:
        capture({"model": net, "opt": wrapper})
    assert caught.value.advice is not None
    assert "opt.optimizer" in caught.value.advice


def test_tied_tensors_are_stored_once() -> None:
    net = nn.Linear(2, 2)
    captured = capture({"a": net, "shared": net.weight, "tree": {"again": net.weight}})
    assert captured.aliases == {"shared": "a/weight", "tree/again": "a/weight"}
    assert {tensor.key for tensor in captured.tensors} == {"a/weight", "a/bias"}


def test_per_rank_and_sharded() -> None:
    rows = torch.ones(2, 3)
    captured = capture(
        {
            "mine": PerRank({"x": 1, "t": torch.ones(2)}),
            "own": PerRank(torch.zeros(3)),
            "cut": Sharded([(rows, (4, 0))], (8, 3)),
            "deep": {"in": [PerRank(5)]},
        },
        rng=False,
    )
    found = {tensor.key: tensor for tensor in captured.tensors}
    assert captured.per_rank_values == {"mine", "deep/in/0"}
    assert found["mine/t"].per_rank
    assert found["own"].per_rank
    assert found["cut"].explicit
    assert found["cut"].pieces[0].chunk.offsets == (4, 0)
    with pytest.raises(UsageError, match="inside PerRank"):
        capture({"m": PerRank(nn.Linear(1, 1))})


def test_the_state_must_be_a_table() -> None:
    with pytest.raises(UsageError, match="expected a table"):
        capture([nn.Linear(1, 1)])  # type: ignore[arg-type]
    assert save({}).tensors == {}
