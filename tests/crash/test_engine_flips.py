"""One flipped bit anywhere in a checkpoint is found by the load and named; the wrong state is never handed out."""

from __future__ import annotations

import random

import pytest

from shardkeep.engine.checkpoint import Checkpoint
from shardkeep.engine.locate import find_checkpoint
from shardkeep.engine.reader import read_verified
from shardkeep.engine.restore import CheckpointReader, restore
from shardkeep.engine.run import read_commit
from shardkeep.errors import CheckpointError, Corrupt, IncompatibleFormat
from shardkeep.format.names import HF_INDEX, StepRef
from shardkeep.ranks.single import SingleGroup
from shardkeep.storage.memory import MemoryStore
from tests.crash.jobs import digest, make_state, manage, save_at

REF = StepRef(10, 1)


def make_run() -> MemoryStore:
    store = MemoryStore()
    manager = manage(store)
    manager.resume(make_state(1))
    save_at(manager, 10)
    return store


def load(store: MemoryStore) -> str:
    """Read everything, as a resume does, without writing anything."""
    from shardkeep.state.restore import plan_restore

    state = make_state(1)
    commit = find_checkpoint(store, 10)
    restore(
        store,
        SingleGroup(),
        commit,
        lambda catalog: plan_restore(state, catalog),
        lambda plan: plan.finish(),
    )
    with Checkpoint(store, commit) as opened:
        assert len(opened) > 0
    return digest(state)


def check_bits(store: MemoryStore, key: str, bits: list[int], wanted: str) -> int:
    data = store.get(key, limit_bytes=1 << 30)
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        store.put(key, bytes(changed))
        with pytest.raises(CheckpointError) as caught:
            load(store)
        assert isinstance(caught.value, (Corrupt, IncompatibleFormat)), (key, bit, caught.value)
        assert key.rpartition("/")[2] in str(caught.value), (key, bit, caught.value)
    store.put(key, data)
    assert load(store) == wanted
    return len(bits)


def files(store: MemoryStore) -> list[tuple[str, int]]:
    return [
        (info.key, info.size_bytes)
        for info in store.list_objects(f"{REF.folder}/")
        if not info.key.endswith(HF_INDEX)  # for other tools; verify checks it
    ]


def test_sampled_bits_of_every_file() -> None:
    store, rng = make_run(), random.Random(5)
    wanted = load(store)
    assert wanted == digest(make_state(10))
    found = files(store)
    assert len(found) == 6
    for key, size in found:
        ends = [0, 7, 8 * size - 1, 8 * size - 8, 8 * 11 + 1, 8 * min(90, size - 1)]
        check_bits(store, key, ends + [rng.randrange(8 * size) for _ in range(12)], wanted)


def read_all(store: MemoryStore) -> None:
    """Read every byte the way a load does, without a live state: a tenth of the time."""
    reader = CheckpointReader(store, read_commit(store, REF))
    part = reader.part(0)
    for number, shard in enumerate(part.record.shards):
        read_verified(part, number, 0, memoryview(bytearray(shard.size_bytes)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_byte_of_every_file() -> None:
    store, rng = make_run(), random.Random(6)
    for key, size in files(store):
        data = store.get(key, limit_bytes=1 << 30)
        for byte in range(size):
            changed = bytearray(data)
            changed[byte] ^= 1 << rng.randrange(8)
            store.put(key, bytes(changed))
            with pytest.raises((Corrupt, IncompatibleFormat)) as caught:
                read_all(store)
            assert key.rpartition("/")[2] in str(caught.value), (key, byte)
        store.put(key, data)
        read_all(store)


def test_cut_and_grown_files() -> None:
    store = make_run()
    for key, size in files(store):
        data = store.get(key, limit_bytes=1 << 30)
        for length in (0, 1, size // 2, size - 1):
            store.put(key, data[:length])
            with pytest.raises(Corrupt, match=key.rpartition("/")[2]):
                load(store)
        store.put(key, data)
