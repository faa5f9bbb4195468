"""Real checkpoints without torch: states made of bytes, saved through the engine by one or several rank threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from shardkeep.engine.environment import describe_environment
from shardkeep.engine.run import claim_generation, create_run
from shardkeep.engine.save import SaveOptions, Saver
from shardkeep.errors import PeerFailure
from shardkeep.format.names import StepRef
from shardkeep.format.records import CommitRecord
from shardkeep.ranks.base import Group
from shardkeep.ranks.single import SingleGroup
from shardkeep.spec.chunks import Chunk, whole
from shardkeep.spec.dtypes import get_dtype
from shardkeep.spec.layout import Mesh, chunk_at
from shardkeep.spec.tensors import Captured, LocalTensor, Piece
from shardkeep.storage.base import Store
from shardkeep.storage.posix import PosixStore


class BufferBytes:
    """`HostBytes` over a bytearray."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def copy_out(self, start: int, out: memoryview) -> None:
        out[:] = self.data[start : start + len(out)]

    def copy_in(self, start: int, data: memoryview) -> None:
        self.data[start : start + len(data)] = data


def pattern(size_bytes: int, seed: int) -> bytes:
    """Return bytes that differ everywhere from those of another seed's."""
    return numpy.random.default_rng(seed).bytes(size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTensor:
    """A global tensor. `placement` None: held whole by all; else DTensor's, over one mesh dimension."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    placement: str | None = None
    per_rank: bool = False

    def local(self, key: str, rank: int, world_size: int) -> LocalTensor:
        section, _, name = key.partition("/")
        mesh = None if self.placement is None else Mesh((world_size,), tuple(range(world_size)))
        placements = () if self.placement is None else (self.placement,)
        chunk = whole(self.shape) if mesh is None else chunk_at(self.shape, mesh.shape, placements, (rank,))
        data = self.data if not self.per_rank else bytes((byte + rank) % 256 for byte in self.data)
        piece = Piece(chunk=chunk, data=BufferBytes(self._cut(chunk, data)))
        return LocalTensor(
            key=key,
            section=section,
            name=name,
            dtype=self.dtype,
            shape=self.shape,
            role="parameter" if section == "model" and not self.per_rank else "state",
            pieces=(piece,) if chunk.numel or 0 in self.shape else (),
            mesh=mesh,
            placements=placements,
            trainable=True if section == "model" else None,
            per_rank=self.per_rank,
        )

    def _cut(self, chunk: Chunk, data: bytes) -> bytes:
        grid = numpy.frombuffer(data, dtype=numpy.uint8).reshape(*self.shape, get_dtype(self.dtype).itemsize_bytes)
        index = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        return grid[index].tobytes()


State = Mapping[str, FakeTensor]


def make_tensor(
    array: Any, *, dtype: str | None = None, placement: str | None = None, per_rank: bool = False
) -> FakeTensor:
    """Return a tensor with a NumPy array's elements; `dtype` names types NumPy lacks, over arrays of their bits."""
    found = numpy.ascontiguousarray(array)
    return FakeTensor(
        dtype=dtype or str(found.dtype),
        shape=numpy.shape(array),
        data=found.tobytes(),
        placement=placement,
        per_rank=per_rank,
    )


def small_state(seed: int = 0, *, placement: str | None = None) -> dict[str, FakeTensor]:
    """Return a model of three tensors and their optimizer moments: a few hundred KiB, several leaves."""
    rng = numpy.random.default_rng(seed)

    def normal(*shape: int) -> FakeTensor:
        return make_tensor(rng.standard_normal(shape, dtype=numpy.float32), placement=placement)

    return {
        "model/embed.weight": normal(256, 300),
        "model/layers.0.wq.weight": normal(64, 64),
        "model/layers.0.norm.weight": normal(64),
        "optimizer/exp_avg/embed.weight": normal(256, 300),
        "optimizer/exp_avg/layers.0.wq.weight": normal(64, 64),
    }


DEFAULT_VALUES: Mapping[str, Any] = {
    "scheduler": {"last_epoch": 3, "base_lrs": [0.1, 0.2]},
    "optimizer/groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
}


def capture_fake(
    state: State, rank: int = 0, world_size: int = 1, *, values: Mapping[str, Any] | None = None, **links: Any
) -> Captured:
    """Take a fake state apart as one rank. `links`: aliases, views."""
    tensors = tuple(state[key].local(key, rank, world_size) for key in sorted(state))
    found = dict(DEFAULT_VALUES if values is None else values)
    found["rng"] = {"rank": rank, "draws": [1, 2, 3]}
    return Captured(
        tensors=tensors,
        aliases=dict(links.get("aliases", {})),
        values=found,
        per_rank_values=frozenset({"rng"}),
        views=dict(links.get("views", {})),
    )


class ThreadWorld:
    """Ranks as threads of this process. `group(rank)` is a `Group`; every rank makes the same calls."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.results: list[bytes | Exception] = [b""] * world_size
        self.verdict: bytes | Exception = b""

    def run(self, work: Callable[[Group], Any]) -> list[Any]:
        """Run `work(group)` on every rank and return the results by rank."""
        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(lambda rank: work(_ThreadGroup(self, rank)), range(self.world_size)))


class _ThreadGroup:
    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.world_size = world.world_size

    def agree(
        self,
        name: str,
        work: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        world = self._world
        try:
            world.results[self.rank] = work()
        except Exception as error:  # noqa: BLE001  # carried to the other ranks
            world.results[self.rank] = error
        world.barrier.wait()
        if self.rank == 0:
            failed = {rank: str(r) for rank, r in enumerate(world.results) if isinstance(r, Exception)}
            try:
                if failed:
                    raise PeerFailure(f"{name}: ranks failed", causes=failed)
                world.verdict = decide([r for r in world.results if isinstance(r, bytes)])
            except Exception as error:  # noqa: BLE001  # carried to the other ranks
                world.verdict = error
        world.barrier.wait()
        own, verdict = world.results[self.rank], world.verdict
        world.barrier.wait()
        if isinstance(own, Exception):
            raise own
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    def clone(self) -> _ThreadGroup:
        return self

    def close(self) -> None:
        return


class FakeRun:
    """A run in a folder, and a job that saves into it."""

    def __init__(self, root: Path, *, world_size: int = 1) -> None:
        self.root = root
        self.store: Store = PosixStore(root)
        self.run_id = create_run(self.store)
        self.world_size = world_size
        self.generation = 0
        self.claim(None)

    def claim(self, parent: StepRef | None) -> int:
        """Start a new generation."""
        record = claim_generation(
            self.store, self.run_id, parent, world_size=self.world_size, environment=describe_environment()
        )
        assert record is not None
        self.generation = record.generation
        return self.generation

    def save(
        self,
        step: int,
        state: State,
        *,
        values: Mapping[str, Any] | None = None,
        options: SaveOptions | None = None,
        **links: Any,
    ) -> CommitRecord:
        """Save on all ranks; return the commit record."""

        def work(group: Group) -> CommitRecord:
            saver = Saver(self.store, group, run_id=self.run_id, generation=self.generation)
            return saver.save(
                step,
                lambda: capture_fake(state, group.rank, group.world_size, values=values, **links),
                options or SaveOptions(),
            )

        if self.world_size == 1:
            return work(SingleGroup())
        found: list[CommitRecord] = ThreadWorld(self.world_size).run(work)
        return found[0]

    def folder(self, step: int, *, generation: int | None = None, attempt: int = 1) -> Path:
        ref = StepRef(step=step, generation=generation or self.generation, attempt=attempt)
        return self.root / ref.folder


def flip(path: Path, offset: int, mask: int = 0x40) -> None:
    """Change bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
