"""Copy a rank's tensors into host memory that is the exact image of its shard files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardkeep import knobs
from shardkeep.engine.arena import Arena
from shardkeep.engine.flight import Flight
from shardkeep.engine.parallel import run_parallel
from shardkeep.engine.phases import PhaseTimes
from shardkeep.engine.writer import ShardFile
from shardkeep.format.digests import BLOCK_BYTES
from shardkeep.plan.shards import ShardItem, ShardPlan
from shardkeep.spec.tensors import HostBytes

_FILE_ALIGN_BYTES = 4096


class StagedState:
    """The images of one rank's shard files, copied in two goes: at once, and what the capture defers.

    Attributes:
        error: what went wrong in the first go; `finish` raises it, where every rank learns of it.
    """

    def __init__(self, deferred: frozenset[str]) -> None:
        self._deferred = deferred
        self._files: list[ShardFile] = []
        self.error: BaseException | None = None

    def copy_first(self, files: list[ShardFile], arena: Arena) -> None:
        """Lay the files out in the arena and copy everything that is not deferred."""
        self._files = files
        lay_out(arena, files)
        copy_tensors(files, lambda key: key not in self._deferred)

    def finish(self, flight: Flight[Any], spent: PhaseTimes) -> list[ShardFile]:
        """Copy what was deferred and return the files; the live state may change when this returns or raises."""
        try:
            if self.error is not None:
                raise self.error
            if self._deferred:
                with spent.phase("stage_deferred"):
                    copy_tensors(self._files, lambda key: key in self._deferred)
            return self._files
        finally:
            for file in self._files:
                file.sources = []  # the live tensors are not this save's business any more
                file.gives_way = lambda: not flight.is_urgent
            flight.mark_staged()

    def release(self) -> None:
        """Let go of the images, so that the arena's memory is free to go."""
        for file in self._files:
            file.sources = []
            file.memory = None
        self._files = []


def place_images(plans: Sequence[ShardPlan]) -> tuple[list[int], int]:
    """Return where each file's image begins in an arena, page-aligned for direct I/O, and the bytes of all."""
    starts: list[int] = []
    end = 0
    for plan in plans:
        starts.append(end)
        end += -(-plan.size_bytes // _FILE_ALIGN_BYTES) * _FILE_ALIGN_BYTES
    return starts, end


def lay_out(arena: Arena, files: Sequence[ShardFile]) -> None:
    """Give every file its place in the arena, headers written; the tensors are still to be copied."""
    starts, size_bytes = place_images([file.plan for file in files])
    memory = arena.take(size_bytes)
    for file, start in zip(files, starts, strict=True):
        file.memory = memory[start : start + file.plan.size_bytes]
        file.memory[: len(file.plan.header)] = file.plan.header


def copy_tensors(files: Sequence[ShardFile], wanted: Callable[[str], bool]) -> int:
    """Copy the tensors whose keys are wanted into the images; return their bytes.

    Copies run in STAGE_THREADS threads, which release the interpreter lock while they copy.
    """
    tasks = list(_iter_copies(files, wanted))
    if tasks:
        thread_count = min(knobs.get_int("STAGE_THREADS"), len(tasks))
        run_parallel(
            tasks, lambda task: task[0].copy_out(*task[1:]), thread_count=thread_count, name="shardkeep-stage"
        )
    return sum(len(memory) for _, _, memory in tasks)


def _iter_copies(
    files: Sequence[ShardFile], wanted: Callable[[str], bool]
) -> Iterator[tuple[HostBytes, int, memoryview]]:
    for file in files:
        for number, item in enumerate(file.plan.items):
            if wanted(item.outgoing.key):
                yield from _cut(file, number, item)


def _cut(file: ShardFile, number: int, item: ShardItem) -> Iterator[tuple[HostBytes, int, memoryview]]:
    """Cut one item in pieces of a block, so that a single large tensor keeps every thread busy."""
    source = file.sources[number]
    assert file.memory is not None
    for begin in range(item.begin, item.end, BLOCK_BYTES):
        end = min(begin + BLOCK_BYTES, item.end)
        yield source.data, source.start + begin - item.begin, file.memory[begin:end]
