"""A keyed permutation of `[0, n)` whose value at any position costs the same, with nothing stored on disk.

Two constructions under one name, `keyed-1`, chosen by n alone:

- n <= 65,536: indices sorted by a keyed 64-bit hash (Knuth's "sort by random keys"). Every one of the n!
  orders can occur, also for tiny n, where a cipher would be far from uniform.
- above: a Feistel network over `Z_a x Z_b` with `a * b` just above n, and cycle-walking for the few values that
  fall outside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, generalized-Feistel).
  Rounds add modulo a and b in turn. Since `a * b - n < a <= sqrt(n) + 1`, fewer than one index in 250 walks at all.

The mixing function is the 64-bit finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014; constants of Stafford's
variant 13); round keys come from BLAKE2b. Only integer arithmetic modulo 2^64 and a stable sort are used, so that
the result is the same on every platform and numpy version. What `keyed-1` computes never changes: checkpoints
depend on it. Another algorithm takes another name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shardkeep.errors import UsageError

KEYED: Final = "keyed-1"
"""The name of the permutation, part of every cursor."""

TABLE_MAX: Final = 65_536
SIZE_MAX: Final = 1 << 62
_ROUNDS: Final = 8
_GRIDS: Final = 64

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_Cipher = Callable[[_Words], _Words]

_MULTIPLY_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2: Final = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_27, _SHIFT_30, _SHIFT_31 = np.uint64(1), np.uint64(27), np.uint64(30), np.uint64(31)


@dataclass(frozen=True, slots=True)
class Key:
    """Eight 64-bit words that choose one permutation of every size."""

    words: tuple[int, ...]


def derive_key(seed: int, epoch: int, *, domain: str = "order", index: int = 0) -> Key:
    """Derive a key from a seed and an epoch, both of any size from 0 up.

    `domain` and `index` separate uses of the same seed: keys of two domains or indexes have nothing in common.
    """
    if seed < 0 or epoch < 0 or index < 0:
        raise UsageError(f"seed {seed}, epoch {epoch}, index {index}: expected integers from 0 up")
    digest = hashlib.blake2b(digest_size=8 * _ROUNDS, person=b"shardkeep-keyed1", usedforsecurity=False)
    for field in (domain.encode(), _int_bytes(seed), _int_bytes(epoch), _int_bytes(index)):
        # Length first: no two different tuples feed the same bytes.
        digest.update(len(field).to_bytes(8, "little") + field)
    data = digest.digest()
    return Key(tuple(int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)))


def _int_bytes(value: int) -> bytes:
    return value.to_bytes((value.bit_length() + 7) // 8, "little")


class Permutation:
    """One permutation of `[0, n)`. Immutable; holds a table of 2 n bytes for n <= 65,536, nothing above.

    A call costs well under a microsecond per index in batches of 256 and more, at any n and any position.
    """

    __slots__ = ("_columns", "_key", "_rows", "_table", "n")

    def __init__(self, n: int, key: Key) -> None:
        if not 0 < n <= SIZE_MAX:
            raise UsageError(f"a permutation of {n} samples: expected 1 to 2^62")
        self.n = n
        self._key = tuple(np.uint64(word) for word in key.words)
        self._rows, self._columns = _find_grid(n)
        self._table = self._sorted_table() if n <= TABLE_MAX else None

    def ids_at(self, positions: npt.ArrayLike) -> Ids:
        """Return the sample ids at `positions`, any shape, int64.

        Raises UsageError for a position outside `[0, n)` or one that is no integer.
        """
        checked = self._checked(positions, "position")
        if self._table is not None:
            return self._table[checked].astype(np.int64)
        return self._walk(checked, self._encipher)

    def positions_of(self, ids: npt.ArrayLike) -> Ids:
        """Return where in the order the samples `ids` come, any shape, int64: the inverse of `ids_at`."""
        checked = self._checked(ids, "sample id")
        if self._table is not None:
            inverse = np.empty(self.n, dtype=np.int64)
            inverse[self._table] = np.arange(self.n, dtype=np.int64)
            return inverse[checked]
        return self._walk(checked, self._decipher)

    def _checked(self, values: npt.ArrayLike, what: str) -> Ids:
        given = np.asarray(values)
        if given.size == 0:
            return np.empty(given.shape, dtype=np.int64)
        if given.dtype.kind not in "iu":
            raise UsageError(f"{what}s of dtype {given.dtype}: expected integers")
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= self.n:
            raise UsageError(f"{what} {low if low < 0 else high}: expected 0 to {self.n - 1}")
        return given.astype(np.int64, copy=False)

    def _sorted_table(self) -> npt.NDArray[np.uint16]:
        index = np.arange(self.n, dtype=np.uint64)
        hashes = _mix(_mix(index, self._key[0]), self._key[1])
        # Stable: equal hashes would keep the order of their indices, so the result has one value only.
        return np.argsort(hashes, kind="stable").astype(np.uint16)

    def _walk(self, values: Ids, cipher: _Cipher) -> Ids:
        """Apply `cipher` to each value until it lies below n again (cycle-walking)."""
        flat = values.astype(np.uint64).ravel()
        result = cipher(flat)
        outside = np.flatnonzero(result >= np.uint64(self.n))
        while outside.size:
            walked = cipher(result[outside])
            result[outside] = walked
            outside = outside[walked >= np.uint64(self.n)]
        return result.astype(np.int64).reshape(values.shape)

    def _encipher(self, values: _Words) -> _Words:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        row, column = np.divmod(values, columns)
        for number, key in enumerate(self._key):
            if number % 2 == 0:
                row += _mix(column, key) >> _SHIFT_1  # 63 bits plus a row below 2^32: no overflow
                row %= rows
            else:
                column += _mix(row, key) >> _SHIFT_1
                column %= columns
        row *= columns
        row += column
        return row

    def _decipher(self, values: _Words) -> _Words:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        row, column = np.divmod(values, columns)
        for number, key in reversed(tuple(enumerate(self._key))):
            if number % 2 == 0:
                row += rows - (_mix(column, key) >> _SHIFT_1) % rows
                row %= rows
            else:
                column += columns - (_mix(row, key) >> _SHIFT_1) % columns
                column %= columns
        row *= columns
        row += column
        return row


class PermutationCache:
    """Keeps the last few permutations, so that a table is sorted once an epoch. Owned by one object, one thread."""

    __slots__ = ("_capacity", "_kept")

    def __init__(self, capacity: int = 2) -> None:
        self._capacity = capacity
        self._kept: dict[tuple[int, Key], Permutation] = {}

    def get(self, n: int, key: Key) -> Permutation:
        """Return the permutation of `[0, n)` under `key`, built now if it is not at hand."""
        found = self._kept.pop((n, key), None) or Permutation(n, key)
        self._kept[n, key] = found  # last in insertion order: the most recently used
        while len(self._kept) > self._capacity:
            del self._kept[next(iter(self._kept))]
        return found


def _find_grid(n: int) -> tuple[int, int]:
    """Return rows and columns, nearly equal, whose product is at or just above n."""
    root = math.isqrt(n - 1) + 1
    # The best of 64 row counts: the cells to spare, and with them the walks, shrink as much.
    rows = min(range(root, max(root - _GRIDS, 0), -1), key=lambda count: -(-n // count) * count)
    return rows, -(-n // rows)


def permute(positions: npt.ArrayLike, *, n: int, key: Key) -> Ids:
    """Return the sample ids at `positions` (each in `[0, n)`), int64, same shape.

    For many calls with one key and n <= 65,536 keep a `Permutation`: this sorts the table anew.
    """
    return Permutation(n, key).ids_at(positions)


def _mix(words: _Words, key: np.uint64) -> _Words:
    """Hash each word under `key`; a bijection of 64-bit words. Arrays only: numpy warns on scalar overflow."""
    mixed = words ^ key
    mixed ^= mixed >> _SHIFT_30
    mixed *= _MULTIPLY_1
    mixed ^= mixed >> _SHIFT_27
    mixed *= _MULTIPLY_2
    mixed ^= mixed >> _SHIFT_31
    return mixed
