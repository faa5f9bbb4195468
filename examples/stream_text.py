"""Train a small text model on a stream: files of Python's standard library, packed, shuffled through a buffer.

    python stream_text.py runs/text

Kill it at any moment and start it again: it goes on within the file, the half-filled sequence and the shuffle buffer
where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardkeep as sk

LENGTH = 64


class SourceFiles:
    """The lines of files, one file after the other; a position is the next line of each file."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = {path.name: path for path in paths}
        self.at = dict.fromkeys(self.paths, 0)

    def __iter__(self) -> Iterator[bytes]:
        for name in sorted(self.at):
            lines = self.paths[name].read_bytes().splitlines(keepends=True)
            for line in lines[self.at[name] :]:
                self.at[name] += 1
                yield line
        self.at = dict.fromkeys(self.at, 0)

    def state_dict(self) -> dict[str, int]:
        return dict(self.at)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = dict(state)


def pack(leftover: list[int], line: bytes) -> tuple[list[bytes], list[int]]:
    """Join lines and cut them into sequences of `LENGTH` bytes and the one that follows."""
    text = bytes(leftover) + line
    whole = len(text) // (LENGTH + 1) * (LENGTH + 1)
    return [text[at : at + LENGTH + 1] for at in range(0, whole, LENGTH + 1)], list(text[whole:])


def collate(sequences: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.tensor([list(sequence) for sequence in sequences])
    return tokens[:, :-1], tokens[:, 1:]


class Model(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mixed: Any = self.mix(self.embed(tokens))[0]
        return self.head(self.dropout(mixed))


def digest(model: nn.Module) -> str:
    """Return a digest of every bit of the weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill-at", type=int, help="end this process by SIGKILL after this step")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    stream = sk.Shuffle(sk.Pack(SourceFiles(files), pack), buffer_size=500, seed=0)
    loader = sk.StreamLoader(stream, batch_size=16, collate_fn=collate)
    state = {"model": model, "optimizer": optimizer, "loader": loader}

    with sk.CheckpointManager(args.run, save_every=10, keep=sk.Keep(last=2)) as manager:
        print(manager.resume(state), flush=True)
        for step, (tokens, following) in manager.steps(loader, stop=args.steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            manager.after_step(step, state, loss=loss)
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"step {manager.step}: weights {digest(model)}")


if __name__ == "__main__":
    main()
