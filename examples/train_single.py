"""Train a small model in one process. Kill it at any moment and start it again: it goes on exactly."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardkeep as sk


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1000, 16, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def digest(model: nn.Module) -> str:
    """Return a digest of every bit of the weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--kill-at", type=int, help="end this process by SIGKILL after this step")
    args = parser.parse_args()

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    loader = sk.ResumableLoader(make_data(), global_batch_size=32, seed=0)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    with sk.CheckpointManager(args.run, save_every=10, keep=sk.Keep(last=3)) as manager:
        print(manager.resume(state), flush=True)
        for step, (x, y) in manager.steps(loader, stop=args.steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            manager.after_step(step, state, loss=loss)
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"step {manager.step}: weights {digest(model)}")


if __name__ == "__main__":
    main()
