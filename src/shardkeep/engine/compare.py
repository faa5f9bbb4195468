"""By how much two tensors differ: bits first, then numbers, a stretch of elements at a time.

Elements are compared as bits, so that nan equals the same nan and -0 differs from 0. What the difference amounts to
is computed in float64, over the pairs that are both finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy

from shardkeep.spec.dtypes import get_dtype

Array = numpy.ndarray[Any, numpy.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How two tensors of one shape differ.

    Attributes:
        element_count, differing_count: elements, and those whose bits differ (or, between two dtypes, whose values
            do).
        max_abs, mean_abs, relative_l2: of the differences over finite pairs: the largest, their mean over all
            elements, and their root of squares over that of the first tensor (inf when that is 0). None for dtypes
            that are no numbers here.
        nonfinite_count: differing elements that are inf or nan on a side, and so are in no number above.
    """

    element_count: int
    differing_count: int
    max_abs: float | None
    mean_abs: float | None
    relative_l2: float | None
    nonfinite_count: int


_STRETCH: Final = 1 << 20
"""Elements compared at once."""


class Comparison:
    """Adds up the difference of two tensors over stretches of their row-major bytes."""

    def __init__(self, dtype_a: str, dtype_b: str) -> None:
        self._decode_a, self._decode_b = find_decoder(dtype_a), find_decoder(dtype_b)
        self._same = dtype_a == dtype_b
        self._size_a = get_dtype(dtype_a).itemsize_bytes
        self._size_b = get_dtype(dtype_b).itemsize_bytes
        self._integers = self._same and dtype_a in _INTEGERS
        self._dtype = dtype_a
        self._elements = self._differing = self._nonfinite = 0
        self._max = self._sum = self._squares = self._reference = 0.0

    def add(self, a: memoryview, b: memoryview) -> None:
        """Take the next stretch: as many elements on both sides."""
        count = len(a) // self._size_a
        for start in range(0, count, _STRETCH):
            stop = min(start + _STRETCH, count)
            self._add(a[start * self._size_a : stop * self._size_a], b[start * self._size_b : stop * self._size_b])

    def _add(self, a: memoryview, b: memoryview) -> None:
        count = len(a) // self._size_a
        self._elements += count
        if self._same and a == b:
            self._add_reference(a)
            return
        differs = self._find_differing(a, b) if self._same else None
        if self._decode_a is None or self._decode_b is None:
            self._differing += count if differs is None else int(differs.sum())
            return
        with numpy.errstate(all="ignore"):
            left, right = self._decode_a(a), self._decode_b(b)
            if differs is None:
                differs = ~((left == right) | (numpy.isnan(left) & numpy.isnan(right)))
            finite = numpy.isfinite(left) & numpy.isfinite(right)
            apart = self._subtract(a, b) if self._integers else numpy.abs(left - right)
            apart = numpy.where(finite, apart, 0.0)
            self._max = max(self._max, float(apart.max(initial=0.0)))
            self._sum += float(apart.sum())
            self._squares += float(numpy.square(apart).sum())
            self._reference += float(numpy.square(numpy.abs(numpy.where(finite, left, 0.0))).sum())
        self._differing += int(differs.sum())
        self._nonfinite += int((differs & ~finite).sum())

    def finish(self) -> Difference:
        """Return the difference over all that was added."""
        numeric = self._decode_a is not None and self._decode_b is not None
        base = math.sqrt(self._reference)
        root = math.sqrt(self._squares)
        relative = root / base if base else (math.inf if root else 0.0)
        return Difference(
            element_count=self._elements,
            differing_count=self._differing,
            max_abs=self._max if numeric else None,
            mean_abs=self._sum / max(self._elements, 1) if numeric else None,
            relative_l2=relative if numeric else None,
            nonfinite_count=self._nonfinite,
        )

    def _add_reference(self, a: memoryview) -> None:
        if self._decode_a is not None:
            with numpy.errstate(all="ignore"):
                left = numpy.abs(self._decode_a(a))
                self._reference += float(numpy.square(numpy.where(numpy.isfinite(left), left, 0.0)).sum())

    def _find_differing(self, a: memoryview, b: memoryview) -> Array:
        left, right = (numpy.frombuffer(m, dtype=numpy.uint8).reshape(-1, self._size_a) for m in (a, b))
        differs: Array = (left != right).any(axis=1)
        return differs

    def _subtract(self, a: memoryview, b: memoryview) -> Array:
        """Return |a - b| of integers without loss: float64 holds no 64-bit integer exactly."""
        left, right = (numpy.frombuffer(m, dtype=_INTEGERS[self._dtype]).astype(numpy.int64) for m in (a, b))
        if self._dtype == "uint64":
            left, right = (numpy.frombuffer(m, dtype="<u8") for m in (a, b))
        apart = numpy.where(left > right, left.view("u8") - right.view("u8"), right.view("u8") - left.view("u8"))
        exact: Array = apart.astype(numpy.float64)
        return exact


_INTEGERS: Final = {
    "int8": "<i1",
    "uint8": "<u1",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "uint64": "<u8",
}
_FLOATS: Final = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
_COMPLEX: Final = {"complex64": "<c8", "complex128": "<c16"}
# name: exponent bits, mantissa bits, bias, and what the topmost codes are (OCP 8-bit floating point, revision 1.0;
# the `fnuz` forms as in "8-bit Numerical Formats for Deep Neural Networks", Noune et al., 2022).
_FLOAT8: Final = {
    "float8_e4m3fn": (4, 3, 7, "nan"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}


def find_decoder(dtype: str) -> Callable[[memoryview], Array] | None:
    """Return what turns a dtype's bytes into float64 (or complex128), or None where it has no numbers here."""
    if dtype == "bool":
        return lambda data: (numpy.frombuffer(data, dtype=numpy.uint8) != 0).astype(numpy.float64)
    if dtype in _INTEGERS or dtype in _FLOATS:
        return lambda data: numpy.frombuffer(data, dtype=(_INTEGERS | _FLOATS)[dtype]).astype(numpy.float64)
    if dtype in _COMPLEX:
        return lambda data: numpy.frombuffer(data, dtype=_COMPLEX[dtype]).astype(numpy.complex128)
    if dtype == "bfloat16":
        return _decode_bfloat16
    if dtype in _FLOAT8 or dtype == "float8_e8m0fnu":
        return lambda data: numpy.array(float8_values(dtype))[numpy.frombuffer(data, dtype=numpy.uint8)]
    return None


def _decode_bfloat16(data: memoryview) -> Array:
    bits = numpy.frombuffer(data, dtype="<u2").astype(numpy.uint32) << numpy.uint32(16)
    return bits.view(numpy.float32).astype(numpy.float64)


@lru_cache(maxsize=8)
def float8_values(dtype: str) -> tuple[float, ...]:
    """Return the value of each of the 256 codes of an 8-bit float type."""
    if dtype == "float8_e8m0fnu":
        return tuple(math.nan if code == 255 else math.ldexp(1.0, code - 127) for code in range(256))
    exponent_bits, mantissa_bits, bias, top = _FLOAT8[dtype]
    return tuple(_decode_float8(code, exponent_bits, mantissa_bits, bias, top) for code in range(256))


def _decode_float8(code: int, exponent_bits: int, mantissa_bits: int, bias: int, top: str) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if top == "fnuz" and code == 0x80:
        return math.nan
    if exponent == (1 << exponent_bits) - 1:
        if top == "ieee":
            return math.nan if mantissa else sign * math.inf
        if top == "nan" and mantissa == (1 << mantissa_bits) - 1:
            return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
