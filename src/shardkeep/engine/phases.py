"""Where the time of a save or a load goes, phase by phase."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping


class PhaseTimes:
    """Seconds by phase; several threads may add to one, so that a phase may take longer than the whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block, also when it raises."""
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begin_s)

    def add(self, name: str, seconds: float) -> None:
        """Add to a phase."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return what was counted so far, by phase, in the order in which phases first ended."""
        with self._lock:
            return dict(self._seconds)
