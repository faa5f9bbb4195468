"""Memory for staging: mapped once, touched ahead, used again, and not there in a fork."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from shardkeep.engine import arena as module
from shardkeep.engine.arena import Arena
from shardkeep.errors import StorageError, UsageError

SIZE = 24 << 20


def resident_kib(arena: Arena) -> int:
    """Return how much of the mapping that the arena lies in has memory."""
    assert arena._memory is not None
    return next((kib for low, high, kib in list_mappings() if low <= arena._memory.address < high), 0)


def list_mappings() -> list[tuple[int, int, int]]:
    """Return every mapping of this process: begin, end, resident KiB."""
    found: list[tuple[int, int, int]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            low, high = (int(part, 16) for part in head[0].split("-"))
            found.append((low, high, 0))
        elif head[0] == "Rss:":
            found[-1] = (*found[-1][:2], int(head[1]))
    return found


def test_it_is_touched_ahead_and_used_again() -> None:
    arena = Arena()
    arena.prepare(SIZE)
    deadline_s = time.monotonic() + 20
    while resident_kib(arena) < SIZE >> 10 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert resident_kib(arena) >= SIZE >> 10
    memory = arena.take(SIZE)
    memory[:4] = b"abcd"
    del memory
    arena.prepare(SIZE // 2)
    assert arena.size_bytes == SIZE
    assert bytes(arena.take(4)) == b"abcd", "the same memory"
    arena.close()
    assert arena.size_bytes == 0
    arena.close()


def test_it_is_page_aligned_and_grows() -> None:
    arena = Arena()
    for size in (1, 5000, 4096, 100_000):
        memory = arena.take(size)
        assert memory.nbytes == size
        assert arena.size_bytes >= size
        assert arena.size_bytes % mmap.PAGESIZE == 0
        del memory
    assert arena.take(0).nbytes == 0


def test_taking_ends_the_touching_and_what_is_written_stays() -> None:
    arena = Arena()
    for _ in range(20):
        arena.prepare(SIZE)
        memory = arena.take(SIZE)
        memory[:] = b"\x5a" * SIZE
        assert memory.tobytes().count(b"\x5a") == SIZE
        del memory
        arena.close()


def test_kernels_that_cannot_populate_are_touched_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POPULATE_WRITE", 9999)
    arena = Arena()
    arena.prepare(SIZE)
    assert arena._toucher is not None
    arena._toucher.join()
    assert resident_kib(arena) >= SIZE >> 10
    assert not any(arena.take(SIZE)[:: 1 << 12])


def test_memory_that_is_not_there_is_an_error_and_a_later_try_may_work() -> None:
    arena = Arena()
    arena.take(100)
    with pytest.raises(StorageError, match=r"no memory to stage \d+ bytes[^\n]*\n.*mode='blocking'"):
        arena.take(1 << 60)
    assert arena.size_bytes == 0
    assert arena.take(100).nbytes == 100


def test_a_fork_has_no_part_of_it_and_may_not_take_it() -> None:
    arena = Arena()
    memory = arena.take(SIZE)
    assert arena._memory is not None
    memory[:] = b"x" * SIZE
    if (pid := os.fork()) == 0:
        code = 1
        try:
            refused = []
            for call in (arena.take, arena.prepare):
                try:
                    call(2 * SIZE)
                except UsageError:
                    refused.append(call)
            mapped = [low for low, high, _ in list_mappings() if low <= arena._memory.address < high]
            arena.close()
            code = 0 if len(refused) == 2 and not mapped else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bytes(memory) == b"x" * SIZE
    assert arena.take(SIZE).nbytes == SIZE
