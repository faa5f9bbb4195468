"""What a verification found: damage by name, bounded in number, and notes that are no damage."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final, Literal

from shardkeep.format.names import StepRef

Kind = Literal[
    "run",  # run.json, a generation's record or a mark
    "commit",  # the commit record
    "layout",  # the layout table: chunks that do not tile a tensor, ranks or dtypes that cannot be
    "part",  # a part record, or what it says against the layout
    "digests",  # a part's digest file
    "missing",  # a file that a record names
    "size",  # a file of another size
    "header",  # a shard's safetensors header
    "block",  # bytes of a shard
    "index",  # the Hugging Face index
    "asset",  # a user's file
    "unreadable",  # storage failed to give bytes: not known to be damage
    "incompatible",  # written by a newer version: not known to be damage
]

MAX_LISTED: Final = 1000
MAX_NAMES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it was written.

    Attributes:
        key: the object, below the run's root.
        text: one sentence: expected, found.
        rank: who wrote it.
        begin, end: bytes of the object; `first_leaf`, `leaf_count`: the same in leaves of 256 KiB.
        tensors: keys of tensors with bytes there, at most 100; `tensor_count` counts all.
    """

    kind: Kind
    key: str
    text: str
    ref: StepRef | None = None
    rank: int | None = None
    begin: int | None = None
    end: int | None = None
    first_leaf: int | None = None
    leaf_count: int | None = None
    tensors: tuple[str, ...] = ()
    tensor_count: int = 0


class Findings:
    """Gathers findings from several threads. `listed` holds at most MAX_LISTED of `count`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed: list[Finding] = []
        self._notes: list[str] = []
        self._kinds: dict[str, int] = {}

    def add(self, finding: Finding) -> None:
        with self._lock:
            self._kinds[finding.kind] = self._kinds.get(finding.kind, 0) + 1
            if len(self._listed) < MAX_LISTED:
                self._listed.append(finding)

    def note(self, text: str) -> None:
        """Keep a remark about something that is no damage."""
        with self._lock:
            if len(self._notes) < MAX_LISTED:
                self._notes.append(text)

    @property
    def listed(self) -> tuple[Finding, ...]:
        return tuple(self._listed)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    @property
    def kinds(self) -> dict[str, int]:
        """How many findings there were of each kind, by name."""
        return dict(sorted(self._kinds.items()))

    @property
    def count(self) -> int:
        return sum(self._kinds.values())
