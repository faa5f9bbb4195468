"""`ObjectUpload`: one large object sent in parts, straight from the memory of those who write it.

A thread of its own gives the parts to obstore in their order; obstore sends several at once. A block that is a whole
part and whose turn it is goes out of the caller's memory: `write_at` returns when obstore has let go of it, so
that the caller may reuse it, and so many parts are on their way as threads write. Everything else (blocks that are no
whole part, blocks ahead of their turn, the tail) is copied into at most WINDOW_PARTS part buffers.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
import weakref
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from shardkeep.errors import CheckpointError, NotFound, StorageError
from shardkeep.knobs import get_int, get_knob
from shardkeep.storage.coverage import Coverage
from shardkeep.storage.object_client import ObjectClient
from shardkeep.storage.retry import MAX_REMOTE_PAUSE_S

PART_BYTES: Final = 8 << 20
"""Parts of all but huge objects: above the 5 MiB that S3 and GCS demand, and the size of the blocks that come."""

MAX_PARTS: Final = 10_000
WINDOW_PARTS: Final = 4
GRACE_S: Final = 0.05
"""How long a block ahead of its turn waits before it is copied: its forerunner is mostly a moment behind."""

_ABORT_S: Final = 5.0

Part = npt.NDArray[np.uint8]


def plan_part_bytes(size_bytes: int) -> int:
    """Return the size of all parts but the last: a multiple of 8 MiB that needs no more parts than services take."""
    return PART_BYTES * max(1, -(-size_bytes // (PART_BYTES * MAX_PARTS)))


class _Stopped(Exception):
    """Ends obstore's pull, which makes it abort the upload; never leaves this module."""


class ObjectUpload:
    """Writes one object. Implements `ObjectWriter`; made by `ObjectStore.writer`.

    Nothing is visible before `finish`. An upload that dies with its process leaves parts that only the bucket's own
    rule for incomplete uploads removes.
    """

    def __init__(self, client: ObjectClient, key: str, size_bytes: int) -> None:
        self._client = client
        self._key = key
        self._size_bytes = size_bytes
        self._part_bytes = plan_part_bytes(size_bytes)
        self._count = -(-size_bytes // self._part_bytes)
        self._nonce = secrets.token_hex(16)
        self._changed = threading.Condition()  # its lock is re-entrant: parts are let go of anywhere
        self._coverage = Coverage(size_bytes, key=key)
        self._state: Literal["open", "finishing", "finished", "failed"] = "open"
        self._failure: Exception | None = None
        self._partial: dict[int, tuple[Part, int]] = {}
        self._ready: dict[int, Part] = {}
        self._whole: set[int] = set()
        self._front = 0
        self._owned_count = 0
        self._holds: dict[int, weakref.ref[Part]] = {}
        self._thread: threading.Thread | None = None

    def write_at(self, offset: int, block: memoryview) -> None:
        """Send a block, or keep it until its part is whole; see `ObjectWriter.write_at`."""
        view = block.cast("B")
        try:
            with self._changed:
                self._check_open()
                self._coverage.claim(offset, len(view))
            end = offset + len(view)
            if not len(view):
                return
            for number in range(offset // self._part_bytes, -(-end // self._part_bytes)):
                begin = number * self._part_bytes
                piece = view[max(begin, offset) - offset : min(begin + self._part_bytes, end) - offset]
                if len(piece) == self._part_bytes and self._count > 1 and self._take_turn(number):
                    self._hand_over(number, piece)
                else:
                    self._keep(number, max(offset - begin, 0), piece)
        except BaseException:
            self.abort()
            raise

    def finish(self) -> None:
        """Make the object visible and durable: the service has acknowledged it, and shows it in its full size."""
        try:
            with self._changed:
                self._check_open()
                self._coverage.check_whole()
            self._check_free()
            with self._changed:
                self._check_open()
                self._state = "finishing"
                self._changed.notify_all()
                thread = self._thread
            if thread is None:
                self._send_whole()
            else:
                thread.join()
            self._confirm()
            self._end()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Give up: whatever was sent is dropped by the service. Never raises; harmless after `finish`."""
        with self._changed:
            if self._state in ("finished", "failed"):
                return
            self._fail()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=_ABORT_S)  # the service is told to drop the parts; no longer than this for a dead one

    # Handing over

    def _take_turn(self, number: int) -> bool:
        """Wait until all parts before this one are whole; False when it should be copied into the window instead."""
        began_s = time.monotonic()
        with self._changed:
            while self._front != number and time.monotonic() - began_s < GRACE_S:
                self._changed.wait(GRACE_S)
                self._check_open()
            return self._front == number

    def _hand_over(self, number: int, piece: memoryview) -> None:
        """Give the caller's own memory to obstore; return when obstore has let go of it."""
        let_go = threading.Event()
        part = np.frombuffer(piece, dtype=np.uint8)
        hold = weakref.ref(part, lambda _: let_go.set())
        with self._changed:
            self._check_open()
            self._add(number, part)
        del part  # obstore has the only reference now, or nobody, when the upload has failed
        let_go.wait()
        del hold
        with self._changed:
            self._check_open()

    def _keep(self, number: int, at: int, piece: memoryview) -> None:
        """Copy a piece into its part's own buffer."""
        size_bytes = min(self._part_bytes, self._size_bytes - number * self._part_bytes)
        with self._changed:
            self._wait_for_room(number)
            if number not in self._partial:
                self._partial[number] = (self._allocate(size_bytes), 0)
            part = self._partial[number][0]
        part[at : at + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        with self._changed:
            self._check_open()
            filled = self._partial[number][1] + len(piece)
            self._partial[number] = (part, filled)
            if filled == size_bytes:
                del self._partial[number]
                self._add(number, part)

    def _wait_for_room(self, number: int) -> None:
        """Wait until a buffer may be made for a part. The part that is due gets one at any time: nothing can jam."""
        deadline_s = time.monotonic() + get_knob("RETRY_BUDGET_S")
        while not (number in self._partial or number == self._front or self._owned_count < WINDOW_PARTS):
            self._check_open()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._refuse(
                    f"part {number} waited in vain for part {self._front}: blocks may come {WINDOW_PARTS} parts of "
                    f"{self._part_bytes} bytes ahead of their turn, not more"
                )
            self._changed.wait(left_s)
        self._check_open()

    def _allocate(self, size_bytes: int) -> Part:
        part = np.empty(size_bytes, dtype=np.uint8)
        self._owned_count += 1
        ident = id(part)
        self._holds[ident] = weakref.ref(part, lambda _: self._release(ident))
        return part

    def _release(self, ident: int) -> None:
        with self._changed:
            self._holds.pop(ident, None)
            self._owned_count -= 1
            self._changed.notify_all()

    def _add(self, number: int, part: Part) -> None:
        """Queue a whole part. The lock is held."""
        self._ready[number] = part
        self._whole.add(number)
        while self._front in self._whole:
            self._whole.discard(self._front)
            self._front += 1
        if self._thread is None and self._count > 1:
            self._thread = threading.Thread(target=self._send_parts, name="shardkeep-upload", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # Sending

    def pull(self, number: int) -> Part | None:
        """Return a part for obstore, None after the last one; for `_Parts`, in the upload's own thread."""
        with self._changed:
            if number == self._count:
                # ORDER: the object becomes visible when the parts end, so they end with `finish`, not before.
                self._changed.wait_for(lambda: self._state != "open")
            else:
                self._changed.wait_for(lambda: self._state == "failed" or number in self._ready)
            if self._state == "failed":
                raise _Stopped
            return self._ready.pop(number, None)

    def _send_parts(self) -> None:
        """Run obstore's put; the body of the upload's own thread."""
        try:
            self._client.put_parts(
                self._key,
                _Parts(self),
                part_bytes=self._part_bytes,
                parallel=max(get_int("IO_THREADS"), 2),
                nonce=self._nonce,
            )
        except Exception as error:  # noqa: BLE001  # raised by whoever writes or finishes
            with self._changed:
                if self._state == "failed":
                    return  # it ends as told
                self._failure = error
                if self._state != "finishing":  # then `finish` looks first whether only the answer was lost
                    self._fail()

    def _send_whole(self) -> None:
        """Send an object of one part, again while that may help; its failure is judged by `_confirm`."""
        part = self._ready.pop(0, None)
        data: Any = b"" if part is None else part
        dice = random.Random(secrets.randbits(64))
        deadline_s = time.monotonic() + get_knob("RETRY_BUDGET_S")
        longest_s = get_knob("RETRY_BASE_S")
        while True:
            try:
                # ORDER: created, not replaced: of two writers that race for a key one gets AlreadyExists.
                self._client.put_whole(self._key, data, nonce=self._nonce)
                self._failure = None
                return
            except CheckpointError as error:
                self._failure = error
                pause_s = dice.uniform(0, longest_s)
                if not getattr(error, "retryable", False) or time.monotonic() + pause_s > deadline_s:
                    return
            time.sleep(pause_s)
            longest_s = min(2 * longest_s, MAX_REMOTE_PAUSE_S)

    def _check_free(self) -> None:
        """Look at the key once more: uploads in parts know no condition, and this one began long ago."""
        try:
            self._client.find_upload(self._key)
        except NotFound:
            return
        raise self._client.refuse_existing(self._key)

    def _confirm(self) -> None:
        """Check that the object that the service shows is ours and whole, also when its last answer was lost."""
        failure = self._failure
        try:
            size_bytes, nonce = self._client.find_upload(self._key)
        except NotFound:
            raise failure or self._refuse("the service acknowledged the object and does not show it") from None
        except CheckpointError as error:
            raise failure or error from None
        if nonce is not None and nonce != self._nonce:
            raise self._client.refuse_existing(self._key)
        if nonce is None and failure is not None:
            raise failure
        if size_bytes != self._size_bytes:
            raise self._refuse(f"expected {self._size_bytes} bytes, the service shows {size_bytes}")

    def _end(self) -> None:
        with self._changed:
            if self._state == "failed":
                raise self._refuse("the writer was aborted while it finished")
            self._state = "finished"

    def _fail(self) -> None:
        """End the upload. The lock is held."""
        self._state = "failed"
        self._partial.clear()
        self._ready.clear()
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._state == "open":
            return
        if self._failure is not None:
            raise self._failure
        how = "failed" if self._state == "failed" else "ended"
        raise self._refuse(f"the writer has {how} before", advice="begin the object again under another key")

    def _refuse(self, what: str, advice: str | None = None) -> StorageError:
        return StorageError(f"{self._client.where(self._key)}: {what}", retryable=False, key=self._key, advice=advice)


class _Parts:
    """The iterator that obstore pulls. It keeps no part: obstore holds the only reference while it sends one."""

    def __init__(self, upload: ObjectUpload) -> None:
        self._upload = upload
        self._number = 0

    def __iter__(self) -> _Parts:
        return self

    def __next__(self) -> Part:
        part = self._upload.pull(self._number)
        if part is None:
            raise StopIteration
        self._number += 1
        return part
