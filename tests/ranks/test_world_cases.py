"""Cases that people met where ranks hold different things, are slow, or fail: real ranks, whole saves and loads."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardkeep as sk
from shardkeep import knobs
from shardkeep.ranks.store_group import StoreGroup
from shardkeep.storage.resolve import open_store
from shardkeep.testing.faults import Fault, FaultStore
from tests.support.ranks import run_ranks, start_ranks
from tests.support.training import build, gather, step_once, train

slow = pytest.mark.slow


def try_it(call: Callable[[], object]) -> str:
    """Return the text of the error that a call raises, or nothing."""
    try:
        call()
    except sk.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


# Pipeline stages


class Stage(nn.Module):
    """Some layers of a model of four, under their global names."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(at): nn.Linear(3, 3) for at in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def build_stage(layers: range, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Stage(layers)
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model(numbered(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def describe_stage(state: dict[str, Any]) -> dict[str, list[float]]:
    return {name: array.ravel().tolist() for name, array in gather(state).items()}


def save_stages(rank: int, world_size: int, root: str) -> dict[str, list[float]]:
    state = build_stage(range(2 * rank, 2 * rank + 2), seed=rank)
    sk.save(root, state)
    return describe_stage(state)


def load_stages(rank: int, world_size: int, root: str, again: str) -> dict[str, list[float]]:
    layers = range(4) if world_size == 1 else range(2 * rank, 2 * rank + 2)
    state = build_stage(layers, seed=17)
    sk.load(root, state)
    if again:
        sk.save(again, state)
    return describe_stage(state)


def test_pipeline_stages_load_into_one_process_and_back(tmp_path: Path) -> None:
    """Names differ from rank to rank, and an optimizer is the union of its parts."""
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    first, second = run_ranks(save_stages, 2, two)
    assert not first.keys() & second.keys()
    assert run_ranks(load_stages, 1, two, one) == [{**first, **second}]
    assert run_ranks(load_stages, 2, one, "") == [first, second]


# One name, several contents


def check_one_name(rank: int, world_size: int, root: str) -> dict[str, str]:
    expert = nn.Linear(2, 2)
    with torch.no_grad():
        expert.weight.fill_(rank)
        expert.bias.fill_(7)
    found = {"refused": try_it(lambda: sk.save(f"{root}/refused", {"experts": expert}))}
    found["the same group saves what is right"] = try_it(lambda: sk.save(f"{root}/refused", {"step": 3}))

    tensor = torch.full((3,), float(rank))
    merged = {"kept": sk.PerRank(tensor), "count": sk.PerRank(rank + 5, merge=sum), "plain": 100 + rank}
    sk.save(f"{root}/kept", merged)
    live = {"kept": sk.PerRank(torch.zeros(3)), "count": sk.PerRank(0, merge=sum), "plain": 0}
    sk.load(f"{root}/kept", live)
    assert live["kept"].value.tolist() == [float(rank)] * 3  # type: ignore[attr-defined]
    assert (live["count"].value, live["plain"]) == (rank + 5, 100 + rank)  # type: ignore[attr-defined]

    sk.save(f"{root}/mergeable", {"count": sk.PerRank(rank + 5, merge=sum)})
    sk.save(f"{root}/counter", {"loader": Counter(223 - 3 * rank)})
    counter = Counter(0)
    sk.load(f"{root}/counter", {"loader": counter})
    assert counter.at == 223 - 3 * rank
    return found


class Counter:
    """A loader's own position, as users write it."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_contents_that_differ_are_kept_per_rank_or_refused(tmp_path: Path) -> None:
    """KempnerInstitute/KempnerForge#202, pytorch/pytorch#120356, PrimeIntellect-ai/prime-rl#1035."""
    root = str(tmp_path)
    for found in run_ranks(check_one_name, 2, root):
        assert "experts/weight" in found["refused"]
        assert "experts/bias" not in found["refused"]
        assert found["the same group saves what is right"] == ""
    # Another number of ranks: a merge decides, or it is refused by name.
    merged = {"count": sk.PerRank(0, merge=sum)}
    sk.load(f"{root}/mergeable", merged)
    assert merged["count"].value == 5 + 6
    counter = Counter(-1)
    text = try_it(lambda: sk.load(f"{root}/counter", {"loader": counter}))
    assert text.startswith("StateMismatch")
    assert "loader" in text
    assert counter.at == -1
    kept = {"kept": sk.PerRank(torch.zeros(3)), "count": sk.PerRank(0, merge=sum), "plain": 0}
    text = try_it(lambda: sk.load(f"{root}/kept", kept))
    assert text.startswith("StateMismatch")
    assert "kept: a tensor per rank, saved by 2 ranks" in text
    assert "plain" in text


# Boxes

TOYS = {1: ("whole",), 2: ("by layer", "by rows")}
HALF = 6  # rows of the gate, then as many of the up projection


def make_fused(rank: int, world_size: int, *, filled: bool) -> sk.Sharded:
    """Return this rank's rows of the gate and the same rows of the up projection, two blocks of one weight."""
    full = numbered(2 * HALF, 5) if filled else torch.full((2 * HALF, 5), -1.0)
    first, last = rank * HALF // world_size, (rank + 1) * HALF // world_size
    blocks = [(full[at + first : at + last].clone(), (at + first, 0)) for at in (0, HALF)]
    return sk.Sharded(blocks, (2 * HALF, 5))


def make_toy(layout: str, rank: int, world_size: int, *, filled: bool) -> dict[str, Any]:
    """Return two layers of 4 x 3, by layer (one on each rank) or by block of rows (half of each on each rank)."""
    layers = [numbered(4, 3, start=100 * at) if filled else torch.full((4, 3), -1.0) for at in range(2)]
    if layout == "whole" or world_size == 1:
        return {f"layer{at}": layer for at, layer in enumerate(layers)}
    if layout == "by layer":
        return {f"layer{rank}": layers[rank]}
    rows = slice(2 * rank, 2 * rank + 2)
    return {
        f"layer{at}": sk.Sharded([(layer[rows].clone(), (2 * rank, 0))], (4, 3)) for at, layer in enumerate(layers)
    }


def flatten(state: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for name, value in sorted(state.items()):
        pieces = value.pieces if isinstance(value, sk.Sharded) else [(value, (0, 0))]
        found += [(name, tuple(at), tensor.tolist()) for tensor, at in pieces]
    return found


def save_boxes(rank: int, world_size: int, root: str) -> None:
    sk.save(f"{root}/fused{world_size}", {"w": make_fused(rank, world_size, filled=True)})
    for layout in TOYS.get(world_size, ()):
        sk.save(f"{root}/{layout}", make_toy(layout, rank, world_size, filled=True))


def load_boxes(rank: int, world_size: int, root: str, saved: list[int]) -> None:
    for writers in saved:
        fused = {"w": make_fused(rank, world_size, filled=False)}
        sk.load(f"{root}/fused{writers}", fused)
        assert flatten(fused) == flatten({"w": make_fused(rank, world_size, filled=True)}), (writers, world_size)
    for layout in TOYS.get(world_size, ()):
        for source in ("by layer", "by rows", "whole"):
            toy = make_toy(layout, rank, world_size, filled=False)
            sk.load(f"{root}/{source}", toy)
            assert flatten(toy) == flatten(make_toy(layout, rank, world_size, filled=True)), (source, layout)


def test_boxes_load_by_place_whatever_the_layout(tmp_path: Path) -> None:
    """ROCm/Megatron-LM#63 (fused gate and up), NVIDIA/Megatron-LM#1517 (by layer, by block of rows)."""
    worlds = [1, 2, 3]
    for world_size in worlds:
        run_ranks(save_boxes, world_size, str(tmp_path))
    for world_size in worlds:
        run_ranks(load_boxes, world_size, str(tmp_path), worlds)


# Time


def save_at_random_times(rank: int, world_size: int, root: str, saves: int) -> list[int]:
    dice = random.Random(rank)
    state = build("ddp", world_size, rank=rank)
    with sk.CheckpointManager(root, keep=sk.Keep(last=3)) as manager:
        manager.resume(state)
        for step in range(1, saves + 1):
            time.sleep(dice.random() * 0.03)
            manager.save(step, state)
        return [sk.open(root).step, manager.latest() or 0]


@pytest.mark.parametrize("saves", [6, pytest.param(30, marks=slow)])
def test_ranks_at_random_times_never_race(saves: int, tmp_path: Path) -> None:
    """huggingface/transformers#28015: ranks wrote into a folder that another renamed."""
    assert run_ranks(save_at_random_times, 4, str(tmp_path), saves) == [[saves, saves]] * 4
    folders = sorted(path.parent.name for path in tmp_path.rglob("commit.json"))
    assert len(folders) == 3


def save_with_rank_0_late(rank: int, world_size: int, root: str) -> float:
    if rank == 0:
        time.sleep(1.5)
    began_s = time.monotonic()
    sk.save(root, {"w": sk.PerRank(numbered(5, start=rank))})
    return time.monotonic() - began_s


def test_rank_0_may_come_late(tmp_path: Path) -> None:
    """karpathy/nanochat#336: a faster rank met a folder that rank 0 had not made yet."""
    waits = run_ranks(save_with_rank_0_late, 2, str(tmp_path / "new" / "folder"))
    assert waits[1] > 1.0


def save_slowly(rank: int, world_size: int, root: str, delay_s: float, timeout_s: float) -> int:
    """Save through a slow store beside a process group that gives up long before; return the collectives it ran."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    state = build("fsdp", world_size, rank=rank)
    slow_write = Fault(kind="delay", delay_s=delay_s, when=lambda call: rank == 1 and call.verb == "write_at")
    with sk.CheckpointManager(root, store=FaultStore(open_store(root), [slow_write])) as manager:
        manager.resume(state)
        step_once(state, next(iter(state["loader"])))
        before = count_collectives()
        began_s = time.monotonic()
        manager.save(1, state)
        assert time.monotonic() - began_s > timeout_s
        assert count_collectives() == before
        step_once(state, next(iter(state["loader"])))
        assert count_collectives() > before
    return before


def count_collectives() -> int:
    """Return how many collectives the default process group has begun."""
    group: Any = dist.distributed_c10d._get_default_group()
    return int(group._get_sequence_number_for_group())


@pytest.mark.parametrize(
    ("timeout_s", "delay_s"), [(3.0, 3.5), pytest.param(5.0, 8.0, marks=slow)], ids=["short", "long"]
)
def test_a_slow_store_meets_no_collective_timeout(timeout_s: float, delay_s: float, tmp_path: Path) -> None:
    """meta-pytorch/torchtune#2093: ranks sat in an all-reduce while another wrote, until the watchdog came."""
    counts = run_ranks(save_slowly, 2, str(tmp_path), delay_s, timeout_s)
    assert min(counts) > 0


# Failures


def save_once(rank: int, world_size: int, root: str, layout: str) -> None:
    sk.save(root, build(layout, world_size, rank=rank), step=1)


def time_it(call: Callable[[], object]) -> tuple[str, float]:
    began_s = time.monotonic()
    return try_it(call), time.monotonic() - began_s


def fail_on_one_rank(rank: int, world_size: int, root: str) -> list[tuple[str, float]]:
    """Resume where rank 1 alone lacks an optimizer's group, then where rank 1 alone cannot read; then for good."""
    state = build("fsdp", world_size, rank=rank)
    other = torch.optim.AdamW([{"params": [p]} for p in state["model"].parameters()])
    misfit = {**state, "optimizer": other} if rank == 1 else state
    misfit.pop("scheduler")
    found = [time_it(lambda: sk.load(root, misfit, strict=False))]
    unreadable = Fault(kind="io_error", times=None, when=lambda call: rank == 1 and call.verb == "read_into")
    with knobs.override(RETRIES=0):
        manager = sk.CheckpointManager(root, store=FaultStore(open_store(root), [unreadable]))
        with manager:
            found.append(time_it(lambda: manager.resume(build("fsdp", world_size, rank=rank))))
    with sk.CheckpointManager(root) as manager:
        assert manager.resume(build("fsdp", world_size, rank=rank)).step == 1
    return found


def test_a_restore_that_fails_on_one_rank_fails_on_all_at_once(tmp_path: Path) -> None:
    """Nobody waits for a timeout, and a failing read is no reason to pass a checkpoint over."""
    run_ranks(save_once, 3, str(tmp_path), "fsdp")
    for misfit, unreadable in run_ranks(fail_on_one_rank, 3, str(tmp_path)):
        assert "parameter groups" in misfit[0]
        assert "rank 1" in misfit[0]
        assert "StorageError" in unreadable[0] or "rank 1" in unreadable[0]
        assert max(misfit[1], unreadable[1]) < 10
    assert not list(tmp_path.rglob("*quarantine*"))


def die_in_a_save(rank: int, world_size: int, root: str) -> tuple[str, float]:
    state = build("fsdp", world_size, rank=rank)
    dies = Fault(kind="kill", when=lambda call: rank == 1 and call.verb == "write_at")
    with (
        knobs.override(PEER_SILENCE_S=1.0),
        sk.CheckpointManager(root, store=FaultStore(open_store(root), [dies])) as manager,
    ):
        manager.resume(state)
        return time_it(lambda: manager.save(1, state))


def resume_and_train(rank: int, world_size: int, root: str) -> list[int]:
    state = build("fsdp", world_size, rank=rank)
    with sk.CheckpointManager(root, save_every=1) as manager:
        begin = manager.resume(state).step
        return [begin, *(step.number for step in train(state, manager, stop=begin + 1))]


def test_a_rank_killed_while_it_writes_is_noticed(tmp_path: Path) -> None:
    with start_ranks(die_in_a_save, 3, str(tmp_path)) as ranks:
        outcomes = ranks.collect(timeout_s=40)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        text, waited_s = outcomes[rank].value
        assert text.startswith("PeerFailure")
        assert "rank 1" in text
        assert waited_s < 20
    assert not list(tmp_path.rglob("commit.json"))
    assert run_ranks(resume_and_train, 3, str(tmp_path)) == [[0, 1]] * 3


# What a save and a load cost


def read_own(rank: int, world_size: int, root: str) -> tuple[int, int, set[str], int]:
    """Return what a same-layout load read and opened, and this rank's own bytes."""
    state = build_wide(world_size)
    store = FaultStore(open_store(root))
    with sk.CheckpointManager(root, store=store) as manager:
        report = manager.resume(state)
    reads = [call for call in store.log if call.verb == "read_into"]
    own = sum(p._local_tensor.nbytes for p in state["model"].parameters())  # type: ignore[attr-defined]
    return report.bytes_read, sum(call.length for call in reads), {call.key for call in reads}, 3 * own


def build_wide(world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(fully_shard(model).parameters())
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save_wide(rank: int, world_size: int, root: str) -> None:
    sk.save(root, build_wide(world_size))


def find_own(rank: int, keys: set[str]) -> set[str]:
    return {key for key in keys if f"-r{rank:05d}-" in key}


def test_a_rank_reads_its_own_bytes(tmp_path: Path) -> None:
    """Every rank its own shards, and of others only what is the same everywhere and stored once (step counters).

    pytorch/pytorch#110479: a load gathered many GB on every rank and ran out of memory, where training had fitted.
    """
    run_ranks(save_wide, 4, str(tmp_path))
    for rank, (reported, read, keys, own) in enumerate(run_ranks(read_own, 4, str(tmp_path))):
        assert reported == read
        assert own <= read <= 1.05 * own + (1 << 20)
        mine = find_own(rank, keys)
        assert {key.rsplit("/", 1)[1].split("-")[0] for key in mine} == {"model", "optimizer"}


def test_a_rank_opens_few_files(tmp_path: Path) -> None:
    """mosaicml/composer#3271: every rank had to fetch every file, though nothing was resharded."""
    run_ranks(save_wide, 4, str(tmp_path))
    for rank, (_, _, keys, _) in enumerate(run_ranks(read_own, 4, str(tmp_path))):
        assert len(keys) <= len(find_own(rank, keys)) + 1


class CountingClient:
    """A client of the job's store that counts calls and bytes; asking whether a key is there yet is left out."""

    def __init__(self, inner: Any, tally: dict[str, int]) -> None:
        self._inner, self._tally = inner, tally

    def clone(self) -> CountingClient:
        return CountingClient(self._inner.clone(), self._tally)

    def has_extended_api(self) -> bool:
        return False

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def counted(*args: Any) -> Any:
            result = method(*args)
            self._tally["calls"] += 1
            for value in (*args, result):
                self._tally["bytes"] += len(value) if isinstance(value, bytes | str) else 0
            return result

        return counted


def count_messages(rank: int, world_size: int, root: str, layers: int) -> list[dict[str, int]]:
    """Return calls and bytes of this rank for a first save, and for one after it."""
    tally = {"calls": 0, "bytes": 0}
    store = dist.distributed_c10d._get_default_store()
    group = StoreGroup(CountingClient(store, tally), rank, world_size, f"count{layers}", pulse=None)
    model = fully_shard(nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers))))
    found = []
    with sk.CheckpointManager(root, group=group) as manager:
        manager.resume({"model": model})
        for step in (1, 2):
            dist.barrier()
            before = dict(tally)
            manager.save(step, {"model": model})
            found.append({name: tally[name] - before[name] for name in tally})
    return found


def test_messages_are_linear_in_ranks_and_know_nothing_of_the_model(tmp_path: Path) -> None:
    """huggingface/accelerate#4099: hours of gathering, and a central plan that broke at scale."""
    later: dict[tuple[int, int], dict[str, float]] = {}
    for world_size in (2, 4):
        for layers in (2, 40):
            root = str(tmp_path / f"{world_size}-{layers}")
            ranks = run_ranks(count_messages, world_size, root, layers)
            later[world_size, layers] = {
                name: sum(saves[1][name] for saves in ranks) / world_size for name in ("calls", "bytes")
            }
    for world_size in (2, 4):
        small, large = later[world_size, 2], later[world_size, 40]
        assert large["calls"] <= small["calls"] + 3
        assert large["bytes"] <= 1.5 * small["bytes"] + 500, later
    for layers in (2, 40):
        assert later[4, layers]["calls"] <= 1.3 * later[2, layers]["calls"] + 3, later
