"""What a save and a load cost: host memory beside the state, and bytes read beside those that are wanted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from shardkeep.engine.restore import CheckpointReader
from shardkeep.engine.run import read_commit
from shardkeep.spec.chunks import Chunk
from shardkeep.storage.posix import PosixStore
from shardkeep.testing.faults import FaultStore
from tests.support.fake_state import BufferBytes, FakeRun, make_tensor

LIMIT_BYTES = 128 << 20

_JOB = """
import sys, torch
from shardkeep.manager.manager import CheckpointManager
from shardkeep.ranks.single import SingleGroup
from tests.support.memory import watch_peak

small = {"warm": torch.ones(4_000_000)}
warm = CheckpointManager(sys.argv[1] + "/warm", group=SingleGroup())
warm.resume(small)
warm.save(1, small)
CheckpointManager(sys.argv[1] + "/warm", group=SingleGroup()).resume(small)
state = {f"t{at}": torch.full((8 << 20,), at + 1, dtype=torch.float32) for at in range(48)}
manager = CheckpointManager(sys.argv[1] + "/run", group=SingleGroup())
manager.resume(state)
with watch_peak() as saved:
    manager.save(1, state)
for tensor in state.values():
    tensor.zero_()
with watch_peak() as loaded:
    CheckpointManager(sys.argv[1] + "/run", group=SingleGroup()).resume(state)
assert all(bool((tensor == at + 1).all()) for at, tensor in enumerate(state.values()))
print(saved.extra_bytes, loaded.extra_bytes)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_save_and_a_load_take_little_memory(tmp_path: Path) -> None:
    """1.5 GiB of state; the process's high-water mark above what it held before."""
    done = subprocess.run(
        [sys.executable, "-c", _JOB, str(tmp_path)], capture_output=True, text=True, check=False, timeout=500
    )
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    assert done.returncode == 0, done.stderr
    saved_bytes, loaded_bytes = map(int, done.stdout.split())
    assert saved_bytes < LIMIT_BYTES
    assert loaded_bytes < LIMIT_BYTES


def read_own(run: FakeRun, world_size: int, rank: int, shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """Read what one of `world_size` row-wise sharded ranks holds; return the bytes wanted and the bytes read."""
    store = FaultStore(run.store)
    record = read_commit(PosixStore(run.root), next(iter(_refs(run))))
    reader = CheckpointReader(store, record)
    wanted: list[Any] = []
    for key, shape in shapes.items():
        rows = -(-shape[0] // world_size)
        begin, end = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        chunk = Chunk((begin, 0), (end - begin, shape[1]))
        wanted.append((key, chunk, BufferBytes(bytes(chunk.numel * 4))))
    counted_bytes = reader.read(wanted)
    read_bytes = sum(call.length for call in store.log if call.verb == "read_into")
    assert counted_bytes == read_bytes
    for key, chunk, data in wanted:
        first = chunk.offsets[0] * shapes[key][1]
        expected = numpy.arange(first, first + chunk.numel, dtype=numpy.float32)
        assert bytes(data.data) == expected.tobytes(), key
    return sum(len(data.data) for _, _, data in wanted), read_bytes


def _refs(run: FakeRun) -> Any:
    from shardkeep.engine.run import list_step_folders

    return list_step_folders(run.store, run.generation)


@pytest.mark.parametrize("saved_by", [4, 2])
def test_each_of_four_ranks_reads_little_more_than_its_own(tmp_path: Path, saved_by: int) -> None:
    shapes = {"model/a": (4096, 1500), "model/b": (2048, 2048), "optimizer/exp_avg/a": (4096, 1500)}
    state = {
        key: make_tensor(numpy.arange(shape[0] * shape[1], dtype=numpy.float32).reshape(shape), placement="S0")
        for key, shape in shapes.items()
    }
    run = FakeRun(tmp_path / "run", world_size=saved_by)
    run.save(1, state)
    for rank in range(4):
        own_bytes, read_bytes = read_own(run, 4, rank, shapes)
        assert own_bytes <= read_bytes <= own_bytes * 1.05, rank
