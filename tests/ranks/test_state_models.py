"""DTensors, tensor parallelism and FSDP2 on real ranks: our boxes against what torch really holds."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardkeep.errors import UnsupportedState
from shardkeep.spec.chunks import Chunk, whole
from shardkeep.spec.layout import Layout, iter_chunks
from shardkeep.spec.tensors import LocalTensor
from shardkeep.state.aliases import deduplicate
from shardkeep.state.dtensor import describe_tensor
from shardkeep.state.hostbytes import torch_dtype
from shardkeep.state.models import find_meta, materialise, model_parts, reshard
from shardkeep.state.names import parameter_names
from shardkeep.state.subclasses import Entry, register_tensor_type, take_apart
from tests.support.ranks import run_ranks
from tests.unit.state.test_subclasses import Codes


def run_all(rank: int, world_size: int, checks: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Run several checks in one world: starting ranks that shard modules is most of the time."""
    return [check(rank, world_size, *arguments) for check, arguments in checks]


def describe(value: torch.Tensor, key: str = "model/w") -> LocalTensor:
    return describe_tensor(key, value, section="model", name="w", role="parameter")


def content_of(local: LocalTensor) -> dict[Chunk, bytes]:
    found = {}
    for piece in local.pieces:
        out = bytearray(piece.data.nbytes)
        piece.data.copy_out(0, memoryview(out))
        assert piece.chunk not in found
        found[piece.chunk] = bytes(out)
    return found


def cut(full: torch.Tensor, chunk: Chunk) -> bytes:
    part = full[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]
    return part.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def check_against(local: LocalTensor, full: torch.Tensor, rank: int, *, note: Any = "") -> None:
    """Say that this rank's pieces hold the right part of `full`, and that the rule puts them there."""
    assert local.shape == tuple(full.shape), note
    for chunk, content in content_of(local).items():
        assert content == cut(full, chunk), (note, chunk)
    if local.mesh is not None and full.numel():
        layout = Layout(meshes=(0,), placements=local.placements)
        mine = {chunk for chunk, holders in iter_chunks(local.shape, layout, (local.mesh,)) if rank in holders}
        assert mine == {piece.chunk for piece in local.pieces}, note
        covered = sum(chunk.numel for chunk, _ in iter_chunks(local.shape, layout, (local.mesh,)))
        assert covered == full.numel(), note


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape) + 1


# One and two mesh dimensions


def check_distributed(rank: int, world_size: int, mesh_shape: tuple[int, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    names = ("dp", "tp")[: len(mesh_shape)]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for shape in ((7,), (2,), (1,), (12,), (5, 7), (3, 1), (1, 9), (6, 4, 3), (2, 3, 5), (0, 3), ()):
        kinds = [Replicate(), *(Shard(dim) for dim in range(-len(shape), len(shape)))]
        for placements in itertools.product(kinds, repeat=len(mesh_shape)):
            full = numbered(*shape)
            live = distribute_tensor(full, mesh, list(placements), src_data_rank=None)
            local = describe(live)
            check_against(local, full, rank, note=(shape, placements))
            sizes, offsets = compute_local_shape_and_global_offset(full.shape, mesh, live.placements)
            if full.numel():
                expected = [(tuple(offsets), tuple(sizes))] if 0 not in sizes else []
                found = [(p.chunk.offsets, p.chunk.sizes) for p in local.pieces]
                assert found == expected, (shape, placements)
            else:
                assert [piece.chunk for piece in local.pieces] == [whole(shape)]
            assert local.mesh is not None
            assert (local.mesh.shape, local.mesh.names) == (mesh_shape, names)
            assert local.mesh.ranks == tuple(range(world_size))


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_boxes_agree_with_torch_and_with_the_true_content(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(check_distributed, torch.Size(mesh_shape).numel(), mesh_shape)


def check_refusals(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    with pytest.raises(UnsupportedState, match=r"model/w: placement .*pending reduction"):
        describe(partial)
    uneven = DTensor.from_local(torch.ones(1 + 2 * rank), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,))
    with pytest.raises(UnsupportedState, match=r"model/w: the local tensor is \([13],\)"):
        describe(uneven)
    # A mesh of one rank: the other holds nothing, and says so with the same rule.
    alone = DeviceMesh("cpu", [1])
    local = describe(distribute_tensor(torch.arange(3), alone, [Replicate()], src_data_rank=None))
    assert local.mesh is not None
    assert local.mesh.ranks == (1,)
    assert len(local.pieces) == rank
    # The backward graph and the version counter are left alone.
    live = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    loss = (live * live).sum()
    content_of(describe(live))
    loss.full_tensor().backward()


def check_strided_views(rank: int, world_size: int) -> list[Any]:
    """A strided shard without the cut it strides over: several boxes per rank, said outright."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    full = numbered(12, 2)
    live = distribute_tensor(full, mesh, [Replicate()], src_data_rank=None)
    live = live.redistribute(placements=[_StridedShard(0, split_factor=3)])
    local = describe(live)
    assert (local.explicit, local.mesh, local.placements) == (True, None, ())
    check_against(local, full, rank)
    local.pieces[-1].data.copy_in(0, memoryview(bytes(local.pieces[-1].data.nbytes)))
    assert live._local_tensor[-2:].count_nonzero() == 0
    assert live._local_tensor[:-2].count_nonzero() == 8
    return [piece.chunk for piece in local.pieces]


# FSDP2, alone and over tensor parallelism


class Layers(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.up = nn.Linear(outer, inner)
        self.down = nn.Linear(inner, outer)
        self.norm = nn.LayerNorm(outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x).relu()))


def build(inner: int, outer: int) -> Layers:
    net = Layers(inner, outer)
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            parameter.copy_(numbered(*parameter.shape) / 8 + index)
    return net


def shard(net: nn.Module | None, mesh_shape: tuple[int, int], **options: Any) -> Any:
    """Apply tensor parallelism over the second mesh dimension, then FSDP2 over the first.

    All ranks of the world call it; those outside the mesh with None.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks = torch.arange(mesh_shape[0] * mesh_shape[1]).reshape(mesh_shape)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    if net is None:
        return None
    if mesh_shape[1] > 1:
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["dp"], **options)


def check_fsdp_over_tp(rank: int, world_size: int, mesh_shape: tuple[int, int], inner: int, outer: int) -> list[str]:
    net = build(inner, outer)
    full = {name: tensor.detach().clone() for name, tensor in net.named_parameters()}
    shard(net, mesh_shape)
    seen = set()
    for entry in model_parts("model", net).entries:
        check_against(entry.local, full[entry.local.name], rank, note=(entry.local.name, mesh_shape, inner))
        seen.update(entry.local.placements)
    return sorted(seen)


LAYOUTS = {
    4: [((2, 2), 8, 4), ((2, 2), 7, 5), ((4, 1), 6, 3), ((2, 2), 3, 2)],
    6: [((3, 2), 7, 3), ((2, 3), 5, 4)],
}


@pytest.mark.parametrize("world_size", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_fsdp_over_tensor_parallel_holds_what_the_rule_says(world_size: int) -> None:
    """NVIDIA/Megatron-LM#659: sizes that no world divides; (3, 2) of 7 is where torch's own rule is wrong."""
    seen = run_ranks(run_all, world_size, [(check_fsdp_over_tp, layout) for layout in LAYOUTS[world_size]])
    for (mesh_shape, _, _), placements in zip(LAYOUTS[world_size], seen[0], strict=True):
        assert (f"SS0:{mesh_shape[1]}" in placements) == (mesh_shape[1] > 1)


def gather(rank: int, world_size: int, mesh_shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Shard a net and put its pieces together again, on every rank of the world."""
    member = rank < mesh_shape[0] * mesh_shape[1]
    net = shard(build(7, 5) if member else None, mesh_shape)
    mine = [(e.local.key, e.local.dtype, e.local.shape, content_of(e.local)) for e in parts_of(net)]
    everybody: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everybody, mine)
    found: dict[str, torch.Tensor] = {}
    for key, dtype, shape, chunks in itertools.chain(*everybody):
        full = found.setdefault(key, torch.zeros(shape, dtype=torch_dtype(dtype)))
        for chunk, data in chunks.items():
            part = torch.frombuffer(bytearray(data), dtype=full.dtype).reshape(chunk.sizes)
            full[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] = part
    return found


def parts_of(net: nn.Module | None) -> tuple[Entry, ...]:
    return () if net is None else model_parts("model", net).entries


def check_change(rank: int, world_size: int, saved: tuple[int, int], restored: tuple[int, int], how: str) -> None:
    """Save a net in one layout, fill a net of another one from it, and train that."""
    expected = dict(build(7, 5).named_parameters())
    stored = gather(rank, world_size, saved)
    for name, parameter in expected.items():
        assert torch.equal(stored[f"model/{name}"], parameter.detach())
    if rank >= restored[0] * restored[1]:
        shard(None, restored)
        return
    with torch.device("meta" if how == "meta" else "cpu"):
        net = Layers(7, 5)
    shard(net, restored)
    if how == "meta":
        assert len(find_meta(net)) == 6
        assert materialise(net, "cpu") == []
    elif how == "unsharded":
        with torch.no_grad():
            net(torch.ones(1, 5))
    for entry in parts_of(net):
        for piece in entry.local.pieces:
            piece.data.copy_in(0, memoryview(cut(stored[entry.local.key], piece.chunk)))
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name  # type: ignore[attr-defined]
    if restored[1] > 1:
        return  # torch's uneven tensor parallelism computes nothing
    reference = build(7, 5)
    for model in (net, reference):
        model(torch.ones(2, 5)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in net.named_parameters():
        # The forward used the filled values, padding included.
        assert torch.allclose(parameter.grad.full_tensor(), gradients[name], rtol=1e-3, atol=1e-3), name  # type: ignore[union-attr]


CHANGES: list[tuple[tuple[int, int], tuple[int, int], str]] = [
    ((2, 1), (3, 1), "plain"),
    ((3, 1), (2, 1), "unsharded"),
    ((2, 2), (3, 1), "meta"),
    ((3, 1), (2, 2), "meta"),
    ((4, 1), (3, 1), "unsharded"),
]


def test_world_sizes_that_do_not_divide() -> None:
    """NVIDIA/Megatron-LM#659."""
    run_ranks(run_all, 4, [(check_change, change) for change in CHANGES])


def check_reshard(rank: int, world_size: int) -> None:
    """An evaluation pass leaves the root unsharded; a save must see current values and change nothing."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    results = []
    for save in (False, True):
        net = nn.Sequential(build(7, 5), build(7, 5))
        fully_shard(net[0])
        fully_shard(net)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            loss = net(torch.full((2, 5), float(step + rank))).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            with torch.no_grad():
                net(torch.ones(2, 5))
            if save:
                assert not isinstance(net[1].up.weight, DTensor), "the evaluation left the root unsharded"
                for entry in model_parts("model", net).entries:
                    assert entry.local.placements == ("S0",)
                    content_of(entry.local)
                names = parameter_names({"model": net})
                assert {names[id(p)][1] for g in optimizer.param_groups for p in g["params"]} == {
                    name for name, _ in build_names(net)
                }
        reshard(net)
        results.append((losses, [p.full_tensor() for p in net.parameters()]))  # type: ignore[attr-defined]
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def build_names(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(net.named_parameters())


def check_ties(rank: int, world_size: int) -> tuple[list[str], dict[str, str]]:
    """A tie must be seen by every rank alike, also by those whose shard is empty."""
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Embedding(1, 3), nn.Linear(3, 1, bias=False))
    net[1].weight = net[0].weight
    fully_shard(net)
    found = deduplicate(model_parts("model", net).entries)
    return [tensor.key for tensor in found.tensors], found.aliases


def check_nested_wrappers(rank: int, world_size: int) -> list[str]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    net = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), torch.compile(nn.Linear(3, 3), backend="eager"))
    fully_shard(net[0])
    fully_shard(net)
    return [entry.local.name for entry in model_parts("model", torch.compile(net, backend="eager")).entries]


def check_subclass(rank: int, world_size: int) -> list[Any]:
    """8-bit state of a sharded parameter (pytorch/ao#1185): codes are sharded as it is, scales stay per rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    register_tensor_type(Codes)
    mesh = init_device_mesh("cpu", (2,))
    rows = 2 - rank
    codes = Codes(numbered(3, 4)[2 * rank : 2 * rank + rows].to(torch.uint8), torch.full((rows,), rank + 0.5), 4)
    found = []
    for placements, shape in (([Shard(0)], (3, 4)), ([Replicate()], (rows, 4))):
        live = DTensor.from_local(codes, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(4, 1))
        parts = take_apart("o/w", live, section="o", name="w", role="state")
        found.append([(e.local.key, e.local.shape, e.local.placements, e.local.per_rank) for e in parts.entries])
        if placements == [Shard(0)]:
            check_against(parts.entries[0].local, numbered(3, 4).to(torch.uint8), rank)
    return found


@pytest.fixture(scope="module")
def pair() -> dict[str, list[Any]]:
    """What every two-rank check returned, by rank."""
    checks = [check_refusals, check_strided_views, check_reshard, check_ties, check_nested_wrappers, check_subclass]
    found = run_ranks(run_all, 2, [(check, ()) for check in checks])
    return {check.__name__: [results[index] for results in found] for index, check in enumerate(checks)}


def test_what_no_rule_says_is_refused_by_name(pair: dict[str, list[Any]]) -> None:
    assert pair["check_refusals"] == [None, None]


def test_strided_views_are_said_outright(pair: dict[str, list[Any]]) -> None:
    found = pair["check_strided_views"]
    assert found[0] == [Chunk((at, 0), (2, 2)) for at in (0, 4, 8)]
    assert found[1] == [Chunk((at, 0), (2, 2)) for at in (2, 6, 10)]


def test_unsharded_modules_are_resharded_and_training_goes_on_the_same(pair: dict[str, list[Any]]) -> None:
    assert pair["check_reshard"] == [None, None]


def test_ties_are_seen_by_every_rank(pair: dict[str, list[Any]]) -> None:
    expected = (["model/0.weight"], {"model/1.weight": "model/0.weight"})
    assert pair["check_ties"] == [expected, expected]


def test_wrappers_around_fsdp_modules_do_not_show(pair: dict[str, list[Any]]) -> None:
    for names in pair["check_nested_wrappers"]:
        assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_subclasses_inside_dtensors(pair: dict[str, list[Any]]) -> None:
    for rank, (sharded, replicated) in enumerate(pair["check_subclass"]):
        rows = 2 - rank
        assert sharded == [("o/w#codes", (3, 4), ("S0",), False), ("o/w#scale", (rows,), (), True)]
        assert replicated == [("o/w#codes", (rows, 4), ("R",), False), ("o/w#scale", (rows,), (), False)]
