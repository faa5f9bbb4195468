"""torch.distributed.checkpoint: its own format, and Hugging Face's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkeep.bench.channel import find_port
from shardkeep.bench.contenders.base import Contender, State

# Torch does not say which of these names it exports.
dcp: Any = importlib.import_module("torch.distributed.checkpoint")


def _no_dist() -> bool:
    return not dist.is_initialized()


class Dcp(Contender):
    """FileSystemWriter; asynchronous saves keep their staging buffers, and with two threads go to a process."""

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._stager: Any = None
        self._pending: Any = None

    def _writer(self, folder: Path) -> Any:
        return dcp.FileSystemWriter(str(folder), thread_count=self._threads, single_file_per_rank=True)

    def save(self, state: State, folder: Path) -> None:
        dcp.save(dict(state.flat), storage_writer=self._writer(folder), no_dist=_no_dist())

    def load(self, state: State, folder: Path) -> None:
        dcp.load(dict(state.flat), storage_reader=dcp.FileSystemReader(str(folder)), no_dist=_no_dist())

    def load_part(self, folder: Path, key: str, rows: int | None) -> None:
        if rows is not None:
            raise NotImplementedError("DCP has no call for some rows of a tensor")
        shape = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata[key].size
        dcp.load({key: torch.empty(shape)}, storage_reader=dcp.FileSystemReader(str(folder)), no_dist=_no_dist())

    def prepare_async(self, state: State, folder: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._threads > 1 and not dist.is_initialized():
            start_single_group()  # its process wants one
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self._threads > 1,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def start_async(self, state: State, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS if self._threads > 1 else AsyncCheckpointerType.THREAD
        self._pending = dcp.async_save(
            dict(state.flat),
            storage_writer=self._writer(folder),
            async_checkpointer_type=kind,
            async_stager=self._stager,
            no_dist=_no_dist(),
        )

    def finish_async(self) -> None:
        pending = getattr(self._pending, "upload_completion", self._pending)
        pending.result()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def start_single_group() -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{find_port()}", rank=0, world_size=1)


class DcpHuggingFace(Contender):
    """HuggingFaceStorageWriter; ranks write a file each, one process writes one file."""

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=dist.is_initialized())
        dcp.save(dict(state.flat), storage_writer=writer, no_dist=_no_dist())

    def load(self, state: State, folder: Path) -> None:
        reader = dcp.HuggingFaceStorageReader(str(folder), thread_count=2)
        dcp.load(dict(state.flat), storage_reader=reader, no_dist=_no_dist())
