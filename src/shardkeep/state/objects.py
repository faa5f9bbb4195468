"""Everything in a state that is neither a model nor an optimizer: which kind each thing is, taken apart and put back.

The state is a table of names. A dict, list or tuple is walked when there is something live in it (a module, an
optimizer, a generator, anything with `state_dict` and `load_state_dict`, a wrapper); its parts are joined to the name
with `/`. Otherwise it is one plain value. On a restore, tensors are filled in place; a mutable container that is a
plain value keeps its identity and gets new content; anything else plain is set anew in the table or list that holds
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from shardkeep.errors import CheckpointError, StateMismatch, UnsupportedState, UsageError
from shardkeep.format.names import is_section
from shardkeep.format.value_atoms import is_plain_text
from shardkeep.format.value_encoder import MAX_DEPTH
from shardkeep.spec.tensors import TensorRef
from shardkeep.state.destinations import plan_tree_tensor
from shardkeep.state.drafts import MISSING, CaptureDraft, RestoreDraft, Stage, split_key
from shardkeep.state.gradients import Gradients
from shardkeep.state.rng import capture_generator, is_generator, plan_generator
from shardkeep.state.subclasses import take_apart
from shardkeep.state.values import escape, find_tensors, format_section, iter_refs, pack_tree, unpack_tree
from shardkeep.state.wrappers import PerRank, Sharded

Kind = Literal["model", "optimizer", "gradients", "generator", "tensor", "object", "value"]

RESERVED: Final = ("rank", "rng")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing of a state.

    Attributes:
        key: its full name.
        value: the live thing, out of its `PerRank` if it was in one.
        per_rank: the `PerRank` it was in.
        holder, slot: `holder[slot]` is where it was found.
    """

    key: str
    kind: Kind
    value: Any
    per_rank: PerRank | None
    holder: Any
    slot: Any


def iter_items(state: Mapping[str, Any]) -> Iterator[Item]:
    """Yield the things of a state by ascending names of its top level.

    Raises:
        UsageError: a name that cannot stand in a checkpoint.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            f"the state is a {type(state).__name__}; expected a table of names",
            advice='pass a dict such as {"model": model, "optimizer": optimizer}',
        )
    for key in state:
        _check_key(key)
    for key in sorted(state):
        yield from _walk(key, state[key], state, key, frozenset())


def _check_key(key: object) -> None:
    fits = isinstance(key, str) and key and is_plain_text(key) and "/" not in key and key[0] not in "$."
    if not fits or not is_section(format_section(str(key))):
        raise UsageError(
            f"the name {key!r} in the state: expected a text of at most about 100 characters, without '/', "
            "that does not begin with '$' or '.'",
            advice="rename it",
        )
    if key in RESERVED:
        raise UsageError(
            f"the name {key!r} in the state is reserved", advice="rename it; RNG streams are saved by themselves"
        )


def _walk(key: str, node: Any, holder: Any, slot: Any, above: frozenset[int]) -> Iterator[Item]:
    per_rank = node if isinstance(node, PerRank) else None
    value = per_rank.value if per_rank is not None else node
    kind = _find_kind(value)
    if per_rank is None and kind == "object" and _is_stream(value):
        # Each rank reads data of its own: equal positions of two ranks are chance, not one position.
        per_rank = PerRank(value, getattr(value, "merge_states", None))
    if per_rank is not None and (kind in ("model", "optimizer", "gradients") or isinstance(value, Sharded)):
        raise UsageError(f"{key}: a {type(value).__name__} inside PerRank; put it into the state by itself", key=key)
    if kind != "value" or per_rank is not None or not _holds_live(value, above):
        yield Item(key=key, kind=kind, value=value, per_rank=per_rank, holder=holder, slot=slot)
        return
    if id(value) in above:
        raise UnsupportedState(f"{key}: a {type(value).__name__} that contains itself cannot be stored", key=key)
    above |= {id(value)}
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str) or not name:
                raise UsageError(
                    f"{key}: its key {name!r} names a live object; expected a text", key=key, advice="rename it"
                )
        for name in sorted(value):
            yield from _walk(f"{key}/{escape(name)}", value[name], value, name, above)
        return
    for index, child in enumerate(value):
        yield from _walk(f"{key}/{index}", child, value, index, above)


def _find_kind(value: Any) -> Kind:
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, Gradients):
        return "gradients"
    if isinstance(value, torch.Tensor | Sharded):
        return "tensor"
    if is_generator(value):
        return "generator"
    if not isinstance(value, type) and all(
        callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
    ):
        return "object"
    return "value"


def _is_stream(value: Any) -> bool:
    """Say whether it is a loader whose position is this rank's alone; `ResumableLoader`'s is everybody's."""
    return hasattr(type(value), "__iter__") and not getattr(value, "is_global_position", False)


def _refuse_source(item: Item) -> None:
    """Refuse sources of data that say too little, or less than they seem to say, about where they are."""
    base = next((base for base in type(item.value).__mro__ if base.__name__ == "IterableDataset"), None)
    lossy = base is not None and base.__module__.split(".")[0] == "datasets"
    if lossy or type(item.value) is torch.utils.data.DataLoader:
        raise UnsupportedState(
            f"{item.key}: a {type(item.value).__module__.split('.')[0]} {type(item.value).__name__} by itself: its "
            "position is not saved, or not all of it",
            key=item.key,
            advice=f"use sk.ResumableLoader, or put sk.StreamLoader({item.key}) into the state and loop over that",
        )


def _holds_live(node: Any, above: frozenset[int]) -> bool:
    """Say whether there is anything in it but plain values and tensors."""
    if isinstance(node, PerRank | Sharded):
        return True
    if not isinstance(node, Mapping | list | tuple):
        return _find_kind(node) not in ("value", "tensor")
    if id(node) in above or len(above) > MAX_DEPTH:
        return False
    children: Iterable[Any] = node.values() if isinstance(node, Mapping) else node
    return any(_holds_live(child, above | {id(node)}) for child in children)


def capture_item(draft: CaptureDraft, item: Item) -> None:
    """Add a tensor, generator, object or plain value to the draft; reads only.

    Raises:
        UnsupportedState: something that cannot be stored, by its path.
    """
    per_rank = item.per_rank is not None
    _refuse_source(item)
    if item.kind == "tensor":
        _capture_tensor(draft, item.key, item.value, per_rank=per_rank)
        return
    if item.kind == "generator":
        draft.add_value(item.key, capture_generator(item.value), per_rank=per_rank)
        return
    tree = item.value if item.kind == "value" else _read_state(item)
    draft.add_value(item.key, pack_captured(draft, item.key, tree, per_rank=per_rank), per_rank=per_rank)


def check_item(item: Item) -> None:
    """Raise what `capture_item` would raise of a plain value or a source of data; calls nothing of the state."""
    _refuse_source(item)
    if item.kind == "value":
        pack_tree(item.value, item.key, lambda tensor, at: TensorRef(at))


def pack_captured(draft: CaptureDraft, key: str, tree: Any, *, per_rank: bool = False) -> Any:
    """Pack a tree; its tensors join the draft under their paths."""

    def take(tensor: torch.Tensor, at: str) -> TensorRef:
        _capture_tensor(draft, at, tensor, per_rank=per_rank)
        return TensorRef(at)

    return pack_tree(tree, key, take)


def _capture_tensor(draft: CaptureDraft, key: str, value: Any, *, per_rank: bool) -> None:
    draft.add_parts(_take(key, PerRank(value) if per_rank else value))


def _take(key: str, value: Any) -> Any:
    """Describe a tensor that stands in the state by itself."""
    section, name = split_key(key)
    inner = value.value if isinstance(value, PerRank) else value
    parameter = isinstance(inner, nn.Parameter)
    device = inner.device.type if isinstance(inner, torch.Tensor) and inner.device.type != "cpu" else None
    return take_apart(
        key,
        value,
        section=section,
        name=name,
        role="parameter" if parameter else "state",
        trainable=inner.requires_grad if parameter else None,
        device=device,
    )


def _read_state(item: Item) -> Any:
    try:
        state = item.value.state_dict()
    except CheckpointError:
        raise
    except Exception as error:
        raise UnsupportedState(f"{item.key}: its state_dict() raised {error!r}", key=item.key) from error
    wrapped = getattr(item.value, "optimizer", None)
    if isinstance(wrapped, Optimizer) and isinstance(state, Mapping) and {"state", "param_groups"} <= set(state):
        raise UnsupportedState(
            f"{item.key}: a {type(item.value).__name__} around an optimizer, whose state_dict() names parameters "
            "by position",
            key=item.key,
            advice=f"put the optimizer itself ({item.key}.optimizer) into the state",
        )
    return state


def plan_item(draft: RestoreDraft, item: Item) -> None:
    """Plan a tensor's, generator's, object's or plain value's restore."""
    _refuse_source(item)
    if item.kind == "tensor":
        if item.per_rank is not None and not draft.catalog.same_ranks:
            draft.miss(
                f"{item.key}: a tensor per rank, saved by {draft.catalog.world_size} ranks; another number restores"
            )
            return
        draft.want_parts(_take(item.key, item.per_rank if item.per_rank is not None else item.value))
        return
    stored = _take_stored(draft, item)
    if stored is MISSING:
        return
    if item.kind == "generator":
        _plan_generator(draft, item, stored)
    elif item.kind == "object":
        _plan_object(draft, item, stored)
    else:
        live = find_tensors(item.value, item.key)
        _plan_value(draft, item, unpack_planned(draft, stored, live))


def _take_stored(draft: RestoreDraft, item: Item) -> Any:
    """Return the stored value of an item; of a `PerRank` on another world size, what its merge makes of all."""
    merge = item.per_rank.merge if item.per_rank is not None else None
    differing = draft.catalog.differing.get(item.key)
    draft.consumed_values.update([item.key] if differing is not None else [])
    if item.kind == "object" and merge is None and differing is not None and not draft.catalog.same_ranks:
        draft.miss(
            f"{item.key}: the positions of {draft.catalog.world_size} ranks in a {type(item.value).__name__}, and "
            f"another number of ranks restores; resume with {draft.catalog.world_size} ranks, use "
            "sk.ResumableLoader, or wrap it in PerRank(..., merge=...) to say what they become"
        )
        return MISSING
    if merge is None or draft.catalog.same_ranks or differing is None:
        return draft.take_value(item.key)
    everyone = list(differing)  # not within the try: it reads, and storage that fails is not the merge's failure
    try:
        ranks = [unpack_tree(value, _refuse_merged_tensor) for value in everyone]
        return pack_tree(merge(ranks), item.key, lambda tensor, at: _refuse_merged_tensor(at))
    except StateMismatch as error:
        draft.problems.append(f"{item.key}: {error.message}" + (f"; {error.advice}" if error.advice else ""))
        return MISSING
    except Exception as error:  # noqa: BLE001  # the user's own function
        draft.problems.append(f"{item.key}: its merge failed: {error}")
        return MISSING


def _refuse_merged_tensor(key: str) -> Any:
    raise StateMismatch(f"{key}: tensors cannot be merged over ranks; keep plain values or arrays in it", key=key)


def _plan_generator(draft: RestoreDraft, item: Item, stored: Any) -> None:
    try:
        setter = plan_generator(item.value, stored)
    except Exception as error:  # noqa: BLE001  # every way a parser fails means one thing: damaged or foreign
        draft.miss(f"{item.key}: this generator cannot be restored: {error or type(error).__name__}")
        return

    def put() -> Iterable[str]:
        setter()
        return ()

    draft.then(Stage.RNG, item.key, put)


def _plan_object(draft: RestoreDraft, item: Item, stored: Any) -> None:
    # A state_dict() may have effects (some loaders start their workers): it is called only when a sharded tensor
    # needs the live layout.
    spread = [draft.find_stored(key) for key in iter_refs(stored)]
    sharded = any(tensor is not None and tensor.placements for tensor in spread)
    live = find_tensors(item.value.state_dict(), item.key) if sharded else {}
    # Not into the live tensors themselves: what its state_dict() returns may be the object's own to check first.
    content = unpack_planned(draft, stored, live, in_place=False)
    _check_content(draft, item, content)
    stage = Stage.LOADERS if hasattr(type(item.value), "__iter__") else Stage.OBJECTS

    def load() -> Iterable[str]:
        try:
            item.value.load_state_dict(content)
        except CheckpointError:
            raise
        except Exception as error:
            raise StateMismatch(
                f"{item.key}: its load_state_dict() raised {error!r}; other parts of the state were restored already",
                key=item.key,
                advice=f"build {item.key} with the same settings as in the saving run, and start the process again",
            ) from error
        return ()

    draft.then(stage, item.key, load)


def _check_content(draft: RestoreDraft, item: Item, content: Any) -> None:
    """Ask an object that can tell (`check_state_dict`) before anything is restored."""
    check = getattr(item.value, "check_state_dict", None)
    if not callable(check):
        return
    try:
        check(content)
    except (StateMismatch, UsageError) as error:
        found = getattr(error, "problems", ()) or (error.message,)
        draft.problems += [
            f"{item.key}: {problem}" + (f"; {error.advice}" if error.advice else "") for problem in found
        ]


def unpack_planned(
    draft: RestoreDraft, stored: Any, live: Mapping[str, torch.Tensor], *, in_place: bool = True
) -> Any:
    """Return the live tree of a stored one whose tensors are destinations, to be filled before it is used.

    Args:
        live: present tensors by path; filled themselves where they fit and `in_place`, else only a pattern.
    """

    def give(key: str) -> torch.Tensor:
        present = live.get(key)
        try:
            return plan_tree_tensor(draft, key, present, in_place=in_place)
        except CheckpointError as error:
            draft.problems.append(error.message)
            return torch.empty(0)

    return unpack_tree(stored, give)


def _plan_value(draft: RestoreDraft, item: Item, content: Any) -> None:
    live = item.value
    settable = isinstance(item.holder, MutableMapping | list)
    refillable = isinstance(live, dict | set | list | bytearray) or (
        isinstance(live, deque) and live.maxlen == getattr(content, "maxlen", None)
    )
    if refillable and type(live) is type(content):
        draft.then(Stage.VALUES, item.key, lambda: _refill(live, content))
        return
    if not settable:
        draft.problems.append(
            f"{item.key}: a {type(live).__name__} in a {type(item.holder).__name__}, which cannot be given a new one"
        )
        return
    value = content if item.per_rank is None else PerRank(content, item.per_rank.merge)

    def put() -> Iterable[str]:
        item.holder[item.slot] = value
        return ()

    draft.then(Stage.VALUES, item.key, put)


def _refill(live: Any, content: Any) -> Iterable[str]:
    """Give a container new content; whoever holds it sees it."""
    if isinstance(live, dict | set):
        live.clear()
        live.update(content)
    elif isinstance(live, deque):
        live.clear()
        live.extend(content)
    else:
        live[:] = content
    return ()
