"""Tensor subclasses: taken apart by a rule and put together again, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardkeep.errors import StateMismatch, UnsupportedState, UsageError
from shardkeep.state.models import model_parts
from shardkeep.state.subclasses import (
    check_type,
    find_registered,
    find_rule,
    rebuild,
    register_tensor_type,
    resolve_plain,
    take_apart,
)
from shardkeep.state.wrappers import PerRank


class Codes(torch.Tensor):
    """8-bit codes with one scale per block, and no bytes of its own (pytorch/ao#1185, pytorch/torchtitan#1414)."""

    codes: torch.Tensor
    scale: torch.Tensor
    block: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, block: int) -> Codes:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale, made.block = codes, scale, block
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.block]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Codes:
        assert tuple(inner["codes"].shape) == tuple(size)
        return cls(inner["codes"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            self = args[0]
            made = Codes(self.codes.detach(), self.scale.detach(), self.block)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        raise NotImplementedError(f"{func}")


class Derived(Codes):
    pass


class Note(nn.Parameter):
    """Plain bytes under another name."""


class Unknown(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def rules() -> Any:
    register_tensor_type(Codes)
    register_tensor_type(Note)
    yield
    for cls in (Codes, Note):
        del cls._shardkeep_rule  # type: ignore[attr-defined]


def make_codes(block: int = 4) -> Codes:
    return Codes(torch.arange(8, dtype=torch.uint8).reshape(2, 4), torch.tensor([0.5, 2.0]), block)


def content(local: Any) -> bytes:
    out = bytearray(local.pieces[0].data.nbytes)
    local.pieces[0].data.copy_out(0, memoryview(out))
    return bytes(out)


def test_a_registered_subclass_is_stored_as_its_inner_tensors() -> None:
    parts = take_apart("optimizer/exp_avg/w", make_codes(), section="optimizer", name="exp_avg/w", role="state")
    assert [(e.local.key, e.local.name, e.local.dtype, e.local.shape) for e in parts.entries] == [
        ("optimizer/exp_avg/w#codes", "exp_avg/w#codes", "uint8", (2, 4)),
        ("optimizer/exp_avg/w#scale", "exp_avg/w#scale", "float32", (2,)),
    ]
    described = {"type": f"{__name__}.Codes", "inner": ["codes", "scale"], "context": [4]}
    assert parts.values == {"optimizer/exp_avg/w#type": described}
    assert content(parts.entries[0].local) == bytes(range(8))


def test_a_restore_writes_into_the_live_inner_tensors_and_can_rebuild() -> None:
    live = make_codes()
    parts = take_apart("x", live, section="x", name="x", role="state")
    parts.entries[0].local.pieces[0].data.copy_in(0, memoryview(bytes(range(100, 108))))
    assert live.codes.flatten().tolist() == list(range(100, 108))
    again = rebuild("x", parts.values["x#type"], {"codes": live.codes, "scale": live.scale}, (2, 4))
    assert type(again) is Codes
    assert again.codes is live.codes
    assert again.block == 4


def test_own_functions_and_context() -> None:
    del Codes._shardkeep_rule  # type: ignore[attr-defined]
    register_tensor_type(
        Codes,
        lambda t: ({"c": t.codes, "s": t.scale}, {"block": t.block}),
        lambda inner, context, shape: Codes(inner["c"], inner["s"], context["block"]),
    )
    parts = take_apart("x", make_codes(7), section="x", name="x", role="state")
    assert [entry.slot for entry in parts.entries] == ["c", "s"]
    assert rebuild("x", parts.values["x#type"], {"c": torch.zeros(1), "s": torch.zeros(1)}, (1,)).block == 7  # type: ignore[attr-defined]


def test_a_model_with_a_subclass_parameter() -> None:
    layer = nn.Linear(4, 2)
    layer.weight = nn.Parameter(make_codes(), requires_grad=False)
    parts = model_parts("model", layer)
    assert [(e.local.key, e.local.section) for e in parts.entries] == [
        ("model/weight#codes", "frozen"),
        ("model/weight#scale", "frozen"),
        ("model/bias", "model"),
    ]


def test_an_unknown_subclass_is_refused_with_its_path_and_type() -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Unknown))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedState, match=r"model/weight: .*test_subclasses\.Unknown"):
        model_parts("model", layer)
    with pytest.raises(UnsupportedState, match="Derived"):
        resolve_plain("x", Derived(torch.zeros(1), torch.zeros(1), 1))
    with pytest.raises(UnsupportedState, match="Unknown"):
        take_apart("x", PerRank(torch.ones(1).as_subclass(Unknown)), section="x", name="x", role="state")
    with pytest.raises(UnsupportedState, match="expected a tensor"):
        take_apart("x", 3, section="x", name="x", role="state")  # type: ignore[arg-type]


def test_an_inner_tensor_of_unknown_type_is_refused_too() -> None:
    bad = Codes(torch.ones(2, dtype=torch.uint8).as_subclass(Unknown), torch.ones(1), 1)
    with pytest.raises(UnsupportedState, match=r"x#codes: .*Unknown"):
        take_apart("x", bad, section="x", name="x", role="state")


def test_a_class_declared_plain_is_stored_as_its_bytes() -> None:
    note = Note(torch.ones(3))
    (entry,) = take_apart("x", note, section="x", name="x", role="state").entries
    assert entry.local.key == "x"
    assert content(entry.local) == torch.ones(3).numpy().tobytes()


def test_lazy_parameters_are_refused_with_advice() -> None:
    layer = nn.LazyLinear(3)
    with pytest.raises(UnsupportedState, match=r"model/weight: .*lazy(.|\n)*forward"):
        model_parts("model", layer)


def test_per_rank_values_stay_per_rank() -> None:
    parts = take_apart("x", PerRank(make_codes()), section="x", name="x", role="state")
    assert all(entry.local.per_rank for entry in parts.entries)
    (entry,) = take_apart("y", PerRank(torch.ones(2)), section="y", name="y", role="state").entries
    assert entry.local.per_rank


def test_a_change_of_kind_is_named() -> None:
    stored = take_apart("x", make_codes(4), section="x", name="x", role="state").values["x#type"]
    check_type("x", stored, dict(stored))
    live = take_apart("x", make_codes(8), section="x", name="x", role="state").values["x#type"]
    with pytest.raises(StateMismatch, match=r"x: context stored \[4\], live \[8\]"):
        check_type("x", stored, live)


def test_classes_are_found_by_name_and_never_imported() -> None:
    assert find_registered(f"{__name__}.Codes") is Codes
    assert find_rule(Derived) is None
    for name in (f"{__name__}.Derived", f"{__name__}.Unknown", "os.system"):
        assert find_registered(name) is None
        with pytest.raises(UnsupportedState, match="no rule"):
            rebuild("x", {"type": name, "inner": [], "context": None}, {}, ())


def test_wrong_registrations_are_refused() -> None:
    for arguments in ((torch.Tensor,), (int,), ("Codes",)):
        with pytest.raises(UsageError, match="subclass"):
            register_tensor_type(*arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="both"):
        register_tensor_type(Unknown, lambda t: ({}, None))
