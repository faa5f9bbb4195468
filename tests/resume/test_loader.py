"""Resuming a loader: the failure cases people have met, each against the unbroken run."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shardkeep.data.loader import ResumableLoader
from shardkeep.errors import UsageError
from shardkeep.order.cursor import Cursor, ids_between

# torch warns where there are more workers than cores.
many_workers = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def build(size: int, batch: int, **options: Any) -> ResumableLoader:
    return ResumableLoader(Numbers(size), **{"global_batch_size": batch, "seed": 0, "collate_fn": list, **options})


def save(loader: ResumableLoader) -> str:
    return json.dumps(loader.state_dict())


def resume(text: str, size: int, batch: int, **options: Any) -> ResumableLoader:
    loader = build(size, batch, **options)
    loader.load_state_dict(json.loads(text))
    return loader


def take(loader: ResumableLoader, count: int) -> list[int]:
    """Train `count` batches, over epochs, then stop for good."""
    ids: list[int] = []
    while count:
        for batch in loader:
            ids += batch
            count -= 1
            if not count:
                break
    return ids


def order(size: int, epochs: int) -> list[int]:
    return [
        int(i)
        for epoch in range(epochs)
        for i in ids_between(Cursor(seed=0, epoch=epoch, consumed=0, size=size), 0, size)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_any_number_of_hops_is_exact(workers: int) -> None:
    """huggingface/datasets#8308: after the first resume the reported position stood still."""
    cuts = [13, 40, 41, 90]
    loader, log, at = build(1000, 10, num_workers=workers), [], 0
    for cut in cuts:
        log += take(loader, cut - at)
        at = cut
        loader = resume(save(loader), 1000, 10, num_workers=workers)
        assert loader.consumed == cut * 10
    log += take(loader, 110 - at)
    assert log == order(1000, 2)[:1100]


def test_the_skip_applies_once_with_persistent_workers() -> None:
    """huggingface/datasets#7447: every later epoch had only what was left of the interrupted one."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    loader = build(128, 8, **options)
    before = take(loader, 16 + 13)  # three batches before the end of epoch 1
    loader = resume(save(loader), 128, 8, **options)
    epochs = [[i for batch in loader for i in batch] for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [24, 128, 128]
    assert before + [i for epoch in epochs for i in epoch] == order(128, 4)


@pytest.mark.parametrize("cut", range(16))
def test_resume_in_a_later_epoch_keeps_its_shuffle(cut: int) -> None:
    """huggingface/transformers#40691: the epoch counter restarted at 0."""
    loader = build(10, 2)
    log = take(loader, cut)
    loader = resume(save(loader), 10, 2)
    assert loader.epoch == cut // 5
    log += take(loader, 15 - cut)
    assert log == order(10, 3)


def test_the_order_does_not_come_from_a_global_generator() -> None:
    """wyim-pgl/transgenic#59: the restored generator drew another permutation for the skip."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    loader = build(24, 4)
    trained = take(loader, 2)
    state, generator = save(loader), torch.get_rng_state()
    torch.set_rng_state(generator)
    torch.rand(100)
    random.random()
    np.random.rand()
    rest = [i for batch in resume(state, 24, 4) for i in batch]
    assert sorted(trained + rest) == list(range(24))
    assert trained + rest == order(24, 1)


def test_resume_goes_on_in_the_same_epoch_at_the_next_batch() -> None:
    """Lightning-AI/pytorch-lightning#5325: the rest of the interrupted epoch was skipped, or it began anew."""
    loader = build(40, 4)
    take(loader, 2)
    loader = resume(save(loader), 40, 4)
    assert (loader.epoch, loader.consumed, loader.batches_left, len(loader)) == (0, 8, 8, 10)
    assert next(iter(loader)) == order(40, 1)[8:12]


def test_a_loop_over_epochs_reads_the_same_after_a_resume() -> None:
    """The loop people write, `for epoch in range(loader.epoch, stop)`, right also at an epoch's last batch."""
    for cut in range(1, 16):
        loader, log = build(10, 2), []
        log += take(loader, cut)
        loader = resume(save(loader), 10, 2)
        for epoch in range(loader.epoch, 3):
            assert loader.epoch == epoch
            log += [i for batch in loader for i in batch]
        assert log == order(10, 3)


@pytest.mark.parametrize("size", [16, 37, 60, 200])
def test_every_remaining_sample_is_read_once_at_any_new_world(size: int) -> None:
    """huggingface/transformers#40245: samples between the old stride and the new one were never read."""

    def world_of(count: int, per_rank: int) -> list[ResumableLoader] | None:
        try:
            return [build(size, count * per_rank, data_rank=rank, data_size=count) for rank in range(count)]
        except UsageError:
            return None  # a tail that would leave a rank without samples is refused, not lost

    tried = 0
    for old in range(1, 5):
        for new in range(1, 5):
            for per_rank in range(1, 6):
                before, after = world_of(old, per_rank), world_of(new, 6 - per_rank)
                if before is None or after is None:
                    continue
                log = []
                for _ in range(size // (old * per_rank) // 2):
                    log += [i for loader in before for i in take(loader, 1)]
                try:
                    for loader in after:
                        loader.load_state_dict(json.loads(save(before[0])))
                except UsageError:
                    continue
                for parts in zip(*after, strict=True):
                    log += [i for part in parts for i in part]
                assert log == order(size, 1)
                tried += 1
    assert tried >= 15


@many_workers
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_saving_is_legal_at_every_step_after_a_resume(taken: int) -> None:
    """meta-pytorch/data#1251: the state lacked workers that had not produced a batch yet."""
    loader = build(200, 5, num_workers=4)
    log = take(loader, 6)
    loader = resume(save(loader), 200, 5, num_workers=4)
    iterator = iter(loader)
    log += [i for _ in range(taken) for i in next(iterator)]
    text = save(loader)
    del iterator
    loader = resume(text, 200, 5, num_workers=4)
    assert loader.consumed == (6 + taken) * 5
    log += [i for batch in loader for i in batch]
    assert log == order(200, 1)


def test_batch_size_and_drop_last_may_change() -> None:
    loader = build(50, 8)
    log = take(loader, 3)
    loader = resume(save(loader), 50, 5)
    log += take(loader, 2)
    assert log == order(50, 1)[:34]
    dropping = resume(save(loader), 50, 7, drop_last=True)
    log += take(dropping, 2)
    assert log == order(50, 1)[:48]
    assert (dropping.epoch, dropping.consumed) == (1, 0)
    # Too few left for one batch: skipping them is what drop_last asks for, and the position says so at once.
    loader = resume(save(loader), 50, 20, drop_last=True)
    assert (loader.epoch, loader.consumed) == (1, 0)


def test_spawned_workers_resume_alike() -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = build(24, 4)
    log = take(loader, 3)
    loader = resume(save(loader), 24, 4, **options)
    log += [i for batch in loader for i in batch]
    assert log == order(24, 1)
