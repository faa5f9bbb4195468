"""The thread that asks one service, now and then, and passes on what is new. It never holds up training."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from shardkeep import knobs
from shardkeep.events import Event, EventSink
from shardkeep.ranks.notice import Kind

_LONGEST_PAUSE_S: Final = 60.0
_STOP_WAIT_S: Final = 1.0
_SLURM_LEAD_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What a service announces. Two with the same `reason` are the same; `left_s` counts from now."""

    kind: Kind
    reason: str
    left_s: float | None = None


class NoticeSource(Protocol):
    """Asks one service. `pause_s` goes by between two polls."""

    @property
    def name(self) -> str: ...

    @property
    def pause_s(self) -> float: ...

    def poll(self) -> list[Notice]:
        """Return what is announced now. Raises OSError, HTTPException or BadAnswer; waits for 15 s at most."""

    def abort(self) -> None:
        """Let a poll in another thread end soon."""


class Watcher:
    """Polls a source in a daemon thread until `stop`."""

    def __init__(
        self, source: NoticeSource, note: Callable[[Notice], None], events: EventSink, *, rank: int = 0
    ) -> None:
        self._source = source
        self._note = note
        self._events = events
        self._rank = rank
        self._seen: set[str] = set()
        self._failures_count = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shardkeep-watch-{source.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; harmless twice."""
        self._stopping.set()
        self._source.abort()
        self._thread.join(_STOP_WAIT_S)

    def _run(self) -> None:
        from shardkeep.manager.notices.metadata import BadAnswer

        while not self._stopping.is_set():
            try:
                notices = self._source.poll()
            except (OSError, http.client.HTTPException, BadAnswer) as error:
                if self._stopping.is_set():
                    return
                self._failed(error)
            else:
                self._worked(notices)
            self._stopping.wait(min(self._source.pause_s * 2 ** min(self._failures_count, 10), _LONGEST_PAUSE_S))

    def _worked(self, notices: Sequence[Notice]) -> None:
        if self._failures_count:
            self._say("preempt.watch_works", f"the notices of {self._source.name} can be read again", "info")
            self._failures_count = 0
        for notice in notices:
            if notice.reason not in self._seen:
                self._seen.add(notice.reason)
                self._note(notice)

    def _failed(self, error: Exception) -> None:
        self._failures_count += 1
        if self._failures_count == 1:  # once, and asked again ever more rarely
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            text = f"the notices of {self._source.name} cannot be read, training goes on without them: {what}"
            self._say("preempt.watch_failed", text, "warning")

    def _say(self, name: str, text: str, level: str) -> None:
        fields: dict[str, str | int | float | bool | None] = {"rank": self._rank, "source": self._source.name}
        self._events.emit(Event(name=name, level=level, text=text, fields=fields))


def start_watchers(
    names: Sequence[str],
    note: Callable[[Notice], None],
    events: EventSink,
    *,
    grace_s: float | None,
    rank: int,
) -> list[Watcher]:
    """Start one watcher per name; the services' addresses may be set by the variables that their own tools read."""
    found = dict.fromkeys(names)
    return [Watcher(_make_source(name, grace_s), note, events, rank=rank) for name in found]


def _make_source(name: str, grace_s: float | None) -> NoticeSource:
    from shardkeep.manager.notices import aws, azure, gcp, slurm

    if name == "slurm":
        lead_s = _SLURM_LEAD_S if grace_s is None else grace_s
        return slurm.SlurmSource(knobs.read_slurm_end_time(), lead_s=lead_s)
    address = knobs.read_metadata_address(name)
    if name == "aws":
        return aws.AwsSource(address or aws.BASE_URL)
    if name == "gcp":
        return gcp.GcpSource(address or gcp.BASE_URL)
    return azure.AzureSource(address or azure.BASE_URL)
