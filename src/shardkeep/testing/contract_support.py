"""What the contract tests share: data, odd keys, threads, and `raises` without a test framework."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Final

from shardkeep.storage.base import Store

SIZES: Final = (0, 1, 511, 512, 4095, 4096, 4097, 12_288, 65_537)
BIG_BYTES: Final = (8 << 20) + 1
THREADS_COUNT: Final = 8

BAD_KEYS: Final = (
    "", ".", "..", "/", "/a", "a/", "a//b", "./a", "a/.", "../a", "a/../b", "a/..", "a\\b", "a\0b", "a\nb", "a b",
    ".a", "a/.tmp-1-2", "é", "a/日本", "a:b", "a*", "a?", "~", "x" * 201, "/".join(["x" * 100] * 11),
)  # fmt: skip
GOOD_KEYS: Final = (
    "-a",
    "a%2Fb",
    "%2e%2e",
    "a",
    "A",
    "_a",
    "0",
    "a.b",
    "a-b_c=d@e,f",
    "g0001/step-00000100.2/part-r00000.json",
    "x" * 200,
)


@contextlib.contextmanager
def raises(*kinds: type[Exception]) -> Iterator[list[Exception]]:
    """Expect one of the errors; the list holds it afterwards."""
    caught: list[Exception] = []
    try:
        yield caught
    except kinds as error:
        caught.append(error)
        return
    raise AssertionError(f"expected {' or '.join(kind.__name__ for kind in kinds)}, nothing was raised")


def make_bytes(size_bytes: int, seed: int = 0) -> bytes:
    """Return bytes that no shift and no swap of blocks leaves equal."""
    return random.Random(seed).randbytes(size_bytes)


def write_object(store: Store, key: str, data: bytes, block_bytes: int = 4096) -> None:
    """Write an object through a writer, block by block."""
    writer = store.writer(key, len(data))
    for offset in range(0, len(data), block_bytes):
        writer.write_at(offset, memoryview(data)[offset : offset + block_bytes])
    writer.finish()


def read_object(store: Store, key: str, offset: int, length: int) -> bytes:
    """Read a range of an object."""
    buffer = bytearray(length)
    store.read_into(key, offset, memoryview(buffer))
    return bytes(buffer)


def run_threads(work: Callable[[int], None], count: int = THREADS_COUNT) -> list[Exception | None]:
    """Run `work(index)` in threads that start together; return what each raised."""
    outcomes: list[Exception | None] = [None] * count
    start = threading.Barrier(count)

    def run(index: int) -> None:
        start.wait(timeout=30)
        try:
            work(index)
        except Exception as error:  # noqa: BLE001  # handed to the test
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a call hangs"
    return outcomes
