"""The harness itself: ranks are real, quick, and their ends are told apart."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest

from tests.support.ranks import RanksFailed, mark, run_ranks, start_ranks


def sum_of_ranks(rank: int, world_size: int, extra: int) -> tuple[int, float, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([rank + extra])
    dist.all_reduce(value)
    return os.getpid(), value.item(), torch.get_num_threads()


def raise_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        raise ValueError("no luck")
    return rank


def hang_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        mark("hanging")
        time.sleep(60)


def die_on_rank_1(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def warn(rank: int, world_size: int) -> None:
    warnings.warn("careless", stacklevel=1)


@pytest.mark.parametrize("store", ["parent", "rank0"])
def test_ranks_are_processes_that_reduce(store: str) -> None:
    results = run_ranks(sum_of_ranks, 3, 10, store=store)  # type: ignore[arg-type]
    assert len({pid for pid, _, _ in results} | {os.getpid()}) == 4
    assert [(value, threads) for _, value, threads in results] == [(33, 1)] * 3


def test_four_ranks_start_quickly_once_the_forkserver_runs() -> None:
    run_ranks(sum_of_ranks, 1, 0)
    began_s = time.monotonic()
    run_ranks(sum_of_ranks, 4, 0)
    assert time.monotonic() - began_s < 5


def test_an_exception_comes_with_its_traceback() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 returned 0.*rank 1 failed.*raise_on_rank_1.*no luck"):
        run_ranks(raise_on_rank_1, 2)


def test_a_hang_ends_with_stacks() -> None:
    with start_ranks(hang_on_rank_0, 2) as ranks:
        ranks.wait_for_mark(0, "hanging")
        with pytest.raises(RanksFailed, match=r"(?s)rank 0 still runs.*in hang_on_rank_0.*rank 1 returned"):
            ranks.collect(timeout_s=0.3)


def test_a_killed_rank_is_told_apart() -> None:
    with start_ranks(die_on_rank_1, 2) as ranks:
        alive, dead = ranks.collect()
    assert alive.value == "alive"
    assert (dead.is_ok, dead.error, dead.exit_code) == (False, None, -signal.SIGKILL)


def test_a_warning_in_a_rank_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="UserWarning: careless"):
        run_ranks(warn, 1)
