"""Every exception shardkeep raises, one tree, each with its exit code.

CheckpointError                         2
├── UsageError (ValueError)             64
├── NotFound (FileNotFoundError)        10
├── NotCommitted                        11
├── IncompatibleFormat                  12
├── StateMismatch                       13
├── UnsupportedState                    14
├── StateChanged                        15
├── Corrupt                             20
├── Unrecoverable                       21
├── StorageError                        30
│   ├── OutOfSpace
│   ├── Throttled
│   ├── AlreadyExists
│   └── Denied
├── PeerFailure                         40
│   └── BarrierTimeout
├── Fenced                              41
└── NotBitExact                         50

A message says what happened, to which object, what was expected and found, what is still safe, and
what to type next. Errors of libraries below never leave the package unmapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class CheckpointError(Exception):
    """Something about a checkpoint went wrong; the subclasses say what.

    Attributes:
        step, rank, key: where it happened, when known.
        advice: what to do next, one sentence, shown after the message.
    """

    exit_code: ClassVar[int] = 2

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        key: str | None = None,
        advice: str | None = None,
    ) -> None:
        self.message = message
        self.step = step
        self.rank = rank
        self.key = key
        self.advice = advice
        super().__init__(message)

    def __str__(self) -> str:
        where = [
            f"{name} {value}"
            for name, value in (("step", self.step), ("rank", self.rank))
            if value is not None and f"{name} {value}" not in self.message
        ]
        text = f"{self.message} ({', '.join(where)})" if where else self.message
        return f"{text}\n  next: {self.advice}" if self.advice else text


class UsageError(CheckpointError, ValueError):
    """A wrong argument or options that contradict each other. Nothing was read or written."""

    exit_code = 64


class NotFound(CheckpointError, FileNotFoundError):
    """No such run, committed step or object."""

    exit_code = 10


class NotCommitted(CheckpointError):
    """The step's folder exists, its commit record does not: the save never finished."""

    exit_code = 11


class IncompatibleFormat(CheckpointError):
    """Written by a newer format, or with a feature this version must understand and does not."""

    exit_code = 12


class StateMismatch(CheckpointError):
    """What is stored and what is wanted differ; `problems` lists every name, shape and dtype."""

    exit_code = 13

    def __init__(self, message: str, *, problems: Sequence[str] = (), **where: object) -> None:
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(message + lines, **where)  # type: ignore[arg-type]  # step, rank, key, advice


class UnsupportedState(CheckpointError):
    """An object that cannot be saved without pickle; the message names its path in the state."""

    exit_code = 14


class StateChanged(CheckpointError):
    """The live state was changed while it was being copied in overlap mode; that checkpoint was given up."""

    exit_code = 15


class Corrupt(CheckpointError):
    """Bytes are not what was written: digest, size, header or a missing shard."""

    exit_code = 20


class Unrecoverable(CheckpointError):
    """Damage that no redundancy and no other checkpoint makes good."""

    exit_code = 21


class StorageError(CheckpointError):
    """A store could not do its work. `retryable` says whether the same call may succeed later."""

    exit_code = 30
    retryable: bool = True

    def __init__(self, message: str, *, retryable: bool | None = None, **where: object) -> None:
        if retryable is not None:
            self.retryable = retryable
        super().__init__(message, **where)  # type: ignore[arg-type]  # step, rank, key, advice


class OutOfSpace(StorageError):
    """The disk or quota is full. Permanent until someone frees space."""

    retryable = False


class Throttled(StorageError):
    """The service asked to slow down."""


class AlreadyExists(StorageError):
    """An exclusive create met an object with other bytes."""

    retryable = False


class Denied(StorageError):
    """Permission or credentials refused."""

    retryable = False


class PeerFailure(CheckpointError):
    """Other ranks failed; `causes` maps each failed rank to its error text, `exit_codes` to its exit code."""

    exit_code = 40

    def __init__(
        self,
        message: str,
        *,
        causes: dict[int, str] | None = None,
        exit_codes: dict[int, int] | None = None,
        **where: object,
    ) -> None:
        self.causes = dict(causes or {})
        self.exit_codes = dict(exit_codes or {})
        lines = "".join(f"\n  rank {rank}: {cause}" for rank, cause in sorted(self.causes.items()))
        super().__init__(message + lines, **where)  # type: ignore[arg-type]  # step, rank, key, advice

    @property
    def transient(self) -> bool:
        """Whether only storage, peers or the moment failed, so that a later try may succeed."""
        passing = (StorageError.exit_code, PeerFailure.exit_code, StateChanged.exit_code)
        return all(code in passing for code in self.exit_codes.values())


class BarrierTimeout(PeerFailure):
    """Some ranks did not arrive in time; `missing` names them."""

    def __init__(self, message: str, *, missing: Sequence[int] = (), **where: object) -> None:
        self.missing = tuple(missing)
        super().__init__(message, **where)  # type: ignore[arg-type]  # causes, step, rank, key, advice


class Fenced(CheckpointError):
    """A later generation owns the run; this process must stop saving into it."""

    exit_code = 41


class NotBitExact(CheckpointError):
    """Two things that must be identical are not; names the quantity, rank and first difference."""

    exit_code = 50
