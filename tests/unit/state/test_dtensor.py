"""What needs no ranks: wrappers, plain tensors, and strided cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardkeep.errors import UnsupportedState, UsageError
from shardkeep.spec.chunks import Chunk
from shardkeep.state.dtensor import _cut_runs, describe_tensor
from shardkeep.state.wrappers import PerRank, Sharded


def describe(value: Any) -> Any:
    return describe_tensor(
        "model/w", value, section="model", name="w", role="parameter", trainable=True, device="cpu"
    )


def test_a_plain_tensor_is_held_whole() -> None:
    local = describe(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert (local.key, local.section, local.name, local.role) == ("model/w", "model", "w", "parameter")
    assert (local.dtype, local.shape, local.mesh, local.placements) == ("bfloat16", (2, 3), None, ())
    assert (local.explicit, local.per_rank, local.trainable, local.device) == (False, False, True, "cpu")
    assert [piece.chunk for piece in local.pieces] == [Chunk((0, 0), (2, 3))]
    assert [piece.chunk for piece in describe(torch.tensor(1.0)).pieces] == [Chunk((), ())]
    assert [piece.chunk for piece in describe(torch.zeros(2, 0)).pieces] == [Chunk((0, 0), (2, 0))]


def test_per_rank_is_declared() -> None:
    local = describe(PerRank(torch.zeros(2)))
    assert local.per_rank
    assert [piece.chunk for piece in local.pieces] == [Chunk((0,), (2,))]
    with pytest.raises(UnsupportedState, match="model/w"):
        describe(PerRank(Sharded([], (2,), dtype=torch.int8)))


def test_blocks_of_a_fused_projection() -> None:
    """ROCm/Megatron-LM#63: two blocks of rows of one global tensor."""
    gate, up = torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)
    local = describe(Sharded([(gate, (2, 0)), (up, (6, 0))], (8, 3)))
    assert (local.shape, local.explicit, local.mesh) == ((8, 3), True, None)
    assert [piece.chunk for piece in local.pieces] == [Chunk((2, 0), (2, 3)), Chunk((6, 0), (2, 3))]
    local.pieces[1].data.copy_in(0, memoryview(bytes(24)))
    assert up.count_nonzero() == 0
    assert gate.count_nonzero() == 6
    nothing = describe(Sharded([(torch.zeros(0, 3), (8, 0))], (8, 3)))
    assert nothing.pieces == ()
    assert describe(Sharded([], (8, 3), dtype=torch.int8)).dtype == "int8"


def test_wrong_boxes_are_refused() -> None:
    block = torch.zeros(2, 3)
    for offsets in ((7, 0), (-1, 0), (0, 1), (0,)):
        with pytest.raises(UsageError, match="not inside"):
            Sharded([(block, offsets)], (8, 3))
    with pytest.raises(UsageError, match="overlap"):
        Sharded([(block, (0, 0)), (block, (1, 0))], (8, 3))
    with pytest.raises(UsageError, match="one dtype"):
        Sharded([(block, (0, 0)), (block.int(), (2, 0))], (8, 3))
    with pytest.raises(UsageError, match="one dtype"):
        Sharded([], (8, 3))


def test_strided_cuts() -> None:
    # 12 in 3 equal pieces, each cut in 2: rank 1 holds the second half of each.
    assert _cut_runs(((0, 12),), 2, 3, 1) == ((2, 2), (6, 2), (10, 2))
    # An ordinary cut of what that left.
    assert _cut_runs(((2, 2), (6, 2), (10, 2)), 2, 1, 1) == ((7, 1), (10, 2))
    # Neighbouring pieces join.
    assert _cut_runs(((0, 4), (4, 4)), 1, 2, 0) == ((0, 8),)
