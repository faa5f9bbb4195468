"""A live training state taken apart on one rank at one moment: tensors described, plain values copied.

Nothing is changed: no parameter, gradient, mode or random stream. Tensors' bytes are not copied here (the engine
stages them); everything else is, so that the caller may go on with it at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from shardkeep.format.names import is_section
from shardkeep.spec.tensors import Captured
from shardkeep.state.aliases import deduplicate
from shardkeep.state.devices import wait_for_queued
from shardkeep.state.drafts import CaptureDraft, split_key
from shardkeep.state.gradients import capture_gradients
from shardkeep.state.models import capture_model
from shardkeep.state.names import parameter_names
from shardkeep.state.objects import Item, capture_item, iter_items, pack_captured
from shardkeep.state.optimizers import Names, capture_optimizer
from shardkeep.state.rng import capture_rng
from shardkeep.state.subclasses import Parts
from shardkeep.state.values import find_tensors


def capture(state: Mapping[str, Any], *, rng: bool = True) -> Captured:
    """Take the state of this rank apart.

    Args:
        state: names -> models, optimizers, objects with `state_dict` and `load_state_dict`, generators, tensors,
            plain values, and dicts and lists of these. `rng` and `rank` are reserved.
        rng: capture the random streams of this process too, as the value `rng`.

    Raises:
        UsageError: a name that cannot stand in a checkpoint, or two things of one name.
        UnsupportedState: something that cannot be stored exactly without pickle; names its path.
    """
    items = list(iter_items(state))
    draft = CaptureDraft()
    # Models first: of several names of one tensor, the model's is the one it is stored under.
    for item in (item for item in items if item.kind == "model"):
        _capture_model(draft, item)
    # ORDER: after the models, which are sharded again now; an FSDP2 module that an evaluation left unsharded has
    # other tensors in place of the parameters that its optimizer knows.
    names = collect_names(items)
    for item in items:
        if item.kind == "optimizer":
            capture_optimizer(draft, item.key, item.value, names)
        elif item.kind == "gradients":
            capture_gradients(draft, item.key, item.value)
        elif item.kind != "model":
            capture_item(draft, item)
    if rng:
        draft.add_value("rng", capture_rng(), per_rank=True)
    found = deduplicate(draft.entries)
    wait_for_queued(found.tensors)
    return Captured(
        tensors=found.tensors,
        aliases=found.aliases,
        views=found.views,
        values={name: draft.values[name] for name in sorted(draft.values)},
        per_rank_values=frozenset(draft.per_rank_values),
    )


def collect_names(items: Iterable[Item]) -> Names:
    """Return who owns each tensor that an optimizer may hold: models first, then the state itself."""
    items = list(items)
    names = dict(parameter_names({item.key: item.value for item in items if item.kind == "model"}))
    for item in items:
        if item.kind in ("tensor", "value"):
            for path, tensor in find_tensors(item.value, item.key).items():
                names.setdefault(id(tensor), ("", path))
    return names


def _capture_model(draft: CaptureDraft, item: Item) -> None:
    def encode(path: str, tree: Any) -> Any:
        return pack_captured(draft, path, tree)

    draft.add_parts(in_own_section(item.key, capture_model(item.key, item.value, encode)))


def in_own_section(key: str, parts: Parts) -> Parts:
    """Move the entries of a model whose key is no section's name (`models/gen`) to one made of its first part."""
    if is_section(key):
        return parts
    section, inner = split_key(key)
    prefix = f"{inner}/" if "/" in key else ""
    moved = []
    for entry in parts.entries:
        suffix = "-frozen" if entry.local.trainable is False else ""
        local = dataclasses.replace(entry.local, section=f"{section}{suffix}", name=f"{prefix}{entry.local.name}")
        moved.append(dataclasses.replace(entry, local=local))
    return Parts(entries=tuple(moved), values=parts.values)
