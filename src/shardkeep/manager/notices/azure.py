"""Scheduled Events of Azure machines: preemption of spot machines 30 s ahead, others up to 15 minutes.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events. The document lists all
machines of a scale set, by name. Events are only read, never approved: that would hasten them.
"""

from __future__ import annotations

import datetime
import email.utils
from typing import Final

import msgspec

from shardkeep.manager.notices.metadata import BadAnswer, MetadataClient, check_status
from shardkeep.manager.notices.watcher import Notice

BASE_URL: Final = "http://169.254.169.254"
_EVENTS: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS: Final = {"Metadata": "true"}
_ENDING: Final = ("Preempt", "Terminate", "Reboot", "Redeploy")
_TIMEOUT_S: Final = 10.0  # the service is slow while it is being switched on, which the first question does


class _Event(msgspec.Struct, frozen=True, rename="pascal"):
    event_id: str
    event_type: str
    resources: tuple[str, ...] = ()
    event_status: str = "Scheduled"
    not_before: str = ""


class _Document(msgspec.Struct, frozen=True, rename="pascal"):
    document_incarnation: int
    events: tuple[_Event, ...] = ()


class AzureSource:
    """Asks every 2 s; looks at a document only when its incarnation changed."""

    name = "azure"
    pause_s = 2.0

    def __init__(self, base_url: str = BASE_URL) -> None:
        self._client = MetadataClient(base_url)
        self._machine: str | None = None
        self._seen: int | None = None

    def poll(self) -> list[Notice]:
        if self._machine is None:
            reply = self._client.ask(_NAME, headers=_HEADERS, timeout_s=_TIMEOUT_S)
            check_status(reply, _NAME)
            self._machine = reply.text
        reply = self._client.ask(_EVENTS, headers=_HEADERS, timeout_s=_TIMEOUT_S)
        check_status(reply, _EVENTS)
        try:
            document = msgspec.json.decode(reply.body, type=_Document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadAnswer(f"{_EVENTS} holds something else than documented: {error}") from None
        if document.document_incarnation == self._seen:
            return []
        found = [_notice_of(event) for event in document.events if self._is_ours(event)]
        self._seen = document.document_incarnation
        return found

    def abort(self) -> None:
        self._client.abort()

    def _is_ours(self, event: _Event) -> bool:
        live = event.event_status in ("Scheduled", "Started")
        return live and (not event.resources or self._machine in event.resources)


def _notice_of(event: _Event) -> Notice:
    if event.event_type not in _ENDING:  # Freeze: a pause of seconds
        return Notice(kind="save", reason=f"Azure event {event.event_type} ({event.event_id})")
    left_s = None
    if event.not_before:
        try:
            when = email.utils.parsedate_to_datetime(event.not_before)
        except ValueError:
            raise BadAnswer(f"NotBefore holds {event.not_before!r:.80}, expected a date") from None
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.UTC)
        left_s = (when - datetime.datetime.now(datetime.UTC)).total_seconds()
    return Notice(kind="stop", reason=f"Azure event {event.event_type} ({event.event_id})", left_s=left_s)
