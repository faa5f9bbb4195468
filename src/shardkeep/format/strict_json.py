"""JSON text written by others, read without trust: every defect is one Corrupt.

Python's own parser, because it alone shows repeated keys; they are kept until somebody looks at the object, so that
the message can name what it belongs to.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from shardkeep.errors import Corrupt


class RepeatedKey(dict[str, Any]):
    """A JSON object in which a key stands twice; `key` is that key."""

    key: str


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object that `data` holds, as a whole and in valid UTF-8.

    Nested objects with a repeated key are `RepeatedKey`; `check_object` refuses them.

    Args:
        where: names the text in messages: `header of model-00001.safetensors`.

    Raises:
        Corrupt: not such a text; repeated keys at the top; nested too deeply.
    """
    try:
        text = data.decode("utf-8")
        parsed = json.loads(text, object_pairs_hook=_keep_pairs, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise Corrupt(f"{where}: expected UTF-8, found byte {data[error.start]:#04x} at {error.start}") from None
    except RecursionError:
        raise Corrupt(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise Corrupt(f"{where}: expected JSON: {str(error)[:200]}") from None
    if not isinstance(parsed, dict):
        raise Corrupt(f"{where}: expected a JSON object, found {describe(parsed)}")
    return check_object(parsed, where)


def check_object(value: Any, where: str, *, key: str | None = None) -> dict[str, Any]:
    """Return `value` if it is a JSON object without repeated keys.

    Raises:
        Corrupt: it is not; `key` goes into the error.
    """
    if isinstance(value, RepeatedKey):
        raise Corrupt(f"{where}: the key {value.key[:200]!r} stands twice", key=key)
    if not isinstance(value, dict):
        raise Corrupt(f"{where}: expected a JSON object, found {describe(value)}", key=key)
    return value


def describe(value: Any) -> str:
    """Return a parsed JSON value as a short text for a message."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _keep_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) == len(pairs):
        return plain
    seen: set[str] = set()
    repeated = RepeatedKey(plain)
    repeated.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return repeated


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
