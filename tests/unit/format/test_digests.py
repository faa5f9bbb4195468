"""Leaf digests: known values, every damaged leaf found, every table of the wrong size refused."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import Corrupt, UsageError
from shardkeep.format.digests import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    LEAF_BYTES,
    DigestTable,
    digest_leaves,
    find_bad_leaf,
    find_bad_leaf_in,
    leaf_count,
)


def test_constants_are_part_of_the_format() -> None:
    assert (LEAF_BYTES, BLOCK_BYTES, DIGEST_BYTES) == (262_144, 8_388_608, 16)
    assert BLOCK_BYTES % LEAF_BYTES == 0


@pytest.mark.parametrize(
    ("size", "count"), [(0, 0), (1, 1), (LEAF_BYTES - 1, 1), (LEAF_BYTES, 1), (LEAF_BYTES + 1, 2), (2**60, 2**42)]
)
def test_leaf_count(size: int, count: int) -> None:
    assert leaf_count(size) == count


def test_known_digests() -> None:
    # The first two are test vectors of xxHash's own XXH3_128bits with seed 0.
    assert digest_leaves(memoryview(b"")) == b""
    assert xxhash.xxh3_128_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert digest_leaves(memoryview(b"a")).hex() == "a96faf705af16834e6c632b61e964e1f"
    assert digest_leaves(memoryview(bytes(LEAF_BYTES))).hex() == "9aa295aead2a46612d64c035e85fb928"


def test_each_leaf_is_digested_alone() -> None:
    data = random.Random(1).randbytes(2 * LEAF_BYTES + 5)
    digests = digest_leaves(memoryview(data))
    leaves = [data[:LEAF_BYTES], data[LEAF_BYTES : 2 * LEAF_BYTES], data[2 * LEAF_BYTES :]]
    assert digests == b"".join(xxhash.xxh3_128(leaf).digest() for leaf in leaves)
    # Blocks may be digested one by one, in any order.
    assert digest_leaves(memoryview(data)[LEAF_BYTES:]) == digests[DIGEST_BYTES:]


def test_any_contiguous_view_will_do() -> None:
    array = np.arange(100_000, dtype=np.float64).reshape(10, -1)
    assert digest_leaves(memoryview(array)) == digest_leaves(memoryview(array.tobytes()))
    assert digest_leaves(memoryview(np.zeros((0, 3)))) == b""


def test_every_damaged_leaf_is_found() -> None:
    data = bytearray(random.Random(2).randbytes(3 * LEAF_BYTES + 1))
    digests = digest_leaves(memoryview(data))
    assert find_bad_leaf(memoryview(data), digests) is None
    assert find_bad_leaf(memoryview(data), memoryview(digests)) is None
    for at in (0, LEAF_BYTES - 1, LEAF_BYTES, 3 * LEAF_BYTES - 1, 3 * LEAF_BYTES):
        data[at] ^= 1
        assert find_bad_leaf(memoryview(data), digests) == at // LEAF_BYTES
        data[at] ^= 1
    assert find_bad_leaf(memoryview(b""), b"") is None


def test_digests_of_another_length_are_refused() -> None:
    for digests in (b"", bytes(15), bytes(32)):
        with pytest.raises(UsageError, match="1 leaves of 3 bytes"):
            find_bad_leaf(memoryview(b"abc"), digests)


def test_table_slices_by_shard() -> None:
    sizes = [LEAF_BYTES + 1, 0, 5, 3 * LEAF_BYTES]
    shards = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
    table = DigestTable(b"".join(digest_leaves(memoryview(shard)) for shard in shards), sizes)
    for number, shard in enumerate(shards):
        assert table.leaves(number) == digest_leaves(memoryview(shard))
        assert find_bad_leaf(memoryview(shard), table.leaves(number)) is None
    middle = memoryview(shards[3])[LEAF_BYTES : 2 * LEAF_BYTES]
    assert find_bad_leaf(middle, table.leaves(3, 1, 2)) is None
    assert table.leaves(3, 3) == b""


@pytest.mark.parametrize("size", [0, 15, 16, 47, 49, 64])
def test_a_table_of_the_wrong_size_is_corrupt(size: int) -> None:
    with pytest.raises(Corrupt, match=f"digest file of {size} bytes: expected 48 for 2 shards"):
        DigestTable(bytes(size), [LEAF_BYTES + 1, 1])


def test_no_such_shard_or_leaf() -> None:
    table = DigestTable(bytes(48), [LEAF_BYTES + 1, 1])
    for shard in (-1, 2):
        with pytest.raises(UsageError, match=f"shard {shard} of 2"):
            table.leaves(shard)
    for first, stop in ((-1, 1), (0, 3), (2, 1), (3, None)):
        with pytest.raises(UsageError, match="of shard 0, which has 2"):
            table.leaves(0, first, stop)


@given(st.lists(st.integers(0, 3 * LEAF_BYTES // 2), max_size=6), st.integers(0, 1 << 20), st.booleans())
@settings(max_examples=40, deadline=None)
def test_leaves_in_several_pieces_are_those_of_the_whole(sizes: list[int], at: int, damaged: bool) -> None:
    data = bytearray(random.Random(len(sizes)).randbytes(sum(sizes)))
    digests = digest_leaves(memoryview(data))
    if damaged and data:
        data[at % len(data)] ^= 1
    cuts = [0, *itertools.accumulate(sizes)]
    pieces = [memoryview(data)[begin:end] for begin, end in itertools.pairwise(cuts)]
    assert find_bad_leaf_in(pieces, digests) == find_bad_leaf(memoryview(data), digests)
