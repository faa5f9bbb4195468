"""The keyed permutation: frozen values, an independent implementation, uniformity, speed."""

from __future__ import annotations

import hashlib
import itertools
import math
import time

import numpy as np
import pytest

from shardkeep.errors import UsageError
from shardkeep.order.permutation import TABLE_MAX, Key, Permutation, PermutationCache, derive_key, permute

MASK = (1 << 64) - 1

# n, seed, epoch, positions, ids. What `keyed-1` computes is part of every checkpoint: these never change.
GOLDEN: list[tuple[int, int, int, list[int], list[int]]] = [
    (1, 0, 0, [0], [0]),
    (5, 0, 0, [0, 1, 2, 3, 4], [3, 0, 4, 2, 1]),
    (10, 0, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 3, 8, 5, 0, 4, 9, 2, 6, 1]),
    (10, 0, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 4, 1, 6, 9, 3, 7, 5, 8, 0]),
    (10, 1, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 4, 5, 9, 7, 2, 1, 8, 3, 6]),
    (1000, 42, 7, [0, 1, 2, 500, 999], [375, 864, 696, 521, 389]),
    (65536, 0, 0, [0, 1, 2, 32768, 65535], [12195, 2387, 43525, 11451, 26573]),
    (65537, 0, 0, [0, 1, 2, 32768, 65536], [47146, 47769, 11396, 5051, 41452]),
    (1000003, 42, 7, [0, 1, 2, 500001, 1000002], [564351, 860845, 982173, 681589, 132665]),
    (
        1000000000000,
        0,
        0,
        [0, 1, 2, 500000000000, 999999999999],
        [979677420459, 571851295048, 744693394103, 318595385267, 846850314898],
    ),
    (
        1000000000000,
        1267650600228229401496703205376,
        1000000,
        [0, 1, 2, 500000000000, 999999999999],
        [548561113572, 237405607868, 188428803705, 599517053380, 7438428816],
    ),
    (
        1099511627777,
        3,
        2,
        [0, 1, 2, 549755813888, 1099511627776],
        [840800118438, 603660237932, 924205490798, 70022746427, 783469300056],
    ),
]


def reference_mix(word: int, key: int) -> int:
    z = word ^ key
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_key(seed: int, epoch: int) -> list[int]:
    """Derive the key words with Python's integers, from the description alone."""
    message = b""
    for field in (b"order", *(v.to_bytes((v.bit_length() + 7) // 8, "little") for v in (seed, epoch, 0))):
        message += len(field).to_bytes(8, "little") + field
    data = hashlib.blake2b(message, digest_size=64, person=b"shardkeep-keyed1").digest()
    return [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(8)]


def reference_id(position: int, n: int, words: list[int]) -> int:
    """Compute one id with Python's integers, from the description alone."""
    if n <= 65_536:
        order = sorted(range(n), key=lambda i: (reference_mix(reference_mix(i, words[0]), words[1]), i))
        return order[position]
    root = math.isqrt(n - 1) + 1
    candidates = [root - k for k in range(64)]
    rows = min(candidates, key=lambda a: (a * -(-n // a) - n, -a))
    columns = -(-n // rows)
    value = position
    while True:
        row, column = divmod(value, columns)
        for number, word in enumerate(words):
            if number % 2 == 0:
                row = (row + (reference_mix(column, word) >> 1)) % rows
            else:
                column = (column + (reference_mix(row, word) >> 1)) % columns
        value = row * columns + column
        if value < n:
            return value


@pytest.mark.parametrize(("n", "seed", "epoch", "positions", "ids"), GOLDEN)
def test_golden_values_never_change(n: int, seed: int, epoch: int, positions: list[int], ids: list[int]) -> None:
    assert permute(positions, n=n, key=derive_key(seed, epoch)).tolist() == ids


@pytest.mark.parametrize("n", [1, 2, 7, 1000, 65_536, 65_537, 70_001, 10**6, 10**9 + 7, 2**40 + 1, 10**12, 2**62])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3), (2**200 + 1, 2**70)])
def test_matches_an_independent_implementation(n: int, seed: int, epoch: int) -> None:
    words = reference_key(seed, epoch)
    key = derive_key(seed, epoch)
    assert list(key.words) == words
    positions = sorted({0, 1 % n, n // 3, n // 2, n - 1})
    expected = [reference_id(p, n, words) for p in positions] if n < 2000 or n > TABLE_MAX else None
    found = permute(positions, n=n, key=key).tolist()
    if expected is None:
        assert found == [reference_id(p, n, words) for p in positions[:2]] + found[2:]
    else:
        assert found == expected


@pytest.mark.parametrize(
    "n", [1, 2, 3, 100, TABLE_MAX - 1, TABLE_MAX, TABLE_MAX + 1, TABLE_MAX + 2, 100_003, 1 << 18]
)
def test_is_a_bijection_with_its_inverse(n: int) -> None:
    permutation = Permutation(n, derive_key(5, 1))
    ids = permutation.ids_at(np.arange(n))
    assert ids.dtype == np.int64
    assert (np.bincount(ids, minlength=n) == 1).all()
    assert (permutation.positions_of(ids) == np.arange(n)).all()


def test_keys_separate_every_field() -> None:
    keys = [
        derive_key(0, 0),
        derive_key(0, 1),
        derive_key(1, 0),
        derive_key(256, 0),
        derive_key(0, 256),
        derive_key(0, 0, domain="workers"),
        derive_key(0, 0, index=1),
        derive_key(2**64, 0),
        derive_key(2**4000, 0),
    ]
    assert len({word for key in keys for word in key.words}) == 8 * len(keys)


@pytest.mark.parametrize("bad", [(-1, 0), (0, -1)])
def test_negative_seed_or_epoch_is_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="from 0 up"):
        derive_key(*bad)


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_impossible_size_is_refused(n: int) -> None:
    with pytest.raises(UsageError, match="expected 1 to"):
        Permutation(n, derive_key(0, 0))


@pytest.mark.parametrize("n", [10, 10**9])
def test_positions_outside_are_refused(n: int) -> None:
    permutation = Permutation(n, derive_key(0, 0))
    for bad in (-1, n):
        with pytest.raises(UsageError, match=f"{bad}.*expected 0 to {n - 1}"):
            permutation.ids_at([0, bad])
        with pytest.raises(UsageError, match="sample id"):
            permutation.positions_of([bad])
    with pytest.raises(UsageError, match="integers"):
        permutation.ids_at([0.5])
    assert permutation.ids_at([]).shape == (0,)
    assert permutation.ids_at(np.arange(6).reshape(2, 3)).shape == (2, 3)


def test_input_is_left_alone() -> None:
    for n in (100, 10**6):
        positions = np.arange(50, dtype=np.int64)
        Permutation(n, derive_key(0, 0)).ids_at(positions)
        assert (positions == np.arange(50)).all()


def test_cache_is_bounded_and_keeps_the_recent() -> None:
    cache = PermutationCache(capacity=2)
    keys = [derive_key(0, epoch) for epoch in range(3)]
    first = cache.get(10, keys[0])
    assert cache.get(10, keys[0]) is first
    second = cache.get(10, keys[1])
    cache.get(10, keys[0])
    cache.get(10, keys[2])  # pushes out keys[1], the one not used for longest
    assert cache.get(10, keys[0]) is first
    assert cache.get(10, keys[1]) is not second
    assert cache.get(11, keys[0]) is not first


# Uniformity: seeds are fixed, so these never flake. A z-score is (chi2 - df) / sqrt(2 df), about normal.


def z_score(counts: np.ndarray, expected: float) -> float:
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return (chi2 - freedom) / math.sqrt(2 * freedom)


def many_keys(count: int) -> list[Key]:
    return [derive_key(seed, epoch) for seed in range(count // 10) for epoch in range(10)]


@pytest.mark.parametrize(("n", "keys"), [(2, 4000), (3, 6000), (4, 8000), (5, 12_000), (6, 24_000)])
def test_all_orders_of_a_tiny_set_are_equally_likely(n: int, keys: int) -> None:
    counts = dict.fromkeys(itertools.permutations(range(n)), 0)
    for key in many_keys(keys):
        counts[tuple(permute(np.arange(n), n=n, key=key).tolist())] += 1
    assert abs(z_score(np.array(list(counts.values())), keys / len(counts))) < 4


@pytest.mark.parametrize("n", [40, 60_000, 65_537, 10**6 + 3, 10**12])
def test_one_position_is_uniform_over_keys(n: int) -> None:
    keys = 4000 if n <= 40 or n > TABLE_MAX else 150
    cells = 20 if keys == 4000 else 10
    for position in (0, n - 1):
        ids = [int(permute([position], n=n, key=key)[0]) for key in many_keys(keys)]
        counts = np.bincount([value * cells // n for value in ids], minlength=cells)
        assert abs(z_score(counts, keys / cells)) < 4


@pytest.mark.parametrize("n", [12, 65_537, 10**12])
def test_pairs_of_positions_are_uniform_over_keys(n: int) -> None:
    keys, cells = 6000, 6
    counts = np.zeros((cells, cells))
    for key in many_keys(keys):
        first, second = permute([3, 4], n=n, key=key).tolist()
        counts[first * cells // n, second * cells // n] += 1
    expected = np.full((cells, cells), keys / cells**2)
    if n == 12:  # without replacement: a cell of two ids holds 2 ordered pairs, two cells hold 4
        expected = np.where(np.eye(cells, dtype=bool), keys * 2 / (12 * 11), keys * 4 / (12 * 11))
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    freedom = cells**2 - 1
    assert abs(chi2 - freedom) / math.sqrt(2 * freedom) < 4


@pytest.mark.parametrize("n", [65_536, 65_537, 10**6 + 3, 2**40 + 1, 10**12])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_stretch_of_one_order_looks_random(n: int, seed: int) -> None:
    """Ids, differences of neighbours at several distances, and low bits of a run of positions."""
    count, cells = 40_000, 64
    start = n // 2 if n > 10**6 else 0
    ids = permute(np.arange(start, start + count), n=n, key=derive_key(seed, 0))
    bins = (ids.astype(object) * cells // n).astype(np.int64)
    assert abs(z_score(np.bincount(bins, minlength=cells), count / cells)) < 5
    for distance in (1, 2, 256, 1000):
        steps = (ids[distance:] - ids[:-distance]) % n
        bins = (steps.astype(object) * cells // n).astype(np.int64)
        assert abs(z_score(np.bincount(bins, minlength=cells), len(steps) / cells)) < 5
        low = (ids[distance:] % 8) * 8 + ids[:-distance] % 8
        assert abs(z_score(np.bincount(low, minlength=64), len(low) / 64)) < 5


@pytest.mark.parametrize("n", [65_537, 300_000])
def test_neighbour_epochs_and_seeds_are_unrelated(n: int) -> None:
    base = permute(np.arange(n), n=n, key=derive_key(0, 0))
    for other in (derive_key(0, 1), derive_key(1, 0)):
        ids = permute(np.arange(n), n=n, key=other)
        # Fixed points of the quotient are Poisson(1); the rank correlation has deviation 1/sqrt(n).
        assert int((ids == base).sum()) <= 8
        assert abs(float(np.corrcoef(ids, base)[0, 1])) < 5 / math.sqrt(n)


def best_of(repeats: int, work: object, inner: int) -> float:
    best = math.inf
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(inner):
            work()  # type: ignore[operator]
        best = min(best, (time.perf_counter() - begun) / inner)
    return best


@pytest.mark.parametrize("n", [1000, 65_536, 65_537, 2**20 + 1, 2**40 + 1, 10**12])
def test_costs_under_a_microsecond_an_index(n: int) -> None:
    permutation = Permutation(n, derive_key(0, 0))
    positions = np.arange(256) + (n - 256) // 2
    assert best_of(20, lambda: permutation.ids_at(positions), 10) / 256 < 1e-6


def test_few_values_walk() -> None:
    """Cycle-walking stays near one pass whatever n, the worst case for a power-of-two domain included."""
    for n in [*range(65_537, 65_700), 2**17 + 1, 2**40 + 1, 10**12 + 39, 2**62 - 57]:
        permutation = Permutation(n, derive_key(0, 0))
        assert n <= permutation._rows * permutation._columns < n * 1.004
