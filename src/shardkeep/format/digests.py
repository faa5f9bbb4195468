"""Leaf digests: one xxh3-128 for every 256 KiB of a shard.

A digest is 16 bytes, the canonical (big-endian) form of the 128-bit hash with seed 0. The leaves of a shard cut its
whole file, header included, from byte 0; the last one may be short. A `digests-*.bin` file is the digests of a
rank's shards, one shard after the other in the order of its part record, and nothing else.

xxh3 finds accidents, not attackers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

from shardkeep.errors import Corrupt, UsageError

LEAF_BYTES: Final = 256 * 1024
"""The unit of digests."""

BLOCK_BYTES: Final = 8 * 1024 * 1024
"""The unit of I/O; a whole number of leaves."""

DIGEST_BYTES: Final = 16


def leaf_count(size_bytes: int) -> int:
    """Return how many leaves a file has; an empty one has none."""
    return -(-size_bytes // LEAF_BYTES)


def digest_leaves(data: memoryview) -> bytes:
    """Return the digests of consecutive leaves, one after the other.

    `data` is contiguous and starts at a leaf; only the last leaf may be short. About 7 us per leaf, without the
    interpreter lock, so that threads digest side by side.
    """
    flat = _flat(data)
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(flat[start : start + LEAF_BYTES]) for start in range(0, len(flat), LEAF_BYTES)])


def find_bad_leaf(data: memoryview, digests: bytes | memoryview) -> int | None:
    """Return the index of the first leaf of `data` that does not have its digest, or None.

    Raises:
        UsageError: `digests` are not those of as many leaves as `data` has.
    """
    flat = _flat(data)
    if len(digests) != DIGEST_BYTES * leaf_count(len(flat)):
        raise UsageError(f"{len(digests)} bytes of digests for {leaf_count(len(flat))} leaves of {len(flat)} bytes")
    found = digest_leaves(flat)
    if found == digests:
        return None
    starts = range(0, len(found), DIGEST_BYTES)
    return next(
        at // DIGEST_BYTES for at in starts if found[at : at + DIGEST_BYTES] != digests[at : at + DIGEST_BYTES]
    )


def find_bad_leaf_in(pieces: Sequence[memoryview], digests: bytes | memoryview) -> int | None:
    """Do what `find_bad_leaf` does for leaves that lie in several pieces of memory, one after the other."""
    found: list[bytes] = []
    open_leaf, left = xxhash.xxh3_128(), LEAF_BYTES
    for piece in map(_flat, pieces):
        at = 0
        while at < len(piece):
            part = piece[at : at + left]
            if len(part) == LEAF_BYTES:
                found.append(xxhash.xxh3_128_digest(part))
            else:
                open_leaf.update(part)
                left -= len(part)
                if not left:
                    found.append(open_leaf.digest())
                    open_leaf, left = xxhash.xxh3_128(), LEAF_BYTES
            at += len(part)
    if left < LEAF_BYTES:
        found.append(open_leaf.digest())
    if len(digests) != DIGEST_BYTES * len(found):
        raise UsageError(f"{len(digests)} bytes of digests for {len(found)} leaves")
    expected = [bytes(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES)]
    return next((at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other), None)


def _flat(data: memoryview) -> memoryview:
    # An empty view cannot be cast.
    return data.cast("B") if data.nbytes else memoryview(b"")


class DigestTable:
    """The digests of one rank's shards, by shard and leaf."""

    __slots__ = ("_data", "_starts")

    def __init__(self, data: bytes, shard_sizes_bytes: Sequence[int]) -> None:
        """Take the content of a `digests-*.bin` file and the sizes of the shards that it describes, in order.

        Raises:
            Corrupt: it does not have one digest per leaf of these shards.
        """
        starts = [0]
        for size_bytes in shard_sizes_bytes:
            starts.append(starts[-1] + DIGEST_BYTES * leaf_count(size_bytes))
        if len(data) != starts[-1]:
            raise Corrupt(
                f"digest file of {len(data)} bytes: expected {starts[-1]} for {len(shard_sizes_bytes)} shards "
                f"of {sum(shard_sizes_bytes)} bytes"
            )
        self._data = memoryview(data)
        self._starts = starts

    def leaves(self, shard: int, first: int = 0, stop: int | None = None) -> memoryview:
        """Return the digests of leaves `[first, stop)` of the `shard`-th shard (default: of all from `first`).

        Raises:
            UsageError: no such shard or leaves.
        """
        if not 0 <= shard < len(self._starts) - 1:
            raise UsageError(f"shard {shard} of {len(self._starts) - 1}")
        start, end = self._starts[shard], self._starts[shard + 1]
        count = (end - start) // DIGEST_BYTES
        last = count if stop is None else stop
        if not 0 <= first <= last <= count:
            raise UsageError(f"leaves {first} to {last} of shard {shard}, which has {count}")
        return self._data[start + first * DIGEST_BYTES : start + last * DIGEST_BYTES]
