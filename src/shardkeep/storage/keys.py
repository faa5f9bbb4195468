"""What a key may look like; every store refuses the rest before it touches anything.

The alphabet is the intersection of what file systems and object stores keep unchanged: no case folding surprises
of Unicode, no escapes, no hidden names. A key read from a damaged or hostile record can therefore never lead
out of the store.
"""

from __future__ import annotations

import re
from typing import Final

from shardkeep.errors import StorageError

MAX_PART_BYTES: Final = 200
MAX_KEY_BYTES: Final = 1000

_PART: Final = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9._%=@,-]*\Z")
_ADVICE: Final = "use letters, digits and any of . _ % = @ , - in each part; no part begins with one of . = @ ,"


def is_part(name: str) -> bool:
    """Say whether one part of a key may have this name."""
    return len(name) <= MAX_PART_BYTES and _PART.match(name) is not None


def check_key(key: str) -> None:
    """Refuse a string that is no key.

    Raises:
        StorageError: not retryable; names the key.
    """
    if len(key) > MAX_KEY_BYTES or not all(is_part(part) for part in key.split("/")):
        raise _refuse("key", key)


def check_prefix(prefix: str) -> None:
    """Refuse a string that no key can start with. Empty and a last part that is cut short are fine.

    Raises:
        StorageError: not retryable; names the prefix.
    """
    *folders, start = prefix.split("/")
    if (
        len(prefix) > MAX_KEY_BYTES
        or not all(is_part(part) for part in folders)
        or not (start == "" or is_part(start))
    ):
        raise _refuse("prefix", prefix)


def check_folder(prefix: str) -> None:
    """Refuse a prefix that is not a folder's: empty, or ending in `/`.

    Raises:
        StorageError: not retryable; names the prefix.
    """
    check_prefix(prefix)
    if prefix and not prefix.endswith("/"):
        raise StorageError(
            f"prefix {prefix!r}: expected a folder, which ends in '/'",
            retryable=False,
            key=prefix,
            advice="add the '/'",
        )


def _refuse(what: str, text: str) -> StorageError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return StorageError(
        f"{shown!r} is no {what}: expected relative names joined by '/', at most {MAX_KEY_BYTES} bytes long",
        retryable=False,
        advice=_ADVICE,
    )
