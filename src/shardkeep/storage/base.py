"""The `Store` protocol: bytes under string keys, and nothing that an object store lacks.

Keys are relative, `/`-separated, made of the names in `format.names`; no `.`/`..` parts, never absolute. Calls are
synchronous and may be made from several threads. There is no rename or append: what becomes visible
under a key is whole, except a `writer`'s object, which readers must reach through a commit record.

Every exception that leaves a store is a `StorageError` (or `NotFound`); `retryable` says whether the same call
may succeed later. Who calls it: only `engine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store can do; `engine` asks this and never the type.

    Attributes:
        exclusive_create: `put(if_absent=True)` is atomic between machines; False: by a protocol that a process which
            stalls at the wrong moment can break.
        write_offsets_multiple_bytes: `write_at` offsets must be multiples of this, in any order (1: anything goes).
        shared: every rank of the job sees the same objects.
        remote: a service over a network: its trouble passes in minutes, so it is waited out by time (RETRY_BUDGET_S),
            not by the number of tries.
    """

    exclusive_create: bool
    write_offsets_multiple_bytes: int
    shared: bool
    remote: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object's key and size."""

    key: str
    size_bytes: int


class ObjectWriter(Protocol):
    """Writes one object of a size known before. `write_at` may be called from several threads."""

    def write_at(self, offset: int, block: memoryview) -> None:
        """Write a block. Blocks do not overlap; together they cover `[0, size)`."""

    def finish(self) -> None:
        """Make the object durable: on return it survives a power cut, its directory entry included; a service has
        acknowledged it at its full size.

        Raises StorageError if any byte of `[0, size)` was not written or could not be made durable; after
        that the object is abandoned, never retried.
        """

    def abort(self) -> None:
        """Give up: remove what was written, as far as possible. Never raises; harmless after `finish`."""


class Store(Protocol):
    """Bytes under keys. See the module's docstring for the rules."""

    @property
    def url(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Store a small object as a whole, durable on return, visible all at once.

        With `if_absent` the object must not exist: AlreadyExists, unless it holds identical bytes (an
        answer that got lost was retried), which is success.
        """

    def writer(self, key: str, size_bytes: int) -> ObjectWriter:
        """Begin a large object; OutOfSpace is raised here already where space can be reserved.

        The key must be free (AlreadyExists): an object is never changed in place.
        """

    def clone(self, source: str, target: str) -> None:
        """Make `target` an object of the bytes of `source`, a finished one; durable on return, visible all at once.

        The bytes do not pass through this process, and the two may share their place on the medium. Either can be
        deleted without the other.

        Raises NotFound when there is no source, AlreadyExists when there is a target (its answer to an earlier try
        may have been lost), StorageError when the store cannot do it.
        """

    def get(self, key: str, *, limit_bytes: int) -> bytes:
        """Return a whole object. Raises NotFound; Corrupt when it is larger than the limit."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes `offset ..`; a short object is Corrupt (it names expected and found)."""

    def head(self, key: str) -> ObjectInfo:
        """Return an object's size. Raises NotFound."""

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """Return every object whose key starts with `prefix`, ascending by key."""

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of the folders right below `prefix` (which ends in `/` or is empty), ascending."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, durable on return, in the order given; missing ones are no error."""


@runtime_checkable
class MeasuredStore(Protocol):
    """A store that can tell how much room is left; an optional addition to `Store`."""

    def find_free_bytes(self) -> int | None:
        """Return how many bytes more this process could store here now, at most; None: not known.

        Never raises. A bound from above: quotas, reserved room and other writers may leave less.
        """
        ...


@runtime_checkable
class CachingStore(Protocol):
    """A store whose objects may be in memory already; an optional addition to `Store`."""

    def read_cached_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> bool:
        """Fill buffers one after the other with bytes `offset ..` of an object if they are in memory.

        Returns whether it did.

        Never raises. What a medium holds only `read_into` tells: it is asked when this says no, or when the bytes
        prove wrong.
        """
        ...
