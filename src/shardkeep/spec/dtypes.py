"""The one dtype table: shardkeep's names (torch's, without `torch.`), item sizes, safetensors tags.

A dtype that safetensors does not know is stored as `U8` with one more dimension, the item's bytes, and its
real name stands in the part record and in the file's `__metadata__`.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from shardkeep.errors import IncompatibleFormat


class DType(Struct, frozen=True, gc=False):
    """One element type. `tag` is its safetensors name, or None where safetensors has none."""

    name: str
    itemsize_bytes: int
    tag: str | None


_TABLE: Final = (
    ("bool", 1, "BOOL"),
    ("uint8", 1, "U8"),
    ("int8", 1, "I8"),
    ("int16", 2, "I16"),
    ("uint16", 2, "U16"),
    ("int32", 4, "I32"),
    ("uint32", 4, "U32"),
    ("int64", 8, "I64"),
    ("uint64", 8, "U64"),
    ("float16", 2, "F16"),
    ("bfloat16", 2, "BF16"),
    ("float32", 4, "F32"),
    ("float64", 8, "F64"),
    ("float8_e4m3fn", 1, "F8_E4M3"),
    ("float8_e5m2", 1, "F8_E5M2"),
    ("complex64", 8, "C64"),
    # Below: known to torch only (or only to some safetensors readers), so stored as bytes with a tag.
    ("float8_e4m3fnuz", 1, None),
    ("float8_e5m2fnuz", 1, None),
    ("float8_e8m0fnu", 1, None),
    ("float4_e2m1fn_x2", 1, None),
    ("complex32", 4, None),
    ("complex128", 16, None),
    *((f"int{bits}", 1, None) for bits in range(1, 8)),
    *((f"uint{bits}", 1, None) for bits in range(1, 8)),
    *((f"bits{name}", size, None) for name, size in (("1x8", 1), ("2x4", 1), ("4x2", 1), ("8", 1), ("16", 2))),
)

DTYPES: Final = {name: DType(name, size, tag) for name, size, tag in _TABLE}
BY_TAG: Final = {dtype.tag: dtype for dtype in DTYPES.values() if dtype.tag}


def get_dtype(name: str) -> DType:
    """Return the dtype called `name`.

    Raises:
        IncompatibleFormat: this version does not know it.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise IncompatibleFormat(
            f"unknown dtype {name!r}; this version knows {', '.join(sorted(DTYPES))}",
            advice="upgrade shardkeep: the checkpoint was written by a version that knows this dtype",
        ) from None
