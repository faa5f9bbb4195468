"""A training script with one switch per defect: what it leaves out of the state, or undoes after the resume."""

from __future__ import annotations

from pathlib import Path

SCRIPT = """
import sys
import time

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import shardkeep as sk

DEFECT = sys.argv[2] if len(sys.argv) > 2 else ""
STOP, EVERY = 12, 3


def main(root):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    x = torch.randn(64, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = sk.ResumableLoader(data, global_batch_size=8, seed=1)
    if DEFECT == "loader":
        loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
    progress = {"seen": 0}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, "progress": progress}
    if DEFECT != "loader":
        state["loader"] = loader
    for name in ("ema", "scheduler", "optimizer", "progress"):
        if DEFECT == name:
            del state[name]
    samples_seen = 0
    began = time.perf_counter()
    with sk.CheckpointManager(root, save_every=EVERY) as manager:
        report = manager.resume(state)
        first = manager.step
        if DEFECT == "reseed":
            torch.manual_seed(7)
        samples_seen = progress["seen"]
        for step, (inputs, targets) in manager.steps(loader, stop=STOP):
            if DEFECT == "fails" and step == 2:
                raise SystemExit(3)
            loss = (model(inputs) - targets).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
            samples_seen += len(inputs)
            progress["seen"] = samples_seen
            if DEFECT == "unseeded":
                with torch.no_grad():
                    model[0].weight.add_(time.time_ns() % 1000 * 1e-6)
            elapsed = time.perf_counter() - began
            manager.after_step(step, state, loss=loss.item())


main(sys.argv[1])
"""

RANKS_SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
import shardkeep as sk
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
net = sk.exact_ddp(DistributedDataParallel(net))
torch.manual_seed(1 + dist.get_rank())
opt = torch.optim.AdamW(net.parameters())
data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(3)))
loader = sk.ResumableLoader(data, global_batch_size=8, seed=0)
state = {"model": net, "optimizer": opt, "loader": loader}
with sk.CheckpointManager(sys.argv[1], save_every=3) as m:
    m.resume(state)
    for step, (x,) in m.steps(loader, stop=8):
        loss = net(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        m.after_step(step, state, loss=loss)
dist.destroy_process_group()
"""


def write_script(folder: Path, text: str = SCRIPT) -> Path:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return path
