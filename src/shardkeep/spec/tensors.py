"""The narrow waist between live tensors and bytes: what `state` hands to `engine`, without torch.

`state` takes a live training state apart into `LocalTensor`s (where the bytes come from, or go to) and plain
values; `engine` moves bytes through the two calls of `HostBytes` and never sees a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Mesh

Role = Literal["parameter", "buffer", "state"]
"""`parameter`: must be equal on every rank that holds it. `buffer`: may differ (BatchNorm under DDP), is then
kept per rank. `state`: anything else; when it differs it is kept per rank too."""


class HostBytes(Protocol):
    """The row-major bytes of one local tensor, whatever its strides or device."""

    @property
    def nbytes(self) -> int: ...

    def copy_out(self, start: int, out: memoryview) -> None:
        """Write bytes `start .. start + len(out)` of the tensor into `out`."""

    def copy_in(self, start: int, data: memoryview) -> None:
        """Overwrite bytes `start .. start + len(data)` of the tensor."""


@runtime_checkable
class MappedBytes(Protocol):
    """`HostBytes` whose bytes lie in this host's memory as they are, or may."""

    def find_memory(self, start: int, stop: int) -> memoryview | None:
        """Return the memory of bytes `start .. stop`, writable; None where they must go through `copy_in`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk of a global tensor and the live local bytes that are its content."""

    chunk: Chunk
    data: HostBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """One tensor as one rank sees it.

    Attributes:
        key: full name, `<state key>/<name>`; `optimizer/exp_avg/layers.0.wq.weight`.
        section: which group of files it goes to; `name` is its name in them (unique per section).
        dtype, shape: shardkeep's dtype name and the *global* shape.
        mesh, placements: the rule that says which rank holds which chunk; `mesh` None and no placements: held
            whole by every rank that has the key, or, with `explicit`, chunks that no rule describes.
        trainable: requires_grad of a parameter, else None.
        pieces: this rank's chunks and bytes; empty when this rank holds nothing of it.
        per_rank: declared by the user to differ between ranks.
        device: the device type of an optimizer state that does not live beside its parameter, else None.
    """

    key: str
    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    pieces: tuple[Piece, ...]
    mesh: Mesh | None = None
    placements: tuple[str, ...] = ()
    explicit: bool = False
    trainable: bool | None = None
    per_rank: bool = False
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor that is stored as part of another one, because both lie on one storage and overlap.

    Attributes:
        base: key of the stored 1-D tensor, `<key of its first view>#storage`.
        offset_bytes: where the view's first element begins in the base's bytes.
        dtype, shape, strides: the view; strides count elements of `dtype` (not bytes).
        role, trainable: as in `LocalTensor`, for the view by itself.
    """

    base: str
    offset_bytes: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    role: Role
    trainable: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A live state taken apart on one rank at one moment.

    Attributes:
        tensors: by ascending key; each distinct storage once.
        aliases: tied tensors: key -> the key in `tensors` that holds the same elements in the same order.
        values: name -> value of the plain-Python part, not yet encoded; names as `scheduler`, `optimizer/groups`,
            `optimizer/param/<name>`, `rng`. Tensors inside stand as `TensorRef`.
        views: key -> the part of a tensor in `tensors` that it is; such keys are neither tensors nor aliases.
        per_rank_values: names in `values` that differ between ranks by nature (`rng`, `PerRank`).
        deferred: keys in `tensors` whose bytes the caller keeps as they are a little longer, until they are copied.
    """

    tensors: tuple[LocalTensor, ...]
    aliases: dict[str, str]
    values: dict[str, Any]
    per_rank_values: frozenset[str] = frozenset()
    views: dict[str, View] = field(default_factory=dict)
    deferred: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands in a value for a tensor that is stored under `key`."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """What a checkpoint says of one tensor, for those who decide what to ask of it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    trainable: bool | None
    device: str | None
    placements: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """All that a checkpoint holds, without bytes.

    Attributes:
        tensors: key -> what is stored, aliases included (an alias has its target's fields).
        aliases: tied key -> the key that holds its elements.
        values: name -> decoded value for this rank: its own where a rank of its number saved, else a holder's. Names
            are known; a value may be read when it is asked for (and so raise Corrupt or StorageError).
        differing: values that differ between the saving ranks (`rng` and other per-rank ones included): name -> the
            values by saving rank, None where a rank lacks it; empty when `same_ranks`. Each may be read when asked
            for, and there may be thousands: take what is needed.
        same_ranks: the checkpoint was saved by as many ranks as now restore, so per-rank state is this rank's own.
        world_size: ranks that saved it.
        is_new: no rank of this rank's number saved.
        views: key -> the part of a stored tensor that it is; such keys are not in `tensors`. A
            restore asks for it by its own key, whole; the engine reads it out of its base (`...#storage`).
    """

    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]
    values: Mapping[str, Any]
    differing: Mapping[str, Sequence[Any]]
    same_ranks: bool
    world_size: int
    is_new: bool = False
    views: dict[str, View] = field(default_factory=dict)
