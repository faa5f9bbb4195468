"""The journal on storage: segments written by the coordinator in the background, and read by a later start.

Nothing here stops training: a segment that cannot be written is reported and tried again with the next one, and one
that cannot be read is left out and named.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardkeep import knobs
from shardkeep.engine.run import WRITER, list_generations, list_step_folders, read_generation
from shardkeep.errors import CheckpointError, Corrupt, NotFound
from shardkeep.events import Event, EventSink
from shardkeep.format.journal import decode_segment, encode_line, encode_segment
from shardkeep.format.names import StepRef, find_journal, format_generation, format_journal
from shardkeep.plan.replay import Recorded, plan_sources
from shardkeep.storage.base import Store

SEGMENT_BYTES: Final = 256 << 10
"""A segment is finished at this size; until then every flush writes it anew under the next number."""
_WAITING_BYTES: Final = 4 << 20
_SOURCES: Final = 16
_READ_LIMIT_BYTES: Final = 64 << 20


class JournalWriter:
    """Writes one generation's journal. `add` is for the training thread and takes microseconds.

    A crash loses at most what `JOURNAL_S` seconds and one write take. Segments beyond `JOURNAL_BYTES` are removed,
    the oldest first.
    """

    def __init__(self, store: Store, events: EventSink, *, run_id: str, generation: int, world_size: int) -> None:
        self._store = store
        self._events = events
        self._run_id = run_id
        self._generation = generation
        self._world_size = world_size
        self._every_s = knobs.get_knob("JOURNAL_S")
        self._limit_bytes = knobs.get_int("JOURNAL_BYTES")
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._lines: list[tuple[int, bytes]] = []
        self._lines_bytes = 0
        # Lines are counted from the first one ever: that of `_lines[0]`, and the first that is not durable.
        self._first = 0
        self._durable = 0
        self._sequence = 0
        self._tail: str | None = None
        self._finished: deque[tuple[str, int]] = deque()
        self._thread: threading.Thread | None = None
        self._flushed_at_s = time.monotonic()
        self._failing = False

    def add(self, step: int, values: Mapping[str, str]) -> None:
        """Take one step's line; it is durable some seconds later, or when `flush` returns."""
        line = encode_line(step, values)
        with self._lock:
            self._lines.append((step, line))
            self._lines_bytes += len(line)
            if self._lines_bytes > _WAITING_BYTES:
                self._drop_half()
        if time.monotonic() - self._flushed_at_s >= self._every_s and (
            self._thread is None or not self._thread.is_alive()
        ):
            # Daemon: a storage that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self.flush, name="shardkeep-journal", daemon=True)
            self._flushed_at_s = time.monotonic()
            self._thread.start()

    def _drop_half(self) -> None:
        """Bound the memory while storage refuses: the older half of what waits is given up."""
        self._forget(len(self._lines) // 2)

    def _forget(self, count: int) -> None:
        self._lines_bytes -= sum(len(line) for _, line in self._lines[:count])
        del self._lines[:count]
        self._first += count

    def flush(self) -> bool:
        """Make every line so far durable; False (and an event) when storage refused."""
        with self._writing:
            try:
                self._write()
            except CheckpointError as error:
                if not self._failing:
                    text = f"the journal was not written, training goes on: {error}"
                    self._events.emit(Event(name="journal.failed", level="warning", text=text))
                self._failing = True
                return False
            finally:
                self._flushed_at_s = time.monotonic()
            self._failing = False
            return True

    def _write(self) -> None:
        with self._lock:
            lines, stop = list(self._lines), self._first + len(self._lines)
            if stop == self._durable:
                return
        self._sequence += 1
        key = format_journal(self._generation, self._sequence, max(step for step, _ in lines))
        data = encode_segment(
            [line for _, line in lines],
            run_id=self._run_id,
            generation=self._generation,
            world_size=self._world_size,
            writer=WRITER,
        )
        # ORDER: the new segment is durable before the one whose lines it repeats is removed. CRASH: between the two
        # both are there, and say the same.
        self._store.put(key, data, if_absent=True)
        tail, self._tail = self._tail, key
        with self._lock:
            self._durable = stop
            if len(data) >= SEGMENT_BYTES:
                self._forget(max(stop - self._first, 0))
                self._finished.append((key, len(data)))
                self._tail = None
        if tail is not None:
            self._store.delete([tail])
        while sum(size for _, size in self._finished) > self._limit_bytes:
            self._store.delete([self._finished.popleft()[0]])

    def close(self) -> None:
        """Write what waits; harmless twice."""
        self.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What earlier generations left of the steps beyond a checkpoint.

    Attributes:
        steps: step -> its record; the earliest generation's where several have it.
        commits: checkpoints beyond it, one a step, ascending.
        left_out: what could not be read.
    """

    steps: Mapping[int, Recorded]
    commits: tuple[StepRef, ...]
    left_out: tuple[str, ...] = ()


def read_history(store: Store, *, run_id: str, parent: StepRef, generation: int) -> History:
    """Return what there is to compare with after a resume of `parent` as `generation`.

    Raises:
        StorageError: storage cannot even be listed.
    """
    numbers = [n for n in list_generations(store) if parent.generation <= n < generation]
    left_out: list[str] = []
    if len(numbers) > _SOURCES:
        left_out.append(
            f"of {len(numbers)} earlier starts only the first and the newest {_SOURCES - 1} were looked at"
        )
        numbers = [numbers[0], *numbers[1 - _SOURCES :]]
    journals = {n: _list_journals(store, n, beyond=parent.step) for n in numbers}
    commits = {
        n: [r for r, folder in list_step_folders(store, n).items() if folder.committed and r.step > parent.step]
        for n in numbers
    }
    parents: dict[int, StepRef | None] = {}
    for number in numbers:
        if number != parent.generation and (journals[number] or commits[number]):
            try:
                parents[number] = read_generation(store, number).parent
            except (Corrupt, NotFound) as error:
                left_out.append(f"generation {number} was not compared: {error}")
    steps: dict[int, Recorded] = {}
    saved: dict[int, StepRef] = {}
    budget_bytes = _READ_LIMIT_BYTES
    for number in plan_sources(parents, parent, generation):
        if number not in journals:
            continue
        own: dict[int, Recorded] = {}
        for key, size_bytes in journals[number]:
            budget_bytes -= size_bytes
            if budget_bytes < 0:
                left_out.append(f"{key} and what follows were not read: more than {_READ_LIMIT_BYTES >> 20} MiB")
                break
            try:
                own.update(_read_segment(store, key, run_id, number, beyond=parent.step))
            except (Corrupt, NotFound) as error:
                left_out.append(f"a segment of the journal was left out: {error}")
        steps.update({step: line for step, line in own.items() if step not in steps})
        for ref in commits[number]:
            # Of several tries at a step of one generation the committed one counts; there is one.
            saved.setdefault(ref.step, ref)
    return History(
        steps=dict(sorted(steps.items())), commits=tuple(saved[s] for s in sorted(saved)), left_out=tuple(left_out)
    )


def _list_journals(store: Store, generation: int, *, beyond: int) -> list[tuple[str, int]]:
    """Return keys and sizes of a generation's segments that reach beyond a step, in the order of writing."""
    found = []
    for info in store.list_objects(f"{format_generation(generation)}/journal-"):
        parsed = find_journal(info.key)
        if parsed is not None and parsed[2] > beyond:
            found.append((parsed[1], info.key, info.size_bytes))
    return [(key, size) for _, key, size in sorted(found)]


def _read_segment(store: Store, key: str, run_id: str, generation: int, *, beyond: int) -> dict[int, Recorded]:
    data = store.get(key, limit_bytes=_READ_LIMIT_BYTES)
    record, lines = decode_segment(data, where=key)
    if (record.run_id, record.generation) != (run_id, generation):
        raise Corrupt(f"{key}: is a segment of generation {record.generation} of run {record.run_id}", key=key)
    return {
        line.step: Recorded(generation=generation, world_size=record.world_size, values=line.values)
        for line in lines
        if line.step > beyond
    }


def prune_journals(store: Store, generations: tuple[int, ...], *, before: int) -> int:
    """Remove segments that no kept checkpoint needs; return how many.

    Args:
        before: the lowest step that can still be resumed; segments that end at or before it are of no use.
    """
    old = [
        info.key
        for number in generations
        for info in store.list_objects(f"{format_generation(number)}/journal-")
        if (parsed := find_journal(info.key)) is not None and parsed[2] <= before
    ]
    store.delete(old)
    return len(old)
