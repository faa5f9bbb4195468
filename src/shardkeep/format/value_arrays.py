"""NumPy scalars and arrays as JSON. NumPy is imported only when a value of it is at hand.

Plain element types only: bool, integers, floats up to 64 bits, complex up to 128, dates, fixed-width bytes and text,
in either byte order. Structured, object and extension types, `longdouble` (its bytes differ between machines) and
subclasses of `ndarray` are refused.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from shardkeep.format.value_atoms import (
    MAX_PLAIN_INT,
    decode_base64,
    decode_str,
    encode_base64,
    encode_str,
    is_plain_text,
)
from shardkeep.types import Json

MAX_DIMS: Final = 64
_DTYPE: Final = re.compile(
    r"[<>](?:[iu][248]|f[248]|c(?:8|16)|U[1-9][0-9]{0,7}"
    r"|[Mm]8(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
    r"|\|(?:[biu]1|S[1-9][0-9]{0,8})"
)


def is_numpy(cls: type) -> bool:
    """Say whether a class is one of NumPy's own."""
    return cls.__module__.partition(".")[0] == "numpy"


def find_numpy_json(value: Any) -> Json:
    """Return the JSON of an object of one of NumPy's classes, or None when it cannot be stored exactly."""
    import numpy

    if type(value) is numpy.ndarray:
        return _encode_array(value)
    if isinstance(value, numpy.str_):
        # NumPy's own conversions to str drop trailing NULs; str's does not.
        return {"$npscalar": ["U", encode_str(str.__str__(value))]}
    if isinstance(value, numpy.bytes_):
        return {"$npscalar": ["S", encode_base64(bytes(value))]}
    if isinstance(value, numpy.generic):
        little = value.dtype.newbyteorder("<")
        if not _is_plain(value.dtype):
            return None
        return {"$npscalar": [little.str, encode_base64(numpy.array(value, dtype=little).tobytes())]}
    return None


def _is_plain(dtype: Any) -> bool:
    import numpy

    # An extension type may print as a plain one; it is not equal to it.
    text = dtype.str
    return bool(_DTYPE.fullmatch(text)) and numpy.dtype(text) == dtype and dtype.metadata is None


def _encode_array(array: Any) -> Json:
    if not _is_plain(array.dtype) or array.ndim > MAX_DIMS:
        return None
    # Column-major arrays stay so: reductions over them add in another order, and so round differently.
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return {"$ndarray": [array.dtype.str, order, list(array.shape), encode_base64(array.tobytes(order=order))]}


def decode_scalar(body: Any) -> Any:
    """Return the NumPy scalar of a `$npscalar` tag. Raises ValueError with the reason."""
    import numpy

    if type(body) is not list or len(body) != 2 or type(body[0]) is not str:
        raise ValueError("expected [dtype, content]")
    kind, content = body
    if kind == "S":
        return numpy.bytes_(decode_base64(content))
    if kind == "U":
        if type(content) is dict and list(content) == ["$str"]:
            return numpy.str_(decode_str(content["$str"]))
        if type(content) is not str or not is_plain_text(content):
            raise ValueError("expected a string")
        return numpy.str_(content)
    if kind.startswith(">") or kind[1:2] in ("S", "U"):
        raise ValueError(f"expected the dtype of a scalar, found {kind[:40]!r}")
    return _build(kind, "C", (), decode_base64(content))[()]


def decode_array(body: Any) -> Any:
    """Return the array of an `$ndarray` tag, writable, in its own byte and memory order.

    Raises ValueError with the reason.
    """
    if type(body) is not list or len(body) != 4:
        raise ValueError("expected [dtype, order, shape, content]")
    dtype, order, shape, content = body
    if type(shape) is not list or len(shape) > MAX_DIMS:
        raise ValueError(f"expected a shape of at most {MAX_DIMS} dimensions")
    sizes = tuple(size for size in shape if type(size) is int and 0 <= size <= MAX_PLAIN_INT)
    if len(sizes) != len(shape):
        raise ValueError("expected a shape of integers from 0 to 2^53-1")
    return _build(dtype, order, sizes, decode_base64(content))


def _build(dtype_text: Any, order: Any, shape: tuple[int, ...], data: bytes) -> Any:
    import numpy

    if type(dtype_text) is not str or not _DTYPE.fullmatch(dtype_text):
        raise ValueError(f"expected a plain NumPy dtype, found {str(dtype_text)[:40]!r}")
    dtype = numpy.dtype(dtype_text)
    if dtype.str != dtype_text:
        raise ValueError(f"expected the dtype {dtype.str!r}, found {dtype_text!r}")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != len(data):
        raise ValueError(
            f"dtype {dtype_text} and shape {list(shape)[:8]} need {hex(wanted)[:40]} bytes, found {len(data)}"
        )
    if dtype.kind == "U" and data and numpy.frombuffer(data, f"{dtype_text[0]}u4").max() > 0x10FFFF:
        raise ValueError("expected code points up to 0x10FFFF")
    array = numpy.ndarray(shape, dtype, buffer=bytearray(data), order="F" if order == "F" else "C")
    if order != ("F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"):
        raise ValueError(f"memory order {str(order)[:8]!r} does not fit the shape {list(shape)[:8]}")
    return array.copy(order=order)  # owns its memory, as an array that NumPy made itself
