"""A few threads, each with one aligned block of memory: the bounded pipeline under every save and load."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from shardkeep.errors import StorageError
from shardkeep.format.digests import BLOCK_BYTES

T = TypeVar("T")


def run_blocks(tasks: Iterable[T], work: Callable[[T, memoryview], None], *, thread_count: int) -> None:
    """Run `work(task, block)` for every task, in order of starting, and return when all are done.

    Each thread owns one page-aligned block of BLOCK_BYTES, so the memory is `thread_count` blocks whatever the
    number of tasks. The first exception stops the rest (tasks already begun are finished) and is raised.
    """
    pending = iter(tasks)
    lock = threading.Lock()
    stop = threading.Event()

    def drain() -> None:
        try:
            block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        except OSError as error:
            stop.set()
            raise StorageError(
                f"no memory for a block of {BLOCK_BYTES} bytes on the host: {error}",
                advice="free host memory, raise its limit (ulimit -v, the job's), or set SHARDKEEP_IO_THREADS=1",
            ) from error
        while not stop.is_set():
            with lock:
                task = next(pending, None)
            if task is None:
                return
            try:
                work(task, block)
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(thread_count, thread_name_prefix="shardkeep-io") as pool:
        futures = [pool.submit(drain) for _ in range(thread_count)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop_now = any(future.done() and future.exception() is not None for future in futures)
            if stop_now or not all(future.done() for future in futures):
                stop.set()
    for future in futures:
        future.result()
