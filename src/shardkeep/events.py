"""What happened: one small record per event, handed to a sink.

Events are for people and dashboards; nothing in the package reads them back to decide anything.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

_log = logging.getLogger("shardkeep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened on one rank.

    Attributes:
        name: dotted and stable, e.g. `save.committed`, `restore.fallback`, `prune.removed`.
        level: `info`, `warning` or `error`.
        text: one sentence for a person.
        fields: numbers and names for machines; units are in the field names (`_s`, `_bytes`, `_count`).
    """

    name: str
    text: str
    level: str = "info"
    fields: dict[str, str | int | float | bool | None] = field(default_factory=dict)


class EventSink(Protocol):
    """Receives events. Must not raise and must be safe to call from several threads."""

    def emit(self, event: Event) -> None: ...


class LogSink:
    """The default sink: the standard logger `shardkeep`."""

    def emit(self, event: Event) -> None:
        _log.log(getattr(logging, event.level.upper()), "%s", event.text, extra={"shardkeep_event": event})
