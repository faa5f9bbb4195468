"""Where the bytes of a stored tensor go: into the live tensor when it fits, else into a new one of the right layout.

New tensors are allocated, never initialised, and nothing live refers to them until a restore finishes. They keep the
stored dtype; nothing is cast.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardkeep.errors import StateMismatch
from shardkeep.spec.layout import chunk_at
from shardkeep.spec.tensors import LocalTensor, StoredTensor
from shardkeep.state.drafts import RestoreDraft, split_key
from shardkeep.state.dtensor import get_spread, is_dtensor
from shardkeep.state.hostbytes import dtype_name, torch_dtype
from shardkeep.state.subclasses import Parts, check_type, rebuild, take_apart
from shardkeep.state.values import as_mapping, pack_tree, unpack_tree


def plan_tensor(
    draft: RestoreDraft,
    key: str,
    *,
    live: torch.Tensor | None = None,
    like: torch.Tensor | None = None,
    like_key: str = "",
) -> torch.Tensor:
    """Choose the tensor that will hold what is stored under `key`, and add it to the draft.

    Args:
        live: the tensor that is there now; filled in place when dtype, global shape and device fit.
        like: the parameter that an optimizer's state belongs to; a new tensor is laid out as it is.
        like_key: the parameter's own key in the checkpoint, if it is there: how *it* was laid out tells what a
            whole tensor beside it means.

    Raises:
        StateMismatch: not stored, or a layout that cannot be derived; one problem by name.
    """
    if f"{key}#type" in draft.catalog.values:
        tensor = _plan_subclass(draft, key, live=live, like=like, like_key=like_key)
    else:
        stored = draft.find_stored(key)
        if stored is None:
            raise StateMismatch(_explain_absent(draft, key), key=key)
        fits = live is not None and _fits(live, stored, like)
        tensor = live if live is not None and fits else _make(draft, stored, like, like_key)
    draft.add_parts(_describe(key, tensor))
    return tensor


def _explain_absent(draft: RestoreDraft, key: str) -> str:
    if draft.catalog.same_ranks:
        return f"{key}: named by the checkpoint, but it holds no such tensor"
    return f"{key}: kept per rank by the {draft.catalog.world_size} saving ranks; another number of ranks restores"


def plan_tree_tensor(
    draft: RestoreDraft, key: str, live: torch.Tensor | None, *, in_place: bool = True
) -> torch.Tensor:
    """Like `plan_tensor`, for a tensor in a tree of values: a live one of another shape or dtype is replaced.

    Args:
        in_place: fill the live tensor itself where it fits; else it only shows the layout.
    """
    stored = draft.find_stored(key)
    sharded = live is not None and is_dtensor(live)
    if stored is not None and any(text != "R" for text in stored.placements) and not sharded:
        raise StateMismatch(
            f"{key}: stored sharded as {stored.placements} over a mesh, and nothing live says how to lay it out; "
            "expected a DTensor at the same place in the live state",
            key=key,
        )
    return plan_tensor(draft, key, live=live if in_place else None, like=live if sharded else None)


def _describe(key: str, tensor: torch.Tensor) -> Parts:
    section, name = split_key(key)
    return take_apart(key, tensor, section=section, name=name, role="state")


def _fits(live: torch.Tensor, stored: StoredTensor, like: torch.Tensor | None) -> bool:
    local = live._local_tensor if is_dtensor(live) else live  # type: ignore[attr-defined]
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or live.is_meta:
        return False
    home = like.device.type if like is not None else "cpu"
    where = stored.device or home
    same = dtype_name(live.dtype) == stored.dtype and tuple(live.shape) == stored.shape
    if like is None and stored.device is None:
        return same
    return same and live.device.type == where


def _make(draft: RestoreDraft, stored: StoredTensor, like: torch.Tensor | None, like_key: str) -> torch.Tensor:
    dtype = torch_dtype(stored.dtype)
    if like is not None and is_dtensor(like):
        placements = _derive_placements(draft, stored, like, like_key)
        if placements is not None:
            return _make_dtensor(stored.key, stored.shape, dtype, like, placements)
    device = _choose_device(draft, stored, like)
    return torch.empty(stored.shape, dtype=dtype, device=device)


def _choose_device(draft: RestoreDraft, stored: StoredTensor, like: torch.Tensor | None) -> torch.device:
    home = like.device if like is not None else torch.device("cpu")
    if stored.device is None or stored.device == home.type:
        return home
    if draft.device is not None and stored.device != "cpu":
        return draft.device
    module = getattr(torch, stored.device, None)
    if stored.device != "cpu" and not (module is not None and module.is_available()):
        raise StateMismatch(
            f"{stored.key}: stored from a {stored.device} device, and this process has none",
            key=stored.key,
            advice="pass device= to say where such tensors go",
        )
    return torch.device(stored.device)


def _derive_placements(draft: RestoreDraft, stored: StoredTensor, like: Any, like_key: str) -> list[Any] | None:
    """Return the placements of a state beside a sharded parameter; None: it is a plain tensor there.

    State of the parameter's shape is laid out as the parameter. Of other shapes, what was a DTensor at the save (or
    lay beside a plain parameter and has dimensions) keeps the parameter's cut of each dimension that both have in the
    same size, and is replicated along those that were reduced to 1.
    """
    from torch.distributed.tensor import Replicate

    beside = draft.find_stored(like_key) if like_key else None
    was_plain = not stored.placements and (beside is None or bool(beside.placements))
    if stored.shape == tuple(like.shape) and stored.shape and not (was_plain and beside is not None):
        return list(like.placements)
    if not stored.placements and (was_plain or not stored.shape):
        return None
    derived: list[Any] = []
    for placement in like.placements:
        dim = getattr(placement, "dim", None)
        if dim is None:
            derived.append(placement)
            continue
        same_rank = len(stored.shape) == like.ndim
        if same_rank and stored.shape[dim] == like.shape[dim]:
            derived.append(placement)
        elif not stored.shape or (same_rank and stored.shape[dim] == 1):
            derived.append(Replicate())
        else:
            raise StateMismatch(
                f"{stored.key}: shape {stored.shape} beside a parameter of shape {tuple(like.shape)} cut as "
                f"{tuple(map(str, like.placements))}: its layout cannot be derived",
                key=stored.key,
                advice="take one optimizer step before the restore, so that the live state shows the layout",
            )
    return derived


def _make_dtensor(
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    like: Any,
    placements: list[Any],
    local: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return an uninitialised DTensor on the mesh of `like`; talks to no other rank."""
    from torch.distributed.tensor import DTensor

    if local is None:
        sizes = _local_sizes(key, shape, like, placements)
        local = torch.empty(sizes, dtype=dtype, device=like._local_tensor.device)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def _local_sizes(key: str, shape: tuple[int, ...], like: Any, placements: list[Any]) -> tuple[int, ...]:
    if shape == tuple(like.shape) and tuple(placements) == tuple(like.placements):
        return tuple(like._local_tensor.shape)
    coordinate = like.device_mesh.get_coordinate()
    if coordinate is None:
        return (0,) * len(shape)
    texts = get_spread(key, like).placements
    kept = tuple(
        text if getattr(p, "dim", None) is not None else "R" for text, p in zip(texts, placements, strict=True)
    )
    return chunk_at(shape, tuple(like.device_mesh.mesh.shape), kept, tuple(coordinate)).sizes


def _plan_subclass(
    draft: RestoreDraft, key: str, *, live: torch.Tensor | None, like: torch.Tensor | None, like_key: str
) -> torch.Tensor:
    """Choose the tensor for a stored subclass: the live one when it is of that kind, else one made by its rule."""
    name = f"{key}#type"
    stored_type = as_mapping(draft.take_value(name), name)
    if live is not None and not live.is_meta:
        described = _describe(key, live)
        live_type = described.values.get(name)
        if live_type is not None:
            packed = pack_tree(live_type, name, lambda *_: None)
            check_type(key, stored_type, packed)
            if all(_same_inner(draft, entry.local) for entry in described.entries):
                return live
    context = unpack_tree(stored_type, lambda _key: torch.empty(0))
    sharded = like is not None and is_dtensor(like)
    inner: dict[str, torch.Tensor] = {}
    elementwise = False
    for part in stored_type["inner"]:
        stored = draft.find_stored(f"{key}#{part}")
        if stored is None:
            raise StateMismatch(_explain_absent(draft, f"{key}#{part}"), key=key)
        made = _make(draft, stored, like, like_key)
        elementwise = elementwise or is_dtensor(made)
        inner[part] = made._local_tensor if is_dtensor(made) else made  # type: ignore[attr-defined]
    if like is None:
        shape = max((tuple(tensor.shape) for tensor in inner.values()), key=math.prod)
        return rebuild(key, context, inner, shape)
    local_shape = tuple(like._local_tensor.shape) if sharded else tuple(like.shape)  # type: ignore[attr-defined]
    made = rebuild(key, context, inner, local_shape)
    if sharded and elementwise:
        live_like: Any = like
        return _make_dtensor(key, tuple(like.shape), made.dtype, like, list(live_like.placements), local=made)
    return made


def _same_inner(draft: RestoreDraft, local: LocalTensor) -> bool:
    stored = draft.find_stored(local.key)
    return stored is not None and stored.dtype == local.dtype and stored.shape == local.shape
