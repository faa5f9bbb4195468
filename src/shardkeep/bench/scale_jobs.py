"""The tensors of big training jobs as their ranks describe them, without any bytes.

The shapes are those of public model families, widened until the parameters add up; the layouts are FSDP2 over tensor,
pipeline and expert parallelism as torchtitan lays them out, with Adam's moments and step counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from shardkeep.errors import UsageError
from shardkeep.plan.structure import HeldTensor, Holding, Structure
from shardkeep.spec.chunks import Chunk, whole
from shardkeep.spec.dtypes import get_dtype
from shardkeep.spec.layout import Mesh, chunk_at, coordinate_at
from shardkeep.spec.tensors import LocalTensor, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter. `kind`: how parallelism cuts it; `expert`: the number of the expert it belongs to alone."""

    name: str
    shape: tuple[int, ...]
    kind: str
    layer: int
    expert: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How many ranks there are, and how tensor, pipeline and expert parallelism divide them; FSDP2 takes the rest."""

    ranks: int
    tp: int = 8
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks % (self.tp * self.pp) or self.ranks // self.pp % self.ep:
            raise UsageError(f"{self}: expected ranks that the parallel dimensions divide")

    @property
    def stage_ranks(self) -> int:
        return self.ranks // self.pp

    def mesh(self, stage: int) -> Mesh:
        """Return a stage's mesh of FSDP2 over tensor parallelism."""
        return self._grid(stage, (self.stage_ranks // self.tp, self.tp), ("fsdp", "tp"))

    def expert_mesh(self, stage: int) -> Mesh:
        """Return the same ranks as FSDP2 over expert parallelism."""
        return self._grid(stage, (self.stage_ranks // self.ep, self.ep), ("efsdp", "ep"))

    def line(self, stage: int, position: int) -> Mesh:
        """Return the ranks of a stage that have one share of the experts."""
        ranks = range(stage * self.stage_ranks + position, (stage + 1) * self.stage_ranks, self.ep)
        return Mesh(shape=(len(ranks),), ranks=tuple(ranks), names=("efsdp",))

    def _grid(self, stage: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
        first = stage * self.stage_ranks
        return Mesh(shape=shape, ranks=tuple(range(first, first + self.stage_ranks)), names=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: its layers, and its weights at a width given in 1/64 of the published one."""

    layer_count: int
    expert_count: int
    weights: Callable[[int], Iterator[Weight]]


def _dense(width: int) -> Iterator[Weight]:
    """Llama 3 405B: 126 layers, grouped-query attention, gated feed-forward."""
    dim, kv, hidden = 256 * width, 16 * width, 832 * width
    yield Weight(name="tok_embeddings.weight", shape=(128_256, dim), kind="column", layer=0)
    for layer in range(126):
        for name, shape, kind in (
            ("attention.wq", (dim, dim), "column"),
            ("attention.wk", (kv, dim), "column"),
            ("attention.wv", (kv, dim), "column"),
            ("attention.wo", (dim, dim), "row"),
            ("feed_forward.w1", (hidden, dim), "column"),
            ("feed_forward.w2", (dim, hidden), "row"),
            ("feed_forward.w3", (hidden, dim), "column"),
            ("attention_norm", (dim,), "vector"),
            ("ffn_norm", (dim,), "vector"),
        ):
            yield Weight(name=f"layers.{layer}.{name}.weight", shape=shape, kind=kind, layer=layer)
    yield Weight(name="norm.weight", shape=(dim,), kind="vector", layer=125)
    yield Weight(name="output.weight", shape=(128_256, dim), kind="column", layer=125)


def _gpt(width: int) -> Iterator[Weight]:
    """GPT-3: 96 layers, fused attention, biases everywhere."""
    dim = 192 * width
    yield Weight(name="wte.weight", shape=(50_304, dim), kind="column", layer=0)
    yield Weight(name="wpe.weight", shape=(2048, dim), kind="replicated", layer=0)
    for layer in range(96):
        for name, shape, kind in (
            ("ln_1.weight", (dim,), "vector"),
            ("ln_1.bias", (dim,), "vector"),
            ("attn.c_attn.weight", (3 * dim, dim), "column"),
            ("attn.c_attn.bias", (3 * dim,), "column"),
            ("attn.c_proj.weight", (dim, dim), "row"),
            ("attn.c_proj.bias", (dim,), "vector"),
            ("ln_2.weight", (dim,), "vector"),
            ("ln_2.bias", (dim,), "vector"),
            ("mlp.c_fc.weight", (4 * dim, dim), "column"),
            ("mlp.c_fc.bias", (4 * dim,), "column"),
            ("mlp.c_proj.weight", (dim, 4 * dim), "row"),
            ("mlp.c_proj.bias", (dim,), "vector"),
        ):
            yield Weight(name=f"h.{layer}.{name}", shape=shape, kind=kind, layer=layer)
    yield Weight(name="ln_f.weight", shape=(dim,), kind="vector", layer=95)


def _moe(width: int, *, grouped: bool) -> Iterator[Weight]:
    """DeepSeek-V3: 61 layers, latent attention, 256 routed experts and a shared one, three dense layers first."""
    dim, heads, hidden = 112 * width, 256 * width, 32 * width
    rank_q, rank_kv = 24 * width, 9 * width
    yield Weight(name="embed_tokens.weight", shape=(129_280, dim), kind="column", layer=0)
    for layer in range(61):
        rows: list[tuple[str, tuple[int, ...], str, int]] = [
            ("self_attn.q_a_proj", (rank_q, dim), "vector", 0),
            ("self_attn.q_a_layernorm", (rank_q,), "vector", 0),
            ("self_attn.q_b_proj", (heads * 3 // 2, rank_q), "column", 0),
            ("self_attn.kv_a_proj", (rank_kv, dim), "vector", 0),
            ("self_attn.kv_a_layernorm", (8 * width,), "vector", 0),
            ("self_attn.kv_b_proj", (2 * heads, 8 * width), "column", 0),
            ("self_attn.o_proj", (dim, heads), "row", 0),
            ("input_layernorm", (dim,), "vector", 0),
            ("post_attention_layernorm", (dim,), "vector", 0),
        ]
        if layer < 3:
            rows += _feed_forward("mlp", dim, 288 * width)
        else:
            rows += [("mlp.gate", (256, dim), "vector", 0), ("mlp.gate.bias", (256,), "replicated", 0)]
            rows += _feed_forward("mlp.shared_experts", dim, hidden)
            rows += _experts(dim, hidden, grouped=grouped)
        for name, shape, kind, expert in rows:
            yield Weight(name=f"layers.{layer}.{name}.weight", shape=shape, kind=kind, layer=layer, expert=expert)
    yield Weight(name="norm.weight", shape=(dim,), kind="vector", layer=60)
    yield Weight(name="lm_head.weight", shape=(129_280, dim), kind="column", layer=60)


def _feed_forward(name: str, dim: int, hidden: int) -> list[tuple[str, tuple[int, ...], str, int]]:
    return [
        (f"{name}.gate_proj", (hidden, dim), "column", 0),
        (f"{name}.up_proj", (hidden, dim), "column", 0),
        (f"{name}.down_proj", (dim, hidden), "row", 0),
    ]


def _experts(dim: int, hidden: int, *, grouped: bool) -> list[tuple[str, tuple[int, ...], str, int]]:
    three = (("gate_proj", (hidden, dim)), ("up_proj", (hidden, dim)), ("down_proj", (dim, hidden)))
    if grouped:
        return [(f"mlp.experts.{name}", (256, *shape), "experts", 0) for name, shape in three]
    return [(f"mlp.experts.{at}.{name}", shape, "expert", at) for at in range(256) for name, shape in three]


FAMILIES: Final = {
    "llama": Family(layer_count=126, expert_count=1, weights=_dense),
    "gpt": Family(layer_count=96, expert_count=1, weights=_gpt),
    "deepseek": Family(layer_count=61, expert_count=256, weights=lambda width: _moe(width, grouped=True)),
    "deepseek-named": Family(layer_count=61, expert_count=256, weights=lambda width: _moe(width, grouped=False)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A family at a width on a topology. `holdings`: what every rank holds, one entry for those alike."""

    name: str
    family: str
    topology: Topology
    params: int
    holdings: tuple[Holding, ...]

    def locals_of(self, rank: int) -> tuple[LocalTensor, ...]:
        """Return the tensors of a rank, over bytes that are none."""
        holding = next(holding for holding in self.holdings if rank in holding.ranks)
        places: dict[int, tuple[int, ...]] = {}
        return tuple(_make_local(tensor, _find_chunk(tensor, rank, places)) for tensor in holding.structure.tensors)


def make_job(family_name: str, topology: Topology, params: int) -> Job:
    """Return the job of a family with about `params` parameters, the width rounded."""
    family = FAMILIES[family_name]
    low, high = 1, 2
    while _count(family, high) < params:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _count(family, middle) <= params else (low, middle)
    name = f"{family_name} tp{topology.tp} fsdp{topology.stage_ranks // topology.tp}"
    name += f" pp{topology.pp}" if topology.pp > 1 else ""
    name += f" ep{topology.ep}" if topology.ep > 1 else ""
    holdings = tuple(_iter_holdings(family, topology, low))
    return Job(name=name, family=family_name, topology=topology, params=_count(family, low), holdings=holdings)


def _count(family: Family, width: int) -> int:
    return sum(math.prod(weight.shape) for weight in family.weights(width))


def _iter_holdings(family: Family, topology: Topology, width: int) -> Iterator[Holding]:
    """Yield what the ranks of each stage hold; experts by name make each share of them another structure."""
    stages: list[list[HeldTensor]] = [[] for _ in range(topology.pp)]
    shares: list[list[list[HeldTensor]]] = [[[] for _ in range(topology.ep)] for _ in range(topology.pp)]
    meshes = [(topology.mesh(stage), topology.expert_mesh(stage)) for stage in range(topology.pp)]
    lines = [[topology.line(stage, at) for at in range(topology.ep)] for stage in range(topology.pp)]
    for weight in family.weights(width):
        stage = weight.layer * topology.pp // family.layer_count
        share = weight.expert * topology.ep // family.expert_count
        mesh, placements = _place(weight, topology, meshes[stage], lines[stage][share])
        into = shares[stage][share] if weight.kind == "expert" else stages[stage]
        into.extend(_with_moments(weight, mesh, placements))
    for stage in range(topology.pp):
        for position, own in enumerate(shares[stage]):
            ranks = lines[stage][position].ranks if any(map(len, shares[stage])) else meshes[stage][0].ranks
            tensors = tuple(sorted([*stages[stage], *own], key=lambda tensor: tensor.key))
            yield Holding(ranks=ranks, structure=Structure(tensors=tensors))
            if ranks is meshes[stage][0].ranks:
                break


def _place(
    weight: Weight, topology: Topology, meshes: tuple[Mesh, Mesh], line: Mesh
) -> tuple[Mesh | None, tuple[str, ...]]:
    if weight.kind == "replicated":
        return None, ()
    if weight.kind == "expert":
        return line, ("S0",)
    if weight.kind == "experts":
        return meshes[1], ("S1", "S0")
    strided = f"SS0:{topology.tp}" if topology.tp > 1 else "S0"
    return meshes[0], {"column": (strided, "S0"), "row": ("S0", "S1"), "vector": ("S0", "R")}[weight.kind]


def _with_moments(weight: Weight, mesh: Mesh | None, placements: tuple[str, ...]) -> Iterator[HeldTensor]:
    kinds = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq", "optimizer/step")
    for kind in kinds:
        scalar = kind == "optimizer/step"
        section, _, rest = kind.partition("/")
        yield HeldTensor(
            key=f"{kind}/{weight.name}",
            section=section,
            name=f"{rest}/{weight.name}" if rest else weight.name,
            dtype="float32",
            shape=() if scalar else weight.shape,
            role="parameter" if kind == "model" else "state",
            mesh=None if scalar else mesh,
            placements=() if scalar else placements,
            trainable=True if kind == "model" else None,
        )


def _find_chunk(tensor: HeldTensor, rank: int, places: dict[int, tuple[int, ...]]) -> Chunk:
    """Return the chunk of a tensor that a rank holds; `places`: of the rank on meshes seen so far."""
    mesh = tensor.mesh
    if mesh is None:
        return whole(tensor.shape)
    if id(mesh) not in places:
        places[id(mesh)] = coordinate_at(mesh.shape, mesh.ranks.index(rank))
    return chunk_at(tensor.shape, mesh.shape, tensor.placements, places[id(mesh)])


class _Zeros:
    """`HostBytes` of zeros that take no memory."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def copy_out(self, start: int, out: memoryview) -> None:
        out[:] = bytes(len(out))

    def copy_in(self, start: int, data: memoryview) -> None:
        return


def _make_local(tensor: HeldTensor, chunk: Chunk) -> LocalTensor:
    data = _Zeros(chunk.numel * get_dtype(tensor.dtype).itemsize_bytes)
    return LocalTensor(
        key=tensor.key,
        section=tensor.section,
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        role="parameter" if tensor.role == "parameter" else "state",
        pieces=(Piece(chunk=chunk, data=data),) if chunk.numel else (),
        mesh=tensor.mesh,
        placements=tensor.placements,
        trainable=tensor.trainable,
    )
