"""A few threads, each with one aligned block of memory: the bounded pipeline under every save and load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from shardkeep.engine.hostmemory import HostMemory
from shardkeep.engine.parallel import run_parallel
from shardkeep.errors import StorageError
from shardkeep.format.digests import BLOCK_BYTES

T = TypeVar("T")


def run_blocks(tasks: Iterable[T], work: Callable[[T, memoryview], None], *, thread_count: int) -> None:
    """Run `work(task, block)` for every task, in order of starting, and return when all are done.

    Each thread owns one page-aligned block of BLOCK_BYTES, so the memory is `thread_count` blocks whatever the
    number of tasks. The first exception stops the rest (tasks already begun are finished) and is raised.
    """
    own = threading.local()

    def work_with_block(task: T) -> None:
        block = getattr(own, "block", None)
        if block is None:
            block = own.block = _make_block()
        work(task, block)

    run_parallel(tasks, work_with_block, thread_count=thread_count, name="shardkeep-io")


def _make_block() -> memoryview:
    try:
        return HostMemory(BLOCK_BYTES).view()
    except OSError as error:
        raise StorageError(
            f"no memory for a block of {BLOCK_BYTES} bytes on the host: {error}",
            advice="free host memory, raise its limit (ulimit -v, the job's), or set SHARDKEEP_IO_THREADS=1",
        ) from error
