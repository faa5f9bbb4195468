"""Python state as JSON, exactly, without pickle.

`encode_value` takes plain Python values, NumPy scalars and arrays, `TorchValue`, `TensorRef` and objects of
registered types apart into JSON; `decode_value` rebuilds them: same types, same bits, same order. What cannot be
rebuilt exactly is refused when it is saved, with its place in the state; nothing is flattened, rounded or left out.
Equal states give equal JSON. Decoding runs no code but that of registered enums, and builds nothing larger than
its input by more than a constant factor.

The encoding is specified in `docs/format/values.md`. This package writes JSON text elsewhere; here are only its
values. A list or dict that is reached on two ways is stored twice and comes back as two objects.
"""

from __future__ import annotations

from typing import Any

from shardkeep.format.value_decoder import Decoder
from shardkeep.format.value_encoder import Encoder
from shardkeep.format.value_registry import DEFAULT_REGISTRY, TypeRegistry, register_type
from shardkeep.types import Json

__all__ = ["DEFAULT_REGISTRY", "TypeRegistry", "decode_value", "encode_value", "register_type"]


def encode_value(value: Any, path: str, *, registry: TypeRegistry = DEFAULT_REGISTRY) -> Json:
    """Return the one JSON value that stands for `value`.

    Args:
        value: left as it is; the result shares no mutable object with it.
        path: where the value stands in the state, for messages: `scheduler`.
        registry: the enum, dataclass and namedtuple types that may occur.

    Raises:
        UnsupportedState: something inside cannot be saved exactly; names its path, its type and what to do.
    """
    return Encoder(path, registry).run(value)


def decode_value(json: Json, path: str, *, registry: TypeRegistry = DEFAULT_REGISTRY) -> Any:
    """Return the value that `json` stands for; safe on input from anywhere.

    Raises:
        Corrupt: not what `encode_value` writes; names the place.
        IncompatibleFormat: holds a tag that this version does not know.
        StateMismatch: holds an object whose type is not registered here, or has other fields or members now.
    """
    return Decoder(path, registry).run(json)
