"""Large objects in parts: without a copy, in bounded memory, through trouble, and never half there."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkeep import knobs
from shardkeep.errors import AlreadyExists, NotFound, StorageError
from shardkeep.storage.base import ObjectWriter, Store
from shardkeep.storage.object_upload import PART_BYTES, WINDOW_PARTS, plan_part_bytes
from shardkeep.storage.resolve import open_store
from tests.support.memory import watch_peak
from tests.support.proxy import FaultProxy, Trouble

MIB = 1 << 20
DATA = random.Random(1).randbytes(2 * PART_BYTES + 4097)


def write(store: Store, key: str, data: bytes = DATA, *, threads: int = 3, block_bytes: int = PART_BYTES) -> None:
    writer = store.writer(key, len(data))
    try:
        with ThreadPoolExecutor(threads) as pool:
            view = memoryview(data)
            starts = range(0, len(data), block_bytes)
            list(pool.map(lambda at: writer.write_at(at, view[at : at + block_bytes]), starts))
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def finish_from(writer: ObjectWriter, begin: int) -> None:
    for at in range(begin, len(DATA), PART_BYTES):
        writer.write_at(at, memoryview(DATA)[at : at + PART_BYTES])
    writer.finish()


def check(store: Store, key: str, data: bytes = DATA) -> None:
    assert store.head(key).size_bytes == len(data)
    assert store.get(key, limit_bytes=len(data)) == data


def once(match: Callable[[str, str], bool], trouble: Trouble, times: int = 1) -> Callable[[str, str], Trouble | None]:
    left = iter(range(times))
    lock = threading.Lock()

    def plan(method: str, path: str) -> Trouble | None:
        with lock:
            return trouble if match(method, path) and next(left, None) is not None else None

    return plan


def is_part(method: str, path: str) -> bool:
    return method == "PUT" and "partNumber=" in path


def is_complete(method: str, path: str) -> bool:
    return method == "POST" and "uploadId=" in path


def test_the_size_of_parts() -> None:
    assert plan_part_bytes(0) == plan_part_bytes(1) == plan_part_bytes(PART_BYTES * 10_000) == PART_BYTES
    for size in (PART_BYTES * 10_000 + 1, 1 << 40, 5 << 40):
        part = plan_part_bytes(size)
        assert part % PART_BYTES == 0
        assert -(-size // part) <= 10_000


def test_blocks_in_order_are_sent_without_a_copy(s3: str) -> None:
    """One block of memory, filled anew for every part: what was in it is sent, and nothing is kept beside it."""
    store = open_store(s3)
    block = bytearray(PART_BYTES)
    count = 4
    writer = store.writer("a", count * PART_BYTES)
    for number in range(count):
        block[:] = bytes([number + 1]) * PART_BYTES
        with watch_peak() as peak:
            writer.write_at(number * PART_BYTES, memoryview(block))
        if number:  # the first one starts obstore's threads
            assert peak.extra_bytes < PART_BYTES // 2
    block[:] = b"\xff" * PART_BYTES
    writer.finish()
    for number in range(count):
        buffer = bytearray(PART_BYTES)
        store.read_into("a", number * PART_BYTES, memoryview(buffer))
        assert buffer == bytes([number + 1]) * PART_BYTES


def test_blocks_ahead_of_their_turn_take_a_bounded_window(s3: str) -> None:
    store = open_store(s3)
    data = random.Random(2).randbytes((WINDOW_PARTS + 1) * PART_BYTES)
    writer = store.writer("a", len(data))
    with watch_peak() as peak:
        for number in (*range(1, WINDOW_PARTS + 1), 0):
            writer.write_at(number * PART_BYTES, memoryview(data)[number * PART_BYTES : (number + 1) * PART_BYTES])
    assert peak.extra_bytes < (WINDOW_PARTS + 1) * PART_BYTES
    writer.finish()
    check(store, "a", data)


def test_blocks_too_far_ahead_are_refused_in_time(s3: str) -> None:
    store = open_store(s3)
    size = (WINDOW_PARTS + 3) * PART_BYTES
    writer = store.writer("a", size)
    with knobs.override(RETRY_BUDGET_S=0.3):
        for number in range(1, WINDOW_PARTS + 1):
            writer.write_at(number * PART_BYTES, memoryview(bytes(PART_BYTES)))
        with pytest.raises(StorageError, match=f"part {WINDOW_PARTS + 1} waited in vain for part 0") as caught:
            writer.write_at((WINDOW_PARTS + 1) * PART_BYTES, memoryview(bytes(PART_BYTES)))
    assert not caught.value.retryable
    with pytest.raises(NotFound):
        store.head("a")


@pytest.mark.parametrize("block_bytes", [3 * MIB, pytest.param(9 * MIB, marks=pytest.mark.slow)])
def test_blocks_of_any_size_from_threads(s3: str, block_bytes: int) -> None:
    store = open_store(s3)
    write(store, "a", block_bytes=block_bytes)
    check(store, "a")


def test_nothing_shows_before_finish_and_an_abort_drops_the_parts(proxied: str, proxy: FaultProxy) -> None:
    store = open_store(proxied)
    writer = store.writer("a", len(DATA))
    for at in range(0, len(DATA), PART_BYTES):
        writer.write_at(at, memoryview(DATA)[at : at + PART_BYTES])
    with pytest.raises(NotFound):
        store.head("a")
    assert store.list_objects("") == []
    writer.abort()
    assert [passed for passed in proxy.log if passed.method == "DELETE" and "uploadId=" in passed.path]
    with pytest.raises(NotFound):
        store.head("a")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "trouble",
    ["slow_down", "cut_later", *(pytest.param(kind, marks=SLOW) for kind in ("internal", "cut", "lost_answer"))],
)
def test_parts_are_repeated(proxied: str, proxy: FaultProxy, quick: object, trouble: Trouble) -> None:
    proxy.plan = once(is_part, trouble, times=2)
    store = open_store(proxied)
    write(store, "a")
    check(store, "a")
    assert sum(passed.trouble == trouble for passed in proxy.log) == 2


@pytest.mark.parametrize("size_bytes", [len(DATA), 4097])
@pytest.mark.parametrize(
    "trouble", ["lost_answer", *(pytest.param(kind, marks=SLOW) for kind in ("slow_down", "cut"))]
)
def test_the_last_request_is_repeated_and_a_lost_answer_to_it_is_success(
    proxied: str, proxy: FaultProxy, quick: object, trouble: Trouble, size_bytes: int
) -> None:
    """Asked again, the service has the object already: it knows no such upload, or says that it exists."""
    proxy.plan = once(lambda m, p: is_complete(m, p) or (m == "PUT" and "partNumber" not in p), trouble)
    store = open_store(proxied)
    write(store, "a", DATA[:size_bytes])
    assert any(passed.trouble == trouble for passed in proxy.log)
    check(store, "a", DATA[:size_bytes])


@pytest.mark.parametrize("size_bytes", [len(DATA), 4097])
def test_the_object_itself_says_whose_it_is(proxied: str, proxy: FaultProxy, quick: object, size_bytes: int) -> None:
    """The answer to the last request is lost, and the repeat is refused: no such upload any more, or it exists."""
    store = open_store(proxied)
    store.put("known", b"", if_absent=True)  # the service heeds conditions: small objects are created under one
    asked, heads = iter(range(100)), iter(range(100))

    def plan(method: str, path: str) -> Trouble | None:
        if is_complete(method, path):
            return "lost_answer" if next(asked) == 0 else (404, "NoSuchUpload")
        if method == "PUT" and "partNumber" not in path:
            return "lost_answer" if next(asked) == 0 else None
        return "cut" if method == "HEAD" and next(heads) % 3 == 1 else None

    proxy.plan = plan
    write(store, "a", DATA[:size_bytes])
    proxy.plan = lambda method, path: None
    assert next(asked) >= 2
    assert any(passed.method == "HEAD" and passed.trouble == "cut" for passed in proxy.log)
    check(store, "a", DATA[:size_bytes])


@pytest.mark.parametrize("size_bytes", [len(DATA), 4097])
def test_another_object_that_came_first_is_kept(s3: str, size_bytes: int) -> None:
    store = open_store(s3)
    writer = store.writer("a", size_bytes)
    for at in range(0, size_bytes, PART_BYTES):
        writer.write_at(at, memoryview(DATA)[at : min(at + PART_BYTES, size_bytes)])
    store.put("a", b"first")
    with pytest.raises(AlreadyExists):
        writer.finish()
    assert store.get("a", limit_bytes=100) == b"first"


def test_of_writers_that_race_for_a_small_object_one_wins(s3: str) -> None:
    store = open_store(s3)
    store.put("known", b"", if_absent=True)
    writers = [store.writer("a", 1) for _ in range(4)]
    for number, writer in enumerate(writers):
        writer.write_at(0, memoryview(bytes([number])))

    def end(number: int) -> bool:
        try:
            writers[number].finish()
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(end, range(4)))
    assert sum(won) == 1
    assert store.get("a", limit_bytes=1)[0] == won.index(True)


def test_a_service_that_stays_away_fails_the_writer_in_time(proxied: str, proxy: FaultProxy) -> None:
    with knobs.override(RETRY_BASE_S=0.02, RETRY_BUDGET_S=0.3, REQUEST_TIMEOUT_S=2.0):
        store = open_store(proxied)
        writer = store.writer("a", len(DATA))
        writer.write_at(0, memoryview(DATA)[:PART_BYTES])
        proxy.down = True
        began_s = time.monotonic()
        with pytest.raises(StorageError) as caught:
            finish_from(writer, PART_BYTES)
        assert time.monotonic() - began_s < 25
        assert caught.value.retryable
        proxy.down = False
        with pytest.raises(StorageError):
            writer.finish()
        with pytest.raises(NotFound):
            store.head("a")


@pytest.mark.parametrize("outage_s", [1.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_an_outage_in_the_middle_is_survived(proxied: str, proxy: FaultProxy, outage_s: float) -> None:
    store = open_store(proxied)
    writer = store.writer("a", len(DATA))
    writer.write_at(0, memoryview(DATA)[:PART_BYTES])
    proxy.down = True
    timer = threading.Timer(outage_s, lambda: setattr(proxy, "down", False))
    timer.start()
    for at in range(PART_BYTES, len(DATA), PART_BYTES):
        writer.write_at(at, memoryview(DATA)[at : at + PART_BYTES])
    writer.finish()
    timer.join()
    check(store, "a")
    assert any(passed.trouble == "down" for passed in proxy.log)
