"""An `nn.Module` taken apart: parameters, persistent buffers, extra state, and how to fill one again.

Names are canonical (see `names`). What `state_dict()` hooks add is kept, what they remove is kept too: a
checkpoint holds the whole state, not a view of it. Nothing here communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardkeep.errors import StateMismatch, UnsupportedState
from shardkeep.spec.tensors import LocalTensor
from shardkeep.state.dtensor import local_of
from shardkeep.state.names import NamedTensor, canonical_names, iter_modules
from shardkeep.state.subclasses import Entry, Parts, take_apart

EncodeTree = Callable[[str, Any], Any]
"""`(path, object) -> value` with tensors replaced by `TensorRef`; given by whoever captures the whole state."""


def capture_model(key: str, module: nn.Module, encode_tree: EncodeTree) -> Parts:
    """Take a module apart to save it.

    Args:
        key: the state key, `model`; tensors are `<key>/<canonical name>`.
        encode_tree: called for every extra state (`<key>/extra/<module name>`) and for every entry that only a
            `state_dict()` hook makes (`<key>/hook/<name>`).

    Returns:
        Entries in order of registration, one for each name of a tied tensor (`aliases.deduplicate` joins
        them), and values by name.

    Raises:
        UnsupportedState: a tensor on the meta device, of an unknown type or layout; names all that are on meta.
    """
    on_meta = find_meta(module)
    if on_meta:
        raise UnsupportedState(
            f"{key}: {len(on_meta)} tensors are on the meta device and have no values: {', '.join(on_meta)}",
            key=key,
            advice="materialise and fill the model before saving it",
        )
    parts = model_parts(key, module)
    values = dict(parts.values)
    for name, owner in sorted(_extra_state_modules(module).items()):
        path = _join(f"{key}/extra", name)
        values[path] = encode_tree(path, owner.get_extra_state())
    for name, (_, value) in sorted(_hook_entries(module).items()):
        path = f"{key}/hook/{name}"
        values[path] = encode_tree(path, value)
    return Parts(entries=parts.entries, values=values)


def model_parts(key: str, module: nn.Module) -> Parts:
    """Return the entries of a module, as sources or as targets, with the types of tensor subclasses.

    FSDP2 modules that a forward without backward left unsharded are resharded first: local, no communication;
    the next forward gathers the same values again.
    """
    reshard(module)
    entries: list[Entry] = []
    values: dict[str, Any] = {}
    for named in canonical_names(module):
        if not named.persistent:
            continue
        parameter = named.kind == "parameter"
        trainable = named.tensor.requires_grad if parameter else None
        parts = take_apart(
            f"{key}/{named.name}",
            named.tensor,
            section=get_section(key, trainable=trainable),
            name=named.name,
            role="parameter" if parameter else "buffer",
            trainable=trainable,
        )
        entries.extend(parts.entries)
        values.update(parts.values)
    return Parts(entries=tuple(entries), values=values)


def model_targets(key: str, module: nn.Module) -> list[LocalTensor]:
    """Return every tensor that a restore has to fill; the pieces are where the bytes go.

    Tied tensors come once for each name. Tensors on the meta device are listed too (`find_meta` names them);
    they refuse bytes until `materialise` gives them memory.
    """
    return [entry.local for entry in model_parts(key, module).entries]


def get_section(key: str, *, trainable: bool | None) -> str:
    """Return the group of files for a tensor of the module at state key `key`; frozen parameters have their own."""
    if trainable is not False:
        return key
    return "frozen" if key == "model" else f"{key}-frozen"


def restore_model_values(key: str, module: nn.Module, values: Mapping[str, Any]) -> None:
    """Give extra states and hook entries back, after all tensors are filled.

    Args:
        values: name -> live value, tensors in place of `TensorRef`; names outside `<key>/extra` and `<key>/hook`
            are ignored.

    Raises:
        StateMismatch: a module has extra state and none is stored, or the reverse; lists every name.
    """
    modules, hooks = _extra_state_modules(module), _hook_entries(module)
    wanted = {_join(f"{key}/extra", name) for name in modules} | {f"{key}/hook/{name}" for name in hooks}
    stored = {name for name in values if name == f"{key}/extra" or name.startswith((f"{key}/extra/", f"{key}/hook/"))}
    problems = [f"{name}: the live model has it, the checkpoint does not" for name in sorted(wanted - stored)]
    problems += [f"{name}: stored, the live model has no such state" for name in sorted(stored - wanted)]
    if problems:
        raise StateMismatch(
            f"the extra state of {key!r} differs from the checkpoint's",
            problems=problems,
            key=key,
            advice="build the model with the same code and settings as in the saving run",
        )
    for name, owner in sorted(modules.items()):
        owner.set_extra_state(values[_join(f"{key}/extra", name)])
    if hooks:
        # The modules that made these entries read them back through load_state_dict. They get a whole
        # dictionary, as they would from torch; all else in it is the live tensor itself.
        whole = module.state_dict()
        whole.update({raw: values[f"{key}/hook/{name}"] for name, (raw, _) in hooks.items()})
        module.load_state_dict(whole)


def reshard(module: nn.Module) -> None:
    """Put FSDP2 modules back to their sharded parameters, which hold the current values. Local.

    Raises:
        UnsupportedState: a module stays unsharded.
    """
    fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if fsdp is None:
        return
    for name, child in module.named_modules():
        if not isinstance(child, fsdp):
            continue
        live: Any = child
        live.reshard()
        state = live._get_fsdp_state()
        # Singular up to torch 2.10.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            if group is not None and not group.is_sharded:
                # reshard() does nothing for a group that believes itself inside a forward; torch's own
                # state_dict hook calls this too.
                group._to_sharded()
                if not group.is_sharded:
                    raise UnsupportedState(f"module {name!r} stays unsharded", advice="save between training steps")


def find_meta(module: nn.Module) -> list[str]:
    """Return the names of parameters and persistent buffers that are on the meta device."""
    return [named.name for named in canonical_names(module) if named.persistent and _is_meta(named.tensor)]


def unfilled_after_materialise(module: nn.Module) -> list[str]:
    """Return the names of meta tensors that no checkpoint fills: non-persistent buffers, such as rotary tables.

    To be asked while they are on the meta device. After `materialise` they hold whatever was in memory until the
    model's own code computes them.
    """
    return [named.name for named in canonical_names(module) if not named.persistent and _is_meta(named.tensor)]


def materialise(module: nn.Module, device: torch.device | str) -> list[str]:
    """Give every meta tensor uninitialised memory on `device`; others, and ties between parameters, stay.

    Returns:
        The names of `unfilled_after_materialise`: the caller must compute these before the model is used.
    """
    unfilled = unfilled_after_materialise(module)
    places: dict[int, list[NamedTensor]] = {}
    for named in canonical_names(module):
        places.setdefault(id(named.tensor), []).append(named)
    made: dict[int, Tensor] = {}

    def give_memory(tensor: Tensor) -> Tensor:
        if not _is_meta(tensor):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=device)
        return made[id(tensor)]

    with torch.no_grad():
        # Through _apply, because FSDP2 renews its view of the parameters there.
        module._apply(give_memory)  # type: ignore[no-untyped-call]  # torch has no types here
    for same in places.values():
        first = same[0]
        tensor = _table(first)[first.attribute]
        for other in same[1:]:
            _table(other)[other.attribute] = tensor
    return unfilled


def _is_meta(tensor: Tensor) -> bool:
    return local_of(tensor).is_meta


def _table(named: NamedTensor) -> dict[str, Any]:
    table: dict[str, Any] = named.module._parameters if named.kind == "parameter" else named.module._buffers
    return table


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if name else prefix


def _extra_state_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return canonical name -> module for modules with extra state; a module with two names by its first."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for place in iter_modules(module):
        has = getattr(type(place.module), "get_extra_state", None) is not nn.Module.get_extra_state
        if has and id(place.module) not in seen:
            seen.add(id(place.module))
            found[place.name] = place.module
    return found


def _hook_entries(module: nn.Module) -> dict[str, tuple[str, Any]]:
    """Return canonical name -> (raw name, value) of what only the `state_dict()` code of some module makes.

    Entries that are registered tensors under another name are left out: they are stored under their own.
    """
    places = list(iter_modules(module))
    if not any(_makes_entries(place.module) for place in places):
        return {}
    named = list(canonical_names(module))
    known = {entry.raw_name for entry in named} | {entry.name for entry in named}
    for place in places:
        known.update(f"{prefix}._extra_state".removeprefix(".") for prefix in (place.raw_name, place.name))
    identities = {_identity(entry.tensor) for entry in named}
    raw_to_name = {place.raw_name: place.name for place in places}
    found: dict[str, tuple[str, Any]] = {}
    for raw, value in module.state_dict().items():
        name = _canonical(raw, raw_to_name)
        if raw in known or name in known:
            continue
        if isinstance(value, Tensor) and _identity(value) in identities:
            continue
        found[name] = (raw, value)
    return found


def _makes_entries(module: nn.Module) -> bool:
    cls = type(module)
    own_code = any(
        getattr(cls, method) is not getattr(nn.Module, method) for method in ("state_dict", "_save_to_state_dict")
    )
    return own_code or bool(module._state_dict_hooks) or bool(module._state_dict_pre_hooks)


def _canonical(raw: str, raw_to_name: Mapping[str, str]) -> str:
    for prefix in _prefixes(raw):
        if prefix in raw_to_name:
            rest = raw[len(prefix) :].removeprefix(".")
            return f"{raw_to_name[prefix]}.{rest}".removeprefix(".")
    return raw


def _prefixes(raw: str) -> Iterator[str]:
    """Yield the module paths that a dotted name may lie in, the longest first."""
    parts = raw.split(".")
    for count in range(len(parts) - 1, -1, -1):
        yield ".".join(parts[:count])


def _identity(tensor: Tensor) -> object:
    local = local_of(tensor)
    if (
        local.is_meta
        or local.layout != torch.strided
        or type(local) not in (Tensor, nn.Parameter)
        or not local.numel()
    ):
        return id(tensor)
    return local.untyped_storage().data_ptr(), local.storage_offset(), tuple(local.shape), local.dtype
