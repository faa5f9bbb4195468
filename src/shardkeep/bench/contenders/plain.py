"""Plain file writers: no protocol, no check, no commit; one file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from shardkeep.bench.contenders.base import Contender, State, copy_into


class TorchSave(Contender):
    """torch.save and torch.load."""

    def __init__(self, *, mapped: bool) -> None:
        self._mapped = mapped

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir()
        torch.save(state.flat, folder / "state.pt")

    def load(self, state: State, folder: Path) -> None:
        copy_into(state, torch.load(folder / "state.pt", mmap=self._mapped, weights_only=True))

    def load_part(self, folder: Path, key: str, rows: int | None) -> None:
        found = torch.load(folder / "state.pt", mmap=True, weights_only=True)[key]
        (found if rows is None else found[:rows]).clone()


class Safetensors(Contender):
    """safetensors.torch.save_file and safe_open."""

    def __init__(self) -> None:
        self._open: Any = importlib.import_module("safetensors").safe_open
        self._save: Any = importlib.import_module("safetensors.torch").save_file

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir()
        self._save(state.flat, folder / "state.safetensors")

    def load(self, state: State, folder: Path) -> None:
        with self._open(folder / "state.safetensors", "pt") as file, torch.no_grad():
            for key, tensor in state.flat.items():
                tensor.copy_(file.get_tensor(key))

    def load_part(self, folder: Path, key: str, rows: int | None) -> None:
        with self._open(folder / "state.safetensors", "pt") as file:
            found = file.get_slice(key)[:] if rows is None else file.get_slice(key)[:rows]
            found.clone()


class RunaiStreamer(Contender):
    """Run:ai's streamer, over a file that safetensors wrote."""

    def __init__(self) -> None:
        self._streamer: Any = importlib.import_module("runai_model_streamer").SafetensorsStreamer

    def load(self, state: State, folder: Path) -> None:
        with self._streamer() as streamer, torch.no_grad():
            streamer.stream_file(str(folder / "state.safetensors"))
            for key, tensor in streamer.get_tensors():
                state.flat[key].copy_(tensor)
