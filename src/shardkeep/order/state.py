"""A loader's state as a small plain dict, and the checks before one is taken over.

Keys: `version`, the cursor's fields, and the options that were in force. Only `seed`, `size` and `algorithm` must
be the same on both sides; the batch size is kept for people to read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from shardkeep.errors import IncompatibleFormat, StateMismatch, UsageError
from shardkeep.order.cursor import SEQUENTIAL, Cursor
from shardkeep.types import Json

VERSION: Final = 1
_KEYS: Final = (
    "version",
    "algorithm",
    "shuffle",
    "seed",
    "epoch",
    "consumed",
    "size",
    "global_batch_size",
    "drop_last",
)
_EXACT_MAX: Final = (1 << 53) - 1
_FIXES: Final = {
    "size": "give the loader the dataset of the run, or begin this one anew with resume(state, override={...})",
    "seed": "construct the loader with the stored seed",
    "algorithm": "construct the loader with the stored shuffle option (a Mixture: its sources and weights)",
}


def encode_state(cursor: Cursor, *, batch_size: int, drop_last: bool) -> dict[str, Json]:
    """Return the state of a loader: plain JSON values, under 1 KiB of text whatever the seed."""
    return {
        "version": VERSION,
        "algorithm": cursor.algorithm,
        "shuffle": cursor.algorithm != SEQUENTIAL,
        "seed": _encode_seed(cursor.seed),
        "epoch": cursor.epoch,
        "consumed": cursor.consumed,
        "size": cursor.size,
        "global_batch_size": batch_size,
        "drop_last": drop_last,
    }


def decode_state(state: Mapping[str, object], live: Cursor) -> Cursor:
    """Return the stored cursor, once it is sure that it means the same order as the `live` one.

    Raises:
        IncompatibleFormat: a newer version wrote the state.
        StateMismatch: not a loader's state, or its dataset size, seed or algorithm differ from the live loader's;
            `problems` lists each with both sides.
    """
    if not isinstance(state, Mapping):
        raise StateMismatch(f"loader state: expected a dict, found {type(state).__name__}")
    version = state.get("version")
    if _is_count(version) and version > VERSION:  # type: ignore[operator]  # _is_count says it is an int
        raise IncompatibleFormat(
            f"loader state of version {version}: this shardkeep reads up to version {VERSION}",
            advice="upgrade shardkeep to the version that saved the checkpoint",
        )
    problems = _find_shape_problems(state)
    if problems:
        raise StateMismatch(
            "this is not the state of a ResumableLoader",
            problems=problems,
            advice="check that the checkpoint holds a ResumableLoader under this name",
        )
    _require_same_order(state, live)
    try:
        return Cursor(
            seed=live.seed,
            epoch=_count(state, "epoch"),
            consumed=_count(state, "consumed"),
            size=live.size,
            algorithm=live.algorithm,
        )
    except UsageError as error:
        raise StateMismatch("loader state holds an impossible position", problems=[error.message]) from error


def _require_same_order(state: Mapping[str, object], live: Cursor) -> None:
    own = {"size": live.size, "seed": _encode_seed(live.seed), "algorithm": live.algorithm}
    differing = [name for name in own if state[name] != own[name]]
    if differing:
        raise StateMismatch(
            "the stored position belongs to another order of samples; the loader keeps its own position",
            problems=[f"{name}: stored {state[name]!r}, this loader {own[name]!r}" for name in differing],
            advice="; ".join(_FIXES[name] for name in differing),
        )


def _find_shape_problems(state: Mapping[str, object]) -> list[str]:
    problems = [f"{name}: missing" for name in _KEYS if name not in state]
    problems += [f"{name}: unknown" for name in sorted(str(key) for key in state) if name not in _KEYS]
    for name in ("version", "epoch", "consumed", "size", "global_batch_size"):
        if name in state and not _is_count(state[name]):
            problems.append(f"{name}: expected an integer from 0 up, found {state[name]!r}")
    return problems


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(state: Mapping[str, object], name: str) -> int:
    value = state[name]
    assert isinstance(value, int)
    return value


def _encode_seed(seed: int) -> int | str:
    """Return a seed as JSON readers keep it: beyond 53 bits its digest, which is all that comparing needs."""
    if seed <= _EXACT_MAX:
        return seed
    data = seed.to_bytes((seed.bit_length() + 7) // 8, "little")
    return f"blake2b:{hashlib.blake2b(data, digest_size=16, usedforsecurity=False).hexdigest()}"
