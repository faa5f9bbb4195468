"""Hugging Face's `model.safetensors.index.json`: which file holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from shardkeep.errors import Corrupt, UsageError
from shardkeep.format.strict_json import check_object, describe, parse_json_object
from shardkeep.format.value_atoms import is_plain_text

INDEX_NAME: Final = "model.safetensors.index.json"
_SUFFIX: Final = ".safetensors"


class HfIndex(Struct, frozen=True, gc=False):
    """A parsed index.

    Attributes:
        weight_map: tensor name -> file name, beside the index.
        total_size_bytes: of all tensors' data, headers not counted; None where the index does not say.
    """

    weight_map: dict[str, str]
    total_size_bytes: int | None


def encode_hf_index(weight_map: Mapping[str, str], total_size_bytes: int) -> bytes:
    """Return the text of an index, laid out and ordered as Hugging Face's own writers do.

    Raises:
        UsageError: a file name that no reader should follow, or a name that is not valid Unicode.
    """
    for tensor, file in weight_map.items():
        if not tensor or not is_plain_text(tensor):
            raise UsageError(f"index entry {tensor!r}: expected a name of valid Unicode")
        if (problem := _find_problem(file)) is not None:
            raise UsageError(f"index entry {tensor!r}: file name {file!r} {problem}")
    index = {"metadata": {"total_size": total_size_bytes}, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def parse_hf_index(data: bytes, where: str = INDEX_NAME) -> HfIndex:
    """Check and return an index written by anybody.

    Unknown entries beside `weight_map` and within `metadata` are passed over; tools add their own.

    Args:
        where: the index's path, for messages.

    Raises:
        Corrupt: malformed, or an entry names a file outside the folder or of another kind.
    """
    index = parse_json_object(data, where)
    if "weight_map" not in index:
        raise Corrupt(f"{where}: no 'weight_map'; found {', '.join(sorted(index))[:200] or 'nothing'}")
    weight_map = check_object(index["weight_map"], f"{where}: weight_map")
    for tensor, file in weight_map.items():
        if not tensor or not is_plain_text(tensor):
            raise Corrupt(f"{where}: tensor name {tensor[:200]!r}: expected valid Unicode", key=ascii(tensor))
        problem = _find_problem(file) if isinstance(file, str) else "is not a string"
        if problem is not None:
            raise Corrupt(f"{where}: tensor {tensor[:200]!r}: file name {describe(file)} {problem}", key=tensor)
    metadata = check_object(index.get("metadata", {}), f"{where}: metadata")
    total = metadata.get("total_size")
    if isinstance(total, float) and total.is_integer():
        total = int(total)  # some published indexes were written with a float sum
    if total is not None and (type(total) is not int or not 0 <= total < 1 << 63):
        raise Corrupt(f"{where}: metadata.total_size: expected a count of bytes, found {describe(total)}")
    return HfIndex(dict(weight_map), total)


def _find_problem(file: str) -> str | None:
    """Return why a file name must not be followed, or None."""
    if not file.endswith(_SUFFIX) or file == _SUFFIX:
        return f"does not end in {_SUFFIX}"
    if any(sign in file for sign in "/\\:") or ".." in file or file.startswith("."):
        return "leads out of the folder or hides in it"
    if not file.isprintable() or not is_plain_text(file) or len(file.encode()) > 255:
        return "is not a printable file name of at most 255 bytes"
    return None
