"""One rank of a job that saves and loads an FSDP2 state over gloo: the worker of the group `ranks`."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkeep.bench.channel import WorkerConfig
from shardkeep.bench.contenders.base import Contender
from shardkeep.bench.device import count_bytes, evict, list_files, make_durable
from shardkeep.bench.gpt import choose_width, list_parameters
from shardkeep.bench.live import BenchAdamW, FlatState, build_training
from shardkeep.bench.registry import EVERYONE

_TIMEOUT_S = 120


class ShardedState(FlatState):
    """A state that is sharded over ranks."""

    def list_local(self) -> list[torch.Tensor]:
        """Return this rank's part of every tensor."""
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in self.flat.values()]


def make_sharded(size_bytes: int, world_size: int) -> ShardedState:
    """Return a state sharded over all ranks by FSDP2, with content that depends on the place of an element alone."""
    parameters = {
        name: torch.arange(shape.numel(), dtype=torch.float32).reshape(shape).mul_(1e-3).add_(at)
        for at, (name, shape) in enumerate((n, torch.Size(s)) for n, s in list_parameters(choose_width(size_bytes)))
    }
    model, optimizer = build_training(parameters)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = BenchAdamW(model.parameters(), lr=1e-4)
    flat: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        flat[f"model.{name}"] = value
        optimizer.state[parameter] = {
            "step": torch.tensor(1000.0),
            "exp_avg": value * 0.5,
            "exp_avg_sq": value * 0.25,
        }
        for role, tensor in optimizer.state[parameter].items():
            flat[f"{role}.{name}"] = tensor
    return ShardedState(model=model, optimizer=optimizer, flat=flat)


class RankJob:
    """The commands of one rank. All ranks get each command; times are from barrier to barrier."""

    def __init__(self, config: WorkerConfig) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{config.port}",
            rank=config.rank,
            world_size=config.world_size,
            timeout=datetime.timedelta(seconds=_TIMEOUT_S),
        )
        self._contenders: dict[str, Contender] = {}
        self.state = make_sharded(config.size_bytes, config.world_size)

    def _get(self, name: str) -> Contender:
        if name not in self._contenders:
            entry = EVERYONE[name]
            module = importlib.import_module(f"shardkeep.bench.contenders.{entry.module}")
            self._contenders[name] = getattr(module, entry.factory)(**entry.arguments)
        return self._contenders[name]

    def save(self, who: str, folder: str) -> dict[str, float]:
        """Save, durable on return on every rank."""
        contender, path = self._get(who), Path(folder)

        def work() -> None:
            contender.save(self.state, path)
            if not contender.is_durable:
                dist.barrier()
                if dist.get_rank() == 0:
                    make_durable(path)

        return {"took_s": self._time(work), "disk_bytes": count_bytes(path) if dist.get_rank() == 0 else 0}

    def load(self, who: str, folder: str, *, reshard: bool = False, check: bool = False) -> dict[str, Any]:
        """Load from a cold page cache; with `check` into a scrambled state.

        Args:
            reshard: another number of ranks saved.
        """
        contender, path = self._get(who), Path(folder)
        if reshard and not contender.can_reshard:
            raise NotImplementedError("reshard here")
        before = [tensor.clone() for tensor in self.state.list_local()] if check else []
        if check:
            with torch.no_grad():
                torch._foreach_mul_(self.state.list_local(), 3.0)
        if dist.get_rank() == 0:
            evict(path)
        found: dict[str, Any] = {"took_s": self._time(lambda: contender.load(self.state, path))}
        if check:
            pairs = zip(before, self.state.list_local(), strict=True)
            found["is_exact"] = all(torch.equal(one, other) for one, other in pairs)
        return found

    def raw_save(self, folder: str) -> dict[str, float]:
        """Write as many bytes as this rank holds with O_DIRECT and one thread."""
        from shardkeep.bench.device import RawMover

        mover = RawMover(threads=1)
        size = sum(tensor.nbytes for tensor in self.state.list_local())
        Path(folder).mkdir(exist_ok=True)
        return {"took_s": self._time(lambda: mover.write(Path(folder) / f"raw-{dist.get_rank()}", size))}

    def raw_load(self, folder: str) -> dict[str, float]:
        """Read this rank's share of a folder's files with O_DIRECT and one thread."""
        from shardkeep.bench.device import RawMover

        mover = RawMover(threads=1)
        mine = list_files(Path(folder))[dist.get_rank() :: dist.get_world_size()]
        return {"took_s": self._time(lambda: mover.read([path for path in mine if path.stat().st_size]))}

    def _time(self, work: Callable[[], object]) -> float:
        import time

        dist.barrier()
        begin = time.monotonic()
        error: BaseException | None = None
        try:
            work()
        except Exception as caught:  # noqa: BLE001  # the others wait at the barrier
            error = caught
        dist.barrier()
        took_s = time.monotonic() - begin
        if error is not None:
            raise error
        return took_s

    def close(self) -> None:
        for contender in self._contenders.values():
            contender.close()
        dist.destroy_process_group()
