"""What any layout saved at any world size, every other layout loads at any other: the same bytes, the same next step.

deepspeedai/DeepSpeed#2898 (other world sizes), NVIDIA/Megatron-LM#659 (sizes that do not divide). Sizes are those of
`tests.support.training`: prime to all worlds, or smaller than some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardkeep as sk
from tests.support.ranks import run_ranks
from tests.support.training import Arrays, build, find_differences, gather, step_once

Source = tuple[str, int]
Saved = tuple[Arrays, Arrays]

ALL: dict[int, tuple[str, ...]] = {
    1: ("plain", "ddp", "fsdp", "tp"),
    2: ("ddp", "fsdp", "tp", "fsdp_tp", "hsdp"),
    3: ("ddp", "fsdp", "tp"),
    4: ("ddp", "fsdp", "tp", "fsdp_tp", "hsdp"),
}
QUICK: dict[int, tuple[str, ...]] = {1: ("plain",), 2: ("tp",), 3: ("ddp", "fsdp"), 4: ("fsdp_tp",)}


def take_quiet_step(state: dict[str, Any]) -> None:
    """Take the next step without dropout, so that it is the same mathematics in every layout."""
    state["model"].eval()
    step_once(state, next(iter(state["loader"])))
    state["model"].train()


def save_all(rank: int, world_size: int, root: str, layouts: tuple[str, ...]) -> dict[Source, Saved]:
    """Save a job of two steps in each layout; return it whole, as saved and one step later."""
    found: dict[Source, Saved] = {}
    for layout in layouts:
        state = build(layout, world_size, rank=rank)
        batches = iter(state["loader"])
        for _ in range(2):
            step_once(state, next(batches))
        del batches
        sk.save(f"{root}/{layout}{world_size}", state, step=2)
        at_save = gather(state)
        take_quiet_step(state)
        found[layout, world_size] = (at_save, gather(state))
    return found


def load_all(
    rank: int, world_size: int, root: str, layouts: tuple[str, ...], saved: dict[Source, Saved]
) -> list[str]:
    """Load everything saved into each layout, one after the other; return what is wrong."""
    wrong = []
    for layout in layouts:
        # Other weights, and from the second load on a state that has trained: a load leaves nothing of either.
        state = build(layout, world_size, rank=rank, seed=9)
        for (source, sources), (at_save, after) in saved.items():
            where = f"{source}{sources} -> {layout}{world_size} on rank {rank}"
            commit = sk.load(f"{root}/{source}{sources}", state)
            if (commit.ref.step, state["loader"].consumed, state["scheduler"].last_epoch) != (2, 24, 2):
                wrong.append(f"{where}: at step {commit.ref.step}, sample {state['loader'].consumed}")
            wrong += [f"{where}: {name} at load" for name in find_differences(gather(state), at_save)]
            take_quiet_step(state)
            now = gather(state)
            if has_same_mathematics((source, sources), (layout, world_size)):
                wrong += [f"{where}: {name} after a step" for name in find_differences(now, after)]
            else:
                wrong += [
                    f"{where}: {name} far off after a step"
                    for name in after
                    if not np.allclose(now[name], after[name], rtol=1e-3, atol=1e-5)
                ]
    return wrong


def has_same_mathematics(one: Source, other: Source) -> bool:
    """Say whether every sum is made of the same numbers in the same order: one process, or the same layout."""
    return one == other or one[1] == other[1] == 1


def check_all_pairs(root: Path, layouts: dict[int, tuple[str, ...]]) -> dict[Source, Saved]:
    saved: dict[Source, Saved] = {}
    for world_size, names in layouts.items():
        results = run_ranks(save_all, world_size, str(root), names, timeout_s=120)
        for rank in range(1, world_size):
            for source, (at_save, after) in results[0].items():
                assert find_differences(results[rank][source][0], at_save) == []
                assert find_differences(results[rank][source][1], after) == []
        saved.update(results[0])
    wrong: list[str] = []
    for world_size, names in layouts.items():
        for found in run_ranks(load_all, world_size, str(root), names, saved, timeout_s=300):
            wrong += found
    assert wrong == []
    return saved


def test_every_layout_loads_every_other(tmp_path: Path) -> None:
    saved = check_all_pairs(tmp_path, QUICK)
    at_save, _ = saved["fsdp", 3]
    assert at_save["model/head.weight"].shape == (2, 7)
    assert at_save["model/seen"] == 2
    assert {str(array) for name, array in at_save.items() if name.startswith("optimizer/step/")} == {"2.0"}
    assert sum(name.startswith("optimizer/exp_avg/") for name in at_save) == 16


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_pairs_of_layouts_and_worlds(tmp_path: Path) -> None:
    saved = check_all_pairs(tmp_path, ALL)
    assert len(saved) == 17


def load_narrower(rank: int, world_size: int, root: str) -> tuple[str, bool]:
    """Load into another model; return the error's text and whether the live model is as it was."""
    state = build("fsdp", world_size, rank=rank)
    model = nn.Sequential(nn.Linear(5, 7))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(sk.CheckpointError) as caught:
        sk.load(root, {**state, "model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert isinstance(caught.value, sk.StateMismatch if rank == 0 else sk.PeerFailure)
    return str(caught.value), all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_model_that_does_not_fit_is_refused_by_name_and_untouched(tmp_path: Path) -> None:
    run_ranks(save_all, 2, str(tmp_path), ("fsdp",))
    for text, is_unchanged in run_ranks(load_narrower, 2, str(tmp_path / "fsdp2")):
        assert "model/first.weight: stored, but nothing in the live state takes it" in text
        assert "0.weight" in text
        assert is_unchanged
