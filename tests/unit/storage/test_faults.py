"""The tools of the tests are tested too: faults that do not strike prove nothing."""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path

import pytest

from shardkeep.errors import NotFound, OutOfSpace, StorageError, UsageError
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.posix import PosixStore
from shardkeep.testing.contract_support import make_bytes, read_object, write_object
from shardkeep.testing.faults import Fault, FaultStore
from shardkeep.testing.lossy import PAGE_BYTES, LossyStore


class TestFaultStore:
    def test_every_call_is_counted_and_recorded(self) -> None:
        store = FaultStore(MemoryStore())
        store.put("a", b"1")
        write_object(store, "w", bytes(10), 5)
        store.get("a", limit_bytes=1)
        read_object(store, "w", 2, 3)
        store.head("a")
        store.list_objects("")
        store.list_folders("")
        store.writer("x", 1).abort()
        store.delete(["a", "w"])
        verbs = "put writer write_at write_at finish get read_into head list_objects list_folders writer abort"
        assert [verb for verb, _ in store.calls] == [*verbs.split(), "delete", "delete"]
        assert [call.number for call in store.log] == list(range(1, 15))
        assert [(call.offset, call.length) for call in store.log if call.verb == "write_at"] == [(0, 5), (5, 5)]

    def test_errors_strike_instead_of_the_call_and_as_often_as_planned(self) -> None:
        inner = MemoryStore()
        store = FaultStore(inner, [Fault(kind="no_space", at_call=1), Fault(kind="io_error", times=2)])
        with pytest.raises(OutOfSpace):
            store.put("a", b"")
        for _ in range(2):
            with pytest.raises(StorageError) as caught:
                store.put("a", b"")
            assert caught.value.retryable
        assert inner.list_objects("") == []
        store.put("a", b"")

    def test_a_lost_answer_comes_after_the_work(self) -> None:
        inner = MemoryStore()
        with pytest.raises(StorageError):
            FaultStore(inner, [Fault(kind="lost_answer")]).put("a", b"x")
        assert inner.get("a", limit_bytes=1) == b"x"

    def test_bit_flips_change_one_bit_of_what_is_read_and_nothing_stored(self) -> None:
        data = make_bytes(1000)
        inner = MemoryStore()
        inner.put("a", data)
        store = FaultStore(inner, [Fault(kind="bit_flip", times=2)])
        for found in (store.get("a", limit_bytes=1000), read_object(store, "a", 0, 1000)):
            assert sum((x ^ y).bit_count() for x, y in zip(found, data, strict=True)) == 1
        assert store.get("a", limit_bytes=1000) == data

    def test_delays_add_to_other_faults(self) -> None:
        store = FaultStore(MemoryStore(), [Fault(kind="delay", delay_s=0.05), Fault(kind="no_space")])
        before_s = time.monotonic()
        with pytest.raises(OutOfSpace):
            store.put("a", b"")
        assert time.monotonic() - before_s >= 0.05

    def test_abort_never_raises(self) -> None:
        store = FaultStore(MemoryStore(), [Fault(kind="io_error", when=lambda call: call.verb == "abort")])
        store.writer("a", 1).abort()

    def test_wrong_plans_are_refused(self) -> None:
        with pytest.raises(UsageError):
            Fault(kind="typo")  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            Fault(kind="kill", at_call=0)

    @pytest.mark.parametrize(("kind", "half_written"), [("kill", False), ("torn", True)])
    def test_kill_ends_the_process_and_torn_writes_half_of_the_block_first(
        self, tmp_path: Path, kind: str, half_written: bool
    ) -> None:
        process = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(tmp_path, kind))
        process.start()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        assert (tmp_path / "w").read_bytes() == (b"x" * 4096 if half_written else bytes(4096)) + bytes(4096)


def _write_and_die(root: Path, kind: str) -> None:
    store = FaultStore(PosixStore(root), [Fault(kind=kind, when=lambda call: call.verb == "write_at")])  # type: ignore[arg-type]
    store.writer("w", 8192).write_at(0, memoryview(b"x" * 8192))


class TestLossyStore:
    def test_finished_and_put_objects_survive_and_unfinished_ones_do_not(self) -> None:
        outcomes = set()
        for seed in range(30):
            store = LossyStore(seed=seed)
            data = make_bytes(4 * PAGE_BYTES)
            store.put("put", b"x")
            write_object(store, "finished", data)
            writer = store.writer("unfinished", len(data))
            writer.write_at(0, memoryview(data))
            assert store.get("unfinished", limit_bytes=len(data)) == data, "visible before it is durable"
            left = store.power_cut()
            assert left.get("put", limit_bytes=1) == b"x"
            assert left.get("finished", limit_bytes=len(data)) == data
            try:
                torn = left.get("unfinished", limit_bytes=len(data))
                assert len(torn) == len(data)
                outcomes.add("whole" if torn == data else "torn")
            except NotFound:
                outcomes.add("gone")
            for call in (
                writer.finish,
                lambda store=store: store.head("put"),
                lambda store=store: store.put("a", b""),
            ):
                with pytest.raises(StorageError):
                    call()
            writer.abort()
        assert {"gone", "torn"} <= outcomes

    def test_a_fault_can_cut_the_power_and_the_machine_starts_again(self) -> None:
        lossy = LossyStore(seed=3)
        store = FaultStore(lossy, [Fault(kind="kill", when=lambda call: call.verb == "finish")], die=lossy.power_cut)
        with pytest.raises(StorageError, match="machine is off"):
            write_object(store, "w", bytes(100))
        again = LossyStore(lossy.power_cut())
        again.delete(["w"])
        write_object(again, "w", b"new")
        assert again.get("w", limit_bytes=3) == b"new"


class TestMemoryStore:
    def test_nothing_is_visible_before_finish(self) -> None:
        store = MemoryStore()
        writer = store.writer("a/b", 1)
        writer.write_at(0, memoryview(b"x"))
        assert store.list_objects("") == store.list_folders("") == []
        writer.finish()
        assert store.list_folders("") == ["a"]

    def test_offsets_that_are_no_multiples_are_refused(self) -> None:
        writer = MemoryStore(write_offsets_multiple_bytes=4).writer("a", 8)
        with pytest.raises(StorageError, match="multiple of 4"):
            writer.write_at(3, memoryview(b"x"))

    def test_capacity_counts_writers_and_gives_room_back(self) -> None:
        store = MemoryStore(capacity_bytes=10)
        writer = store.writer("a", 8)
        for begin in (lambda: store.writer("b", 3), lambda: store.put("b", b"123")):
            with pytest.raises(OutOfSpace):
                begin()
        writer.abort()
        store.put("b", b"1234567890")
        store.put("b", b"0987654321")
        store.delete(["b"])
        write_object(store, "a", bytes(10))

    def test_of_two_writers_of_one_key_the_first_to_finish_wins(self) -> None:
        store = MemoryStore(capacity_bytes=2)
        writers = [store.writer("a", 1) for _ in range(2)]
        for number, writer in enumerate(writers):
            writer.write_at(0, memoryview(b"%d" % number))
        writers[0].finish()
        with pytest.raises(StorageError):
            writers[1].finish()
        assert store.get("a", limit_bytes=1) == b"0"
        store.put("b", b"x")
