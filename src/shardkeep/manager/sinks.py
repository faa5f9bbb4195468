"""Between what happens and whoever listens: a listener's failure is not the checkpoint's."""

from __future__ import annotations

import logging

from shardkeep.events import Event, EventSink

_log = logging.getLogger("shardkeep")


class SafeSink:
    """Hands events on; what the receiver raises is logged, with the event, and goes no further.

    Events arrive in the middle of a save and in the thread of a save in the background, where an exception would
    make a committed checkpoint look like a failed one, on one rank alone.
    """

    def __init__(self, inner: EventSink) -> None:
        self._inner = inner

    def emit(self, event: Event) -> None:
        """Hand on an event. An interrupt goes through."""
        try:
            self._inner.emit(event)
        except Exception:  # noqa: BLE001  # the receiver's, whatever it is
            _log.exception("the receiver of events failed at %s: %s", event.name, event.text)
