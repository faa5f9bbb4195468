"""Every store passes the contract that is shipped to others."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkeep.engine.tiers import Place, TieredStore
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.posix import PosixStore
from shardkeep.storage.retry import RetryingStore
from shardkeep.testing.faults import Fault, FaultStore
from shardkeep.testing.lossy import LossyStore
from shardkeep.testing.store_contract import StoreContract


class TestPosixStoreOnDisk(StoreContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "made" / "at first write"

    def make_store(self) -> Store:
        return PosixStore(self.root)

    def reopen(self, store: Store) -> Store:
        return PosixStore(store.url)

    @pytest.fixture(autouse=True)
    def _nothing_left_over(self, _root: None) -> Iterator[None]:
        """No test leaves a descriptor open or a temporary file behind."""
        before = _count_descriptors()
        yield
        assert _count_descriptors() == before
        assert [str(path) for path in self.root.rglob(".*")] == []


class TestPosixStoreOnTmpfs(TestPosixStoreOnDisk):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> Iterator[None]:
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("there is no /dev/shm to write to")
        top = tempfile.mkdtemp(dir="/dev/shm", prefix="shardkeep-test-")
        self.root = Path(top) / "run"
        yield
        shutil.rmtree(top)


class TestMemoryStore(StoreContract):
    def make_store(self) -> Store:
        return MemoryStore()


class TestMemoryStoreOfEqualParts(StoreContract):
    def make_store(self) -> Store:
        return MemoryStore(write_offsets_multiple_bytes=4096)


class TestLossyStore(StoreContract):
    def make_store(self) -> Store:
        return LossyStore()


class TestTieredStore(TestPosixStoreOnDisk):
    """Writes are the root's; a tier that holds nothing of the run, and one that is down, change no answer."""

    def make_store(self) -> Store:
        down = Fault(kind="io_error", times=None)
        tiers = [MemoryStore(name="empty"), FaultStore(MemoryStore(name="down"), [down])]
        return TieredStore([Place(store=tier, shared=False) for tier in tiers], PosixStore(self.root))


class TestRetryingStore(StoreContract):
    """Calls that may be repeated fail again and again, before the work or after it."""

    def make_store(self) -> Store:
        counter = itertools.count()
        repeatable = {"put", "writer", "get", "read_into", "head", "list_objects", "list_folders", "delete"}
        harmless = repeatable - {"writer"}  # a writer whose answer was lost holds the name
        plan = [
            Fault(kind="io_error", when=lambda call: call.verb in repeatable and next(counter) % 13 == 0, times=None),
            Fault(
                kind="lost_answer", when=lambda call: call.verb in harmless and next(counter) % 13 == 0, times=None
            ),
        ]
        return RetryingStore(FaultStore(MemoryStore(), plan), sleep=lambda _: None)


def _count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
