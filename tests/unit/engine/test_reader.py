"""Bytes on their way in: from memory where the host holds them, from storage where not or where they are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from shardkeep.engine.phases import PhaseTimes
from shardkeep.engine.reader import read_verified
from shardkeep.engine.restore import CheckpointReader
from shardkeep.engine.run import list_step_folders, read_commit
from shardkeep.errors import Corrupt
from shardkeep.spec.chunks import Chunk, whole
from shardkeep.storage.base import CachingStore
from shardkeep.storage.posix import PosixStore
from shardkeep.storage.retry import RetryingStore
from shardkeep.testing.faults import Call, Fault, FaultStore
from tests.support.fake_state import BufferBytes, FakeRun, make_tensor

SHAPE = (4096, 1600)  # 25 MiB in float32: four blocks
KEY = "model/a"


class MemoryOverStorage(FaultStore):
    """A fault store with a memory in front: it serves what `memory` holds of an object, and counts who asks."""

    def __init__(self, inner: PosixStore, memory: dict[str, bytes], plan: tuple[Fault, ...] = ()) -> None:
        super().__init__(inner, plan)
        self._memory = memory
        self.asked_count = 0

    def read_cached_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> bool:
        self.asked_count += 1
        for buffer in buffers:
            found = self._memory.get(key, b"")[offset : offset + len(buffer)]
            buffer[: len(found)] = found
            offset += len(found)
            if len(found) < len(buffer):
                return False
        return True

    def read_bytes(self) -> int:
        return sum(call.length for call in self.log if call.verb == "read_into")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    run = FakeRun(tmp_path_factory.mktemp("reader") / "run")
    elements = numpy.arange(SHAPE[0] * SHAPE[1], dtype=numpy.float32).reshape(SHAPE)
    run.save(1, {KEY: make_tensor(elements), "model/b": make_tensor(elements[:3])})
    return run


def load(run: FakeRun, store: Any, spent: PhaseTimes | None = None, *, mapped: bool = False) -> int:
    """Read the large tensor, check every element, and return the bytes read."""
    reader = CheckpointReader(store, read_commit(PosixStore(run.root), next(iter(_refs(run)))))
    empty = bytearray(SHAPE[0] * SHAPE[1] * 4)
    data = MappedBuffer(empty) if mapped else BufferBytes(bytes(empty))
    read_bytes = reader.read([(KEY, whole(SHAPE), data)], spent=spent)
    assert bytes(data.data) == numpy.arange(SHAPE[0] * SHAPE[1], dtype=numpy.float32).tobytes()
    return read_bytes


def _refs(run: FakeRun) -> Any:
    return list_step_folders(run.store, run.generation)


def shards(run: FakeRun) -> dict[str, bytes]:
    root = Path(run.root)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")}


def test_what_memory_holds_is_not_read_from_storage(saved: FakeRun) -> None:
    store = MemoryOverStorage(PosixStore(saved.root), shards(saved))
    for one in (store, RetryingStore(store)):
        assert isinstance(one, CachingStore)
        assert load(saved, one) > 0
    assert store.read_bytes() == 0


@pytest.mark.parametrize("mapped", [False, True])
def test_memory_is_asked_once_for_each_block_of_a_cold_file(saved: FakeRun, mapped: bool) -> None:
    store = MemoryOverStorage(PosixStore(saved.root), {})
    read_bytes = load(saved, store, mapped=mapped)
    assert read_bytes == store.read_bytes()
    assert store.asked_count == -(-read_bytes // (8 << 20))


class MappedBuffer(BufferBytes):
    """A destination whose memory may be written directly."""

    def find_memory(self, start: int, stop: int) -> memoryview:
        return memoryview(self.data)[start:stop]


def test_a_long_copy_around_short_ones_is_filled_in_every_block(saved: FakeRun) -> None:
    reader = CheckpointReader(PosixStore(saved.root), read_commit(PosixStore(saved.root), next(iter(_refs(saved)))))
    row_bytes = SHAPE[1] * 4
    rows = [Chunk((at, 0), (1, SHAPE[1])) for at in (0, SHAPE[0] // 2, SHAPE[0] - 1)]
    short = [BufferBytes(bytes(row_bytes)) for _ in rows]
    long = BufferBytes(bytes(SHAPE[0] * row_bytes))
    reader.read([(KEY, whole(SHAPE), long), *((KEY, row, data) for row, data in zip(rows, short, strict=True))])
    expected = numpy.arange(SHAPE[0] * SHAPE[1], dtype=numpy.float32).reshape(SHAPE)
    assert bytes(long.data) == expected.tobytes()
    for row, data in zip(rows, short, strict=True):
        assert bytes(data.data) == expected[row.offsets[0]].tobytes()


@pytest.mark.parametrize("wrong_at", [None, 0, 20 << 20])
def test_memory_is_read_in_place_and_verified_there(saved: FakeRun, wrong_at: int | None) -> None:
    memory = {key: bytearray(data) for key, data in shards(saved).items()}
    if wrong_at is not None:
        for data in memory.values():
            data[wrong_at] ^= 1
    store = MemoryOverStorage(PosixStore(saved.root), {key: bytes(data) for key, data in memory.items()})
    spent = PhaseTimes()
    load(saved, store, spent, mapped=True)
    assert 0 <= store.read_bytes() <= (8 << 20)
    assert (store.read_bytes() == 0) == (wrong_at is None)
    assert ("copy" in spent.seconds) == (wrong_at is not None), "nothing is copied where it is read in place"


@pytest.mark.parametrize("at", [0, 1 << 20, 20 << 20])
def test_a_wrong_byte_in_memory_is_no_damage(saved: FakeRun, at: int) -> None:
    wrong = {key: bytearray(data) for key, data in shards(saved).items()}
    for data in wrong.values():
        data[at] ^= 1
    store = MemoryOverStorage(PosixStore(saved.root), {key: bytes(data) for key, data in wrong.items()})
    load(saved, store)
    assert 0 < store.read_bytes() <= 8 << 20


def test_memory_and_storage_both_wrong_is_damage(saved: FakeRun) -> None:
    """Storage is asked twice whatever memory said."""
    wrong = {key: bytes(len(data)) for key, data in shards(saved).items()}
    for times, refused in ((1, False), (None, True)):
        fault = Fault(kind="bit_flip", times=times, when=lambda call: _is_first_block(call))
        store = MemoryOverStorage(PosixStore(saved.root), wrong, (fault,))
        if refused:
            with pytest.raises(Corrupt, match="are not what was written"):
                load(saved, store)
        else:
            load(saved, store)


def _is_first_block(call: Call) -> bool:
    return call.verb == "read_into" and call.key.endswith(".safetensors") and call.offset == 0


def test_a_file_gone_or_cut_is_damage_also_when_memory_is_asked_first(saved: FakeRun, tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.save(1, {KEY: make_tensor(numpy.zeros(SHAPE, dtype=numpy.float32))})
    (path,) = Path(run.root).rglob("*.safetensors")
    reader = CheckpointReader(PosixStore(run.root), read_commit(run.store, next(iter(_refs(run)))))
    block = memoryview(bytearray(8 << 20))
    read_verified(reader.part(0), 0, 8 << 20, block)
    with path.open("r+b") as file:
        file.truncate(10 << 20)
    with pytest.raises(Corrupt, match="expected at least"):
        read_verified(reader.part(0), 0, 8 << 20, block)
    path.unlink()
    with pytest.raises(Corrupt, match="missing"):
        read_verified(reader.part(0), 0, 8 << 20, block)


def test_time_is_counted_by_phase(saved: FakeRun) -> None:
    for memory in ({}, shards(saved)):
        spent = PhaseTimes()
        load(saved, MemoryOverStorage(PosixStore(saved.root), memory), spent)
        assert sorted(spent.seconds) == ["copy", "digest", "read"]
        assert all(seconds > 0 for seconds in spent.seconds.values())


def test_a_partial_load_reads_little_beside_what_is_asked(tmp_path: Path) -> None:
    """One tensor of 100 MB among others, and a quarter of its rows at any place."""
    shape = (5000, 5000)
    elements = numpy.arange(shape[0] * shape[1], dtype=numpy.float32).reshape(shape)
    run = FakeRun(tmp_path / "run")
    others = {f"model/{at}": make_tensor(elements[: 100 * at + 7]) for at in (1, 3)}
    run.save(1, {**others, "model/2": make_tensor(elements)})
    commit = read_commit(run.store, next(iter(_refs(run))))
    for begin, end in ((0, 5000), (0, 1250), (1875, 3125), (3750, 5000)):
        store = FaultStore(PosixStore(run.root))
        data = BufferBytes(bytes((end - begin) * shape[1] * 4))
        counted_bytes = CheckpointReader(store, commit).read(
            [("model/2", Chunk((begin, 0), (end - begin, shape[1])), data)]
        )
        read_bytes = sum(call.length for call in store.log if call.verb == "read_into")
        assert data.data == elements[begin:end].tobytes()
        assert len(data.data) <= read_bytes == counted_bytes <= 1.05 * len(data.data)
