"""Preemption and host maintenance of Compute Engine machines, by the metadata server.

https://cloud.google.com/compute/docs/instances/spot#detect-preemption: `instance/preempted` turns from FALSE to TRUE,
30 s ahead. With `wait_for_change` the server holds its answer back until then, or for `timeout_sec`.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

from shardkeep.manager.notices.metadata import TIMEOUT_S, BadAnswer, MetadataClient, check_status
from shardkeep.manager.notices.watcher import Notice

BASE_URL: Final = "http://metadata.google.internal"
_PREEMPTED: Final = "/computeMetadata/v1/instance/preempted"
_MAINTENANCE: Final = "/computeMetadata/v1/instance/maintenance-event"
_HEADERS: Final = {"Metadata-Flavor": "Google"}
_HOLD_S: Final = 10
_GRACE_S: Final = 30.0


class GcpSource:
    """Has a question open at all times, so that a preemption is known at once; asks for maintenance every 10 s."""

    name = "gcp"
    pause_s = 0.2  # between answers that come at once, as after a change

    def __init__(self, base_url: str = BASE_URL) -> None:
        self._client = MetadataClient(base_url)
        self._etag = ""

    def poll(self) -> list[Notice]:
        found = []
        event = self._ask(_MAINTENANCE)
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            found.append(Notice(kind="stop", reason="GCP host maintenance (the machine is terminated)"))
        elif event == "MIGRATE_ON_HOST_MAINTENANCE":
            found.append(Notice(kind="save", reason="GCP host maintenance (the machine is migrated)"))
        elif event != "NONE":
            raise BadAnswer(f"{_MAINTENANCE} holds {event!r:.80}, expected NONE or an event")
        preempted = self._ask(_PREEMPTED, wait=not found)
        if preempted == "TRUE":
            found.append(Notice(kind="stop", reason="GCP preemption", left_s=_GRACE_S))
        elif preempted != "FALSE":
            raise BadAnswer(f"{_PREEMPTED} holds {preempted!r:.80}, expected TRUE or FALSE")
        return found

    def abort(self) -> None:
        self._client.abort()

    def _ask(self, path: str, *, wait: bool = False) -> str:
        waits = wait and bool(self._etag)
        query = {"wait_for_change": "true", "timeout_sec": _HOLD_S, "last_etag": self._etag} if waits else {}
        reply = self._client.ask(
            f"{path}?{urlencode(query)}" if query else path,
            headers=_HEADERS,
            timeout_s=_HOLD_S + TIMEOUT_S if waits else TIMEOUT_S,
        )
        check_status(reply, path)
        if reply.headers.get("metadata-flavor") != "Google":
            raise BadAnswer(f"{path} was answered by another server: it lacks the header Metadata-Flavor: Google")
        if path == _PREEMPTED:
            self._etag = reply.headers.get("etag", "")
        return reply.text
