"""Exclusive creates where there are no conditional writes: claim with an object of one's own, own only if alone.

The protocol, for one key: write a claim beside it under a name with a nonce, list the claims, look at the key; alone
and the key free: write the key, then remove the claim. Not alone: withdraw, wait a random while, begin again. Claims
and lists being consistent, of two that race at least one sees the other's claim, or the other's object.

What it cannot do, and why a store that needs it says `exclusive_create=False`: a process that stops for longer than
CLAIM_S between its look and its write may overwrite another's object. It looks at its clock before it writes, so that
only the write itself may be late, and it checks afterwards that the object is still its own.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import time
from typing import Final

from shardkeep.errors import AlreadyExists, NotFound, StorageError
from shardkeep.knobs import get_knob
from shardkeep.storage.object_client import ObjectClient

CLAIM_S: Final = 60.0
"""A claim that others saw for this long and whose owner still has not written is dead."""

_SMALL: Final = 1 << 30


def claim_name(key: str, data: bytes, nonce: str) -> str:
    """Return the name of a claim on `key`; hidden, so that no list of objects shows it."""
    return f"{claim_prefix(key)}{hashlib.sha256(data).hexdigest()[:32]}.{nonce}"


def claim_prefix(key: str) -> str:
    """Return what the names of all claims on `key` begin with."""
    folder, _, name = key.rpartition("/")
    return f"{folder}/.claim/{name}/" if folder else f".claim/{name}/"


def put_by_claim(
    client: ObjectClient, key: str, data: bytes, *, claim_s: float = CLAIM_S, patience_s: float | None = None
) -> None:
    """Create an object that must not exist; identical bytes are success.

    Args:
        claim_s: how long another's claim counts; all processes must agree.
        patience_s: how long to go on; by default long enough to see a dead claim out.

    Raises:
        AlreadyExists: there is an object with other bytes. StorageError: retryable; others kept claiming the key.
    """
    dice = random.Random(secrets.randbits(64))
    seen: dict[str, float] = {}
    if patience_s is None:
        patience_s = max(get_knob("RETRY_BUDGET_S"), 2 * claim_s)
    deadline_s = time.monotonic() + patience_s
    pause_s = 0.05
    while True:
        if _is_there(client, key, data):
            return
        if _try_once(client, key, data, seen, claim_s):
            return
        if time.monotonic() + pause_s > deadline_s:
            raise StorageError(f"{client.where(key)}: other processes kept claiming it", retryable=True, key=key)
        time.sleep(dice.uniform(0, pause_s))
        pause_s = min(2 * pause_s, 5.0)


def _try_once(client: ObjectClient, key: str, data: bytes, seen: dict[str, float], claim_s: float) -> bool:
    began_s = time.monotonic()
    own = claim_name(key, data, secrets.token_hex(16))
    client.put(own, b"")
    try:
        # ORDER: claim, list, look at the key, write, remove the claim; see the module.
        if not _is_alone(client, key, own, seen, claim_s) or _is_there(client, key, data):
            return _is_there(client, key, data)
        if time.monotonic() - began_s > claim_s / 4:
            return False
        client.put(key, data)
        return _is_there(client, key, data)
    finally:
        client.delete(own)


def _is_alone(client: ObjectClient, key: str, own: str, seen: dict[str, float], claim_s: float) -> bool:
    """Say whether nobody else claims the key with other bytes; the dead do not count and are removed."""
    now_s = time.monotonic()
    same = own.rpartition(".")[0]
    alone = True
    for info in client.list_below(claim_prefix(key)):
        if info.key.rpartition(".")[0] == same:
            continue  # the same bytes: whoever writes them, the object is the same
        if now_s - seen.setdefault(info.key, now_s) > claim_s:
            client.delete(info.key)
        else:
            alone = False
    return alone


def _is_there(client: ObjectClient, key: str, data: bytes) -> bool:
    try:
        found = client.get(key, limit_bytes=_SMALL)
    except NotFound:
        return False
    if found != data:
        raise AlreadyExists(
            f"{client.where(key)} exists with other bytes ({len(found)}, ours are {len(data)})",
            key=key,
            advice="another process got there first: read what it wrote before going on",
        )
    return True
