"""Tensors that share memory: stored once, restored into whatever shares memory then (safetensors/safetensors#202)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardkeep.errors import StateMismatch
from shardkeep.spec.tensors import LocalTensor, StoredTensor
from shardkeep.state.aliases import Deduplicated, _span, deduplicate, share_bytes
from shardkeep.state.casts import CastBytes
from shardkeep.state.fill import plan_fill
from shardkeep.state.models import model_parts
from shardkeep.state.subclasses import Entry, take_apart


def entries_of(**tensors: torch.Tensor) -> list[Entry]:
    return [e for key, t in tensors.items() for e in take_apart(key, t, section="s", name=key, role="state").entries]


def save(entries: list[Entry]) -> tuple[dict[str, bytes], Deduplicated]:
    found = deduplicate(entries)
    content = {}
    for local in found.tensors:
        (piece,) = local.pieces
        out = bytearray(piece.data.nbytes)
        piece.data.copy_out(0, memoryview(out))
        content[local.key] = bytes(out)
    return content, found


def load(entries: list[Entry], content: dict[str, bytes], found: Deduplicated, **options: Any) -> list[LocalTensor]:
    stored = {
        t.key: StoredTensor(
            key=t.key, dtype=t.dtype, shape=t.shape, role=t.role, trainable=None, device=None, placements=()
        )
        for t in found.tensors
    }
    fill = plan_fill(entries, stored=stored, aliases=found.aliases, views=found.views, **options)
    assert len({read.key for read in fill.reads}) == len(fill.reads)
    for read in fill.reads:
        assert (read.dtype, read.shape) == (stored[read.key].dtype, stored[read.key].shape)
        for piece in read.pieces:
            piece.data.copy_in(0, memoryview(content[read.key]))
    fill.finish()
    assert fill.consumed == set(stored) | set(found.aliases) | set(found.views)
    return list(fill.reads)


def test_tied_parameters_are_stored_once_and_read_once() -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    net["head"].weight = net["embed"].weight
    content, found = save(list(model_parts("model", net).entries))
    assert list(content) == ["model/embed.weight"]
    assert found.aliases == {"model/head.weight": "model/embed.weight"}
    expected = net["embed"].weight.detach().clone()
    net["embed"].weight.data.zero_()
    reads = load(list(model_parts("model", net).entries), content, found)
    assert [(read.key, len(read.pieces)) for read in reads] == [("model/embed.weight", 1)]
    assert torch.equal(net["head"].weight, expected)
    assert net["head"].weight is net["embed"].weight


def test_ties_of_memory_without_one_object() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    _, found = save(
        entries_of(
            a=base, b=base.detach(), c=base.view(2, 3), d=base.t(), e=base.view(3, 2), f=base.view(torch.int32)
        )
    )
    assert found.aliases == {"b": "a", "c": "a"}
    assert {key: (view.base, view.strides) for key, view in found.views.items()} == {
        "a": ("a#storage", (3, 1)),
        "d": ("a#storage", (1, 3)),
        "e": ("a#storage", (2, 1)),
        "f": ("a#storage", (3, 1)),
    }
    assert [(t.key, t.dtype, t.shape) for t in found.tensors] == [("a#storage", "uint8", (24,))]


def test_stored_tied_live_apart() -> None:
    base = torch.arange(6.0)
    content, found = save(entries_of(a=base, b=base))
    a, b = torch.zeros(6), torch.zeros(6)
    reads = load(entries_of(a=a, b=b), content, found)
    assert [len(read.pieces) for read in reads] == [2]
    assert torch.equal(a, base)
    assert torch.equal(b, base)


def test_stored_apart_live_tied() -> None:
    content, found = save(entries_of(a=torch.arange(6.0), b=torch.arange(6.0)))
    assert found.aliases == {}
    tied = torch.zeros(6)
    load(entries_of(a=tied, b=tied), content, found)
    assert torch.equal(tied, torch.arange(6.0))
    content["b"] = bytes(24)
    with pytest.raises(StateMismatch, match="a, b share memory here"):
        load(entries_of(a=tied, b=tied), content, found)


def test_overlapping_views_are_stored_as_one_base() -> None:
    base = torch.arange(10.0)
    content, found = save(entries_of(x=base[:6], y=base[4:].view(2, 3).t()))
    assert list(content) == ["x#storage"]
    assert content["x#storage"] == base.numpy().tobytes()
    view = found.views["y"]
    assert (view.base, view.offset_bytes, view.dtype, view.shape, view.strides) == (
        "x#storage",
        16,
        "float32",
        (3, 2),
        (1, 3),
    )
    live = torch.zeros(10)
    reads = load(entries_of(x=live[:6], y=live[4:].view(2, 3).t()), content, found)
    assert torch.equal(live, base)
    assert reads[0].section == "s", "read in place"
    # Not overlapping in the same way, or not at all.
    for shift in (0, 3):
        other = torch.zeros(20)
        x, y = other[:6], other[4 + shift : 10 + shift].view(2, 3).t()
        if shift == 0:
            y = torch.zeros(3, 2)
        load(entries_of(x=x, y=y), content, found)
        assert torch.equal(y, base[4:].view(2, 3).t())
        assert torch.equal(x, base[:6]) or shift == 0
    # Stored apart, live overlapping.
    content, found = save(entries_of(x=base[:6].clone(), y=base[4:].clone()))
    live.zero_()
    load(entries_of(x=live[:6], y=live[4:]), content, found)
    assert torch.equal(live, base)


def test_views_of_another_dtype_or_shape_are_refused_unless_cast() -> None:
    base = torch.arange(10.0) / 3
    content, found = save(entries_of(x=base[:6], y=base[4:]))
    x, y = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(6)
    with pytest.raises(StateMismatch, match=r"x: stored float32 \(6,\), live bfloat16 \(6,\)"):
        load(entries_of(x=x, y=y), content, found)
    load(entries_of(x=x, y=y), content, found, cast=True)
    assert torch.equal(x, base[:6].bfloat16())
    with pytest.raises(StateMismatch, match=r"live float32 \(5,\)"):
        load(entries_of(x=torch.zeros(5), y=y), content, found, cast=True)


def test_neighbours_on_one_storage_are_independent() -> None:
    flat = torch.arange(24.0)
    matrix = flat.view(4, 6)
    for parts in (
        {"q": flat[:8], "k": flat[8:16], "v": flat[16:]},
        {"left": matrix[:, :2], "right": matrix[:, 2:]},
        {"even": flat[::2], "odd": flat[1::2]},
        {"none": flat[3:3], "all": flat},
    ):
        _, found = save(entries_of(**parts))
        assert found.views == {}
        assert found.aliases == {}
        assert len(found.tensors) == len(parts)


def test_memory_that_no_tensor_owns_is_never_stored() -> None:
    flat = torch.arange(100.0)
    content, found = save(entries_of(a=flat[:40:4], b=flat[4:80:4]))
    assert found.views == {}
    assert {key: len(data) for key, data in content.items()} == {"a": 40, "b": 76}


def test_same_names_on_different_layouts_are_no_aliases() -> None:
    flat = torch.arange(4.0)
    _, found = save(entries_of(a=flat, b=flat[:0], c=torch.empty(0), d=flat.view(4, 1)))
    assert found.aliases == {}
    assert found.views.keys() == {"a", "d"}


def test_size_one_dimensions_do_not_hide_a_tie() -> None:
    base = torch.arange(4.0)
    _, found = save(entries_of(a=base.view(1, 4), b=torch.as_strided(base, (1, 4), (77, 1))))
    assert found.aliases == {"b": "a"}


@st.composite
def placed(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    return draw(st.integers(0, 20)), shape, tuple(draw(st.integers(0, 12)) for _ in shape)


@settings(max_examples=300)
@given(
    first=placed(),
    second=placed(),
    dtypes=st.tuples(*[st.sampled_from([torch.uint8, torch.int32, torch.float64])] * 2),
)
def test_sharing_is_found_exactly(first: Any, second: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    storage = torch.UntypedStorage(8 * 160)
    tensors = [
        torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
        for (offset, shape, strides), dtype in zip((first, second), dtypes, strict=True)
    ]
    touched = []
    for tensor in tensors:
        index = torch.arange(storage.nbytes() // tensor.element_size())
        elements = torch.as_strided(index, tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()
        touched.append({e * tensor.element_size() + i for e in elements for i in range(tensor.element_size())})
    spans = [_span(entry) for entry in entries_of(a=tensors[0], b=tensors[1])]
    assert share_bytes(*spans) == bool(touched[0] & touched[1])  # type: ignore[arg-type]


@settings(max_examples=100)
@given(places=st.lists(placed(), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_every_tensor_gets_its_bytes_back(places: list[Any], seed: int) -> None:
    flat = torch.randn(160, generator=torch.Generator().manual_seed(seed))
    tensors = {f"t{i}": torch.as_strided(flat, shape, strides, at) for i, (at, shape, strides) in enumerate(places)}
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    content, found = save(entries_of(**tensors))
    apart = {key: torch.zeros(tensor.shape) for key, tensor in tensors.items()}
    load(entries_of(**apart), content, found)
    other = torch.zeros(160)
    same = {f"t{i}": torch.as_strided(other, shape, strides, at) for i, (at, shape, strides) in enumerate(places)}
    load(entries_of(**same), content, found)
    for key, tensor in expected.items():
        assert torch.equal(apart[key], tensor)
        assert torch.equal(same[key], tensor)


def test_stored_apart_live_in_common_memory_must_fit() -> None:
    """A live tensor whose elements share bytes, with itself or another, cannot hold just any stored values."""

    def expanded() -> dict[str, torch.Tensor]:
        return {"t": torch.zeros(1, 4).expand(3, 4)}

    def windows() -> dict[str, torch.Tensor]:
        return {"t": torch.zeros(6).as_strided((3, 4), (1, 1))}

    def overlapping() -> dict[str, torch.Tensor]:
        flat = torch.zeros(10)
        return {"a": flat[:6], "b": flat[4:].view(torch.int32), "c": flat}

    row, ramp = torch.arange(4.0), torch.arange(10.0)
    apart = {"a": ramp[:6].clone(), "b": ramp[4:].clone().view(torch.int32), "c": ramp.clone()}
    for make, fits in (
        (expanded, {"t": row.expand(3, 4).clone()}),
        (windows, {"t": ramp[:6].unfold(0, 4, 1).clone()}),
        (overlapping, apart),
    ):
        live = make()
        load(entries_of(**live), *save(entries_of(**fits)))
        assert all(torch.equal(live[key], fits[key]) for key in fits)
        for key in fits:
            other = {**fits, key: fits[key] + torch.arange(fits[key].numel()).reshape(fits[key].shape).to(fits[key])}
            with pytest.raises(StateMismatch, match=rf"{key}\b.* differ"):
                load(entries_of(**make()), *save(entries_of(**other)))


def test_stored_views_go_to_memory_that_overlaps_in_another_way() -> None:
    base = torch.arange(10.0)
    content, found = save(entries_of(x=base[:6], y=base[4:]))
    assert set(found.views) == {"x", "y"}
    live = torch.zeros(10)
    with pytest.raises(StateMismatch, match="x, y share memory here"):
        load(entries_of(x=live[:6], y=live[3:9]), content, found)
    # A third tensor of its own in the checkpoint is one more view of the same memory here.
    both = {**content, "z": torch.full((3,), 7.0).numpy().tobytes()}
    _, stored = save([*entries_of(x=base[:6], y=base[4:]), *entries_of(z=torch.zeros(3))])
    with pytest.raises(StateMismatch, match="share memory here"):
        load(entries_of(x=live[:6], y=live[4:], z=live[2:5]), both, stored)


def test_stored_apart_live_tied_is_compared_in_the_live_dtype() -> None:
    third = torch.full((6,), 1 / 3)
    draft_like = [
        replace(
            entry,
            local=replace(
                entry.local,
                dtype="float32",
                pieces=tuple(
                    replace(piece, data=CastBytes(piece.data, torch.float32, torch.bfloat16))
                    for piece in entry.local.pieces
                ),
            ),
        )
        for tied in [torch.zeros(6, dtype=torch.bfloat16)]
        for entry in entries_of(a=tied, b=tied)
    ]
    load(draft_like, *save(entries_of(a=third, b=third.clone())))
    assert torch.equal(draft_like[0].data, third.bfloat16())
