"""Cursors, batches, shares and the checks before a run starts."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import numpy as np
import pytest

from shardkeep.errors import UsageError
from shardkeep.order.cursor import (
    SEQUENTIAL,
    Cursor,
    check_batches,
    count_batches,
    ids_between,
    next_batch,
    plan_batch,
    settle,
    share,
    share_bounds,
)


def begin(size: int, *, seed: int = 0, consumed: int = 0, epoch: int = 0, algorithm: str = "keyed-1") -> Cursor:
    return Cursor(seed=seed, epoch=epoch, consumed=consumed, size=size, algorithm=algorithm)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_is_cut_into_batches_and_rolls_over(drop_last: bool) -> None:
    cursor, seen = begin(10), []
    for _ in range(2 if drop_last else 3):
        assert cursor.epoch == 0
        ids, cursor = next_batch(cursor, 4, drop_last=drop_last)
        seen.append(ids.tolist())
    assert cursor == begin(10, epoch=1)
    assert [len(ids) for ids in seen] == ([4, 4] if drop_last else [4, 4, 2])
    order = ids_between(begin(10), 0, 10).tolist()
    assert [*itertools.chain.from_iterable(seen)] == order[: 8 if drop_last else 10]
    assert sorted(order) == list(range(10))
    assert ids_between(cursor, 0, 10).tolist() != order


def test_sequential_order_ascends_in_every_epoch() -> None:
    cursor = begin(5, algorithm=SEQUENTIAL)
    for _ in range(2):
        for expected in ([0, 1, 2], [3, 4]):
            ids, cursor = next_batch(cursor, 3, drop_last=False)
            assert ids.tolist() == expected


def test_batch_size_may_change_anywhere() -> None:
    order = ids_between(begin(20), 0, 20).tolist()
    first, cursor = next_batch(begin(20), 6, drop_last=False)
    second, cursor = next_batch(cursor, 3, drop_last=False)
    third, cursor = next_batch(cursor, 100, drop_last=False)
    assert [*first, *second, *third] == order
    assert cursor == begin(20, epoch=1)


def test_a_cursor_without_a_whole_batch_left_settles_on_the_next_epoch() -> None:
    assert settle(begin(10, consumed=8), 4, drop_last=True) == begin(10, epoch=1)
    assert settle(begin(10, consumed=8), 4, drop_last=False) == begin(10, consumed=8)
    assert settle(begin(10, consumed=10), 4, drop_last=False) == begin(10, epoch=1)
    assert settle(begin(10, consumed=6), 4, drop_last=True) == begin(10, consumed=6)
    batch = plan_batch(begin(10, consumed=8), 4, drop_last=True)
    assert (batch.cursor.epoch, batch.start, batch.stop) == (1, 0, 4)


@pytest.mark.parametrize("count", range(14))
@pytest.mark.parametrize("size", range(1, 6))
def test_shares_are_contiguous_and_even(count: int, size: int) -> None:
    ids = np.arange(100, 100 + count)
    shares = [share(ids, rank, size) for rank in range(size)]
    assert np.concatenate(shares).tolist() == ids.tolist()
    lengths = [len(part) for part in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_share_of_a_rank_outside_is_refused() -> None:
    for rank in (-1, 2):
        with pytest.raises(UsageError, match=f"rank {rank} of 2"):
            share_bounds(4, rank, 2)


def test_counts_batches() -> None:
    assert [count_batches(n, 4, drop_last=False) for n in (1, 4, 5, 8)] == [1, 1, 2, 2]
    assert [count_batches(n, 4, drop_last=True) for n in (1, 4, 5, 8)] == [0, 1, 1, 2]


def test_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(UsageError, match=r"10 does not divide by the 4.*\n.*global_batch_size=8 or 12"):
        check_batches(begin(96), 10, 4, drop_last=False)
    with pytest.raises(UsageError, match=r"global_batch_size=4$"):
        check_batches(begin(96), 3, 4, drop_last=False)
    with pytest.raises(UsageError, match=r"global_batch_size=8$"):  # 12 is more than a dataset of 11 holds
        check_batches(begin(11), 10, 4, drop_last=True)


def test_tail_too_small_to_go_round_is_refused() -> None:
    with pytest.raises(UsageError, match=r"last batch of an epoch has 1 samples for 4.*\n.*drop_last=True") as caught:
        check_batches(begin(129), 64, 4, drop_last=False)
    assert "global_batch_size=60 or 68" in str(caught.value)
    for fine in (60, 68):
        check_batches(begin(129), fine, 4, drop_last=False)
    check_batches(begin(129), 64, 4, drop_last=True)
    check_batches(begin(128), 64, 4, drop_last=False)
    check_batches(begin(132), 64, 4, drop_last=False)


def test_tail_of_an_epoch_begun_under_another_batch_size_is_checked() -> None:
    check_batches(begin(128), 64, 4, drop_last=False)
    with pytest.raises(UsageError, match="has 1 samples for 4"):
        check_batches(begin(128, consumed=63), 64, 4, drop_last=False)


def test_dataset_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"fewer than 4 data-parallel ranks or a larger dataset") as caught:
        check_batches(begin(3), 4, 4, drop_last=False)
    assert "drop_last=True" not in str(caught.value)


def test_no_whole_batch_under_drop_last_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no epoch would have a batch.*\n.*global_batch_size=3"):
        check_batches(begin(3), 4, 1, drop_last=True)
    with pytest.raises(UsageError, match="no epoch"):
        next_batch(begin(3), 4, drop_last=True)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True])
def test_batch_size_must_count(batch_size: int) -> None:
    with pytest.raises(UsageError, match="global_batch_size is"):
        next_batch(begin(10), batch_size, drop_last=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": -1},
        {"seed": 1.5},
        {"seed": True},
        {"epoch": -1},
        {"consumed": 11},
        {"consumed": -1},
        {"size": 0},
        {"size": 2**62 + 1},
        {"algorithm": "keyed-2"},
    ],
)
def test_impossible_cursors_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="cursor: "):
        Cursor(**{"seed": 0, "epoch": 0, "consumed": 0, "size": 10, **fields})  # type: ignore[arg-type]


def test_seeking_in_a_trillion_samples_takes_under_a_millisecond() -> None:
    times = []
    for number in range(20):
        cursor = begin(10**12, epoch=number, consumed=7 * 10**11 + number)
        begun = time.perf_counter()
        ids, _ = next_batch(cursor, 256, drop_last=False)
        times.append(time.perf_counter() - begun)
        assert len(set(ids.tolist())) == 256
    assert min(times) < 1e-3


def test_is_pure_and_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import shardkeep.order.cursor, shardkeep.order.state, shardkeep.order.permutation, shardkeep.data"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
