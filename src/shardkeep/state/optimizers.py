"""Optimizers by parameter name: every state tensor in its own dtype, shape and device, every field of every group.

A state tensor is stored as `<key>/<state>/<parameter>`; what is not a tensor, and the index of the parameter's group,
in the value `<key>/param/<parameter>`; the fields of the groups in `<key>/groups`. So ranks that hold different
parameters (pipeline stages) add up to one optimizer, and order of registration does not matter. A restore is driven
by what is stored and sets state and groups directly: `Optimizer.load_state_dict` would cast state to the dtype of its
parameter and match by position. No step is taken and no hook is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim import Optimizer

from shardkeep.errors import CheckpointError, UnsupportedState
from shardkeep.spec.tensors import TensorRef
from shardkeep.state.destinations import plan_tensor, plan_tree_tensor
from shardkeep.state.drafts import MISSING, CaptureDraft, RestoreDraft, Stage, split_key
from shardkeep.state.subclasses import take_apart
from shardkeep.state.values import as_mapping, escape, find_tensors, pack_tree, unpack_tree

# The parameters themselves stand under their names; `param_names` are the user's own labels of live objects.
_NOT_FIELDS: Final = ("params", "param_names")

Names = Mapping[int, tuple[str, str]]
"""`id(parameter) -> (model key, canonical name)`; the model key is empty for a tensor that is itself in the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter of an optimizer: its name there, its own key in the checkpoint, its group (None: in no group)."""

    name: str
    key: str
    tensor: torch.Tensor
    group: int | None


def name_parameters(key: str, optimizer: Optimizer, names: Names) -> list[NamedParameter]:
    """Return the optimizer's parameters, named; with the model's key before the name when it spans several models.

    Raises:
        UnsupportedState: a parameter that nothing in the state holds, or an optimizer that hides its state.
    """
    _refuse_hidden_state(key, optimizer)
    found: list[tuple[torch.Tensor, int | None]] = []
    seen: set[int] = set()
    for index, group in enumerate(optimizer.param_groups):
        found += [(tensor, index) for tensor in group["params"]]
    found += [(tensor, None) for tensor in optimizer.state if isinstance(tensor, torch.Tensor)]
    unknown = [
        f"{position} of group {group}, shape {tuple(tensor.shape)}"
        for position, (tensor, group) in enumerate(found)
        if id(tensor) not in names
    ]
    if unknown:
        raise UnsupportedState(
            f"{key}: {len(unknown)} of its parameters belong to no model in the state: parameter "
            f"{'; '.join(unknown)}",
            key=key,
            advice="put the module (or the tensor itself) that owns them into the state, and build the optimizer "
            "after the model has been sharded or moved",
        )
    models = {names[id(tensor)][0] for tensor, _ in found}
    result: list[NamedParameter] = []
    for tensor, index_of_group in found:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        model, name = names[id(tensor)]
        own_key = f"{model}/{name}" if model else name
        result.append(
            NamedParameter(
                name=own_key if len(models) > 1 else name, key=own_key, tensor=tensor, group=index_of_group
            )
        )
    return result


def capture_optimizer(draft: CaptureDraft, key: str, optimizer: Optimizer, names: Names) -> None:
    """Add an optimizer's state to the draft; reads only.

    Raises:
        UnsupportedState: see `name_parameters`; or state that cannot be stored, by its path.
    """
    for parameter in name_parameters(key, optimizer, names):
        _capture_parameter(draft, key, parameter, optimizer.state.get(parameter.tensor))
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        fields = {name: value for name, value in group.items() if name not in _NOT_FIELDS}
        groups.append(_pack(draft, f"{key}/groups/{index}", fields))
    draft.add_value(f"{key}/groups", groups)
    draft.add_value(f"{key}/class", type(optimizer).__name__)
    shared = _shared(optimizer)
    if shared:
        draft.add_value(f"{key}/shared", _pack(draft, f"{key}/shared", shared))
    extra = _find_extra(optimizer)
    if extra:
        draft.add_value(f"{key}/extra", _pack(draft, f"{key}/extra", extra))


def _capture_parameter(draft: CaptureDraft, key: str, parameter: NamedParameter, state: Any) -> None:
    record: dict[str, Any] = {"group": parameter.group}
    name = f"{key}/param/{parameter.name}"
    if state:
        if not isinstance(state, Mapping) or not all(type(part) is str for part in state):
            raise UnsupportedState(
                f"{name}: its state is a {type(state).__name__} that is no table of texts", key=name
            )
        tensors = [part for part, value in state.items() if isinstance(value, torch.Tensor)]
        rest = {part: value for part, value in state.items() if part not in tensors}
        for part in tensors:
            _capture_tensor(draft, f"{key}/{escape(part)}/{parameter.name}", state[part], parameter.tensor)
        record |= {"tensors": tensors} if tensors else {}
        record |= {"state": _pack(draft, name, rest)} if rest else {}
    draft.add_value(name, record)


def _capture_tensor(draft: CaptureDraft, key: str, tensor: torch.Tensor, beside: torch.Tensor | None) -> None:
    section, name = split_key(key)
    home = beside.device.type if beside is not None else "cpu"
    device = tensor.device.type if tensor.device.type != home else None
    draft.add_parts(take_apart(key, tensor, section=section, name=name, role="state", device=device))


def _pack(draft: CaptureDraft, path: str, tree: Any) -> Any:
    def take(tensor: torch.Tensor, at: str) -> TensorRef:
        _capture_tensor(draft, at, tensor, None)
        return TensorRef(at)

    return pack_tree(tree, path, take)


def _shared(optimizer: Optimizer) -> dict[Any, Any]:
    """Return state that belongs to no parameter; torch types the keys as tensors, others occur."""
    table: dict[Any, Any] = optimizer.state
    return {name: value for name, value in table.items() if not isinstance(name, torch.Tensor)}


def _find_extra(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer's own `state_dict` adds to state and groups."""
    if type(optimizer).state_dict is Optimizer.state_dict and not _has_state_hooks(optimizer):
        return {}
    return {k: v for k, v in optimizer.state_dict().items() if k not in ("state", "param_groups")}


def _has_state_hooks(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_optimizer_state_dict_post_hooks", None))


def _refuse_hidden_state(key: str, optimizer: Optimizer) -> None:
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise UnsupportedState(
            f"{key}: ZeroRedundancyOptimizer keeps its state in an inner optimizer",
            key=key,
            advice=f"put {key}.optim into the state instead: each rank then stores what it owns",
        )


def plan_optimizer(draft: RestoreDraft, key: str, optimizer: Optimizer, names: Names) -> None:
    """Plan an optimizer's restore: destinations, problems by name, and the actions that install it.

    Raises:
        UnsupportedState: see `name_parameters`.
    """
    parameters = name_parameters(key, optimizer, names)
    states: list[tuple[NamedParameter, dict[str, Any]]] = []
    for parameter in parameters:
        record = draft.take_value(f"{key}/param/{parameter.name}")
        if record is MISSING:
            continue
        record = as_mapping(record, f"{key}/param/{parameter.name}")
        if record.get("group") != parameter.group:
            draft.problems.append(
                f"{key}: parameter {parameter.name} is in group {record.get('group')} of the checkpoint and "
                f"in group {parameter.group} here"
            )
        states.append((parameter, _plan_state(draft, key, parameter, record, optimizer)))
    saved_by = draft.take_value(f"{key}/class")
    if saved_by is not MISSING and saved_by != type(optimizer).__name__:
        draft.miss(f"{key}: the checkpoint's is of class {saved_by!r}, the live one of {type(optimizer).__name__!r}")
    groups = _plan_groups(draft, key, optimizer)
    shared = _plan_optional(draft, f"{key}/shared", _shared(optimizer))
    extra = _plan_optional(draft, f"{key}/extra", {})

    def install() -> Iterable[str]:
        if extra:
            _load_extra(optimizer, extra)
        _install_states(optimizer, states, shared)
        return groups.install(optimizer) if groups else ()

    draft.then(Stage.OPTIMIZERS, key, install)
    if groups is not None:
        draft.then(Stage.GROUPS, key, lambda: groups.put_back(key, optimizer))


def _plan_state(
    draft: RestoreDraft, key: str, parameter: NamedParameter, record: Mapping[str, Any], optimizer: Optimizer
) -> dict[str, Any]:
    live = optimizer.state.get(parameter.tensor) or {}
    state: dict[str, Any] = {}
    for part in record.get("tensors", ()):
        present = live.get(part)
        try:
            state[part] = plan_tensor(
                draft,
                f"{key}/{escape(part)}/{parameter.name}",
                live=present if isinstance(present, torch.Tensor) else None,
                like=parameter.tensor,
                like_key=parameter.key,
            )
        except CheckpointError as error:
            draft.problems.append(error.message)
    if "state" in record:
        rest = {part: value for part, value in live.items() if not isinstance(value, torch.Tensor)}
        state.update(_unpack(draft, f"{key}/param/{parameter.name}", record["state"], rest))
    return state


def _unpack(draft: RestoreDraft, path: str, stored: Any, live: Any) -> Any:
    present = find_tensors(live, path)

    def give(at: str) -> torch.Tensor:
        try:
            return plan_tree_tensor(draft, at, present.get(at))
        except CheckpointError as error:
            draft.problems.append(error.message)
            return torch.empty(0)

    return unpack_tree(stored, give)


def _plan_optional(draft: RestoreDraft, name: str, live: Any) -> dict[str, Any]:
    if name not in draft.catalog.values:
        return {}
    stored = draft.take_value(name)
    return {} if stored is MISSING else dict(_unpack(draft, name, as_mapping(stored, name), live))


def _install_states(
    optimizer: Optimizer, states: list[tuple[NamedParameter, dict[str, Any]]], shared: dict[str, Any]
) -> None:
    for parameter, state in states:
        if not state:
            optimizer.state.pop(parameter.tensor, None)
            continue
        # The table itself stays: an optimizer may hold on to it.
        present = optimizer.state.get(parameter.tensor)
        if isinstance(present, dict):
            present.clear()
            present.update(state)
        else:
            optimizer.state[parameter.tensor] = state
    table: dict[Any, Any] = optimizer.state
    for name in sorted(set(_shared(optimizer)) - set(shared), key=str):
        del table[name]
    table.update(shared)


def _load_extra(optimizer: Optimizer, extra: dict[str, Any]) -> None:
    """Give an optimizer what its own `state_dict` had added, through its own `load_state_dict`.

    State and groups passed along are the present ones, and are set exactly right after.
    """
    groups = optimizer.param_groups
    optimizer.load_state_dict({**optimizer.state_dict(), **extra})
    if optimizer.param_groups is not groups:
        # Torch makes new tables of groups; whoever holds the old ones must keep seeing the truth.
        optimizer.param_groups = groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """The fields that each group will have; live tensors among them are filled in place.

    Attributes:
        kept: a line for each field that the checkpoint lacks.
        copies: `(group, field) -> copy` of tensor fields, taken when they are installed.
    """

    fields: tuple[dict[str, Any], ...]
    kept: tuple[str, ...]
    copies: dict[tuple[int, str], torch.Tensor]

    def install(self, optimizer: Optimizer) -> tuple[str, ...]:
        for index, (group, fields) in enumerate(zip(optimizer.param_groups, self.fields, strict=True)):
            group.update(fields)
            for name, value in fields.items():
                if isinstance(value, torch.Tensor):
                    self.copies[index, name] = value.detach().clone()
        return self.kept

    def put_back(self, key: str, optimizer: Optimizer) -> tuple[str, ...]:
        """Set again what other objects changed while they were restored; report each."""
        notes: list[str] = []
        for index, (group, fields) in enumerate(zip(optimizer.param_groups, self.fields, strict=True)):
            for name, value in fields.items():
                copy = self.copies.get((index, name))
                if name in group and _is_same(group[name], value, copy):
                    continue
                if copy is not None:
                    value.copy_(copy)
                group[name] = value
                notes.append(
                    f"{key}: another object changed {name} of group {index} during the restore; "
                    "it is back at the saved value"
                )
        return tuple(notes)


def _is_same(found: Any, value: Any, copy: torch.Tensor | None) -> bool:
    if copy is not None:
        return found is value and bool(torch.equal(found, copy))
    return found is value or (type(found) is type(value) and bool(found == value))


def _plan_groups(draft: RestoreDraft, key: str, optimizer: Optimizer) -> _Groups | None:
    stored = draft.take_value(f"{key}/groups")
    if stored is MISSING:
        return None
    if len(stored) != len(optimizer.param_groups):
        draft.problems.append(
            f"{key}: the checkpoint has {len(stored)} parameter groups, "
            f"the live optimizer {len(optimizer.param_groups)}"
        )
        return None
    planned: list[dict[str, Any]] = []
    kept: list[str] = []
    for index, (group, fields) in enumerate(zip(optimizer.param_groups, stored, strict=True)):
        live = {name: value for name, value in group.items() if name not in _NOT_FIELDS}
        planned.append(_unpack(draft, f"{key}/groups/{index}", fields, live))
        kept += [
            f"{key}: group {index} keeps its own {name} = {live[name]!r}; the checkpoint has no such field"
            for name in sorted(set(live) - set(fields))
        ]
    return _Groups(fields=tuple(planned), kept=tuple(kept), copies={})
