"""What ranks tell each other in a phase, as JSON with a payload behind it, and the errors made of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeVar

import msgspec

from shardkeep.errors import BarrierTimeout, CheckpointError, PeerFailure, UsageError

INLINE_BYTES: Final = 64 << 10
"""Payloads up to this size travel behind their message; larger ones in chunks of their own."""

_TEXT_CHARS: Final = 4000
_NAMED_RANKS: Final = 16


FailureKind = Literal["error", "lost", "late", "mismatch"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a phase failed at one rank.

    Attributes:
        kind: `error`: its code raised; `lost`: it died; `late`: it did not come in time; `mismatch`: it made
            another call than rank 0.
    """

    rank: int
    phase: str
    kind: FailureKind
    type: str = ""
    text: str = ""
    exit_code: int = 1


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's result; the payload follows inline when `chunk_count` is 0."""

    phase: str
    chunk_count: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for all. With failures there is no payload."""

    chunk_count: int = 0
    failures: tuple[Failure, ...] = ()


M = TypeVar("M", Post, Verdict, Failure)


def encode_message(message: Post | Verdict | Failure, payload: bytes = b"") -> bytes:
    """Return JSON on one line, then the payload."""
    return msgspec.json.encode(message) + b"\n" + payload


def decode_message(data: bytes, kind: type[M], *, rank: int) -> tuple[M, bytes]:
    """Return a message and its payload. Raises PeerFailure when `rank` sent something else."""
    head, _, payload = data.partition(b"\n")
    try:
        return msgspec.json.decode(head, type=kind), payload
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerFailure(
            f"rank {rank} sent a message that this version cannot read: expected {kind.__name__}, {error}",
            causes={rank: f"unreadable message of {len(data)} bytes"},
            advice="run the same version of shardkeep on every rank",
        ) from error


def failure_of(error: BaseException, *, rank: int, phase: str) -> Failure:
    """Return what the other ranks are told about an exception."""
    return Failure(
        rank=rank,
        phase=phase,
        kind="error",
        type=type(error).__name__,
        text=_readable(str(error)),
        exit_code=error.exit_code if isinstance(error, CheckpointError) else 1,
    )


def error_of(phase: str, failures: Sequence[Failure], *, own_rank: int) -> CheckpointError:
    """Return the exception that a rank raises when others made the phase fail."""
    mismatch = next((failure for failure in failures if failure.kind == "mismatch"), None)
    if mismatch is not None:
        return UsageError(
            mismatch.text,
            rank=own_rank,
            advice="make every rank call the same shardkeep functions in the same order",
        )
    causes = {failure.rank: _cause(failure, phase) for failure in reversed(failures) if failure.kind != "late"}
    late = tuple(sorted({failure.rank for failure in failures if failure.kind == "late"}))
    if late:
        text = next(failure.text for failure in failures if failure.kind == "late")
        return BarrierTimeout(
            f"phase {phase!r}: {format_ranks(late)} did not arrive {text}",
            missing=late,
            causes=causes,
            advice="look at the logs of these ranks; raise SHARDKEEP_BARRIER_TIMEOUT_S if they are only slow",
        )
    codes = {failure.rank: failure.exit_code for failure in reversed(failures) if failure.kind == "error"}
    return PeerFailure(
        f"phase {phase!r} failed on {format_ranks(sorted(causes))}",
        causes=causes,
        exit_codes=codes,
        advice="look at the logs of these ranks; what was committed before is untouched",
    )


def mismatch_of(phase: str, others: dict[int, str]) -> Failure:
    """Return the failure for ranks that are in another phase than rank 0 (`others`: rank -> its phase)."""
    by_name: dict[str, list[int]] = {}
    for rank, name in sorted(others.items()):
        by_name.setdefault(name, []).append(rank)
    theirs = "; ".join(f"{format_ranks(ranks)} in {name!r}" for name, ranks in sorted(by_name.items()))
    text = f"ranks made different calls: rank 0 is in phase {phase!r}, {theirs}"
    return Failure(rank=min(others), phase=phase, kind="mismatch", type="UsageError", text=text, exit_code=64)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 1, 3, 4` with the tail of a long list counted."""
    listed = list(ranks)
    shown = ", ".join(map(str, listed[:_NAMED_RANKS]))
    more = f" and {len(listed) - _NAMED_RANKS} more" if len(listed) > _NAMED_RANKS else ""
    return f"rank{'s' if len(listed) != 1 else ''} {shown}{more}"


def _cause(failure: Failure, phase: str) -> str:
    elsewhere = f" (in phase {failure.phase!r})" if failure.phase != phase else ""
    if failure.kind == "lost":
        return f"lost: {failure.text}{elsewhere}"
    return f"{failure.type} (exit code {failure.exit_code}): {failure.text}{elsewhere}"


def _readable(text: str) -> str:
    # Lone surrogates (undecodable file names) have no UTF-8; a report of an error must not fail for that.
    clean = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return clean if len(clean) <= _TEXT_CHARS else f"{clean[:_TEXT_CHARS]} ..."
