"""The safetensors header: laid out for our shards, read strictly from anybody's.

A shard is a plain safetensors file. Its header is a pure function of names, dtypes and shapes, so every byte of it,
and the place of every tensor, is known before any data moves. Offsets of tensors count from the start of the
data, as in the file itself; `ShardHeader.data_start` is where the data starts.

The layout is specified in `docs/format/shards.md`; safetensors itself at github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from shardkeep.errors import Corrupt, IncompatibleFormat, UsageError
from shardkeep.format.strict_json import check_object, describe, parse_json_object
from shardkeep.format.value_atoms import is_plain_text
from shardkeep.spec.dtypes import BY_TAG, get_dtype

MAX_HEADER_BYTES: Final = 100_000_000
"""The cap of the safetensors format on the length of the JSON text."""

ALIGNMENT_BYTES: Final = 4096
"""Data of our shards starts on a multiple of this: a page, and a sector of any disk."""

MAX_DIMS: Final = 64
DTYPES_KEY: Final = "shardkeep.dtypes"
"""The metadata entry that names the dtypes which safetensors does not know: JSON, tensor name -> dtype."""

_METADATA: Final = "__metadata__"
_FIELDS: Final = ("dtype", "shape", "data_offsets")
_INT64_MAX: Final = (1 << 63) - 1

# Tags that newer safetensors writers use for dtypes that we, for older readers, store as bytes.
_FOREIGN_TAGS: Final = {
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
# Elements of half a byte: the file counts them one by one, torch's dtype holds two.
_HALF_BYTE_TAG: Final = "F4"
_HALF_BYTE_DTYPE: Final = "float4_e2m1fn_x2"


class ShardTensor(Struct, frozen=True, gc=False):
    """One tensor of a shard: shardkeep's dtype name, the shape in that dtype, bytes `[begin, end)` of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class ShardHeader(Struct, frozen=True, gc=False):
    """Everything before the data of one shard.

    Attributes:
        tensors: in the order of their bytes.
        metadata: the file's own strings, `shardkeep.dtypes` included.
        data: all bytes before the data: 8 bytes of length, JSON, padding.
        size_bytes: of the whole file.
    """

    tensors: tuple[ShardTensor, ...]
    metadata: dict[str, str]
    data: bytes
    size_bytes: int

    @property
    def data_start(self) -> int:
        """Return the file offset at which `begin` 0 lies."""
        return len(self.data)


def plan_shard(
    entries: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> ShardHeader:
    """Lay tensors `(name, dtype, shape)` out in one file and return its header.

    Tensors lie back to back in descending element size, then by name, so each starts at a multiple of its
    element size; the result does not depend on the order of `entries`. Pure; nothing is written.

    Raises:
        UsageError: a repeated or impossible name, a negative size, reserved metadata, or a header over the cap.
        IncompatibleFormat: an unknown dtype.
    """
    _check_entries(entries)
    tensors: list[ShardTensor] = []
    stored: dict[str, Any] = {}
    untagged: dict[str, str] = {}
    at = 0
    for name, dtype_name, shape in sorted(entries, key=lambda entry: (-get_dtype(entry[1]).itemsize_bytes, entry[0])):
        dtype = get_dtype(dtype_name)
        end = at + math.prod(shape) * dtype.itemsize_bytes
        tensors.append(ShardTensor(name, dtype_name, tuple(shape), at, end))
        as_bytes = [] if dtype.tag else [dtype.itemsize_bytes]
        if not dtype.tag:
            untagged[name] = dtype_name
        stored[name] = {"dtype": dtype.tag or "U8", "shape": [*shape, *as_bytes], "data_offsets": [at, end]}
        at = end
    texts = _plan_metadata({} if metadata is None else metadata, untagged)
    text = _format_json({_METADATA: texts, **stored})
    padding = -(8 + len(text)) % ALIGNMENT_BYTES
    length = len(text) + padding
    if length > MAX_HEADER_BYTES:
        raise UsageError(
            f"a shard of {len(tensors)} tensors needs a header of {length} bytes; the cap is {MAX_HEADER_BYTES}",
            advice="spread the tensors over more shards (SHARDKEEP_SHARD_BYTES)",
        )
    data = length.to_bytes(8, "little") + text + b" " * padding
    return ShardHeader(tuple(tensors), texts, data, len(data) + at)


def header_length(first8: bytes, size_bytes: int) -> int:
    """Return the length N of the JSON text from a file's first 8 bytes; the data begins at 8 + N.

    Raises:
        Corrupt: the file of `size_bytes` cannot hold such a header, or N is over the format's cap.
    """
    if size_bytes < 8 or len(first8) < 8:
        raise Corrupt(f"safetensors file of {min(size_bytes, len(first8))} bytes: expected at least 8")
    length = int.from_bytes(first8[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise Corrupt(
            f"safetensors header of {length} bytes: the format allows {MAX_HEADER_BYTES}; this is no safetensors "
            "file, or its first bytes are damaged"
        )
    if length < 2:
        raise Corrupt(f"safetensors header of {length} bytes: expected at least an empty JSON object")
    if 8 + length > size_bytes:
        raise Corrupt(
            f"safetensors file of {size_bytes} bytes: its header alone needs {8 + length}; it was cut short"
        )
    return length


def parse_shard_header(data: bytes, size_bytes: int) -> ShardHeader:
    """Check and return the header of any safetensors file.

    Args:
        data: the first bytes of the file, at least all of the header.
        size_bytes: of the whole file; the tensors must cover it exactly.

    Raises:
        Corrupt: a defect; names the tensor where it is one's.
        IncompatibleFormat: a dtype that this version does not know, or whose elements no torch dtype holds.
    """
    length = header_length(data, size_bytes)
    if len(data) < 8 + length:
        raise Corrupt(f"safetensors header: expected {8 + length} bytes, found {len(data)}")
    if data[8:9] != b"{":
        raise Corrupt(f"safetensors header: expected the JSON text to begin with '{{', found {data[8:9]!r}")
    parsed = parse_json_object(data[8 : 8 + length], "safetensors header")
    metadata = _parse_metadata(parsed.pop(_METADATA, {}))
    real_dtypes = _parse_dtypes(metadata.get(DTYPES_KEY))
    tensors = [_parse_tensor(name, entry, real_dtypes.pop(name, None)) for name, entry in parsed.items()]
    if real_dtypes:
        name = min(real_dtypes)
        raise Corrupt(f"safetensors metadata {DTYPES_KEY!r} names {name[:200]!r}, which is not in the file", key=name)
    # Stable: empty tensors at one offset stay in the header's order.
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_cover(tensors, size_bytes - 8 - length)
    return ShardHeader(tuple(tensors), metadata, data[: 8 + length], size_bytes)


def _check_entries(entries: Sequence[tuple[str, str, Sequence[int]]]) -> None:
    names: set[str] = set()
    for name, dtype, shape in entries:
        if not name or name == _METADATA or not is_plain_text(name):
            raise UsageError(f"tensor name {name!r}: expected non-empty valid Unicode other than {_METADATA!r}")
        if name in names:
            raise UsageError(f"tensor {name!r} stands twice in one shard")
        names.add(name)
        if any(size < 0 for size in shape):
            raise UsageError(f"tensor {name!r}: shape {tuple(shape)[:8]} has a negative size")
        # Stored as bytes, a dtype without a tag takes one dimension more.
        if len(shape) + (get_dtype(dtype).tag is None) > MAX_DIMS:
            raise UsageError(f"tensor {name!r} of {len(shape)} dimensions: a shard holds up to {MAX_DIMS}")


def _plan_metadata(metadata: Mapping[str, str], untagged: dict[str, str]) -> dict[str, str]:
    if metadata.get("format", "pt") != "pt" or DTYPES_KEY in metadata:
        raise UsageError(f"shard metadata {dict(metadata)}: 'format' is always 'pt', and {DTYPES_KEY!r} is derived")
    if not all(type(text) is str and is_plain_text(text) for item in metadata.items() for text in item):
        raise UsageError("shard metadata: expected strings of valid Unicode, names and values alike")
    texts = {**metadata, "format": "pt"}
    if untagged:
        texts[DTYPES_KEY] = _format_json(dict(sorted(untagged.items()))).decode()
    return dict(sorted(texts.items()))


def _format_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _parse_metadata(value: Any) -> dict[str, str]:
    for name, text in check_object(value, f"safetensors {_METADATA}").items():
        if not isinstance(text, str):
            raise Corrupt(f"safetensors {_METADATA} {name[:200]!r}: expected a string, found {describe(text)}")
        if not (is_plain_text(name) and is_plain_text(text)):
            raise Corrupt(f"safetensors {_METADATA} {name[:200]!r}: expected valid Unicode")
    return dict(value)


def _parse_dtypes(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    where = f"safetensors metadata {DTYPES_KEY!r}"
    names = parse_json_object(text.encode(), where)
    for name, dtype in names.items():
        if not isinstance(dtype, str):
            raise Corrupt(f"{where}: tensor {name[:200]!r}: expected a dtype, found {describe(dtype)}", key=name)
        if get_dtype(dtype).tag:
            raise Corrupt(f"{where}: tensor {name[:200]!r}: safetensors has a tag for {dtype}", key=name)
    return names


def _parse_tensor(name: str, entry: Any, real_dtype: str | None) -> ShardTensor:
    where = f"tensor {name[:200]!r}"
    if not name or not is_plain_text(name):
        raise Corrupt(f"{where}: expected a name of valid Unicode", key=ascii(name))
    fields = check_object(entry, where, key=name)
    if set(fields) != set(_FIELDS):
        found = ", ".join(sorted(fields))[:200] or "none"
        raise Corrupt(f"{where}: expected the fields {', '.join(_FIELDS)}, found {found}", key=name)
    tag = fields["dtype"]
    if not isinstance(tag, str):
        raise Corrupt(f"{where}: expected a dtype, found {describe(tag)}", key=name)
    shape = _parse_ints(fields["shape"], f"{where}: shape", name)
    if len(shape) > MAX_DIMS:
        raise Corrupt(f"{where}: {len(shape)} dimensions; {MAX_DIMS} are the limit", key=name)
    offsets = _parse_ints(fields["data_offsets"], f"{where}: data_offsets", name)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Corrupt(f"{where}: expected data_offsets [begin, end], found {list(offsets[:4])}", key=name)
    begin, end = offsets
    bits = 4 if tag == _HALF_BYTE_TAG else 8 * _itemsize_bytes(tag, name)
    # Empty dimensions do not hide others that no strided tensor could have.
    if math.prod(size for size in shape if size) * bits > 8 * _INT64_MAX:
        raise Corrupt(f"{where}: shape {list(shape)} overflows 64 bits", key=name)
    wanted_bits = math.prod(shape) * bits
    if wanted_bits != 8 * (end - begin):
        raise Corrupt(
            f"{where}: {tag} of shape {list(shape)} needs {wanted_bits / 8:g} bytes, "
            f"data_offsets [{begin}, {end}] hold {end - begin}",
            key=name,
        )
    if tag == _HALF_BYTE_TAG:
        return ShardTensor(name, _HALF_BYTE_DTYPE, _pair_up(shape, name), begin, end)
    if real_dtype is None:
        return ShardTensor(name, _FOREIGN_TAGS.get(tag) or BY_TAG[tag].name, shape, begin, end)
    itemsize_bytes = get_dtype(real_dtype).itemsize_bytes
    if tag != "U8" or shape[-1:] != (itemsize_bytes,):
        raise Corrupt(
            f"{where}: {DTYPES_KEY!r} says {real_dtype}, so expected U8 with a last dimension of {itemsize_bytes}, "
            f"found {tag} of shape {list(shape)}",
            key=name,
        )
    return ShardTensor(name, real_dtype, shape[:-1], begin, end)


def _parse_ints(value: Any, where: str, name: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise Corrupt(f"{where}: expected a list, found {describe(value)}", key=name)
    for number in value:
        if type(number) is not int or not 0 <= number <= _INT64_MAX:
            raise Corrupt(f"{where}: expected integers from 0 to 2^63-1, found {describe(number)}", key=name)
    return tuple(value)


def _itemsize_bytes(tag: str, name: str) -> int:
    if tag in _FOREIGN_TAGS:
        return get_dtype(_FOREIGN_TAGS[tag]).itemsize_bytes
    if tag in BY_TAG:
        return BY_TAG[tag].itemsize_bytes
    if tag in ("F6_E2M3", "F6_E3M2"):
        raise IncompatibleFormat(
            f"tensor {name[:200]!r}: {tag} has elements of 6 bits, which no torch dtype holds",
            key=name,
            advice="convert the file to another dtype with the tool that wrote it",
        )
    raise IncompatibleFormat(
        f"tensor {name[:200]!r}: unknown safetensors dtype {tag[:40]!r}",
        key=name,
        advice="upgrade shardkeep: the file was written for a newer safetensors",
    )


def _pair_up(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return the shape in torch's dtype of two F4 elements per item."""
    if not shape or shape[-1] % 2:
        raise IncompatibleFormat(
            f"tensor {name[:200]!r}: F4 of shape {list(shape)} has rows of half bytes, which no torch dtype holds",
            key=name,
            advice="convert the file to another dtype with the tool that wrote it",
        )
    return (*shape[:-1], shape[-1] // 2)


def _check_cover(tensors: Sequence[ShardTensor], data_bytes: int) -> None:
    """Require that sorted tensors lie back to back over all of the data."""
    at = 0
    before = "the header"
    for tensor in tensors:
        if tensor.begin < at:
            raise Corrupt(f"tensor {tensor.name[:200]!r} overlaps {before}: it begins at {tensor.begin}, before {at}")
        if tensor.end > data_bytes:
            raise Corrupt(
                f"tensor {tensor.name[:200]!r} ends at byte {tensor.end} of the data, and the file has {data_bytes}: "
                "it was cut short",
                key=tensor.name,
            )
        if tensor.begin > at:
            raise Corrupt(
                f"hole of {tensor.begin - at} bytes between {before} and tensor {tensor.name[:200]!r}",
                key=tensor.name,
            )
        at, before = tensor.end, f"tensor {tensor.name[:200]!r}"
    if at != data_bytes:
        raise Corrupt(f"{data_bytes - at} bytes after {before} belong to no tensor")
