"""The barrier that carries errors, on every store torch has."""

from __future__ import annotations

import collections
import functools
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import FileStore, HashStore, PrefixStore

from shardkeep.errors import BarrierTimeout, OutOfSpace, PeerFailure, UsageError
from shardkeep.knobs import override
from shardkeep.ranks.store_group import StoreGroup
from tests.unit.ranks.worlds import CountingStore, OldStore, make_tcp_store, run_group, run_threads


@pytest.fixture(params=["hash", "tcp", "prefix", "file", "old"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return {
        "hash": HashStore,
        "tcp": make_tcp_store,
        "prefix": lambda: PrefixStore("p", make_tcp_store()),
        "file": lambda: FileStore(str(tmp_path / "store"), -1),
        "old": lambda: OldStore(make_tcp_store()),
    }[request.param]()


def name_of(group: StoreGroup) -> bytes:
    return b"r%d" % group.rank


def join(results: list[bytes]) -> bytes:
    return b",".join(results)


def test_results_come_by_rank_and_one_verdict_goes_to_all(store: Any) -> None:
    def body(group: StoreGroup) -> list[bytes]:
        return [group.agree(f"p{n}", lambda n=n: name_of(group) + b"-%d" % n, join) for n in range(3)]

    verdicts = [b"r0-%d,r1-%d,r2-%d" % (n, n, n) for n in range(3)]
    assert run_group(body, 3, store=store) == [verdicts] * 3


def test_a_world_of_one_works_too() -> None:
    assert run_group(lambda group: group.agree("p", lambda: b"x", join), 1) == [b"x"]


def test_nobody_returns_before_everybodys_work_is_done() -> None:
    done: list[int] = []

    def body(group: StoreGroup) -> int:
        def work() -> bytes:
            time.sleep(0.1 * group.rank)
            done.append(group.rank)
            return b""

        group.agree("p", work, join)
        return len(done)

    assert run_group(body, 3) == [3, 3, 3]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_reaches_every_rank_and_the_group_goes_on(store: Any, bad: int) -> None:
    caught: dict[int, BaseException] = {}

    def body(group: StoreGroup) -> bytes:
        def work() -> bytes:
            if group.rank == bad:
                raise OutOfSpace("disk full: 3 bytes missing")
            return b""

        with pytest.raises((OutOfSpace, PeerFailure)) as info:
            group.agree("save.flush", work, lambda _: pytest.fail("decided over a failure"))
        caught[group.rank] = info.value
        return group.agree("next", lambda: name_of(group), join)

    assert run_group(body, 3, store=store) == [b"r0,r1,r2"] * 3
    assert type(caught[bad]) is OutOfSpace
    for rank in {0, 1, 2} - {bad}:
        error = caught[rank]
        assert type(error) is PeerFailure
        assert error.causes == {bad: "OutOfSpace (exit code 30): disk full: 3 bytes missing"}
        assert f"phase 'save.flush' failed on rank {bad}" in str(error)


def test_an_error_of_decide_is_rank_0s(store: Any) -> None:
    def refuse(_: list[bytes]) -> bytes:
        raise ValueError("gap in layer 3")

    errors = run_group(lambda group: group.agree("p", lambda: b"", refuse), 3, store=store)
    assert [type(error) for error in errors] == [ValueError, PeerFailure, PeerFailure]
    assert errors[1].causes == errors[2].causes == {0: "ValueError (exit code 1): gap in layer 3"}


def test_all_alike_each_raises_its_own_and_notes_the_others() -> None:
    def body(group: StoreGroup) -> None:
        def work() -> bytes:
            raise OSError(f"rank {group.rank} is unhappy")

        group.agree("p", work, join)

    errors = run_group(body, 4)
    assert [str(error) for error in errors] == [f"rank {rank} is unhappy" for rank in range(4)]
    assert errors[2].__notes__ == ["phase 'p' also failed on ranks 0, 1, 3"]


def test_several_failed_ranks_are_all_named() -> None:
    def body(group: StoreGroup) -> None:
        def work() -> bytes:
            if group.rank in {1, 3}:
                raise OSError(f"bad disk {group.rank}")
            return b""

        group.agree("p", work, join)

    errors = run_group(body, 4)
    assert errors[0].causes == errors[2].causes
    assert sorted(errors[0].causes) == [1, 3]
    assert "bad disk 3" in str(errors[2])


def test_a_failure_is_known_while_rank_0_still_works() -> None:
    waited_s: dict[int, float] = {}

    def body(group: StoreGroup) -> None:
        def work() -> bytes:
            if group.rank == 0:
                time.sleep(1.5)
            if group.rank == 1:
                raise OSError("x")
            return b""

        began_s = time.monotonic()
        try:
            group.agree("p", work, join)
        finally:
            waited_s[group.rank] = time.monotonic() - began_s

    errors = run_group(body, 3)
    assert [type(error) for error in errors] == [PeerFailure, OSError, PeerFailure]
    assert waited_s[1] < 1.2
    assert waited_s[2] < 1.2


def test_an_interrupt_is_told_and_goes_on_as_itself() -> None:
    class Interrupt(BaseException):
        pass

    def body(group: StoreGroup) -> object:
        def work() -> bytes:
            if group.rank == 1:
                raise Interrupt
            return b""

        try:
            return group.agree("p", work, join)
        except Interrupt as error:
            return error

    results = run_group(body, 2)
    assert isinstance(results[1], Interrupt)
    assert results[0].causes[1].startswith("Interrupt")


@pytest.mark.parametrize(("late", "missing"), [((1, 3), (1, 3)), ((0,), (0,)), ((0, 2), (0,))])
def test_a_timeout_names_who_is_missing(late: tuple[int, ...], missing: tuple[int, ...]) -> None:
    def body(group: StoreGroup) -> None:
        def work() -> bytes:
            if group.rank in late:
                time.sleep(0.8)
            return b""

        group.agree("p", work, join, timeout_s=0.3)

    errors = run_group(body, 4)
    # Late ranks learn it when they come: all agree that the phase failed.
    assert all(isinstance(error, BarrierTimeout) for error in errors), errors
    assert {error.missing for error in errors} == {missing}
    assert "within 0.3 s" in str(errors[1])


def test_a_rank_0_that_never_comes_is_named_after_the_timeout() -> None:
    store = HashStore()
    group = StoreGroup(store, 1, 2, "n")
    began_s = time.monotonic()
    with pytest.raises(BarrierTimeout, match="rank 0 did not arrive") as info:
        group.agree("p", lambda: b"", join, timeout_s=0.5)
    assert info.value.missing == (0,)
    assert 0.5 <= time.monotonic() - began_s < 2
    group.close()


def test_rank_0_waits_in_vain_for_its_whole_timeout_not_less() -> None:
    # The others arrive a whole timeout before rank 0 does, and are still there for a late rank 3.
    def body(group: StoreGroup) -> bytes:
        def work() -> bytes:
            time.sleep({0: 0.7, 1: 0.0, 2: 0.0, 3: 1.3}[group.rank])
            return b""

        return group.agree("p", work, lambda _: b"ok", timeout_s=0.9)

    assert run_group(body, 4) == [b"ok"] * 4


def test_when_a_waiting_rank_gave_up_rank_0_does_not_succeed_alone() -> None:
    def body(group: StoreGroup) -> bytes:
        def decide(_: list[bytes]) -> bytes:
            time.sleep(1.5)
            return b"committed"

        return group.agree("p", lambda: b"", decide, timeout_s=0.3)

    errors = run_group(body, 2)
    assert [type(error) for error in errors] == [BarrierTimeout, BarrierTimeout]
    assert [error.missing for error in errors] == [(0,), (0,)]


def test_a_rank_that_closes_early_is_noticed_at_once() -> None:
    store = HashStore()
    groups = [StoreGroup(store, rank, 3, "n") for rank in range(3)]
    groups[2].close()
    began_s = time.monotonic()
    with override(PEER_SILENCE_S=6):
        errors = run_threads(lambda rank: groups[rank].agree("p", lambda: b"", join) if rank < 2 else None, 3)
    assert errors[0].causes == {2: "lost: it closed its group or its process ended"}
    assert errors[1].causes == errors[0].causes
    assert time.monotonic() - began_s < 12
    for group in groups:
        group.close()


def test_a_silent_rank_is_lost_a_busy_one_is_not() -> None:
    store = HashStore()
    with override(PEER_SILENCE_S=0.4):
        groups = [StoreGroup(store, rank, 3, "n") for rank in range(3)]
        groups[2]._pulse._stopping.set()  # dies without a word

        def body(rank: int) -> bytes:
            def work() -> bytes:
                time.sleep(1.2 if rank == 2 else 0.0)
                return b""

            return groups[rank].agree("p", work, join)

        errors = run_threads(body, 3)
        assert all(type(error) is PeerFailure for error in errors)
        assert errors[0].causes == {2: "lost: no sign of life for 0.4 s, its process or node died"}

        groups = [StoreGroup(store, rank, 3, "m") for rank in range(3)]
        assert run_threads(body, 3) == [b",,"] * 3  # as long at work, with a pulse
        for group in groups:
            group.close()


def test_a_watcher_that_was_suspended_itself_declares_nobody_lost() -> None:
    store = HashStore()
    with override(PEER_SILENCE_S=0.6):
        groups = [StoreGroup(store, rank, 2, "n") for rank in range(2)]
        watch = groups[0]._watch
        assert watch.find_lost() == {}
        groups[1]._pulse._stopping.set()
        time.sleep(0.8)  # longer than the silence, nobody looking
        assert watch.find_lost() == {}
        deadline_s = time.monotonic() + 5
        while not watch.find_lost():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        groups[0].close()


@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_in_different_phases_are_told_both_names(odd: int) -> None:
    def body(group: StoreGroup) -> bytes:
        name = "load.plan" if group.rank == odd else "save.commit"
        return group.agree(name, lambda: b"", join)

    errors = run_group(body, 3)
    assert [type(error) for error in errors] == [UsageError] * 3
    for error in errors:
        assert "'load.plan'" in str(error)
        assert "'save.commit'" in str(error)
    assert ("ranks 1, 2 in" if odd == 0 else "rank 2 in") in str(errors[0])


@settings(max_examples=8)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 65_536, 65_537, (4 << 20) - 1, 4 << 20, (4 << 20) + 1]), min_size=2, max_size=3
    ),
    verdict_bytes=st.sampled_from([0, 65_537, 8 << 20, 9_000_001]),
)
def test_large_payloads_arrive_whole_and_leave_nothing(sizes: list[int], verdict_bytes: int) -> None:
    store = make_tcp_store()
    verdict = os.urandom(verdict_bytes)
    payloads = [os.urandom(size) for size in sizes]
    gathered: list[list[bytes]] = []

    def body(group: StoreGroup) -> bytes:
        def decide(results: list[bytes]) -> bytes:
            gathered.append(results)
            return verdict

        return group.agree("p", lambda: payloads[group.rank], decide)

    results = run_group(body, len(sizes), store=store)
    assert all(result == verdict for result in results)
    assert gathered == [payloads]
    assert store.num_keys() <= len(sizes) + 1  # the pulses, and one key of torch's own


def test_a_hundred_phases_leave_no_keys() -> None:
    store = make_tcp_store()
    before: list[int] = []

    def body(group: StoreGroup) -> None:
        for number in range(100):
            if number == 5 and group.rank == 0:
                before.append(store.num_keys())
            work = functools.partial(fail, group) if number % 25 == 0 else lambda: b"x" * 70_000
            try:
                group.agree("p", work, join)
            except (ValueError, PeerFailure):
                assert number % 25 == 0

        if group.rank == 0:
            before.append(store.num_keys())

    def fail(group: StoreGroup) -> bytes:
        if group.rank in {0, 1}:
            raise ValueError(f"rank {group.rank}")
        return b"y" * 70_000

    assert run_group(body, 3, store=store) == [None] * 3
    assert before[1] <= before[0] + 6
    assert store.num_keys() <= 3 + 1


def test_messages_are_linear_in_ranks() -> None:
    # Looking whether a key is there yet depends on timing and costs next to nothing; everything else is counted.
    phases_count = 10
    per_rank: dict[int, float] = {}
    for world_size in (2, 4, 8):
        counts: collections.Counter[str] = collections.Counter()
        store = CountingStore(make_tcp_store(), counts, threading.Lock())

        def body(group: StoreGroup) -> None:
            for _ in range(phases_count):
                group.agree("p", lambda: b"x", join)

        assert run_group(body, world_size, store=store) == [None] * world_size
        moved = sum(count for name, count in counts.items() if name not in {"check", "has_extended_api"})
        per_rank[world_size] = moved / phases_count / world_size
        assert counts["check"] / phases_count / world_size < 60
    assert per_rank[8] <= per_rank[4] <= per_rank[2] <= 7, per_rank


def test_waiting_costs_next_to_nothing() -> None:
    counts: collections.Counter[str] = collections.Counter()
    store = CountingStore(make_tcp_store(), counts, threading.Lock())

    def body(group: StoreGroup) -> bytes:
        return group.agree("p", lambda: time.sleep(1.5) or b"" if group.rank == 1 else b"", join)

    began_s = time.process_time()
    assert run_group(body, 2, store=store) == [b",", b","]
    assert time.process_time() - began_s < 0.2
    assert counts["check"] < 300


def test_a_clone_is_a_group_of_its_own_and_outlives_the_first() -> None:
    def body(group: StoreGroup) -> list[bytes]:
        twin = group.clone()
        seen: list[bytes] = []
        thread = threading.Thread(
            target=lambda: seen.extend(twin.agree("b", lambda: name_of(twin), join) for _ in range(20))
        )
        thread.start()
        for _ in range(20):
            assert group.agree("a", lambda: b"m", join) == b"m,m,m"
        thread.join()
        group.close()
        seen.append(twin.agree("last", lambda: b"t", join))
        twin.close()
        return seen

    assert run_group(body, 3, store=make_tcp_store()) == [[b"r0,r1,r2"] * 20 + [b"t,t,t"]] * 3


def test_two_groups_with_other_nonces_do_not_meet() -> None:
    store = make_tcp_store()
    old = StoreGroup(store, 1, 2, "old")
    with pytest.raises(BarrierTimeout):
        old.agree("p", lambda: b"stale", join, timeout_s=0.2)
    assert (
        run_group(lambda group: group.agree("p", lambda: b"new", join), 2, store=store, nonce="new")
        == [b"new,new"] * 2
    )
    old.close()


def test_the_thread_ends_with_close_and_with_the_group_itself() -> None:
    def pulses() -> int:
        return sum(thread.name == "shardkeep-pulse" for thread in threading.enumerate())

    before = pulses()
    group: StoreGroup | None = StoreGroup(HashStore(), 0, 1, "n")
    other: StoreGroup | None = StoreGroup(HashStore(), 0, 1, "n")
    assert pulses() == before + 2
    assert group is not None
    group.close()
    group.close()
    other = None
    gc.collect()
    assert other is None
    assert pulses() == before


def test_rank_0_stays_until_the_last_verdict_is_read() -> None:
    store = HashStore()
    groups = [StoreGroup(store, rank, 2, "n") for rank in range(2)]
    left_s: dict[int, float] = {}

    class SlowReader(StoreGroup):
        def _await_verdict(self, phase: Any) -> Any:
            time.sleep(1.0)
            return super()._await_verdict(phase)

    groups[1].__class__ = SlowReader

    def body(rank: int) -> None:
        groups[rank].agree("p", lambda: b"", join)
        left_s[rank] = time.monotonic()
        if rank == 0:
            groups[0].close()
            left_s[0] = time.monotonic()

    assert run_threads(body, 2) == [None, None]
    assert left_s[0] >= left_s[1] - 0.01
    groups[1].close()


@pytest.mark.parametrize(
    ("rank", "world_size", "nonce"), [(2, 2, "n"), (-1, 2, "n"), (0, 0, "n"), (0, 2, ""), (0, 2, "a/b")]
)
def test_wrong_arguments_are_refused(rank: int, world_size: int, nonce: str) -> None:
    with pytest.raises(UsageError):
        StoreGroup(HashStore(), rank, world_size, nonce)


def test_misuse_is_refused() -> None:
    group = StoreGroup(HashStore(), 0, 1, "n")
    with pytest.raises(UsageError, match="expected a name and a positive"):
        group.agree("", lambda: b"", join)
    with pytest.raises(UsageError, match="expected a name and a positive"):
        group.agree("p", lambda: b"", join, timeout_s=0)
    with pytest.raises(UsageError, match="work returned str, expected bytes"):
        group.agree("p", lambda: "text", join)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="decide returned NoneType"):
        group.agree("p", lambda: b"", lambda _: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="in another thread"):
        group.agree("p", lambda: group.agree("inner", lambda: b"", join), join)
    group.close()
    with pytest.raises(UsageError, match="closed"):
        group.agree("p", lambda: b"", join)


def test_odd_error_texts_travel() -> None:
    def body(group: StoreGroup) -> None:
        def work() -> bytes:
            if group.rank == 1:
                raise OSError("file \udcff" + "é" * 10_000)
            return b""

        group.agree("p", work, join)

    cause = run_group(body, 2)[0].causes[1]
    assert "file \\udcffé" in cause
    assert len(cause) < 5_000
