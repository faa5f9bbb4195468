"""Canonical names: wrappers never show, the user's own children always do."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.optim.swa_utils import AveragedModel

from shardkeep.errors import UnsupportedState
from shardkeep.state.names import canonical_names, iter_modules, parameter_names, unwrap
from tests.support.ranks import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 2)
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


class Tricky(nn.Module):
    """Real children that are called as wrappers call theirs (ray-project/ray#43594)."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Sequential(nn.Linear(2, 2))
        self._checkpoint_wrapped_module = nn.Linear(2, 1)


NET_NAMES = [
    "table",
    "first.weight",
    "first.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "second.weight",
    "second.bias",
]


def names_of(module: nn.Module) -> list[str]:
    return [named.name for named in canonical_names(module)]


def wrap_all(
    kinds: tuple[str, ...], module: nn.Module, wrappers: dict[str, Callable[[nn.Module], nn.Module]]
) -> nn.Module:
    for kind in kinds:
        module = wrappers[kind](module)
    return module


def test_names_are_what_the_user_wrote() -> None:
    net = Net()
    assert names_of(net) == NET_NAMES
    kinds = {named.name: (named.kind, named.persistent) for named in canonical_names(net)}
    assert kinds["table"] == ("buffer", False)
    assert kinds["norm.running_mean"] == ("buffer", True)
    assert kinds["first.bias"] == ("parameter", True)
    assert set(names_of(net)) - {"table"} == set(net.state_dict())


def check_nestings(rank: int, world_size: int) -> None:
    """All nestings of compile, DDP and checkpoint wrappers (karpathy/nanoGPT#325)."""
    warnings.simplefilter("ignore")  # torch deprecates functions inside its own compiler
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "compile": lambda m: torch.compile(m, backend="eager"),
        "ddp": nn.parallel.DistributedDataParallel,
        "checkpoint": checkpoint_wrapper,
        "offload": offload_wrapper,
    }
    for count in range(4):
        for kinds in itertools.product(wrappers, repeat=count):
            if max(kinds.count("ddp"), kinds.count("compile")) > 1:  # torch cannot do these
                continue
            net = Net()
            net.first = wrap_all(kinds[:1], net.first, wrappers)
            inner = dict(canonical_names_by_name(net))
            wrapped = wrap_all(kinds, net, wrappers)
            assert names_of(wrapped) == NET_NAMES, kinds
            assert unwrap(wrapped) is net
            assert {name: id(t) for name, t in canonical_names_by_name(wrapped)} == {
                k: id(t) for k, t in inner.items()
            }
            found = parameter_names({"model": wrapped})
            assert found[id(net.second.weight)] == ("model", "second.weight")
            assert len(found) == 6
            # raw_name is how the live object's own state_dict may be asked.
            live = dict(wrapped.named_parameters(remove_duplicate=False))
            if not {"checkpoint", "offload"} & set(kinds):
                assert all(named.raw_name in live for named in canonical_names(wrapped) if named.kind == "parameter")


def canonical_names_by_name(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(named.name, named.tensor) for named in canonical_names(module)]


def test_all_nestings_of_wrappers() -> None:
    run_ranks(check_nestings, 1)


def test_children_called_like_wrappers_keep_their_names() -> None:
    expected = [
        "module.weight",
        "module.bias",
        "_orig_mod.0.weight",
        "_orig_mod.0.bias",
        "_checkpoint_wrapped_module.weight",
        "_checkpoint_wrapped_module.bias",
    ]
    assert names_of(Tricky()) == expected
    assert names_of(checkpoint_wrapper(Tricky())) == expected
    assert names_of(nn.DataParallel(Tricky())) == expected


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_needs_no_prefix() -> None:
    assert names_of(torch.compile(Tricky(), backend="eager")) == names_of(Tricky())
    net = Net()
    net.compile()
    assert names_of(net) == NET_NAMES


def test_averaged_model_is_a_structure_of_its_own() -> None:
    assert names_of(AveragedModel(checkpoint_wrapper(Net()))) == ["n_averaged", *(f"module.{n}" for n in NET_NAMES)]


def test_parametrizations_keep_their_names() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert set(names_of(layer)) == set(layer.state_dict())


def test_state_of_a_wrapper_itself_is_not_lost() -> None:
    class Wrapper(nn.DataParallel):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.register_buffer("calls", torch.zeros(1))

    assert names_of(Wrapper(nn.Linear(1, 1))) == ["calls", "weight", "bias"]

    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

    with pytest.raises(UnsupportedState, match=r"calls.*module\.calls"):
        names_of(Wrapper(Clash()))


def test_tied_modules_and_parameters_come_under_all_their_names() -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False)})
    net["b"] = net["a"]
    net["c"] = nn.Linear(2, 2, bias=False)
    net["c"].weight = net["a"].weight
    assert names_of(net) == ["a.weight", "b.weight", "c.weight"]
    assert parameter_names({"model": net}) == {id(net["a"].weight): ("model", "a.weight")}
    assert [place.name for place in iter_modules(net)] == ["", "a", "b", "c"]


def test_a_module_in_two_models_belongs_to_the_first_key() -> None:
    net = Net()
    found = parameter_names({"b": net, "a": net.first})
    assert found[id(net.first.weight)] == ("a", "weight")
    assert found[id(net.second.weight)] == ("b", "second.weight")


def test_a_module_that_contains_itself_is_walked_once() -> None:
    net = Net()
    net.first.parent = net
    assert names_of(net) == NET_NAMES


def refuse_fsdp1(rank: int, world_size: int) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore")
    net = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    with pytest.raises(UnsupportedState) as caught:
        names_of(net)
    return str(caught.value)


def test_fsdp1_is_refused_with_advice() -> None:
    (text,) = run_ranks(refuse_fsdp1, 1)
    assert text.startswith("0 is wrapped in FullyShardedDataParallel")
    assert "fully_shard" in text
