"""Canonical names: the ones the user wrote, whatever wraps the modules while they train.

Wrappers are recognised by their type, never by the text of a name, so a child of the user's own that is called
`module` or `_orig_mod` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from shardkeep.errors import UnsupportedState

# Where a wrapper class lives and the attribute under which it keeps the user's module. A wrapper can only be
# in a model if its module has been imported, so nothing is imported to ask. FSDP2 and torch's composable
# `replicate` change the class of a module in place and are no wrappers; AveragedModel is a structure of its own.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """One registered tensor of a module tree.

    Attributes:
        name: canonical, without any wrapper.
        raw_name: as `state_dict()` of the live object spells it, wrappers included.
        module, attribute: who holds it: `module._parameters[attribute]` or `module._buffers[attribute]`.
        persistent: part of the state; False for buffers registered with `persistent=False`.
    """

    name: str
    raw_name: str
    module: nn.Module
    attribute: str
    tensor: Tensor
    kind: Literal["parameter", "buffer"]
    persistent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModule:
    """One place in a module tree, wrappers left out. A module that is registered twice has two places."""

    name: str
    raw_name: str
    module: nn.Module


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module inside any nesting of torch's wrappers.

    Raises:
        UnsupportedState: FSDP1's FullyShardedDataParallel.
    """
    while (attribute := _find_wrapped("", module)) is not None:
        module = module._modules[attribute]  # type: ignore[assignment]  # checked by _find_wrapped
    return module


def iter_modules(root: nn.Module) -> Iterator[NamedModule]:
    """Yield every place of every module, parents first, in order of registration.

    Raises:
        UnsupportedState: an FSDP1 wrapper.
    """
    yield from _walk("", "", root, ())


def canonical_names(root: nn.Module) -> Iterator[NamedTensor]:
    """Yield every registered parameter and buffer, tied ones once for each of their names.

    Of several names of one tensor, the first that comes is the canonical one.

    Raises:
        UnsupportedState: an FSDP1 wrapper, or two tensors whose names are equal once wrappers are left out.
    """
    taken: dict[str, str] = {}
    for place in iter_modules(root):
        module = place.module
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for attribute, tensor in table.items():
                if tensor is None:
                    continue
                name = _join(place.name, attribute)
                raw_name = _join(place.raw_name, attribute)
                if name in taken:
                    raise UnsupportedState(
                        f"{taken[name]} and {raw_name} are both {name!r} once wrappers are left out of the names",
                        key=name,
                        advice="rename one of the two",
                    )
                taken[name] = raw_name
                yield NamedTensor(
                    name=name,
                    raw_name=raw_name,
                    module=module,
                    attribute=attribute,
                    tensor=tensor,
                    kind="parameter" if kind == "parameter" else "buffer",
                    persistent=kind == "parameter" or attribute not in module._non_persistent_buffers_set,
                )


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, tuple[str, str]]:
    """Return `id(parameter) -> (model key, canonical name)` for optimizers.

    Models are taken by ascending key; of several names the first counts.
    """
    found: dict[int, tuple[str, str]] = {}
    for key in sorted(models):
        for named in canonical_names(models[key]):
            if named.kind == "parameter":
                found.setdefault(id(named.tensor), (key, named.name))
    return found


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _walk(name: str, raw_name: str, module: nn.Module, path: tuple[int, ...]) -> Iterator[NamedModule]:
    if id(module) in path:
        # A module that contains itself: torch walks it once, and so do we.
        return
    wrapped = _find_wrapped(raw_name, module)
    yield NamedModule(name=name, raw_name=raw_name, module=module)
    for child_name, child in module._modules.items():
        if child is None:
            continue
        child_canonical = name if child_name == wrapped else _join(name, child_name)
        yield from _walk(child_canonical, _join(raw_name, child_name), child, (*path, id(module)))


def _find_wrapped(raw_name: str, module: nn.Module) -> str | None:
    """Return the attribute that holds the user's module when `module` is one of torch's wrappers."""
    fsdp1: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp1 is not None and isinstance(module, fsdp1.FullyShardedDataParallel):
        raise UnsupportedState(
            f"{raw_name or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters "
            "have no layout of their own",
            advice="use FSDP2: torch.distributed.fsdp.fully_shard(module)",
        )
    for module_name, class_name, attribute in _WRAPPERS:
        wrapper: Any = getattr(sys.modules.get(module_name), class_name, None)
        if wrapper is not None and isinstance(module, wrapper) and module._modules.get(attribute) is not None:
            return attribute
    return None
