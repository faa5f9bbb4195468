"""Classify handwritten digits with augmentation in loader workers. Kill it at any moment and start it again.

    python digits_classifier.py runs/digits --workers 2

The data comes with scikit-learn (1,797 images of 8 x 8). Shifts, noise and brightness are drawn with `random`, NumPy
and torch inside the workers; the number of workers may change between two starts and nothing else does.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

import shardkeep as sk


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """The digits, each time moved, brightened and noised anew."""

    def __init__(self) -> None:
        found = load_digits()
        self.images = torch.tensor(found.images, dtype=torch.float32) / 16
        self.labels = found.target.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.roll(self.images[index], (random.randint(-1, 1), random.randint(-1, 1)), (0, 1))
        image = image * float(np.random.uniform(0.8, 1.2)) + 0.05 * torch.randn(8, 8)
        return image.unsqueeze(0), self.labels[index]


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16 * 64, 10),
    )


def digest(model: nn.Module) -> str:
    """Return a digest of every bit of the weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-at", type=int, help="end this process by SIGKILL after this step")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = sk.ResumableLoader(
        Digits(), global_batch_size=64, seed=0, num_workers=args.workers, persistent_workers=args.workers > 0
    )
    state = {"model": model, "optimizer": optimizer, "loader": loader}

    with sk.CheckpointManager(args.run, save_every=10, keep=sk.Keep(last=2)) as manager:
        print(manager.resume(state), flush=True)
        for step, (images, labels) in manager.steps(loader, stop=args.steps):
            optimizer.zero_grad()
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            loss.backward()
            optimizer.step()
            manager.after_step(step, state, loss=loss)
            if step % 10 == 0:
                right = (scores.argmax(1) == labels).float().mean().item()
                print(f"step {step}: loss {loss.item():.4f}, {right:.0%} right", flush=True)
            if step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"step {manager.step}: weights {digest(model)}")


if __name__ == "__main__":
    main()
