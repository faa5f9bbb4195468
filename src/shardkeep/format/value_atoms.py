"""The leaves of an encoded value: numbers, text and bytes that JSON cannot hold as they are.

Each `decode_*` accepts exactly what its `encode_*` writes and raises ValueError with the reason otherwise.
"""

from __future__ import annotations

import binascii
import math
import struct
from typing import Final

from shardkeep.types import Json

MAX_PLAIN_INT: Final = (1 << 53) - 1
"""Integers up to this magnitude are JSON numbers: every JSON reader holds them exactly."""


def encode_int(value: int) -> Json:
    """Return a JSON number, or `{"$int": hexadecimal}` beyond 53 bits (linear time at any size)."""
    return int(value) if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT else {"$int": hex(value)}


def decode_int(text: Json) -> int:
    """Return the integer of a `$int` tag."""
    if type(text) is not str:
        raise ValueError("expected a hexadecimal string")
    try:
        # Base 16 costs linear time; Python's decimal parser is quadratic and so is limited in size.
        value = int(text, 16)
    except ValueError:
        raise ValueError(f"expected a hexadecimal string, found {text[:40]!r}") from None
    if hex(value) != text or -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT:
        raise ValueError(f"expected a number beyond 53 bits as -0x1f, found {text[:40]!r}")
    return value


def encode_float(value: float) -> Json:
    """Return a JSON number, or `{"$float": bits}` for infinities and NaNs: 64 bits, big-endian, 16 hex digits."""
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def decode_float(text: Json) -> float:
    """Return the float of a `$float` tag, every bit of a NaN kept."""
    if type(text) is not str or len(text) != 16 or text != text.lower():
        raise ValueError("expected 16 lower-case hexadecimal digits")
    value: float = struct.unpack(">d", decode_hex(text))[0]
    if math.isfinite(value):
        raise ValueError("expected an infinity or NaN; finite floats are JSON numbers")
    return value


def decode_hex(text: str) -> bytes:
    """Return the bytes of hexadecimal digits, without the blanks that `bytes.fromhex` lets pass."""
    try:
        return binascii.unhexlify(text)
    except ValueError:
        raise ValueError("expected hexadecimal digits") from None


def is_plain_text(text: str) -> bool:
    """Say whether a string is valid Unicode, so that JSON can hold it: no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def encode_str(value: str) -> Json:
    """Return a JSON string, or `{"$str": base64}` of generalized UTF-8 where there are surrogates."""
    if is_plain_text(value):
        return value
    return {"$str": encode_base64(value.encode("utf-8", "surrogatepass"))}


def decode_str(body: Json) -> str:
    """Return the string of a `$str` tag."""
    try:
        text = decode_base64(body).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise ValueError("expected generalized UTF-8") from None
    if is_plain_text(text):
        raise ValueError("expected a string with surrogates; others are JSON strings")
    return text


def encode_base64(data: bytes | bytearray | memoryview) -> str:
    """Return standard base64 with padding and no line breaks."""
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def decode_base64(body: Json) -> bytes:
    """Return the bytes; only the one text that `encode_base64` writes for them is accepted."""
    if type(body) is not str:
        raise ValueError("expected a base64 string")
    try:
        data = binascii.a2b_base64(body, strict_mode=True)
    except ValueError as error:
        raise ValueError(f"expected base64: {error}") from None
    # Strict mode still lets the unused last bits be anything.
    if body and encode_base64(data[-((len(data) - 1) % 3 + 1) :]) != body[-4:]:
        raise ValueError("expected base64 whose unused bits are zero")
    return data
