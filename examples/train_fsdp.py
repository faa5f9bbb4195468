"""Train a small model sharded over all ranks with FSDP2. Any rank may be killed at any moment.

torchrun --nproc-per-node 2 --max-restarts 3 train_fsdp.py runs/fsdp
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import shardkeep as sk


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1000, 16, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def make_model(device: str) -> nn.Sequential:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(Block(16), Block(16), nn.Linear(16, 1)).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + dist.get_rank())  # dropout of its own on every rank
    return model


def digest(model: nn.Module) -> str:
    """Return a digest of every bit of the weights; every rank calls it."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.full_tensor().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run, on a file system that all nodes share")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--kill-at", type=int, help="in the first start, end the last rank by SIGKILL after this step"
    )
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    is_first = dist.get_rank() == 0
    dies = dist.get_rank() == dist.get_world_size() - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    loader = sk.ResumableLoader(make_data(), global_batch_size=32, seed=0)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    with sk.CheckpointManager(args.run, save_every=10, keep=sk.Keep(last=3)) as manager:
        report = manager.resume(state)
        if is_first:
            print(report, flush=True)
        for step, (x, y) in manager.steps(loader, stop=args.steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            manager.after_step(step, state, loss=loss)
            if step == args.kill_at and dies:
                os.kill(os.getpid(), signal.SIGKILL)
    weights = digest(model)
    if is_first:
        print(f"step {manager.step}: weights {weights}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
