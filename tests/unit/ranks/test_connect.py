"""The nonce of a start: shared by its ranks, never by two starts, whatever an earlier one left in the store."""

from __future__ import annotations

import collections
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from shardkeep.errors import BarrierTimeout, UsageError
from shardkeep.ranks.connect import _get_default_store, agree_nonce
from tests.unit.ranks.worlds import make_tcp_store, run_threads


def agree_all(store: Any, world_size: int) -> list[Any]:
    return run_threads(lambda rank: agree_nonce(store, rank, world_size, timeout_s=10), world_size)


def test_ranks_share_a_nonce_and_starts_do_not() -> None:
    store = make_tcp_store()
    nonces = [agree_all(store, world_size) for world_size in (3, 4, 2)]
    assert [len(set(each)) for each in nonces] == [1, 1, 1]
    assert len({each[0] for each in nonces}) == 3


def test_many_connects_in_a_row_never_mix() -> None:
    store = HashStore()

    def body(rank: int) -> list[str]:
        return [agree_nonce(store, rank, 4, timeout_s=20) for _ in range(60)]

    first, *others = run_threads(body, 4)
    assert len(set(first)) == 60
    assert others == [first] * 3


def test_the_store_does_not_grow() -> None:
    store = make_tcp_store()
    agree_all(store, 4)
    before = store.num_keys()
    for _ in range(20):
        agree_all(store, 4)
    assert store.num_keys() == before


@pytest.mark.parametrize("dead", [0, 1])
def test_what_a_start_that_died_left_is_not_believed(dead: int) -> None:
    store = HashStore()
    if dead == 1:  # rank 0 died: the others asked in vain
        errors = run_threads(lambda rank: agree_nonce(store, rank + 1, 3, timeout_s=0.1), 2)
    else:  # ranks died
        errors = run_threads(lambda rank: agree_nonce(store, rank, 3, timeout_s=0.1) if rank < 2 else None, 2)
    assert isinstance(errors[0], BarrierTimeout)

    def body(rank: int) -> str:
        time.sleep(0.3 if rank else 0.0)  # rank 0 finds the old questions first
        return agree_nonce(store, rank, 3, timeout_s=10)

    assert len(set(run_threads(body, 3))) == 1


def test_missing_ranks_are_named() -> None:
    store = HashStore()
    errors = run_threads(lambda rank: agree_nonce(store, rank * 2, 4, timeout_s=0.3), 2)
    assert errors[0].missing == (1, 3)
    assert "ranks 1, 3 did not connect" in str(errors[0])
    assert collections.Counter(type(error) for error in errors)[BarrierTimeout] == 1
    with pytest.raises(BarrierTimeout, match="rank 0 did not connect") as info:
        agree_nonce(HashStore(), 1, 2, timeout_s=0.1)
    assert info.value.missing == (0,)


def test_a_process_group_without_a_store_is_refused() -> None:
    class WithoutStore:
        class distributed_c10d:  # as torch spells it
            @staticmethod
            def _get_default_store() -> None:
                return None

        @staticmethod
        def get_backend() -> str:
            return "mpi"

    with pytest.raises(UsageError, match="'mpi' has no store"):
        _get_default_store(WithoutStore)
    with pytest.raises(UsageError, match="hides the store"):
        _get_default_store(object())
