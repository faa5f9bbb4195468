"""Small shared value types with no home of their own, and how a size is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""A value that the JSON text of a record can hold."""


@dataclass(frozen=True, slots=True)
class TorchValue:
    """A torch object that is not a tensor, named without importing torch.

    `text` is `float32` for a dtype, `cuda:0` for a device, `2,3` for a Size, `channels_last` for a memory
    format. `state` makes these of live objects and live objects of these.
    """

    kind: Literal["dtype", "device", "size", "memory_format"]
    text: str


_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_bytes(count: int) -> str:
    """Return a size for a person: `1.5 GiB`."""
    size = float(count)
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
