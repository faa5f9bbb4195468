"""Two checkpoints of one step compare through digests; another plan is another layout, whatever the sizes."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

import shardkeep as sk
from shardkeep.engine.run import read_commit
from shardkeep.engine.same_step import compare_parts, format_comparison
from shardkeep.format.digests import LEAF_BYTES
from shardkeep.format.names import StepRef
from shardkeep.ranks.single import SingleGroup
from shardkeep.storage.memory import MemoryStore


class Silent:
    def emit(self, event: Any) -> None:
        pass


def save_two(change: tuple[str, int] | None) -> tuple[MemoryStore, Any, Any]:
    """Save step 1 in two generations; element `change[1]` of tensor `change[0]` differs in the second."""
    store = MemoryStore()
    for generation in (1, 2):
        state = {"w": {"a": torch.zeros(100), "b": torch.zeros(LEAF_BYTES), "c": torch.zeros(100)}}
        if generation == 2 and change is not None:
            state["w"][change[0]][change[1]] = 1.0
        torch.manual_seed(0)
        with sk.CheckpointManager("unused", store=store, group=SingleGroup(), events=Silent()) as manager:
            manager.resume(state, fresh=True)
            manager.save(1, state)
    one, two = (read_commit(store, StepRef(1, generation)) for generation in (1, 2))
    return store, one, two


def test_equal_ones_are_equal() -> None:
    store, one, two = save_two(None)
    found = compare_parts(store, one, two, 0)
    assert found.same
    assert found.shard_bytes > 4 * LEAF_BYTES


def test_the_first_tensor_that_differs_is_named_within_its_leaf() -> None:
    for key, at in (("a", 99), ("b", 3), ("b", LEAF_BYTES - 1), ("c", 0)):
        store, one, two = save_two((key, at))
        found = compare_parts(store, one, two, 0)
        assert not found.same
        assert (found.differing_leaves, found.tensors) == (1, (f"w/{key}",))
        assert format_comparison(found) == f"tensors, the first in each file being w/{key}"


def test_another_plan_is_not_compared() -> None:
    store, one, two = save_two(None)
    other = msgspec.structs.replace(two, plan="0" * 64)
    found = compare_parts(store, one, other, 0)
    assert not found.comparable
    assert not found.same
