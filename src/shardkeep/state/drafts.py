"""What capturing and planning a restore gather on their way through a state, before it is checked and frozen."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from shardkeep.errors import StateMismatch, UnsupportedState, UsageError
from shardkeep.spec.tensors import Catalog, StoredTensor
from shardkeep.state.casts import CastBytes, can_cast
from shardkeep.state.hostbytes import torch_dtype
from shardkeep.state.subclasses import Entry, Parts, check_type
from shardkeep.state.values import format_section, pack_tree

Action = Callable[[], Iterable[str]]


class _Missing(enum.Enum):
    MISSING = "missing"


MISSING: Final = _Missing.MISSING
_ON_META: Final = "give it memory first, for example with torch.empty_like(tensor, device=...)"


class Stage(enum.IntEnum):
    """The order in which a restore puts things back once all bytes are in place."""

    MODELS = 0
    OPTIMIZERS = 1
    OBJECTS = 2
    VALUES = 3
    LOADERS = 4
    # ORDER: after everything that may write to an optimizer's groups, such as a scheduler's load_state_dict.
    GROUPS = 5
    # ORDER: last: building or positioning a loader draws random numbers.
    RNG = 6


def split_key(key: str) -> tuple[str, str]:
    """Return the section of a full key and its name within the section."""
    top, _, rest = key.partition("/")
    return format_section(top), rest or top


@dataclass(slots=True)
class CaptureDraft:
    """Entries and values found so far."""

    entries: list[Entry] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank_values: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    places: set[tuple[str, str]] = field(default_factory=set)

    def add_value(self, name: str, value: Any, *, per_rank: bool = False) -> None:
        """Keep a packed value.

        Raises:
            UsageError: the state gives two things this name.
        """
        if name in self.values:
            raise UsageError(f"two things in the state have the name {name!r}", key=name, advice="rename one of them")
        self.values[name] = value
        if per_rank:
            self.per_rank_values.add(name)

    def add_parts(self, parts: Parts) -> None:
        """Keep a tensor that was taken apart.

        Raises:
            UsageError: the state gives two tensors one key. UnsupportedState: it is on the meta device.
        """
        for entry in parts.entries:
            if entry.local.key in self.keys:
                raise UsageError(
                    f"two tensors in the state have the key {entry.local.key!r}",
                    key=entry.local.key,
                    advice="rename one of them",
                )
            if (place := (entry.local.section, entry.local.name)) in self.places:
                raise UsageError(
                    f"{entry.local.key}: another tensor is called {place[1]!r} in the files {place[0]!r}",
                    key=entry.local.key,
                    advice="rename one of the two in the state",
                )
            if entry.data is not None and entry.data.is_meta:
                raise UnsupportedState(
                    f"{entry.local.key}: a tensor on the meta device has no values",
                    key=entry.local.key,
                    advice=_ON_META,
                )
            self.keys.add(entry.local.key)
            self.places.add(place)
        self.entries.extend(parts.entries)
        for name, value in parts.values.items():
            self.add_value(name, pack_tree(value, name, refuse_tensor))


@dataclass(slots=True)
class RestoreDraft:
    """Destinations, problems and later actions found so far. Live objects are only read while it is filled."""

    catalog: Catalog
    cast: bool = False
    strict: bool = True
    device: torch.device | None = None
    entries: list[Entry] = field(default_factory=list)
    asked_tensors: set[str] = field(default_factory=set)
    consumed_values: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    actions: list[tuple[Stage, str, Action]] = field(default_factory=list)

    def miss(self, text: str) -> None:
        """Report something wanted that the checkpoint lacks: a problem, or a note in a relaxed restore."""
        (self.problems if self.strict else self.notes).append(text)

    def take_value(self, name: str) -> Any:
        """Return a stored value of this rank and count it as consumed, or MISSING after reporting why."""
        catalog = self.catalog
        if name in catalog.differing and not catalog.same_ranks:
            self.consumed_values.add(name)
            self.miss(
                f"{name}: its {catalog.world_size} saving ranks hold different values and another number of ranks "
                "restores; wrap it in PerRank(..., merge=...) to say what they become"
            )
            return MISSING
        if name not in catalog.values:
            self.miss(f"{name}: in the state, not in the checkpoint")
            return MISSING
        self.consumed_values.add(name)
        return catalog.values[name]

    def find_stored(self, key: str) -> StoredTensor | None:
        """Return what the checkpoint says of a tensor; views and aliases count."""
        stored = self.catalog.tensors.get(key)
        if stored is not None or key not in self.catalog.views:
            return stored
        view = self.catalog.views[key]
        return StoredTensor(
            key=key,
            dtype=view.dtype,
            shape=view.shape,
            role=view.role,
            trainable=view.trainable,
            device=None,
            placements=(),
        )

    def add_parts(self, parts: Parts) -> None:
        """Keep destinations, under the names that they have in the live state."""
        self.entries.extend(parts.entries)
        self.consumed_values.update(parts.values)

    def want_parts(self, parts: Parts) -> None:
        """Keep live tensors as destinations after comparing each with what is stored.

        Missing ones are misses; other shapes, dtypes (unless `cast` can round them), kinds and trainability are
        problems. Only what agrees becomes a destination.
        """
        for name, value in sorted(parts.values.items()):
            stored = self.take_value(name)
            if stored is MISSING:
                continue
            try:
                check_type(name.removesuffix("#type"), stored, pack_tree(value, name, refuse_tensor))
            except StateMismatch as error:
                self.problems.extend(error.problems)
        for entry in parts.entries:
            if (fitting := self._compare(entry)) is not None:
                self.entries.append(fitting)

    def _compare(self, entry: Entry) -> Entry | None:
        local = entry.local
        source = self.catalog.aliases.get(local.key, local.key)
        self.asked_tensors.update((local.key, source))
        stored = self.find_stored(local.key)
        if source in self.catalog.views:
            self.asked_tensors.add(self.catalog.views[source].base)
        if stored is None:
            self.miss(f"{local.key}: in the state, not in the checkpoint")
            return None
        if stored.shape != local.shape:
            self.problems.append(f"{local.key}: shape {stored.shape} stored, {local.shape} live")
            return None
        if entry.data is not None and entry.data.is_meta:
            self.problems.append(f"{local.key}: on the meta device, so it has no memory to restore into; {_ON_META}")
            return None
        if local.trainable is not None and stored.trainable is not None and local.trainable != stored.trainable:
            self.miss(
                f"{local.key}: requires_grad is {stored.trainable} in the checkpoint and {local.trainable} here"
            )
        if stored.dtype == local.dtype:
            return entry
        before, after = torch_dtype(stored.dtype), torch_dtype(local.dtype)
        if not self.cast or not can_cast(before, after):
            why = "pass cast=True to round it" if can_cast(before, after) else "it cannot be converted"
            self.problems.append(f"{local.key}: dtype {stored.dtype} stored, {local.dtype} live; {why}")
            return None
        self.notes.append(f"{local.key}: rounded from {stored.dtype} to {local.dtype}")
        if source in self.catalog.views:
            return entry  # views are converted when their base is spread
        pieces = tuple(
            dataclasses.replace(piece, data=CastBytes(piece.data, before, after)) for piece in local.pieces
        )
        return dataclasses.replace(entry, local=dataclasses.replace(local, dtype=stored.dtype, pieces=pieces))

    def then(self, stage: Stage, name: str, action: Action) -> None:
        """Do something after all bytes are in place; within a stage, by ascending name."""
        self.actions.append((stage, name, action))


def refuse_tensor(_tensor: torch.Tensor, path: str) -> Any:
    """Refuse a tensor where only plain values may stand."""
    raise UsageError(f"{path}: a tensor cannot stand here; keep it as a tensor of the state", key=path)
