"""One rank of the demo's training job: `python -m shardkeep.demo.train CONFIG`, started as torchrun would start it.

A training script like any other, apart from what it writes down and from the sabotage it can be asked for.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import msgspec

from shardkeep.demo.records import LeaveOut, RankConfig, RankLog, StartRecord, StepRecord


def follow_parent(parent_pid: int) -> None:
    """End this process when the one that started it is gone, however that one went."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="follow-parent").start()


def main(argument: str) -> None:
    """Train as the config (JSON) says; rank, world size and address come from the environment."""
    config = msgspec.json.decode(argument, type=RankConfig)
    follow_parent(config.parent_pid)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        exit_code = _train(config, dist.get_rank())
    finally:
        dist.destroy_process_group()
    sys.exit(exit_code)


def _seed(rank: int) -> None:
    import numpy as np
    import torch

    random.seed(10 + rank)
    np.random.seed(20 + rank)
    torch.manual_seed(30 + rank)


def _train(config: RankConfig, rank: int) -> int:
    import torch

    import shardkeep as sk
    from shardkeep.demo.accident import KillingStore
    from shardkeep.demo.fingerprint import hash_state
    from shardkeep.demo.model import make_model, make_optimizer, make_scheduler
    from shardkeep.demo.text import SourceText
    from shardkeep.storage.resolve import open_store

    shape = config.shape
    torch.manual_seed(1)  # the same first weights on all ranks
    text = SourceText(shape.context_bytes, shape.windows_count)
    model = make_model(shape)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, shape.stop)
    loader = sk.ResumableLoader(text, global_batch_size=shape.batch_count, seed=7)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    _seed(rank)

    store = open_store(config.root)
    if config.kill is not None and config.kill.rank == rank:
        store = KillingStore(store, config.kill)
    unscheduled = scheduler.state_dict()
    every = shape.save_every if config.save else None
    with sk.CheckpointManager(
        config.root,
        save_every=every,
        store=store,
        tolerate=0,
        tiers=[sk.Tier(tier.url, every=tier.every, keep=tier.keep) for tier in config.tiers],
        mode="async" if config.tiers else "blocking",
        preemption=sk.Preemption(grace_s=config.grace_s),
    ) as manager:
        report = manager.resume(state, step=config.resume_step)
        with contextlib.closing(RankLog(config.logs, report.generation, rank)) as log:
            log.write(
                StartRecord(
                    step=report.step,
                    fresh=report.fresh,
                    generation=report.generation,
                    report=str(report),
                    parameters_count=sum(parameter.numel() for parameter in model.parameters()),
                    text_bytes=text.text_bytes,
                    files_count=text.files_count,
                )
            )
            if not report.fresh:
                if config.leave_out is not None:
                    _sabotage(config.leave_out, state, unscheduled, rank)
                log.write(hash_state(report.step, "restored", state, rank=rank))
            for step, (window, ids) in manager.steps(loader, stop=shape.stop):
                log.write(_train_step(step, window, ids, state))
                if step % (config.hash_every or shape.save_every) == 0:
                    log.write(hash_state(step, "trained", state, rank=rank))
                manager.after_step(step, state)
    return manager.exit_code


def _train_step(step: int, window: Any, ids: Any, state: dict[str, Any]) -> StepRecord:
    import torch
    from torch.nn import functional

    model, optimizer, scheduler = state["model"], state["optimizer"], state["scheduler"]
    lr = optimizer.param_groups[0]["lr"]
    inputs, wanted = _spoil(window[:, :-1]), window[:, 1:]
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), wanted.flatten())
    torch.autograd.backward(loss)
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    optimizer.step()
    scheduler.step()
    return StepRecord(
        step=step,
        ids=tuple(ids.tolist()),
        lr=float(lr).hex(),
        loss=float(loss.item()).hex(),
        grad_norm=float(norm.item()).hex(),
    )


def _spoil(inputs: Any) -> Any:
    """Replace a few bytes of the input: an augmentation that draws from Python's and NumPy's generators."""
    import numpy as np

    spoiled = inputs.clone()
    for row in range(len(spoiled)):
        for at in np.random.randint(0, spoiled.shape[1], size=random.randrange(4)).tolist():
            spoiled[row, at] = ord(" ")
    return spoiled


def _sabotage(what: LeaveOut, state: dict[str, Any], unscheduled: dict[str, Any], rank: int) -> None:
    """Undo one part of a restore, to show that the comparison sees it."""
    import torch

    if what == "rng":
        torch.manual_seed(30 + rank)
    elif what == "moment":
        optimizer = state["optimizer"]
        first = optimizer.param_groups[0]["params"][0]
        optimizer.state[first]["exp_avg"].zero_()
    elif what == "loader":
        next(iter(state["loader"]))
    else:
        state["scheduler"].load_state_dict(unscheduled)


if __name__ == "__main__":
    main(sys.argv[1])
