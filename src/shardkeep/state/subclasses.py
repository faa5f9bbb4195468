"""Tensor subclasses: taken apart by a declared rule, or refused by name. Nothing is guessed, nothing is pickled.

A rule lives on the class itself, so there is no table that depends on import order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from shardkeep.errors import StateMismatch, UnsupportedState, UsageError
from shardkeep.spec.tensors import LocalTensor, Role
from shardkeep.state.dtensor import PLAIN, cut_pieces, describe_tensor, get_spread, is_dtensor, local_of, settle
from shardkeep.state.hostbytes import check_storable, dtype_name
from shardkeep.state.wrappers import PerRank, Sharded

Flatten = Callable[[Any], tuple[Mapping[str, torch.Tensor], Any]]
Unflatten = Callable[[Mapping[str, torch.Tensor], Any, tuple[int, ...]], torch.Tensor]

_RULE: Final = "_shardkeep_rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """How a subclass is taken apart. `flatten` None: its own strided bytes are all it is."""

    flatten: Flatten | None
    unflatten: Unflatten | None
    elementwise: frozenset[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A described tensor beside the live objects it was made from.

    Attributes:
        local: the description.
        owner, slot: the live object, and which of its inner tensors; two names with the same are one tensor.
        data: this rank's plain tensor, or None where it is several.
    """

    local: LocalTensor
    owner: object
    data: torch.Tensor | None
    slot: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One value of a state taken apart: tensors, and the values (`<key>#type`) that rebuild a subclass."""

    entries: tuple[Entry, ...]
    values: dict[str, Any]


def register_tensor_type(
    cls: type[torch.Tensor],
    flatten: Flatten | None = None,
    unflatten: Unflatten | None = None,
    *,
    elementwise: Sequence[str] | None = None,
) -> None:
    """Declare how tensors of exactly the class `cls` are stored.

    Args:
        cls: the subclass; classes derived from it need a rule of their own.
        flatten: `tensor -> ({name: inner tensor}, context)`. The inner tensors must be the live ones, not copies: a
            restore writes into them. The context is a plain value (numbers, texts, lists, dtypes).
        unflatten: `(inner, context, shape) -> tensor`, the way back; `shape` is that of the result.
            Both left out: a class with `__tensor_flatten__` is taken apart by it; any other is stored as the plain
            tensor that its bytes are.
        elementwise: names of the inner tensors that have one element for each of the outer tensor, and so are
            sharded as it is. Default: those of the same shape. Others of a sharded tensor are kept per rank.

    Raises:
        UsageError: only one of the two functions is given, or `cls` is not a tensor subclass.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.Tensor) and cls is not torch.Tensor):
        raise UsageError(f"register_tensor_type: expected a subclass of torch.Tensor, found {cls!r}")
    if (flatten is None) != (unflatten is None):
        raise UsageError(f"register_tensor_type({cls.__name__}): give both flatten and unflatten, or neither")
    if flatten is None and hasattr(cls, "__tensor_flatten__"):
        flatten, unflatten = _protocol_flatten, _protocol_unflatten(cls)
    names = None if elementwise is None else frozenset(elementwise)
    setattr(cls, _RULE, TensorRule(flatten=flatten, unflatten=unflatten, elementwise=names))


def type_name(cls: type) -> str:
    """Return the name under which a class stands in a checkpoint."""
    return f"{cls.__module__}.{cls.__qualname__}"


def find_rule(cls: type) -> TensorRule | None:
    """Return the rule declared for exactly this class."""
    rule = cls.__dict__.get(_RULE)
    return rule if isinstance(rule, TensorRule) else None


def find_registered(name: str) -> type[torch.Tensor] | None:
    """Return the class with a rule whose `type_name` is `name`. Imports nothing: it must be defined already."""
    for cls in _iter_subclasses(torch.Tensor):
        if find_rule(cls) is not None and type_name(cls) == name:
            return cls
    return None


def resolve_plain(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its strided bytes are all it is; waits for a pending functional collective.

    Raises:
        UnsupportedState: a subclass without a rule, or see `check_storable`; names the path and the type.
    """
    cls = type(tensor)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        check_storable(path, tensor)
        return tensor
    if (settled := settle(tensor)) is not tensor:
        return resolve_plain(path, settled)
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedState(
            f"{path}: the parameter of a lazy module has no shape yet",
            key=path,
            advice="run one forward pass first, so that lazy modules are initialised",
        )
    rule = find_rule(cls)
    if rule is not None and rule.flatten is None:
        return tensor
    raise UnsupportedState(
        f"{path}: no rule says how a tensor of type {type_name(cls)} is stored",
        key=path,
        advice=f"call shardkeep.register_tensor_type({cls.__name__}, flatten, unflatten) before saving",
    )


def take_apart(
    key: str,
    value: torch.Tensor | Sharded | PerRank,
    *,
    section: str,
    name: str,
    role: Role,
    trainable: bool | None = None,
    device: str | None = None,
    owner: object = None,
) -> Parts:
    """Describe any tensor of a state: plain, DTensor, wrapped, or of a registered subclass.

    A subclass becomes one tensor `<key>#<inner name>` for each inner tensor and a value `<key>#type`. Used in
    the same way to save and to find the targets of a restore.

    Raises:
        UnsupportedState: see `describe_tensor` and `resolve_plain`.
    """
    owner = value if owner is None else owner
    if isinstance(value, torch.Tensor) and type(value) in PLAIN:
        plain = describe_tensor(key, value, section=section, name=name, role=role, trainable=trainable, device=device)
        return Parts(entries=(Entry(local=plain, owner=owner, data=value),), values={})
    words = {"role": role, "trainable": trainable, "device": device, "section": section}
    inner = value.value if isinstance(value, PerRank) else value
    if isinstance(inner, Sharded):
        for tensor, _ in inner.pieces:
            resolve_plain(key, tensor)
        local = describe_tensor(key, value, name=name, **words)  # type: ignore[arg-type]  # words is a mixed dict
        return Parts(entries=(Entry(local=local, owner=owner, data=None),), values={})
    if not isinstance(inner, torch.Tensor):
        raise UnsupportedState(f"{key}: expected a tensor, found {type_name(type(inner))}", key=key)
    local_tensor = local_of(inner)
    rule = find_rule(type(local_tensor))
    if rule is not None and rule.flatten is not None:
        return _take_subclass_apart(key, value, local_tensor, rule, name=name, owner=owner, **words)
    resolved = resolve_plain(key, local_tensor)
    if resolved is not local_tensor and not is_dtensor(inner):
        value = PerRank(resolved) if isinstance(value, PerRank) else resolved
    local = describe_tensor(key, value, name=name, **words)  # type: ignore[arg-type]
    return Parts(entries=(Entry(local=local, owner=owner, data=resolved),), values={})


def _take_subclass_apart(
    key: str, value: Any, local: torch.Tensor, rule: TensorRule, *, name: str, owner: object, **words: Any
) -> Parts:
    assert rule.flatten is not None
    inner, context = rule.flatten(local)
    described = {"type": type_name(type(local)), "inner": sorted(inner), "context": context}
    entries: list[Entry] = []
    spread = get_spread(key, value) if is_dtensor(value) else None
    for part, tensor in sorted(inner.items()):
        path = f"{key}#{part}"
        tensor = resolve_plain(path, tensor)
        same = part in rule.elementwise if rule.elementwise is not None else tensor.shape == local.shape
        if spread is not None and same:
            check_storable(path, tensor)
            described_tensor = LocalTensor(
                key=path,
                name=f"{name}#{part}",
                dtype=dtype_name(tensor.dtype),
                shape=spread.shape,
                pieces=cut_pieces(path, spread, tensor if spread.local is not None else None),
                mesh=spread.mesh,
                placements=spread.placements,
                explicit=spread.explicit,
                **words,
            )
        else:
            cut = spread is not None and any(
                text != "R" and size > 1
                for text, size in zip(spread.placements, spread.mesh.shape if spread.mesh else (), strict=True)
            )
            per_rank = cut or (spread is not None and spread.explicit) or isinstance(value, PerRank)
            wrapped = PerRank(tensor) if per_rank else tensor
            described_tensor = describe_tensor(path, wrapped, name=f"{name}#{part}", **words)
        entries.append(Entry(local=described_tensor, owner=owner, data=tensor, slot=part))
    return Parts(entries=tuple(entries), values={f"{key}#type": described})


def check_type(key: str, stored: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Compare the `<key>#type` values of a checkpoint and of the live tensor it goes into.

    Raises:
        StateMismatch: another class, other inner tensors or another context.
    """
    problems = [
        f"{key}: {field} stored {stored.get(field)!r}, live {live.get(field)!r}"
        for field in ("type", "inner", "context")
        if stored.get(field) != live.get(field)
    ]
    if problems:
        raise StateMismatch(
            f"{key}: the stored tensor and the live one are of different kinds",
            problems=problems,
            key=key,
            advice="build the model with the same tensor subclass and settings as in the saving run",
        )


def rebuild(
    key: str, stored: Mapping[str, Any], inner: Mapping[str, torch.Tensor], shape: Sequence[int]
) -> torch.Tensor:
    """Make a tensor subclass of its inner tensors, for state that has no live counterpart.

    Args:
        stored: the value `<key>#type`.
        shape: of the result on this rank.

    Raises:
        UnsupportedState: the class has no rule in this process.
    """
    name = str(stored["type"])
    cls = find_registered(name)
    rule = find_rule(cls) if cls is not None else None
    if rule is None or rule.unflatten is None:
        raise UnsupportedState(
            f"{key}: stored as {name}, for which this process has no rule",
            key=key,
            advice=f"import the module of {name} and call shardkeep.register_tensor_type for it before restoring",
        )
    return rule.unflatten(inner, stored["context"], tuple(shape))


def _iter_subclasses(cls: type[torch.Tensor]) -> Iterator[type[torch.Tensor]]:
    for child in type.__subclasses__(cls):
        yield child
        yield from _iter_subclasses(child)


def _protocol_flatten(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def _protocol_unflatten(cls: Any) -> Unflatten:
    def unflatten(inner: Mapping[str, torch.Tensor], context: Any, shape: tuple[int, ...]) -> torch.Tensor:
        strides = torch.empty(shape, device="meta").stride()
        tensor: torch.Tensor = cls.__tensor_unflatten__(dict(inner), context, shape, strides)
        return tensor

    return unflatten
