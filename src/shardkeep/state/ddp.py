"""DistributedDataParallel whose gradients are summed in the same order in every start of a job.

DDP copies gradients into flat buckets and all-reduces each. A ring adds the ranks' numbers in an order that depends
on where in its bucket an element lies. A fresh DDP puts everything in one bucket, and lays the buckets out anew
after its first backward, in the order in which gradients arrived; a resumed process therefore reduces its first step
in other buckets than the process it replaces, and from three ranks up the last bits differ (with two ranks the
order of an addition does not matter).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkeep.errors import UnsupportedState, UsageError

_MARK = "_shardkeep_exact"
_INIT_PARAMETERS = ("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph")


def exact_ddp(model: DistributedDataParallel) -> DistributedDataParallel:
    """Fix the gradient buckets of `model` for its whole life and return it.

    The layout becomes a function of the parameters alone: reversed order of registration (the usual order of
    their gradients), cut at DDP's own bucket sizes. Call it on every rank (it is collective over the process group
    of the model), right after the constructor: before a communication hook is registered and before training. It
    draws no random number and changes no parameter. With `find_unused_parameters=True` buckets never move, and
    nothing is done.

    Raises:
        UsageError: not a DDP, or one that has trained or has a built-in communication hook.
        UnsupportedState: this torch has another reducer than the ones this function knows.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"exact_ddp got a {type(model).__name__}; expected a torch DistributedDataParallel",
            advice="wrap the model first: model = exact_ddp(DistributedDataParallel(net))",
        )
    if is_exact(model):
        return model
    if _may_rebuild(model):
        _refuse_if_unfit(model)
        _fix_buckets(model)
    setattr(model, _MARK, True)
    return model


def is_exact(model: DistributedDataParallel) -> bool:
    """Say whether `exact_ddp` fixed the buckets of `model` and nothing has reset them since."""
    # Swapping the process group (`_update_process_group`) makes torch rebuild again and clears its own flag.
    return bool(getattr(model, _MARK, False)) and (not _may_rebuild(model) or bool(model._has_rebuilt_buckets))


def find_inexact_ddp(state: Mapping[str, Any]) -> list[str]:
    """Return the paths in `state` of DDP modules whose resume may differ in the last bits, ascending.

    These are DDPs over three or more ranks whose buckets move after the first step.
    """
    found: set[str] = set()
    for path, module in _iter_modules(state, ""):
        for name, child in module.named_modules():
            if not isinstance(child, DistributedDataParallel) or is_exact(child) or not _may_rebuild(child):
                continue
            if dist.get_world_size(child.process_group) >= 3:
                found.add(f"{path}.{name}" if name else path)
    return sorted(found)


def _iter_modules(node: Any, path: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(node, nn.Module):
        yield path, node
    elif isinstance(node, Mapping):
        for key in sorted(node, key=str):
            yield from _iter_modules(node[key], f"{path}/{key}" if path else str(key))
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _iter_modules(child, f"{path}/{index}")


def _may_rebuild(model: DistributedDataParallel) -> bool:
    """Say whether this DDP lays its buckets out anew after its first backward."""
    if getattr(model, "_use_python_reducer", False):
        return False  # compiled autograd reduces each gradient by itself
    return bool(model.static_graph or not model.find_unused_parameters)


def _refuse_if_unfit(model: DistributedDataParallel) -> None:
    trained = bool(model._has_rebuilt_buckets) or any(p.grad is not None for p in model.parameters())
    if trained:
        raise UsageError(
            "exact_ddp: the model has gradients or has trained; its buckets can no longer be fixed",
            advice="call exact_ddp right after DistributedDataParallel(...), before the first step",
        )
    live: Any = model  # torch has no types for what follows
    hooked = str(live._get_ddp_logging_data().get("comm_hook", ""))
    if hooked and not model._comm_hooks:
        raise UsageError(
            f"exact_ddp: the built-in communication hook {hooked} was registered before",
            advice="call exact_ddp first, then register the hook",
        )
    init = getattr(model, "_ddp_init_helper", None)
    known = init is not None and tuple(inspect.signature(init).parameters) == _INIT_PARAMETERS
    needed = ("_push_all_rebuilt_params", "_rebuild_buckets", "_remove_autograd_hooks")
    missing = [name for name in needed if not hasattr(model.reducer, name)]
    if not known or missing:
        raise UnsupportedState(
            f"exact_ddp: torch {torch.__version__} builds DDP's reducer in a way that this version does not know"
            f"{': it lacks ' + ', '.join(missing) if missing else ''}",
            advice="use find_unused_parameters=True, whose buckets never move, or a torch from 2.6 to 2.13",
        )


def _fix_buckets(model: DistributedDataParallel) -> None:
    """Build the reducer again over the reversed parameters and let it lay out its buckets at once."""
    live: Any = model  # torch has no types for what follows
    parameters, sparse = live._build_params_for_reducer()
    names = live._build_debug_param_to_name_mapping(parameters)
    count = len(parameters)
    mirrored = {count - 1 - index: name for index, name in names.items()}
    # ORDER: the old hooks go first, or each gradient would be reduced twice while the old reducer lives on.
    live.reducer._remove_autograd_hooks()
    live._ddp_init_helper(parameters[::-1], sparse[::-1], mirrored, live.static_graph)
    if live.static_graph:
        live.reducer._set_static_graph()
        live.logger._set_static_graph()
    if live.mixed_precision is not None and live.mixed_precision.param_dtype is not None:
        live.reducer._set_mixed_precision_param_dtype(live.mixed_precision.param_dtype)
    register: Any = getattr(dist, "_register_comm_hook")  # noqa: B009  # not exported to type checkers
    for hook, hook_state in live._comm_hooks:
        register(live.reducer, hook_state, hook)
    # "Rebuild" lays out the parameters in the order pushed, here that of their indexes, and never happens again.
    live.reducer._push_all_rebuilt_params()
    if not live.reducer._rebuild_buckets():
        raise UnsupportedState(
            f"exact_ddp: the reducer of torch {torch.__version__} did not take the layout",
            advice="use find_unused_parameters=True, whose buckets never move",
        )
    live._has_rebuilt_buckets = True
