"""Try a place for checkpoints as a save would use it: objects of its own, written, read back and removed again."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from shardkeep.engine.diagnosis import Check, failed
from shardkeep.engine.hostmemory import HostMemory
from shardkeep.errors import AlreadyExists, CheckpointError, StorageError
from shardkeep.storage import survey
from shardkeep.storage.base import Store
from shardkeep.types import format_bytes

PROBE_BYTES: Final = 1 << 20
_SKEW_S: Final = 30.0

Step = tuple[str, Callable[[], Check | None]]


def probe_place(place: str, store: Store, folder: str | None) -> list[Check]:
    """Write, create exclusively, read, list and remove small objects; return what came of it.

    Nothing stays, folders included, unless the process is killed meanwhile; then a folder `doctor-...` does, which no
    run minds.

    Args:
        folder: the place's path, where it is one of this machine's.
    """
    missing = survey.list_missing(folder) if folder is not None else ()
    probe = _Probe(place, store, folder)
    try:
        return probe.go()
    finally:
        probe.clean()
        survey.remove_folders(missing)


class _Probe:
    def __init__(self, place: str, store: Store, folder: str | None) -> None:
        self._say = partial(Check, place=place)
        self._place = place
        self._store = store
        self._folder = folder
        self._name = f"doctor-{secrets.token_hex(8)}"
        self._small, self._large = f"{self._name}/small", f"{self._name}/large"
        self._data = secrets.token_bytes(64)

    def go(self) -> list[Check]:
        steps: list[Step] = [("write", self._write), ("exclusive create", self._create), ("read", self._read)]
        if self._folder is not None:
            steps += [("direct I/O", self._direct), ("clock", self._clock)]
        steps.append(("remove", self._remove))
        found: list[Check] = []
        for what, step in steps:
            try:
                check = step()
            except CheckpointError as error:
                # What comes after it would only say the same again.
                return [*found, failed(self._place, what, error)]
            except OSError as error:
                check = self._say(what=what, status="warn", found=f"could not be looked at: {error}")
            if check is not None:
                found.append(check)
        return found

    def clean(self) -> None:
        with contextlib.suppress(CheckpointError):
            self._store.delete([self._small, self._large])

    def _write(self) -> Check:
        begin_s = time.monotonic()
        self._store.put(self._small, self._data, if_absent=True)
        put_s = time.monotonic() - begin_s
        block = HostMemory(PROBE_BYTES).view()
        block[: len(self._data)] = self._data
        writer = self._store.writer(self._large, PROBE_BYTES)
        try:
            writer.write_at(0, block)
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        found = f"takes objects; a small one is durable after {1000 * put_s:.1f} ms"
        return self._say(what="write", status="ok", found=found)

    def _create(self) -> Check:
        say = partial(self._say, what="exclusive create")
        with contextlib.suppress(AlreadyExists):
            self._store.put(self._small, secrets.token_bytes(64), if_absent=True)
            return say(
                status="fail",
                found="a second create replaced the first: two starts could both take the run for theirs",
                advice="take another place for the root: one with atomic link(2), or conditional writes",
            )
        if self._store.capabilities.exclusive_create:
            return say(status="ok", found="of two creates of one name the second is refused")
        return say(
            status="warn",
            found="without conditional writes: by a protocol that a process stalled for a minute could break",
            advice="start a run once at a time; docs/guides/object-stores.md says which services need this",
        )

    def _read(self) -> Check | None:
        data = self._store.get(self._small, limit_bytes=1024)
        block = HostMemory(PROBE_BYTES).view()
        self._store.read_into(self._large, 0, block)
        if data != self._data or block[: len(self._data)] != self._data or any(block[-4096:]):
            raise StorageError("what was read is not what was written", advice="take another place", retryable=False)
        listed = [info.key for info in self._store.list_objects(f"{self._name}/")]
        if listed != [self._large, self._small]:
            raise StorageError(
                f"two objects were written, the list shows {len(listed)}",
                advice="take another place: a run is found by its lists",
                retryable=False,
            )
        return self._say(
            what="read", status="ok", found=f"{format_bytes(PROBE_BYTES)} read back as written, and listed"
        )

    def _direct(self) -> Check:
        assert self._folder is not None
        direct = survey.reads_direct(os.path.join(self._folder, self._large))
        found = (
            "works" if direct else "is not to be had here: files go through the page cache, as checked, just slower"
        )
        return self._say(what="direct I/O", status="ok", found=found)

    def _clock(self) -> Check:
        """Compare the clock that stamps files with this host's."""
        assert self._folder is not None
        skew_s = os.stat(os.path.join(self._folder, self._small)).st_mtime - time.time()
        say = partial(self._say, what="clock")
        if abs(skew_s) <= _SKEW_S:
            return say(status="ok", found="files are stamped with this host's time")
        return say(
            status="warn",
            found=f"files are stamped {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this host's "
            "clock; nothing is decided by it, but ages look wrong",
            advice="timedatectl status",
        )

    def _remove(self) -> Check:
        self._store.delete([self._small, self._large])
        left = self._store.list_objects(f"{self._name}/")
        if left:
            raise StorageError(f"{len(left)} objects are still listed after they were removed", retryable=False)
        return self._say(what="remove", status="ok", found="what was written for this check is gone again")
