"""Modules taken apart and filled again, without any process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkeep.errors import StateMismatch, UnsupportedState
from shardkeep.state.models import (
    capture_model,
    find_meta,
    get_section,
    materialise,
    model_parts,
    model_targets,
    restore_model_values,
    unfilled_after_materialise,
)


def as_is(path: str, value: Any) -> Any:
    return value


class Counter(nn.Linear):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = {"count": 3, "seen": torch.ones(2)}

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Packed(nn.Module):
    """A module whose state_dict holds entries that are no parameters or buffers, as quantised modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.packed = torch.arange(3)
        self.bits = 8

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = self.packed * 10
        destination[prefix + "bits"] = self.bits

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.packed = state_dict.pop(prefix + "packed") // 10
        self.bits = state_dict.pop(prefix + "bits")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Rotary(nn.Module):
    """A non-persistent table beside weights (huggingface/transformers#48892)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def content(local: Any) -> bytes:
    out = bytearray(local.pieces[0].data.nbytes)
    local.pieces[0].data.copy_out(0, memoryview(out))
    return bytes(out)


def test_roles_sections_and_flags() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net[0].weight.requires_grad_(False)
    found = {t.key: (t.section, t.name, t.role, t.trainable) for t in model_targets("model", net)}
    assert found["model/0.weight"] == ("frozen", "0.weight", "parameter", False)
    assert found["model/0.bias"] == ("model", "0.bias", "parameter", True)
    assert found["model/1.running_mean"] == ("model", "1.running_mean", "buffer", None)
    assert {t.section for t in model_targets("ema", net)} == {"ema", "ema-frozen"}
    assert get_section("model", trainable=None) == "model"


def test_bytes_go_out_and_come_back_in_place() -> None:
    net, other = nn.Linear(3, 4), nn.Linear(3, 4)
    kept = other.weight
    for source, target in zip(model_targets("model", net), model_targets("model", other), strict=True):
        assert source.shape == target.shape
        target.pieces[0].data.copy_in(0, memoryview(content(source)))
    assert other.weight is kept
    assert torch.equal(net.weight, other.weight)
    assert torch.equal(net.bias, other.bias)


def test_saving_changes_nothing() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Counter())
    before = {
        name: (id(t), t._version, t.requires_grad)
        for name, t in net.state_dict(keep_vars=True).items()
        if isinstance(t, torch.Tensor)
    }
    torch.manual_seed(1)
    state = torch.get_rng_state()
    capture_model("model", net, as_is)
    after = {
        name: (id(t), t._version, t.requires_grad)
        for name, t in net.state_dict(keep_vars=True).items()
        if isinstance(t, torch.Tensor)
    }
    assert before == after
    assert torch.equal(state, torch.get_rng_state())


def test_extra_state_goes_to_values_and_back() -> None:
    net = nn.ModuleDict({"a": Counter(), "b": nn.Linear(1, 1)})
    net["c"] = net["a"]
    paths: list[str] = []

    def encode(path: str, value: Any) -> Any:
        paths.append(path)
        return dict(value)

    parts = capture_model("model", net, encode)
    assert paths == ["model/extra/a"]
    assert parts.values["model/extra/a"]["count"] == 3
    root = capture_model("ema", Counter(), as_is)
    assert list(root.values) == ["ema/extra"]
    restore_model_values("model", net, {"model/extra/a": {"count": 9}, "optimizer/groups": 1})
    assert net["a"].calls == {"count": 9}


def test_extra_state_on_one_side_only_is_named() -> None:
    with pytest.raises(StateMismatch) as caught:
        restore_model_values("model", nn.Sequential(Counter()), {"model/extra/1": 3})
    assert caught.value.problems == (
        "model/extra/0: the live model has it, the checkpoint does not",
        "model/extra/1: stored, the live model has no such state",
    )


def test_entries_of_state_dict_code_are_kept_and_given_back() -> None:
    net = nn.Sequential(nn.Linear(1, 1), Packed())
    parts = capture_model("model", net, as_is)
    assert sorted(parts.values) == ["model/hook/1.bits", "model/hook/1.packed"]
    assert parts.values["model/hook/1.packed"].tolist() == [0, 10, 20]
    assert "model/1.weight" in {entry.local.key for entry in parts.entries}
    live = nn.Sequential(nn.Linear(1, 1), Packed())
    live[1].bits, live[1].packed = 4, torch.zeros(3, dtype=torch.int64)
    kept, weight = live[0].weight, live[0].weight.detach().clone()
    restore_model_values("model", live, parts.values)
    assert (live[1].bits, live[1].packed.tolist()) == (8, [0, 1, 2])
    assert live[0].weight is kept
    assert torch.equal(kept, weight)


def test_hooks_that_rename_or_remove_do_not_lose_or_double_anything() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "renamed"] = state.pop(prefix + "0.weight")
        del state[prefix + "1.bias"]

    net.register_state_dict_post_hook(rename)
    parts = capture_model("model", net, as_is)
    assert parts.values == {}
    assert [e.local.name for e in parts.entries] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_meta_models_are_refused_at_save_and_listed_at_load() -> None:
    with torch.device("meta"):
        net = Rotary()
    names = [
        "embed.weight",
        "head.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert find_meta(net) == names
    with pytest.raises(UnsupportedState, match=r"7 tensors are on the meta device.*head\.weight"):
        capture_model("model", net, as_is)
    targets = {target.name: target for target in model_targets("model", net)}
    assert list(targets) == names
    with pytest.raises(UnsupportedState, match="meta"):
        targets["embed.weight"].pieces[0].data.copy_in(0, memoryview(bytes(60)))


def test_materialise_gives_memory_keeps_ties_and_says_what_stays_unfilled() -> None:
    with torch.device("meta"):
        net = Rotary()
    net.norm.weight = nn.Parameter(torch.full((3,), 7.0))
    net.embed.weight.requires_grad_(False)
    kept = net.norm.weight
    assert unfilled_after_materialise(net) == ["table"]
    assert materialise(net, "cpu") == ["table"]
    assert find_meta(net) == unfilled_after_materialise(net) == []
    assert net.head.weight is net.embed.weight
    assert isinstance(net.embed.weight, nn.Parameter)
    assert not net.embed.weight.requires_grad
    assert net.norm.weight is kept
    assert torch.equal(kept, torch.full((3,), 7.0))
    assert net.norm.num_batches_tracked.dtype == torch.int64
    for entry in model_parts("model", net).entries:
        entry.local.pieces[0].data.copy_in(0, memoryview(bytes(entry.local.pieces[0].data.nbytes)))
    assert net.embed.weight.count_nonzero() == 0


def test_nothing_to_materialise() -> None:
    net = Rotary()
    before = {name: id(t) for name, t in net.named_parameters()}
    assert materialise(net, "cpu") == []
    assert before == {name: id(t) for name, t in net.named_parameters()}
    assert torch.equal(net.table, torch.arange(4.0))
