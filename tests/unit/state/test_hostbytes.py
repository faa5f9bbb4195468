"""Bytes in and out of live tensors: any strides, any dtype, any cut, bounded memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import IncompatibleFormat, UnsupportedState
from shardkeep.spec.dtypes import DTYPES
from shardkeep.state.hostbytes import TensorBytes, check_storable, dtype_name, iter_boxes, torch_dtype
from tests.support.memory import watch_peak
from tests.support.ranks import run_ranks

ALL_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
PLAIN_DTYPES = [dtype for dtype in ALL_DTYPES if dtype not in QUANTIZED]


def make(
    dtype: torch.dtype, content: bytes, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    storage = torch.UntypedStorage(len(content))
    torch.empty(0, dtype=torch.uint8).set_(storage).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)


def reference_bytes(tensor: torch.Tensor) -> bytes:
    """The row-major bytes by plain indexing of the storage: nothing of the code under test."""
    itemsize, content = tensor.element_size(), bytes(tensor.untyped_storage())
    out = bytearray()
    for index in itertools.product(*(range(n) for n in tensor.shape)):
        at = tensor.storage_offset() + sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        out += content[at * itemsize : (at + 1) * itemsize]
    return bytes(out)


def read(tensor: torch.Tensor, cuts: tuple[int, ...] = ()) -> bytes:
    data = TensorBytes(tensor)
    out = bytearray(b"\xaa" * data.nbytes)
    edges = sorted({0, *(cut for cut in cuts if cut < data.nbytes), data.nbytes})
    for start, stop in reversed(list(itertools.pairwise(edges))):
        data.copy_out(start, memoryview(out)[start:stop])
    return bytes(out)


def write(tensor: torch.Tensor, content: bytes, cuts: tuple[int, ...] = ()) -> None:
    data = TensorBytes(tensor)
    edges = sorted({0, *(cut for cut in cuts if cut < data.nbytes), data.nbytes})
    for start, stop in itertools.pairwise(edges):
        data.copy_in(start, memoryview(content)[start:stop])


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([d for d in PLAIN_DTYPES if d is not torch.complex32]))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    strides = tuple(draw(st.integers(0, 12)) for _ in shape)
    offset = draw(st.integers(0, 3))
    count = offset + sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True)) + 1
    content = draw(st.randoms(use_true_random=False)).randbytes(count * dtype.itemsize)
    return make(dtype, content, shape, strides, offset)


@settings(max_examples=200)
@given(tensor=strided(), cuts=st.lists(st.integers(0, 200), max_size=5).map(tuple))
def test_any_strides_read_and_written_in_any_cuts(tensor: torch.Tensor, cuts: tuple[int, ...]) -> None:
    expected = reference_bytes(tensor)
    assert read(tensor, cuts) == expected
    blank = bytes(len(bytes(tensor.untyped_storage())))
    other = make(tensor.dtype, blank, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    write(other, expected, cuts)
    assert reference_bytes(other) == expected


@given(
    shape=st.lists(st.integers(1, 6), max_size=4).map(tuple),
    limit=st.integers(1, 20),
    cut=st.tuples(st.integers(0, 1296), st.integers(0, 1296)),
)
def test_boxes_walk_a_range_in_order_and_stay_small(shape: tuple[int, ...], limit: int, cut: tuple[int, int]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    first, last = sorted(min(c, tensor.numel()) for c in cut)
    boxes = list(iter_boxes(tensor, first, last, limit))
    assert all(0 < box.numel() <= limit for box in boxes)
    assert [int(x) for box in boxes for x in box.flatten()] == list(range(first, last))


def test_boxes_are_few_for_a_large_tensor() -> None:
    tensor = torch.empty(0).set_(torch.UntypedStorage(4), 0, (1000, 1000), (0, 0))
    assert len(list(iter_boxes(tensor, 3, 999_997, 10_000))) <= 105


def test_layouts_of_fmt_3() -> None:
    """safetensors/safetensors#469: t(), permute, expand, stride 0, channels-last."""
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    for tensor in (
        base.flatten(1).t(),
        base.permute(3, 1, 0, 2),
        base[:1].expand(6, 3, 4, 5),
        torch.tensor(7.5).expand(3, 4),
        base.to(memory_format=torch.channels_last),
        base[:, ::2, 1:, ::3],
        base[..., 2],
    ):
        assert read(tensor, (1, 7, 50)) == tensor.contiguous().numpy().tobytes()
        target = torch.empty_like(tensor)
        write(target, read(tensor), (3, 6, 61))
        assert torch.equal(target, tensor)


def test_writing_an_expanded_tensor_writes_its_base() -> None:
    base = torch.zeros(3, 1)
    write(base.expand(3, 4), torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 4).contiguous().numpy().tobytes(), (5, 17))
    assert base.flatten().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3, 4)])
def test_tensors_without_elements(shape: tuple[int, ...]) -> None:
    """run-ai/runai-model-streamer#43."""
    for dtype in (torch.float32, torch.bool, torch.complex128):
        tensor = torch.empty(shape, dtype=dtype)
        assert TensorBytes(tensor).nbytes == 0
        assert read(tensor) == b""
        TensorBytes(tensor).copy_out(0, memoryview(bytearray()))
        TensorBytes(tensor).copy_in(0, memoryview(b""))


def test_lazy_conjugate_and_negative_views_give_their_elements() -> None:
    base = torch.randn(5, 7, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    for view in (base.conj(), base.conj().imag, base.t().conj(), base.imag.conj(), base[:, :1].conj().expand(5, 7)):
        resolved = view.resolve_conj().resolve_neg().contiguous()
        assert read(view, (3, 9)) == resolved.numpy().tobytes()
    target = torch.zeros(5, 7, dtype=torch.complex64)
    write(target.conj(), base.numpy().tobytes(), (3, 12, 100))
    assert torch.equal(target, base.conj().resolve_conj())
    assert base.conj().imag.is_neg()


def test_odd_bits_survive() -> None:
    """huggingface/huggingface_hub#4901: NaN payloads and -0.0."""
    content = bytes.fromhex("01 00 80 7f 00 00 00 80 ff ff ff ff")
    tensor = torch.frombuffer(bytearray(content), dtype=torch.float32)
    assert read(tensor) == content
    target = torch.zeros(3, 2)[:, 0]
    write(target, content)
    assert read(target) == content


def test_parameters_inference_tensors_and_graphs() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    loss = (parameter * parameter).sum()
    before = parameter._version
    read(parameter.t())
    assert parameter._version == before
    loss.backward()
    with torch.inference_mode():
        frozen = torch.ones(4, 3, dtype=torch.complex64)
    for view in (frozen, frozen.t(), frozen.conj()):
        write(view, bytes(96))
        assert read(view) == bytes(96)
    write(parameter, bytes(48))
    assert parameter.detach().count_nonzero() == 0
    assert parameter.requires_grad


def test_misaligned_host_memory() -> None:
    tensor = torch.arange(40, dtype=torch.float64).reshape(8, 5).t()
    space = bytearray(8 * 40 + 3)
    TensorBytes(tensor).copy_out(0, memoryview(space)[3:])
    assert bytes(space[3:]) == tensor.contiguous().numpy().tobytes()
    target = torch.zeros(8, 5, dtype=torch.float64).t()
    TensorBytes(target).copy_in(0, memoryview(space)[3:])
    assert torch.equal(target, tensor)


def test_ranges_outside_are_refused() -> None:
    for start, length in ((-1, 1), (0, 17), (16, 1)):
        with pytest.raises(ValueError, match="of a tensor of 16 bytes"):
            TensorBytes(torch.zeros(4)).copy_out(start, memoryview(bytearray(length)))


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_of_this_torch(dtype: torch.dtype) -> None:
    """huggingface/huggingface_hub#4901."""
    name = dtype_name(dtype)
    assert torch_dtype(name) is dtype
    assert DTYPES[name].itemsize_bytes == dtype.itemsize
    content = bytes(range(6 * dtype.itemsize))
    for shape, strides in (((2, 3), (3, 1)), ((2, 3), (1, 2)), ((), ())):
        tensor = make(dtype, content, shape, strides, 0)
        check_storable("model/x", tensor)
        assert read(tensor, (1, 5)) == reference_bytes(tensor)


@pytest.mark.parametrize("dtype", sorted(QUANTIZED, key=str), ids=str)
def test_quantized_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedState, match=str(dtype).removeprefix("torch.")):
        dtype_name(dtype)


def test_unknown_names_are_refused() -> None:
    for name in ("nn", "float33", "Tensor"):
        with pytest.raises(IncompatibleFormat, match=name):
            torch_dtype(name)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layouts_without_strided_bytes_are_refused_by_name() -> None:
    for tensor in (
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ):
        with pytest.raises(UnsupportedState, match="model/layers"):
            check_storable("model/layers.0.x", tensor)


def test_meta_tensors_pass_the_check_and_refuse_bytes() -> None:
    tensor = torch.empty(3, device="meta")
    check_storable("x", tensor)
    with pytest.raises(UnsupportedState, match="meta"):
        TensorBytes(tensor).copy_in(0, memoryview(bytes(12)))


def measure_peak(rank: int, world_size: int) -> dict[str, int]:
    """Return by how much the peak of resident memory grows while 64 MiB go out and in, in bytes."""
    grown = {}
    space = bytearray(b"\x01" * (64 << 20))
    for name in ("contiguous", "transposed", "channels_last", "conj", "rows"):
        live = torch.ones(4096, 4096) if name != "conj" else torch.ones(4096, 2048, dtype=torch.complex64)
        if name == "transposed":
            live = live.t()
        elif name == "channels_last":
            live = live.view(16, 64, 128, 128).to(memory_format=torch.channels_last)
        elif name == "conj":
            live = live.conj()
        elif name == "rows":
            live = live.view(2, -1).t()
        data = TensorBytes(live)
        small = memoryview(space)
        data.copy_out(0, small[: 1 << 20])
        with watch_peak() as peak:
            data.copy_out(0, small)
            data.copy_in(3, small.toreadonly()[3:])
        grown[name] = peak.extra_bytes
    return grown


def test_memory_stays_bounded() -> None:
    """safetensors/safetensors#458."""
    (grown,) = run_ranks(measure_peak, 1)
    assert max(grown.values()) < 16 << 20, grown


def test_memory_in_place_is_the_tensors_own_and_keeps_it() -> None:
    tensor = torch.arange(5000, dtype=torch.float32)[1000:]
    memory = TensorBytes(tensor).find_memory(8, 12_008)
    assert memory is not None
    assert memory == bytes(tensor.untyped_storage())[4008:16_008]
    memory[:4] = torch.tensor([-1.0]).numpy().tobytes()
    assert tensor[:4].tolist() == [1000.0, 1001.0, -1.0, 1003.0]
    expected = bytes(memory)
    del tensor
    others = [torch.full((5000,), 7.0) for _ in range(8)]  # would take the memory, were it free
    assert bytes(memory) == expected
    assert others[0][0] == 7.0


def test_memory_in_place_is_only_of_plain_tensors_and_within_them() -> None:
    tensor = torch.zeros(4, 4)
    found = TensorBytes(tensor).find_memory(64, 64)
    assert found is not None
    assert found.nbytes == 0
    assert TensorBytes(tensor).find_memory(0, 65) is None
    assert TensorBytes(tensor.t()[1:]).find_memory(0, 4) is None
    assert TensorBytes(torch.zeros(4, dtype=torch.complex64).conj()).find_memory(0, 4) is None
    assert TensorBytes(torch.zeros(4, device="meta")).find_memory(0, 4) is None
