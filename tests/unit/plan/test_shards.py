"""Which tensors share a shard file: one section, and never a frozen one with another."""

from __future__ import annotations

from shardkeep.plan.shards import Outgoing, ShardPlan, plan_shards
from shardkeep.spec.chunks import whole


def piece(section: str, name: str, *, frozen: bool = False, count: int = 256) -> Outgoing:
    key = f"{section}/{name}"
    return Outgoing(key=key, section=section, name=name, dtype="float32", chunk=whole((count,)), frozen=frozen)


def show(plans: list[ShardPlan]) -> list[tuple[str, bool, set[str]]]:
    return [(plan.name, plan.frozen, {item.outgoing.name for item in plan.items}) for plan in plans]


MIXED = [piece("m", "a"), piece("m", "b", frozen=True), piece("m", "c"), piece("n", "d", frozen=True)]


def test_frozen_tensors_have_files_of_their_own_after_the_others_of_their_section() -> None:
    assert show(plan_shards(MIXED, 3, limit_bytes=1 << 20)) == [
        ("m-r00003-00001.safetensors", False, {"a", "c"}),
        ("m-r00003-00002.safetensors", True, {"b"}),
        ("n-r00003-00001.safetensors", True, {"d"}),
    ]


def test_each_kind_is_cut_at_the_limit_by_itself() -> None:
    pieces = [piece("m", f"{at}", frozen=at % 2 == 0) for at in range(6)]
    plans = plan_shards(pieces, 0, limit_bytes=2048)
    assert [(plan.frozen, len(plan.items)) for plan in plans] == [(False, 2), (False, 1), (True, 2), (True, 1)]


def test_a_change_of_another_tensor_leaves_the_file_of_the_frozen_ones_alone() -> None:
    before = plan_shards(MIXED, 0, limit_bytes=1 << 20)[1]
    after = plan_shards([*MIXED, piece("m", "added")], 0, limit_bytes=1 << 20)[1]
    assert (before.name, before.header) == (after.name, after.header)


def test_without_frozen_tensors_it_is_as_ever() -> None:
    plans = plan_shards([piece("m", "a"), piece("m", "b"), piece("o", "c")], 0, limit_bytes=1 << 20)
    assert show(plans) == [
        ("m-r00000-00001.safetensors", False, {"a", "b"}),
        ("o-r00000-00001.safetensors", False, {"c"}),
    ]
