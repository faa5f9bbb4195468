"""Whole runs on an S3 service: save, resume, prune, the command, kills, throttling and outages."""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from shardkeep import knobs
from shardkeep.engine.run import list_generations, scan_run
from shardkeep.errors import StorageError
from shardkeep.plan.retention import Keep
from shardkeep.storage.resolve import open_store
from shardkeep.testing.faults import Call, Fault, FaultKind, FaultStore
from tests.cli.runner import shardkeep
from tests.crash.jobs import Sink, check_clean, committed, digest, make_state, manage, restart, save_at
from tests.support.adapters import make_adapted, same_state, train_to
from tests.support.proxy import FaultProxy, Trouble
from tests.support.ranks import start_ranks
from tests.support.servers import Server


def run_of(url: str, *steps: int, keep: Keep | None = None) -> None:
    with manage(open_store(url), keep=keep) as manager:
        manager.resume(make_state(1))
        for step in steps:
            save_at(manager, step)


def test_a_run_lives_on_a_service(s3: str) -> None:
    """STORE-1: no rename, fsync, append or link is asked of it."""
    with sk.CheckpointManager(s3, keep=Keep(last=2)) as manager:
        assert manager.resume(make_state(1)).fresh
        for step in (10, 20, 30):
            save_at(manager, step)
    state = make_state(1)
    with sk.CheckpointManager(s3) as manager:
        assert manager.resume(state).step == 30
    assert digest(state) == digest(make_state(30))
    assert committed(open_store(s3)) == [20, 30]
    check_clean(open_store(s3))


def test_two_ranks_share_it(s3: str) -> None:
    store = open_store(s3)
    assert restart(store, 2) == 0
    assert restart(store, 2) == 20
    assert committed(store) == [20, 30]
    check_clean(store)


def test_one_checkpoint_by_url(s3: str) -> None:
    """Also through pathlib, which makes one slash of two."""
    root = Path(s3) / "one"
    state = make_state(7)
    sk.save(root, state, step=7)
    with pytest.raises(sk.AlreadyExists):
        sk.save(f"{s3}/one", state, step=8)
    sk.save(f"{s3}/one", make_state(9), step=9, overwrite=True)
    found = make_state(1)
    assert sk.load(root, found).ref.step == 9
    assert digest(found) == digest(make_state(9))


def test_a_frozen_base_is_sent_once_and_copied_by_the_service(proxied: str, proxy: FaultProxy) -> None:
    """LORA-3: five saves send one base and five adapters; each checkpoint has all of its own."""
    steps, sent = (1, 2, 3, 4, 5), []
    store = open_store(proxied)
    with manage(store, keep=Keep(last=4)) as manager:
        state = make_adapted(0)
        manager.resume(state)
        for step in steps:
            train_to(state, step)
            proxy.log.clear()
            manager.save(step, state)
            sent.append(sum(passed.sent_bytes for passed in proxy.log))
    assert sent[0] > 10_000_000
    assert max(sent[1:]) < 100_000
    frozen = [info for info in store.list_objects("") if "/frozen-" in info.key]
    assert [info.size_bytes > 10_000_000 for info in frozen] == [True] * 4
    assert committed(store) == [2, 3, 4, 5]
    check_clean(store)
    for step in (2, 5):
        found = make_adapted(0)
        sk.load(proxied, found, step=step)
        assert same_state(found, make_adapted(step))


def test_a_partial_read_fetches_what_it_needs(proxied: str, proxy: FaultProxy) -> None:
    big = torch.arange(4 << 20, dtype=torch.float32).reshape(4096, 1024)
    sk.save(proxied, {"model": {"big": big, "small": torch.ones(3)}})
    proxy.log.clear()
    with sk.open(proxied) as checkpoint:
        rows = checkpoint["model/big"][100:110]
    assert torch.equal(rows, big[100:110])
    got = sum(passed.got_bytes for passed in proxy.log)
    assert got < 1 << 20, f"{got} bytes for 40 KiB of 16 MiB"


def test_every_command_takes_a_url(s3: str) -> None:
    run_of(s3, 10, 20, 30)
    listed = shardkeep("ls", s3, "--json")
    assert [entry["step"] for entry in listed.json["steps"]] == [10, 20, 30]
    assert listed.json["run"] == s3
    assert shardkeep("show", f"{s3}@20", "--json").json["step"] == 20
    assert shardkeep("show", f"{s3}/g0001/step-00000020/", "--json").json["step"] == 20
    verified = shardkeep("verify", s3)
    assert verified.code == 0, verified
    assert "all as written" in verified.out
    assert shardkeep("diff", f"{s3}@10", f"{s3}@10").code == 0
    assert shardkeep("diff", f"{s3}@10", f"{s3}@30").code == 1
    assert shardkeep("prune", s3, "--keep-last", "2", "--yes").code == 0
    assert [entry["step"] for entry in shardkeep("ls", s3, "--json").json["steps"]] == [20, 30]
    assert shardkeep("rollback", s3, "20", "--yes").code == 0
    assert committed(open_store(s3)) == [20]
    missing = shardkeep("ls", f"{s3}-none")
    assert missing.code == sk.NotFound.exit_code
    assert f"{s3}-none" in missing.err
    check_clean_of_twenty(s3)


def check_clean_of_twenty(url: str) -> None:
    state = make_state(1)
    with manage(open_store(url)) as manager:
        assert manager.resume(state).step == 20
    assert digest(state) == digest(make_state(20))


# Kills


def job(rank: int, world_size: int, url: str, kind: FaultKind | None, at_call: int) -> int:
    plan = [Fault(kind=kind, at_call=at_call)] if kind else []
    store = FaultStore(open_store(url), plan)
    with manage(store, keep=Keep(last=1)) as manager:
        state = make_state(1)
        report = manager.resume(state)
        if not report.fresh:
            assert digest(state) == digest(make_state(report.step))
        save_at(manager, 10 if report.fresh else 20)
    return len(store.log)


def strike(url: str, env: dict[str, str], kind: FaultKind, at_call: int) -> bool:
    """Save 10, die in the job that saves 20, start again; says whether it died."""
    run_of(url, 10, keep=Keep(last=1))
    with start_ranks(job, 1, url, kind, at_call, env=env) as ranks:
        (outcome,) = ranks.collect(timeout_s=60)
    died = outcome.exit_code == -9
    if not died:
        assert outcome.value < at_call
    before = committed(open_store(url))
    step = restart(open_store(url), 1, keep=Keep(last=1))
    assert step in (10, 20)
    assert step >= max(before)
    check_clean(open_store(url))
    return died


@pytest.mark.parametrize("at_call", [8, 21, 34, 47])
def test_a_job_that_ends_at_a_call(s3: str, at_call: int) -> None:
    """In this process: from one call on, nothing it asks for reaches the service."""
    run_of(s3, 10, keep=Keep(last=1))
    dead = Fault(kind="kill", when=lambda call: call.number >= at_call, times=None)
    store = FaultStore(open_store(s3), [dead], die=lambda: None)
    with contextlib.suppress(StorageError):
        with manage(store, keep=Keep(last=1)) as manager:
            manager.resume(make_state(1))
            save_at(manager, 20)
    assert len(store.log) >= at_call
    before = committed(open_store(s3))
    step = restart(open_store(s3), 1, keep=Keep(last=1))
    assert step in (10, 20)
    assert step >= max(before)
    check_clean(open_store(s3))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["kill", "torn", "lost_answer"])
def test_a_kill_at_every_call(s3: str, seaweed: Server, kind: FaultKind) -> None:
    if kind == "lost_answer":
        every_answer_lost(s3)
        return
    at = 1
    while strike(f"{s3}/{at}", seaweed.env, kind, at):
        at += 1
    assert at > 30


def every_answer_lost(url: str) -> None:
    """Each call's answer is lost once, and the call repeated: nothing is different."""
    counted = FaultStore(open_store(f"{url}/counted"))
    with manage(counted) as manager:
        manager.resume(make_state(1))
        save_at(manager, 10)
    for at in range(1, len(counted.log) + 1):
        if counted.log[at - 1].verb in ("writer", "write_at", "finish", "abort"):
            continue
        store = FaultStore(open_store(f"{url}/{at}"), [Fault(kind="lost_answer", at_call=at)])
        with knobs.override(RETRY_BASE_S=0.0), manage(store) as manager:
            manager.resume(make_state(1))
            save_at(manager, 10)
        check_clean(open_store(f"{url}/{at}"))


# Trouble


def throttle(share: float, seed: int) -> Callable[[str, str], Trouble | None]:
    dice = random.Random(seed)
    lock = threading.Lock()

    def plan(method: str, path: str) -> Trouble | None:
        with lock:
            return "slow_down" if dice.random() < share else None

    return plan


def test_throttled_requests_end_in_whole_checkpoints(proxied: str, proxy: FaultProxy, quick: object) -> None:
    """STORE-5: three in ten are answered with SlowDown."""
    proxy.plan = throttle(0.3, 1)
    run_of(proxied, 10, 20, keep=Keep(last=2))
    assert restart(open_store(proxied), 1) == 20
    proxy.plan = lambda method, path: None
    check_clean(open_store(proxied))
    assert sum(passed.trouble == "slow_down" for passed in proxy.log) > 10


def test_a_hard_outage_fails_a_save_and_not_the_run(proxied: str, proxy: FaultProxy) -> None:
    """STORE-5: longer than anybody waits; the failure is told, and the next save is whole."""
    sink = Sink()
    with knobs.override(RETRY_BASE_S=0.01, RETRY_BUDGET_S=0.2, REQUEST_TIMEOUT_S=2.0):
        with sk.CheckpointManager(proxied, save_every=10, events=sink, tolerate=1) as manager:
            manager.resume(make_state(1))
            manager.after_step(10, make_state(10))
            proxy.down = True
            manager.after_step(20, make_state(20))
            proxy.down = False
            manager.after_step(30, make_state(30))
    assert any(event.level in ("warning", "error") and "fail" in event.name for event in sink.events), sink.names()
    assert committed(open_store(proxied)) == [10, 30]
    state = make_state(1)
    with manage(open_store(proxied)) as manager:
        assert manager.resume(state).step == 30
    assert digest(state) == digest(make_state(30))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_long_run_through_throttling_and_an_outage(proxied: str, proxy: FaultProxy) -> None:
    """Three in ten requests throttled, and nothing for 20 s in the middle of a save: every checkpoint is whole."""
    proxy.plan = throttle(0.3, 2)
    weights = torch.randn(12 << 20, generator=torch.Generator().manual_seed(3))  # 48 MiB: in parts
    steps = [10, 20, 30, 40]
    outage = threading.Timer(0.0, lambda: None)
    with sk.CheckpointManager(proxied) as manager:
        manager.resume({"weights": torch.zeros(12 << 20)})
        for step in steps:
            if step == 20:
                outage = threading.Timer(0.5, lambda: _go_away(proxy, 20.0))
                outage.start()
            manager.save(step, {"weights": weights + step})
    outage.join()
    assert any(passed.trouble == "down" for passed in proxy.log)
    proxy.plan = lambda method, path: None
    assert committed(open_store(proxied)) == steps
    check_clean(open_store(proxied))
    found = {"weights": torch.zeros(12 << 20)}
    sk.load(proxied, found, step=20)
    assert torch.equal(found["weights"], weights + 20)


def _go_away(proxy: FaultProxy, for_s: float) -> None:
    proxy.down = True
    time.sleep(for_s)
    proxy.down = False


def test_a_reader_never_sees_a_checkpoint_that_is_not_whole(s3: str) -> None:
    """STORE-3: writes of other keys are late; whoever polls finds a checkpoint only when all of it is there."""
    slow = Fault(kind="delay", when=_is_data, times=None, delay_s=0.05)
    stop = threading.Event()
    seen: list[int] = []
    problems: list[object] = []

    def poll() -> None:
        store = open_store(s3)
        while not stop.is_set():
            for step in committed(store):
                try:
                    state = make_state(1)
                    sk.load(s3, state, step=step)
                    assert digest(state) == digest(make_state(step))
                    seen.append(step)
                except Exception as error:  # noqa: BLE001  # handed to the test
                    problems.append(error)

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        with manage(FaultStore(open_store(s3), [slow])) as manager:
            manager.resume(make_state(1))
            for step in (10, 20, 30):
                save_at(manager, step)
    finally:
        time.sleep(0.3)
        stop.set()
        reader.join(timeout=30)
    assert not problems
    assert 30 in seen or 20 in seen


def _is_data(call: Call) -> bool:
    return call.verb in ("finish", "put") and not call.key.endswith("commit.json")


def test_newest_is_found_without_pointers(s3: str) -> None:
    """STORE-6: by commit records alone; the run can be copied elsewhere, key by key."""
    run_of(s3, 10, 20)
    first = open_store(s3)
    second = open_store(f"{s3}-{secrets.token_hex(4)}")
    for info in first.list_objects(""):
        second.put(info.key, first.get(info.key, limit_bytes=1 << 30))
    assert committed(second) == [10, 20]
    view = scan_run(second)
    assert view is not None
    assert list_generations(second) == (1,)
    assert restart(second, 1) == 20


def test_azure_takes_a_whole_run(az: str) -> None:
    run_of(az, 5, 10, 20, keep=Keep(last=2))
    assert committed(open_store(az)) == [10, 20]
    assert restart(open_store(az), 1) == 20
    check_clean(open_store(az))
    assert shardkeep("verify", az).code == 0


def test_azure_takes_large_objects(az: str) -> None:
    from tests.objects.test_upload import check, write

    store = open_store(az)
    write(store, "a")
    check(store, "a")
