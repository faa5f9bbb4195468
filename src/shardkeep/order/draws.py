"""Seeds of the draws made for one sample: a pure function of the run's seed, the epoch and the sample.

Each sample gets three numbers that have nothing in common, one per generator that a transform may draw from.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from shardkeep.order.permutation import Key, derive_key

DrawSeeds = tuple[int, int, int]
"""For Python's generator 64 bits, for NumPy's and torch's 32 bits each: more they do not take, or not as fast."""

_SEEDS: Final = struct.Struct("<QII")
_NUMBER: Final = struct.Struct("<Q")
_KEY: Final = struct.Struct("<4Q")
_WORD: Final = (1 << 64) - 1


def iter_draw_seeds(
    seed: int, epoch: int, marks: Iterable[int], *, domain: str, index: int = 0
) -> Iterator[DrawSeeds]:
    """Yield the seeds of each mark (a sample's id, or a position), any integer; a microsecond a mark.

    `domain` and `index` separate uses of the same seed.
    """
    # A hash of at most one block of input: cheaper for a handful of marks than any array.
    start = _begin_hash(derive_key(seed, epoch, domain=domain, index=index), _SEEDS.size)
    for mark in marks:
        digest = start.copy()
        digest.update(_NUMBER.pack(mark & _WORD))
        yield _SEEDS.unpack(digest.digest())


def draw_below(key: Key, number: int, bound: int) -> int:
    """Return draw `number` of a key's sequence, an integer in `[0, bound)`, for any bound far below 2^64."""
    digest = _begin_hash(key, _NUMBER.size)
    digest.update(_NUMBER.pack(number & _WORD))
    word: int = _NUMBER.unpack(digest.digest())[0]
    return word * bound >> 64


def _begin_hash(key: Key, size: int) -> hashlib.blake2b:
    return hashlib.blake2b(_KEY.pack(*key.words[:4]), digest_size=size, usedforsecurity=False)
