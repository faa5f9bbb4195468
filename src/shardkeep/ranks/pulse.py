"""Signs of life: each process counts up a key of its own; who waits for a rank watches that rank's count.

Clocks of different machines are never compared: a rank is silent for as long as its count stood still while the
watcher looked on, by the watcher's own monotonic clock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

from shardkeep.errors import PeerFailure
from shardkeep.ranks.channel import Channel

_BEATS_PER_SILENCE: Final = 6
_SLOWEST_BEAT_S: Final = 5.0
_STOP_WAIT_S: Final = 2.0
_FAILURES_ALLOWED: Final = 5
_GOODBYE: Final = b"bye"


class Pulse:
    """The beating of this process: one daemon thread, shared by a group and its clones."""

    def __init__(self, channel: Channel, *, rank: int, silence_s: float) -> None:
        self._channel = channel
        self._key = pulse_key(rank)
        self._every_s = min(_SLOWEST_BEAT_S, silence_s / _BEATS_PER_SILENCE)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._holders_count = 1
        self._pid = os.getpid()
        channel.put(self._key, b"0")  # before the thread: who meets this rank finds its pulse
        self._thread = threading.Thread(target=self._beat, name="shardkeep-pulse", daemon=True)
        self._thread.start()

    @property
    def prefix(self) -> str:
        """Where the pulses of this start are, for watching them."""
        return self._channel.prefix

    def hold(self) -> Pulse:
        """Count one more group that needs the pulse."""
        with self._lock:
            self._holders_count += 1
        return self

    def release(self) -> None:
        """Count one group less; the last one stops the thread and says goodbye, so that nobody waits in vain."""
        if os.getpid() != self._pid:
            return  # a forked child shares the connection and must not speak on it
        with self._lock:
            self._holders_count -= 1
            if self._holders_count:
                return
        self._stopping.set()
        self._thread.join(_STOP_WAIT_S)
        if not self._thread.is_alive():
            with contextlib.suppress(PeerFailure):
                self._channel.put(self._key, _GOODBYE)

    def _beat(self) -> None:
        count = failures_count = 0
        while not self._stopping.wait(self._every_s):
            count += 1
            try:
                self._channel.put(self._key, b"%d" % count)
                failures_count = 0
            except PeerFailure:  # the store is gone: the next phase reports it, this thread only ends
                failures_count += 1
                if failures_count == _FAILURES_ALLOWED:
                    return


class Watch:
    """Watches the pulses of some ranks. For one thread."""

    def __init__(self, channel: Channel, ranks: Sequence[int], *, silence_s: float) -> None:
        self._channel = channel
        self._silence_s = silence_s
        self._every_s = min(_SLOWEST_BEAT_S, silence_s / _BEATS_PER_SILENCE)
        self._looked_s = time.monotonic() - self._every_s
        self._seen: dict[int, bytes | None] = dict.fromkeys(ranks)
        self._quiet_s: dict[int, float] = dict.fromkeys(ranks, 0.0)

    @property
    def every_s(self) -> float:
        return self._every_s

    def find_lost(self) -> dict[int, str]:
        """Return the ranks without a sign of life, with the reason; cheap when called often.

        Time in which nobody looked does not count against a rank beyond two intervals: a watcher that was
        itself suspended, together with its peers, declares nobody lost.
        """
        now_s = time.monotonic()
        elapsed_s = now_s - self._looked_s
        if elapsed_s < self._every_s:
            return {}
        self._looked_s = now_s
        lost: dict[int, str] = {}
        for rank, value in self._read().items():
            if value != self._seen[rank]:
                self._seen[rank] = value
                self._quiet_s[rank] = 0.0
            else:
                self._quiet_s[rank] += min(elapsed_s, 2 * self._every_s)
            if value == _GOODBYE:
                lost[rank] = "it closed its group or its process ended"
            elif self._quiet_s[rank] >= self._silence_s:
                lost[rank] = f"no sign of life for {self._silence_s:g} s, its process or node died"
        return lost

    def _read(self) -> dict[int, bytes | None]:
        keys = {rank: pulse_key(rank) for rank in self._seen}
        if not keys:
            return {}
        present = keys
        if not self._channel.has_all(list(keys.values())):  # some have not started yet
            present = {rank: key for rank, key in keys.items() if self._channel.has_all([key])}
        values = self._channel.get_each(list(present.values()))
        return {**dict.fromkeys(keys), **dict(zip(present, values, strict=True))}


def pulse_key(rank: int) -> str:
    """Return the key under which a rank counts."""
    return f"pulse/{rank}"
