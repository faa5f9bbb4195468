"""Everything that leaves the command: escaped text, plain tables, JSON. No colours, no cursor movement.

Names come from storage and may hold anything; what is printed for a person never holds a control character.
"""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Sequence
from typing import Any


def escape(text: str) -> str:
    """Return text with everything unprintable (controls, bidi marks, lone surrogates) written as an escape."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def escape_lines(text: str) -> str:
    """Like `escape`, but line breaks stay."""
    return "\n".join(escape(line) for line in text.split("\n"))


def write(*lines: str) -> None:
    """Write lines to stdout at once."""
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")


def write_error(*lines: str) -> None:
    """Write lines to stderr at once."""
    sys.stdout.flush()
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def write_json(document: dict[str, Any]) -> None:
    """Write one JSON document to stdout: ASCII, two spaces of indent; numbers that JSON lacks become null."""
    import json

    sys.stdout.write(json.dumps(_finite(document), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    # By map: a frame per level and no more, since values may be nested as deep as the format lets them.
    if isinstance(value, dict):
        return dict(zip(map(str, value), map(_finite, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return [*map(_finite, value)]
    return value


def format_count(count: int, word: str) -> str:
    """Return `1 shard`, `2 shards`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def format_age(created_at: str) -> str:
    """Return how long ago an ISO time was, for a person; empty where it is no time."""
    try:
        then = datetime.datetime.fromisoformat(created_at)
    except ValueError:
        return ""
    if then.tzinfo is None:
        then = then.replace(tzinfo=datetime.UTC)
    seconds = int((datetime.datetime.now(datetime.UTC) - then).total_seconds())
    if seconds < 0:
        return "0s"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def format_metrics(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in metrics.items())


def format_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Return lines of a plain table. Cells are escaped; the last column is cut to a terminal's width.

    Args:
        right: titles, separated by blanks, of columns that are aligned to the right.
    """
    cells = [list(titles), *([escape(cell) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(titles))]
    to_right = [title in right.split() for title in titles]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if right_hand else cell.ljust(width)
            for cell, width, right_hand in zip(row, widths, to_right, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return fit(lines)


def fit(lines: list[str]) -> list[str]:
    """Cut lines to the width of the terminal; where there is none (a pipe, a file), leave them whole."""
    if not sys.stdout.isatty():
        return lines
    import shutil

    width = max(shutil.get_terminal_size().columns, 20)
    return [line if len(line) <= width else line[: width - 1] + "~" for line in lines]
