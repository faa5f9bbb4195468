"""`engine.diff`, `engine.compare`, `engine.sources`: right numbers, bounded reading, every form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardkeep.engine.compare import Comparison, find_decoder, float8_values
from shardkeep.engine.diff import diff_sources, iter_value_changes
from shardkeep.engine.run import read_commit
from shardkeep.engine.sources import CheckpointSource, find_files, iter_boxes
from shardkeep.errors import Corrupt, NotFound
from shardkeep.format.names import StepRef
from shardkeep.spec.chunks import iter_runs, whole
from shardkeep.spec.dtypes import DTYPES
from shardkeep.spec.tensors import View
from tests.support.fake_state import FakeRun, FakeTensor, flip, make_tensor, pattern, small_state


def compare(a: Any, b: Any, dtype: str | None = None, other: str | None = None) -> Any:
    left, right = numpy.ascontiguousarray(a), numpy.ascontiguousarray(b)
    comparison = Comparison(dtype or str(left.dtype), other or dtype or str(right.dtype))
    comparison.add(memoryview(left.tobytes()), memoryview(right.tobytes()))
    return comparison.finish()


def test_numbers_of_a_small_difference() -> None:
    found = compare(numpy.array([3.0, 4.0, 0.0]), numpy.array([3.0, 4.5, -1.0]))
    assert (found.element_count, found.differing_count, found.nonfinite_count) == (3, 2, 0)
    assert found.max_abs == 1.0
    assert found.mean_abs == pytest.approx(0.5)
    assert found.relative_l2 == pytest.approx(math.sqrt(1.25) / 5)


def test_the_same_nan_is_equal_and_zero_has_a_sign() -> None:
    nan = numpy.array([math.nan, 1.0], dtype=numpy.float32)
    assert compare(nan, nan).differing_count == 0
    found = compare(nan, numpy.array([2.0, 1.0], dtype=numpy.float32))
    assert (found.differing_count, found.nonfinite_count, found.max_abs) == (1, 1, 0.0)
    zeros = compare(numpy.array([0.0]), numpy.array([-0.0]))
    assert (zeros.differing_count, zeros.max_abs) == (1, 0.0)
    other_nan = (nan.view(numpy.uint32) ^ 1).view(numpy.float32)
    assert compare(nan, other_nan).differing_count == 2
    infinite = compare(numpy.array([math.inf, 1.0]), numpy.array([1.0, 1.0]))
    assert (infinite.nonfinite_count, infinite.max_abs) == (1, 0.0)


def test_a_difference_from_nothing_is_infinite() -> None:
    assert compare(numpy.zeros(2), numpy.ones(2)).relative_l2 == math.inf


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int8", "uint8", "int32"])
def test_integers_lose_nothing(dtype: str) -> None:
    top = numpy.iinfo(dtype).max
    found = compare(numpy.array([top, 0], dtype=dtype), numpy.array([top - 1, 0], dtype=dtype))
    assert (found.differing_count, found.max_abs) == (1, 1.0)
    far = compare(numpy.array([numpy.iinfo(dtype).min], dtype=dtype), numpy.array([top], dtype=dtype))
    assert far.max_abs == float(top - int(numpy.iinfo(dtype).min))


def test_complex_and_bool() -> None:
    assert compare(numpy.array([1 + 1j]), numpy.array([4 + 5j])).max_abs == 5.0
    assert compare(numpy.array([True, False]), numpy.array([False, False])).differing_count == 1


def test_stretches_add_up() -> None:
    rng = numpy.random.default_rng(5)
    a, b = rng.standard_normal(3_000_000, dtype=numpy.float32), rng.standard_normal(3_000_000, dtype=numpy.float32)
    found = compare(a, b)
    apart = numpy.abs(a.astype(numpy.float64) - b)
    assert found.differing_count == int((a != b).sum())
    assert found.max_abs == float(apart.max())
    assert found.mean_abs == pytest.approx(float(apart.mean()))
    assert found.relative_l2 == pytest.approx(float(numpy.linalg.norm(apart) / numpy.linalg.norm(a.astype("f8"))))


def test_dtypes_without_numbers_are_compared_as_bytes() -> None:
    found = compare(
        numpy.array([1, 2], dtype=numpy.uint8), numpy.array([1, 3], dtype=numpy.uint8), "float4_e2m1fn_x2"
    )
    assert (found.differing_count, found.max_abs, found.relative_l2) == (1, None, None)
    for name in DTYPES:
        size = 2 * DTYPES[name].itemsize_bytes
        assert compare(numpy.zeros(size, numpy.uint8), numpy.zeros(size, numpy.uint8), name).element_count == 2


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"],
)
def test_decoders_agree_with_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    size = DTYPES[dtype].itemsize_bytes
    codes = numpy.arange(256**size, dtype=f"<u{size}")
    decode = find_decoder(dtype)
    assert decode is not None
    expected = torch.from_numpy(codes.view(numpy.uint8).copy()).view(getattr(torch, dtype)).double().numpy()
    with numpy.errstate(invalid="ignore"):  # signalling nans
        found = decode(memoryview(codes.tobytes()))
    numpy.testing.assert_array_equal(found, expected)


def test_float8_tables_hold_what_the_specification_says() -> None:
    table = float8_values("float8_e4m3fn")
    assert (table[0x7E], table[0x01], table[0x08]) == (448.0, 2.0**-9, 2.0**-6)
    assert math.isnan(table[0x7F])
    assert float8_values("float8_e5m2")[0x7C] == math.inf


def test_values_across_dtypes_are_compared_as_numbers() -> None:
    exact = numpy.array([1.0, 0.5], dtype=numpy.float32)
    assert compare(exact, exact.astype(numpy.float16)).differing_count == 0
    assert compare(exact, numpy.array([1.0, 0.25], dtype=numpy.float16)).max_abs == 0.25


@given(
    shape=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    count=st.integers(1, 60),
)
@settings(max_examples=200)
def test_boxes_follow_each_other_in_row_major_order(shape: tuple[int, ...], count: int) -> None:
    at = 0
    for box in iter_boxes(shape, count):
        assert 0 < box.numel <= max(count, 1)
        assert list(iter_runs(box, whole(shape))) == [(at, box.numel)]
        at += box.numel
    assert at == math.prod(shape)


def source(run: FakeRun, step: int) -> CheckpointSource:
    return CheckpointSource(run.store, read_commit(run.store, StepRef(step, run.generation)))


def test_equal_digests_prove_equality_without_reading(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    state = small_state(1)
    run.save(1, state)
    run.save(2, state)
    changed = dict(state)
    changed["model/embed.weight"] = make_tensor(numpy.zeros((256, 300), dtype=numpy.float32))
    run.save(3, changed)
    report = diff_sources(source(run, 1), source(run, 2))
    assert (report.same, report.proved_count, report.identical_count) == (True, 5, 5)
    report = diff_sources(source(run, 1), source(run, 3))
    assert [(change.key, change.what) for change in report.changes] == [("model/embed.weight", "changed")]
    # The optimizer's file is proved equal; the model's other tensors share a leaf with the change, and are read.
    assert (report.proved_count, report.identical_count) == (2, 4)


def test_layouts_do_not_matter(tmp_path: Path) -> None:
    one, three = FakeRun(tmp_path / "a"), FakeRun(tmp_path / "b", world_size=3)
    one.save(1, small_state(4))
    three.save(
        1,
        small_state(4, placement="S1") | {"model/layers.0.norm.weight": small_state(4)["model/layers.0.norm.weight"]},
    )
    report = diff_sources(source(one, 1), source(three, 1))
    assert report.changes == ()
    assert report.proved_count == 0 < report.identical_count
    assert {change.path for change in report.values} == {"rng@rank1", "rng@rank2"}


def test_damage_is_raised_where_bytes_are_read(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.save(1, small_state(1))
    run.save(2, small_state(2))
    flip(run.folder(1) / "model-r00000-00001.safetensors", 100_000)
    with pytest.raises(Corrupt, match=r"model-r00000-00001.*embed\.weight"):
        diff_sources(source(run, 1), source(run, 2))


def test_ties_views_and_per_rank_tensors(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, world_size=2)

    def save(step: int, seed: int, own: int) -> None:
        state: dict[str, FakeTensor] = {
            "model/w": make_tensor(numpy.full((2, 2), 1.0, dtype=numpy.float32)),
            "model/base#storage": FakeTensor(dtype="float32", shape=(12,), data=pattern(48, seed)),
            "extra/own": make_tensor(numpy.full(3, own, dtype=numpy.uint8), per_rank=True),
        }
        views = {
            "model/v": View(
                base="model/base#storage",
                offset_bytes=4,
                dtype="float32",
                shape=(3, 2),
                strides=(4, 1),
                role="buffer",
            )
        }
        run.save(step, state, aliases={"model/tied": "model/w"}, views=views)

    save(1, 1, 7)
    save(2, 2, 7)
    save(3, 1, 9)
    first = source(run, 1)
    assert sorted(first.tensors) == ["extra/own@rank0", "extra/own@rank1", "model/tied", "model/v", "model/w"]
    block = bytearray(24)
    first.read([("model/v", whole((3, 2)), memoryview(block))])
    base = numpy.frombuffer(pattern(48, 1), dtype=numpy.uint32)
    assert numpy.frombuffer(block, dtype=numpy.uint32).tolist() == base[[1, 2, 5, 6, 9, 10]].tolist()
    assert [change.key for change in diff_sources(first, source(run, 2)).changes] == ["model/v"]
    by_rank = diff_sources(first, source(run, 3)).changes
    assert [(change.key, change.difference and change.difference.max_abs) for change in by_rank] == [
        ("extra/own@rank0", 2.0),
        ("extra/own@rank1", 2.0),
    ]


class Counting:
    """A source that remembers how much was read at once."""

    def __init__(self, inner: CheckpointSource) -> None:
        self._inner = inner
        self.read_bytes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, wanted: Any) -> None:
        self.read_bytes.append(sum(len(memory) for _, _, memory in wanted))
        self._inner.read(wanted)


def test_large_tensors_are_read_in_stretches(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, world_size=2)
    a = numpy.arange(60 * 50, dtype=numpy.float32).reshape(60, 50)
    b = a.copy()
    b[59, 49] += 1
    b[0, 0] -= 2
    run.save(1, {"model/w": make_tensor(a, placement="S1"), "model/e": make_tensor(numpy.zeros((0, 3)))})
    run.save(2, {"model/w": make_tensor(b, placement="S1"), "model/e": make_tensor(numpy.zeros((0, 3)))})
    counting: Any = Counting(source(run, 1))
    other: Any = Counting(source(run, 2))
    report = diff_sources(counting, other, batch_bytes=1000)
    (change,) = report.changes
    assert change.difference is not None
    assert (change.difference.element_count, change.difference.differing_count) == (3000, 2)
    assert change.difference.max_abs == 2.0
    assert max(counting.read_bytes) <= 1000
    assert sum(counting.read_bytes) == 60 * 50 * 4


def test_folders_with_and_without_an_index(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({name: numpy.full(3, value)}, tmp_path / f"{name}.safetensors")
    found = find_files(str(tmp_path))
    assert found is not None
    assert sorted(found.tensors) == ["a", "b"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "a.safetensors"}}')
    found = find_files(str(tmp_path))
    assert found is not None
    assert sorted(found.tensors) == ["a"]
    index.write_text('{"weight_map": {"a": "b.safetensors"}}')
    with pytest.raises(Corrupt, match=r"says that b\.safetensors holds 'a'"):
        find_files(str(tmp_path))
    index.write_text('{"weight_map": {"a": "c.safetensors"}}')
    with pytest.raises(NotFound):
        find_files(str(tmp_path))
    index.write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(Corrupt, match="leads out"):
        find_files(str(tmp_path))
    index.unlink()
    save_file({"a": numpy.zeros(1)}, tmp_path / "c.safetensors")
    with pytest.raises(Corrupt, match="stands in"):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    ("a", "b", "changes"),
    [
        ({"x": 1}, {"x": 1}, []),
        ({"x": 1}, {"x": True}, [("x", "1", "True")]),
        ({"x": 1}, {"x": 1.0}, [("x", "1", "1.0")]),
        ({"x": [1, 2]}, {"x": [1, 3]}, [("x[1]", "2", "3")]),
        ({"x": [1, 2]}, {"x": [1]}, [("x", "[1, 2]", "[1]")]),
        ({"x": {"$tuple": [1, {"y": 0}]}}, {"x": {"$tuple": [1, {"y": 2}]}}, [("x[1].y", "0", "2")]),
        ({"x": 1}, {"y": 1}, [("x", "1", None), ("y", None, "1")]),
    ],
)
def test_values_are_named_by_path(a: Any, b: Any, changes: list[tuple[str, str | None, str | None]]) -> None:
    assert [(change.path, change.a, change.b) for change in iter_value_changes(a, b)] == changes
