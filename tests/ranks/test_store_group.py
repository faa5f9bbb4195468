"""Groups over real processes: killed, stopped, restarted, and beside training."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from shardkeep.errors import PeerFailure, UsageError
from shardkeep.ranks.connect import connect
from tests.support.ranks import mark, run_ranks, serve_store, start_ranks

QUICK = {"SHARDKEEP_PEER_SILENCE_S": "1"}


def join(results: list[bytes]) -> bytes:
    return b",".join(results)


def agree_twice(rank: int, world_size: int, text: str) -> list[bytes]:
    group = connect()
    first = group.agree("one", lambda: f"{text}{rank}".encode(), join)
    second = group.agree("two", lambda: first[-1:], join)
    group.close()
    return [first, second]


def work_forever_on(rank: int, world_size: int, slow: int) -> None:
    group = connect()
    group.agree("begin", lambda: b"", join)

    def work() -> bytes:
        mark("working")
        if rank == slow:
            time.sleep(60)
        return b""

    group.agree("save.flush", work, join)


def work_a_second(rank: int, world_size: int) -> None:
    group = connect()

    def work() -> bytes:
        mark("working")
        time.sleep(1 if rank == 2 else 0)
        return b""

    try:
        group.agree("p", work, join)
    except PeerFailure:
        mark("failed")
        raise


def hold_the_interpreter(rank: int, world_size: int) -> bytes:
    group = connect()

    def work() -> bytes:
        if rank == 1:
            time.sleep(0.1)
            deadline_s = time.monotonic() + 3
            while time.monotonic() < deadline_s:
                sum(range(2_000_000))  # each holds the interpreter for a while
        return b"done"

    verdict = group.agree("p", work, join)
    group.close()
    return verdict


def save_while_training(rank: int, world_size: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    group = connect()
    background = group.clone()
    rounds: list[bytes] = []

    def save() -> None:
        for number in range(30):
            rounds.append(background.agree("save", lambda n=number: b"%d" % n, join))
        background.close()

    thread = threading.Thread(target=save)
    thread.start()
    total = 0
    for step in range(200):
        value = torch.tensor([step + rank])
        dist.all_reduce(value)
        total += int(value.item())
        if step % 50 == 0:
            group.agree("step", lambda: b"", join)
    thread.join()
    group.close()
    assert rounds == [b",".join([b"%d" % number] * world_size) for number in range(30)]
    return total, len(rounds)


def leave_without_closing(rank: int, world_size: int) -> None:
    group = connect()
    group.agree("one", lambda: b"", join)
    if rank == 1:
        raise SystemExit(3)
    group.agree("two", lambda: b"", join)


def end_at_once_after_the_last_verdict(rank: int, world_size: int) -> bytes:
    group = connect()
    verdict = group.agree("last", lambda: b"x" * 2_000_000, lambda results: results[0])
    group.close()
    if rank == 0:
        os._exit(0)  # the store goes with it
    return verdict


def use_in_a_fork(rank: int, world_size: int) -> bytes:
    group = connect()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            group.agree("in the child", lambda: b"", join)
            os.write(write, b"worked")
        except UsageError as error:
            group.close()  # must not silence the parent
            os.write(write, b"refused" if "fork" in str(error) else b"?")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    answer = os.read(read, 100)
    verdict = group.agree("in the parent", lambda: answer, join)
    group.close()
    return verdict


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_connect_gives_the_group_of_the_job(world_size: int) -> None:
    first = b",".join(b"r%d" % rank for rank in range(world_size))
    second = b",".join([first[-1:]] * world_size)
    assert run_ranks(agree_twice, world_size, "r") == [[first, second]] * world_size


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_noticed_and_named(victim: int) -> None:
    with start_ranks(work_forever_on, 3, victim, env=QUICK) as ranks:
        for rank in range(3):
            ranks.wait_for_mark(rank, "working")
        began_s = time.monotonic()
        ranks.kill(victim)
        outcomes = ranks.collect(timeout_s=20)
    assert time.monotonic() - began_s < 10
    for rank in {0, 1, 2} - {victim}:
        error = outcomes[rank].error
        assert type(error) is PeerFailure
        assert error.causes == {victim: "lost: no sign of life for 1 s, its process or node died"}
        assert "phase 'save.flush'" in str(error)


def test_a_store_that_dies_with_rank_0_is_reported() -> None:
    with start_ranks(work_forever_on, 3, 0, env=QUICK, store="rank0") as ranks:
        for rank in range(3):
            ranks.wait_for_mark(rank, "working")
        ranks.kill(0)
        outcomes = ranks.collect(timeout_s=20)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, PeerFailure)
        assert "key-value store does not answer" in str(outcome.error)
        assert "rank 0" in str(outcome.error)


def test_a_stopped_rank_is_lost_and_learns_it_when_it_wakes() -> None:
    with start_ranks(work_a_second, 3, env=QUICK) as ranks:
        ranks.wait_for_mark(2, "working")
        ranks.send_signal(2, signal.SIGSTOP)
        ranks.wait_for_mark(0, "failed")
        ranks.wait_for_mark(1, "failed")
        ranks.send_signal(2, signal.SIGCONT)
        outcomes = ranks.collect(timeout_s=20)
    assert [type(outcome.error) for outcome in outcomes] == [PeerFailure] * 3
    assert outcomes[2].error.causes == outcomes[0].error.causes  # type: ignore[union-attr]


def test_a_busy_rank_is_not_lost() -> None:
    assert run_ranks(hold_the_interpreter, 2, env=QUICK) == [b"done,done"] * 2


def test_a_rank_that_ends_without_closing_is_noticed() -> None:
    with start_ranks(leave_without_closing, 3, env={"SHARDKEEP_PEER_SILENCE_S": "3"}) as ranks:
        outcomes = ranks.collect(timeout_s=20)
    assert isinstance(outcomes[1].error, SystemExit)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, PeerFailure)
        assert list(outcomes[rank].error.causes) == [1]


def test_a_clone_saves_in_the_background_while_the_ranks_reduce() -> None:
    results = run_ranks(save_while_training, 3)
    assert results == [(sum(3 * step + 3 for step in range(200)), 30)] * 3


def test_rank_0_takes_the_store_away_only_after_the_last_verdict_is_read() -> None:
    for _ in range(3):
        with start_ranks(end_at_once_after_the_last_verdict, 4, store="rank0") as ranks:
            outcomes = ranks.collect()
        assert [outcome.value for outcome in outcomes[1:]] == [b"x" * 2_000_000] * 3


def test_a_forked_child_is_refused_and_harms_nothing() -> None:
    assert run_ranks(use_in_a_fork, 2) == [b"refused,refused"] * 2


def test_a_restart_on_the_same_store_meets_nothing_of_the_former_start() -> None:
    with serve_store() as port:
        with start_ranks(work_forever_on, 3, 1, store=port) as ranks:
            ranks.wait_for_mark(1, "working")
        for world_size, text in ((3, "a"), (2, "b"), (4, "c")):
            first = ",".join(f"{text}{rank}" for rank in range(world_size)).encode()
            results = run_ranks(agree_twice, world_size, text, store=port)
            assert [result[0] for result in results] == [first] * world_size
