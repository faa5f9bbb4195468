"""The journal's segments: what every step was, one line a step, for a later start to compare with.

A segment is a record of kind `journal` on its first line, then one JSON array `[step, {quantity: text}]` a line. The
record names the sha256 of all that follows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from shardkeep.errors import Corrupt
from shardkeep.format.records import JournalRecord, decode_record, encode_record


class JournalLine(Struct, frozen=True, array_like=True):
    """One step: what is known of it, as text; floats as `float.hex()`, so that every bit is there."""

    step: int
    values: dict[str, str]


def encode_line(step: int, values: Mapping[str, str]) -> bytes:
    """Return one line, newline included."""
    return msgspec.json.encode(JournalLine(step, dict(values))) + b"\n"


def encode_segment(lines: Sequence[bytes], *, run_id: str, generation: int, world_size: int, writer: str) -> bytes:
    """Return the file bytes of a segment of lines made by `encode_line`."""
    content = b"".join(lines)
    record = JournalRecord(
        run_id=run_id,
        generation=generation,
        world_size=world_size,
        step_count=len(lines),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    return encode_record(record, writer=writer) + content


def decode_segment(data: bytes, *, where: str) -> tuple[JournalRecord, tuple[JournalLine, ...]]:
    """Check and parse a segment.

    Args:
        where: the object's key, for messages.

    Raises:
        Corrupt: the bytes are not those that were written. IncompatibleFormat: a newer version wrote them.
    """
    first, newline, content = data.partition(b"\n")
    record = decode_record(JournalRecord, first + newline, where=where)
    found = hashlib.sha256(content).hexdigest()
    if found != record.sha256:
        raise Corrupt(f"{where}: the sha256 of its lines is {found}, its record says {record.sha256}", key=where)
    try:
        lines = tuple(msgspec.json.decode(line, type=JournalLine) for line in content.splitlines())
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Corrupt(f"{where}: malformed line: {error}", key=where) from None
    if len(lines) != record.step_count:
        raise Corrupt(f"{where}: {len(lines)} lines, its record says {record.step_count}", key=where)
    return record, lines
