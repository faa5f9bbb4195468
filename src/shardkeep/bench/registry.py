"""Who is measured: shardkeep, the raw limit, and every library that does some of the same work. Pure.

A contender's module is imported in a worker process alone; here are only names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

Kind = Literal["limit", "ours", "checkpointer", "writer"]
Ability = Literal["save", "load", "partial", "async", "ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One contender.

    Attributes:
        module, factory, arguments: what a worker imports (below `shardkeep.bench.contenders`) and calls.
        package: what must be importable for it, besides torch.
        files: contenders with the same name here read each other's files.
        install: what to give to pip.
    """

    name: str
    kind: Kind
    module: str
    factory: str
    package: str
    abilities: frozenset[Ability]
    what: str
    install: str = ""
    files: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


def _peer(
    name: str, kind: Kind, module: str, factory: str, package: str, abilities: str, what: str, **more: Any
) -> Entry:
    found: Any = frozenset(abilities.split())
    return Entry(
        name=name,
        kind=kind,
        module=module,
        factory=factory,
        package=package,
        abilities=found,
        what=what,
        files=more.pop("files", name),
        install=more.pop("install", package),
        arguments=more,
    )


_DCP: Final = "torch.distributed.checkpoint"

PEERS: Final = {
    entry.name: entry
    for entry in (
        _peer("torch", "writer", "plain", "TorchSave", "torch", "save load partial", "torch.save, torch.load",
              files="torch", mapped=False),
        _peer("torch-mmap", "writer", "plain", "TorchSave", "torch", "load", "torch.load(mmap=True)",
              files="torch", mapped=True),
        _peer("safetensors", "writer", "plain", "Safetensors", "safetensors", "save load partial",
              "save_file; safe_open", files="safetensors"),
        _peer("runai", "writer", "plain", "RunaiStreamer", "runai_model_streamer", "load",
              "SafetensorsStreamer", files="safetensors", install="runai-model-streamer"),
        _peer("deepspeed-fast", "writer", "fast_writer", "FastWriter", "deepspeed", "save",
              "torch.save into FastFileWriter"),
        _peer("dcp-1t", "checkpointer", "dcp", "Dcp", "torch", "save load partial async ranks",
              f"{_DCP}, one writer thread; async in a thread", files="dcp", threads=1),
        _peer("dcp-2t", "checkpointer", "dcp", "Dcp", "torch", "save async",
              f"{_DCP}, two writer threads; async in a process", files="dcp", threads=2),
        _peer("dcp-hf", "checkpointer", "dcp", "DcpHuggingFace", "safetensors", "save load ranks",
              "HuggingFaceStorageWriter and Reader"),
        _peer("torch_checkpointing", "checkpointer", "torch_checkpointing_", "TorchCheckpointing",
              "torch_checkpointing", "save load async ranks", "CheckpointManager, defaults",
              install="torch_checkpointing", files="torch_checkpointing", prewarm=False),
        _peer("torch_checkpointing-prewarmed", "checkpointer", "torch_checkpointing_", "TorchCheckpointing",
              "torch_checkpointing", "async", "the same, staging allocated ahead by prewarm_staging()",
              install="torch_checkpointing", files="torch_checkpointing", prewarm=True),
        _peer("torchsnapshot", "checkpointer", "torchsnapshot_", "Torchsnapshot", "torchsnapshot",
              "save load async", "Snapshot.take, async_take, restore"),
        _peer("orbax", "checkpointer", "orbax_", "Orbax", "orbax.checkpoint", "save load async",
              "PyTreeCheckpointer, AsyncCheckpointer, numpy views", install="orbax-checkpoint"),
        _peer("bytecheckpoint", "checkpointer", "bytecheckpoint_", "Bytecheckpoint", "bytecheckpoint",
              "save load async", "save and load, framework ddp"),
    )
}  # fmt: skip

OURS: Final = _peer(
    "shardkeep", "ours", "shardkeep_", "Shardkeep", "torch", "save load partial async ranks", "shardkeep"
)
LIMIT: Final = _peer("raw", "limit", "raw", "Raw", "torch", "save load ranks", "O_DIRECT, 2 threads, 8 MiB blocks")
EVERYONE: Final = {"raw": LIMIT, "shardkeep": OURS, **PEERS}


def list_peers(ability: Ability, names: tuple[str, ...]) -> list[Entry]:
    """Return those of `names` that can do something."""
    return [PEERS[name] for name in PEERS if name in names and ability in PEERS[name].abilities]
