"""The resume cases of the loader with transforms that draw: ids and draws are those of the unbroken run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import shardkeep as sk
from shardkeep.data.loader import ResumableLoader

many_workers = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Augmented(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), float(torch.rand(1))


def build(size: int, batch: int, **options: Any) -> ResumableLoader:
    return ResumableLoader(Augmented(size), **{"global_batch_size": batch, "seed": 0, "collate_fn": list, **options})


def take(loader: ResumableLoader, count: int) -> list[Any]:
    found: list[Any] = []
    while count:
        for batch in loader:
            found += batch
            count -= 1
            if not count:
                break
    return found


def resume(before: ResumableLoader, size: int, batch: int, **options: Any) -> ResumableLoader:
    loader = build(size, batch, **options)
    loader.load_state_dict(before.state_dict())
    return loader


@many_workers
@pytest.mark.parametrize("workers", [[0, 2, 1, 0], [2, 0, 3, 2]])
def test_hops_keep_ids_and_draws(workers: list[int]) -> None:
    """huggingface/datasets#8308, meta-pytorch/data#1251 with another number of workers in each life."""
    whole = take(build(200, 10), 50)
    loader, found = build(200, 10), []
    for count, lives in zip([1, 13, 27, 9], workers, strict=True):
        loader = resume(loader, 200, 10, num_workers=lives)
        found += take(loader, count)
    assert found == whole


def test_persistent_workers_draw_anew_every_epoch_and_as_before() -> None:
    """huggingface/datasets#7447 and transformers#40691."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    whole = take(build(40, 8), 20)
    loader = build(40, 8, **options)
    found = take(loader, 7)
    found += take(resume(loader, 40, 8, **options), 13)
    assert found == whole


@pytest.mark.parametrize(("old", "new"), [(1, 3), (2, 4), (4, 2), (3, 1)])
def test_another_world_draws_the_same(old: int, new: int) -> None:
    """huggingface/transformers#40245."""
    whole = take(build(96, 12), 8)
    found: list[Any] = []
    before = [build(96, 12, data_rank=rank, data_size=old) for rank in range(old)]
    for _ in range(3):
        found += [sample for loader in before for sample in take(loader, 1)]
    after = [resume(before[0], 96, 12, data_rank=rank, data_size=new) for rank in range(new)]
    for _ in range(5):
        found += [sample for loader in after for sample in take(loader, 1)]
    assert found == whole


def train(root: Path, stop: int, trace: dict[int, Any], **options: Any) -> None:
    """One start: data, and what dropout, Python and NumPy draw in the loop itself."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    loader = build(30, 6, **options)
    state = {"loader": loader}
    with sk.CheckpointManager(root, save_every=1, keep=sk.Keep(last=1)) as manager:
        manager.resume(state)
        for step, batch in manager.steps(loader, stop=stop):
            mask = torch.nn.functional.dropout(torch.ones(8)).tolist()
            trace[step] = (batch, mask, random.gauss(0, 1), float(np.random.standard_normal()))
            manager.after_step(step, state)


def test_the_loop_draws_the_same_whoever_fetches(tmp_path: Path) -> None:
    """Fetching, with or without workers, and resuming move no stream of the loop."""
    whole: dict[int, Any] = {}
    train(tmp_path / "whole", 12, whole)
    for name, options in {"workers": {"num_workers": 2}, "none": {}}.items():
        found: dict[int, Any] = {}
        for stop in (1, 4, 6, 12):
            train(tmp_path / name, stop, found, **options)
        assert found == whole


def test_uneven_tails_and_another_batch_size_keep_draws() -> None:
    whole = [sample for batch in build(50, 8) for sample in batch]
    loader = build(50, 8)
    found = take(loader, 3)
    loader = resume(loader, 50, 5, num_workers=1)
    found += take(loader, 2)
    found += [sample for batch in resume(loader, 50, 7, drop_last=True) for sample in batch]
    assert found == whole[:48]
