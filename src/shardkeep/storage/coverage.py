"""Which bytes of an object were written: claims before the write, a proof of completeness at its end."""

from __future__ import annotations

from bisect import bisect_right

from shardkeep.errors import StorageError


class Coverage:
    """The written ranges of `[0, size)`, merged where they touch. Not thread-safe: callers hold a lock.

    Blocks that arrive roughly in order keep it a few entries long.
    """

    __slots__ = ("_ends", "_key", "_size", "_starts")

    def __init__(self, size_bytes: int, *, key: str) -> None:
        self._size = size_bytes
        self._key = key
        self._starts: list[int] = []
        self._ends: list[int] = []

    def claim(self, offset: int, length: int) -> None:
        """Take `[offset, offset + length)`.

        Raises:
            StorageError: not retryable; the range leaves the object or was taken before.
        """
        end = offset + length
        if offset < 0 or end > self._size:
            raise self._refuse(f"block {offset}..{end} lies outside of its {self._size} bytes")
        if length == 0:
            return
        at = bisect_right(self._starts, offset)
        if at > 0 and self._ends[at - 1] > offset:
            raise self._refuse(f"block {offset}..{end} overlaps {self._starts[at - 1]}..{self._ends[at - 1]}")
        if at < len(self._starts) and self._starts[at] < end:
            raise self._refuse(f"block {offset}..{end} overlaps {self._starts[at]}..{self._ends[at]}")
        self._insert(at, offset, end)

    def check_whole(self) -> None:
        """Raise StorageError unless every byte of `[0, size)` was claimed; it names the first hole."""
        if self._size == 0 or (self._starts == [0] and self._ends == [self._size]):
            return
        hole = 0 if not self._starts or self._starts[0] > 0 else self._ends[0]
        hole_end = next((start for start in self._starts if start > hole), self._size)
        raise self._refuse(f"bytes {hole}..{hole_end} of {self._size} were never written")

    def _insert(self, at: int, offset: int, end: int) -> None:
        joins_left = at > 0 and self._ends[at - 1] == offset
        joins_right = at < len(self._starts) and self._starts[at] == end
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._starts[at] = offset
        else:
            self._starts.insert(at, offset)
            self._ends.insert(at, end)

    def _refuse(self, what: str) -> StorageError:
        return StorageError(f"{self._key}: {what}", retryable=False, key=self._key)
