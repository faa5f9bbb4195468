from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import StorageError
from shardkeep.storage.coverage import Coverage
from shardkeep.storage.keys import check_key, is_part


@given(st.lists(st.integers(1, 50), max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_blocks_in_any_order_cover_the_object(lengths: list[int], order: random.Random) -> None:
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    blocks = list(zip(starts, lengths, strict=True))
    order.shuffle(blocks)
    coverage = Coverage(sum(lengths), key="a")
    for number, (start, length) in enumerate(blocks):
        if number:
            with pytest.raises(StorageError, match="never written"):
                coverage.check_whole()
        coverage.claim(start, length)
    coverage.check_whole()


@given(st.lists(st.tuples(st.integers(-5, 40), st.integers(0, 12)), max_size=12))
@settings(max_examples=300)
def test_claims_agree_with_a_set_of_bytes(claims: list[tuple[int, int]]) -> None:
    size = 36
    coverage = Coverage(size, key="a")
    taken: set[int] = set()
    for offset, length in claims:
        wanted = set(range(offset, offset + length))
        # An empty block is fine anywhere inside.
        allowed = offset >= 0 and offset + length <= size and not wanted & taken
        if allowed:
            coverage.claim(offset, length)
            taken |= wanted
        else:
            with pytest.raises(StorageError):
                coverage.claim(offset, length)
    if taken == set(range(size)):
        coverage.check_whole()
    else:
        hole = min(set(range(size)) - taken)
        end = next(byte for byte in range(hole, size + 1) if byte in taken or byte == size)
        with pytest.raises(StorageError, match=rf"bytes {hole}\.\.{end} of {size}"):
            coverage.check_whole()


def test_sequential_blocks_stay_one_range() -> None:
    coverage = Coverage(1_000_000, key="a")
    for offset in range(0, 1_000_000, 10):
        coverage.claim(offset, 10)
        assert len(coverage._starts) == 1


@given(st.text(max_size=12))
@settings(max_examples=300)
def test_a_part_is_ascii_and_neither_hidden_nor_a_path(name: str) -> None:
    if is_part(name):
        assert name.isascii()
        assert name.isprintable()
        assert name[0] not in ".=@,"
        assert not set(name) & set("/\\:*?\"<>|+ ~'")
        check_key(f"a/{name}/b")
    else:
        with pytest.raises(StorageError):
            check_key(f"a/{name}/b" if "/" not in name else f"{name}//")
