from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from shardkeep import knobs
from shardkeep.errors import (
    AlreadyExists,
    CheckpointError,
    Corrupt,
    Denied,
    NotFound,
    OutOfSpace,
    StorageError,
    UsageError,
)
from shardkeep.events import Event
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.oserrors import map_os_error, mapped
from shardkeep.storage.posix import PosixStore
from shardkeep.storage.resolve import open_store
from shardkeep.storage.retry import MAX_PAUSE_S, RetryingStore
from shardkeep.testing.faults import Fault, FaultStore


class TestRetryingStore:
    @pytest.mark.parametrize("kind", ["io_error", "lost_answer"])
    def test_transient_trouble_is_waited_out_with_growing_pauses(self, kind: str) -> None:
        pauses: list[float] = []
        faulty = FaultStore(MemoryStore(), [Fault(kind=kind, times=4)])  # type: ignore[arg-type]
        RetryingStore(faulty, sleep=pauses.append).put("a", b"x", if_absent=True)
        assert faulty.calls == [("put", "a")] * 5
        assert len(pauses) == 4
        for number, pause in enumerate(pauses):
            assert 0.1 * 2**number <= pause <= 0.2 * 2**number

    def test_it_gives_up_with_the_last_error(self) -> None:
        faulty = FaultStore(MemoryStore(), [Fault(kind="io_error", times=None)])
        with knobs.override(RETRIES=2), pytest.raises(StorageError, match="at call 3"):
            RetryingStore(faulty, sleep=lambda _: None).head("a")

    def test_pauses_are_bounded(self) -> None:
        pauses: list[float] = []
        store = RetryingStore(FaultStore(MemoryStore(), [Fault(kind="io_error", times=20)]), sleep=pauses.append)
        with knobs.override(RETRIES=20):
            store.list_objects("")
        assert max(pauses) <= MAX_PAUSE_S

    def test_lasting_errors_pass_at_once(self) -> None:
        inner = MemoryStore()
        inner.put("a", b"xx")
        faulty = FaultStore(inner, [Fault(kind="no_space", when=lambda call: call.key == "full")])
        store = RetryingStore(faulty, sleep=lambda _: pytest.fail("slept"))
        for error, call in (
            (NotFound, lambda: store.head("none")),
            (Corrupt, lambda: store.get("a", limit_bytes=1)),
            (OutOfSpace, lambda: store.put("full", b"")),
            (AlreadyExists, lambda: store.put("a", b"y", if_absent=True)),
        ):
            with pytest.raises(error):
                call()
        assert len(faulty.calls) == 4

    def test_a_writer_is_never_retried(self) -> None:
        for verb in ("write_at", "finish"):
            faulty = FaultStore(
                MemoryStore(), [Fault(kind="io_error", when=lambda call, verb=verb: call.verb == verb)]
            )
            writer = RetryingStore(faulty, sleep=lambda _: pytest.fail("slept")).writer("a", 1)
            if verb == "finish":
                writer.write_at(0, memoryview(b"x"))
            with pytest.raises(StorageError, match="I/O error"):
                writer.finish() if verb == "finish" else writer.write_at(0, memoryview(b"x"))

    def test_repeats_are_told_and_the_global_random_state_stays(self) -> None:
        events: list[Event] = []

        class Sink:
            def emit(self, event: Event) -> None:
                events.append(event)

        before = random.getstate()
        faulty = FaultStore(MemoryStore(), [Fault(kind="io_error", times=2)])
        RetryingStore(faulty, events=Sink(), sleep=lambda _: None).put("a/b", b"")
        assert random.getstate() == before
        assert [(event.name, event.fields["attempt_count"]) for event in events] == [
            ("storage.retried", 1),
            ("storage.retried", 2),
        ]
        assert "put a/b" in events[0].text

    def test_delete_of_an_iterator_is_repeated_whole(self) -> None:
        inner = MemoryStore()
        for key in "abc":
            inner.put(key, b"")
        faulty = FaultStore(inner, [Fault(kind="io_error", at_call=2)])
        RetryingStore(faulty, sleep=lambda _: None).delete(iter("abc"))
        assert inner.list_objects("") == []


class TestOpenStore:
    def test_paths_and_file_urls_name_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        for url, path in (
            ("run", tmp_path / "run"),
            (Path("run"), tmp_path / "run"),
            (str(tmp_path / "a:b"), tmp_path / "a:b"),
            (f"file://{tmp_path}/a%20b%3F", tmp_path / "a b?"),
            (f"FILE://localhost{tmp_path}/x/", tmp_path / "x"),
            ("~/run", tmp_path / "home/run"),
        ):
            store = open_store(url)
            assert isinstance(store, PosixStore)
            assert store.url == str(path)
            assert open_store(store.url).url == store.url
            assert not path.exists()

    @pytest.mark.parametrize(
        "url",
        ["memory://x", "ftp://host/x", Path("hdfs://bucket/run"), "", "a\0b", "file://host/run",
         "file://relative", "file:///a?b", "file:///a#b", b"bytes"],
    )  # fmt: skip
    def test_others_are_refused_by_name(self, url: str | Path) -> None:
        with pytest.raises(UsageError, match="file:///") as caught:
            open_store(url)
        assert caught.value.advice


class TestOsErrors:
    @pytest.mark.parametrize(
        ("code", "kind", "retryable"),
        [
            (errno.ENOSPC, OutOfSpace, False),
            (errno.EDQUOT, OutOfSpace, False),
            (errno.EACCES, Denied, False),
            (errno.EPERM, Denied, False),
            (errno.EROFS, Denied, False),
            (errno.ELOOP, Denied, False),
            (errno.EIO, StorageError, True),
            (errno.ESTALE, StorageError, True),
            (errno.EINTR, StorageError, True),
            (errno.ETIMEDOUT, StorageError, True),
            (errno.EAGAIN, StorageError, True),
            (errno.EMFILE, StorageError, True),
            (errno.ENAMETOOLONG, StorageError, False),
            (errno.EFBIG, StorageError, False),
            (errno.EINVAL, StorageError, False),
            (errno.ENOENT, StorageError, True),
        ],
    )
    def test_every_code_has_its_class_path_and_advice(
        self, code: int, kind: type[StorageError], retryable: bool
    ) -> None:
        error = map_os_error(OSError(code, os.strerror(code)), "write", "/run/g/a", key="g/a")
        assert type(error) is kind
        assert isinstance(error, StorageError)
        assert error.retryable is retryable
        assert error.key == "g/a"
        for part in ("cannot write /run/g/a", errno.errorcode[code], os.strerror(code)):
            assert part in str(error)
        assert retryable or error.advice

    def test_missing_is_not_found_only_where_that_is_an_answer(self) -> None:
        for code in (errno.ENOENT, errno.ENOTDIR):
            assert isinstance(map_os_error(OSError(code, ""), "read", "/a", key="a", missing_ok=True), NotFound)
            assert not isinstance(map_os_error(OSError(code, ""), "read", "/a", key="a"), NotFound)

    def test_our_own_errors_pass_unchanged(self) -> None:
        for error in (NotFound("x"), Corrupt("y"), StorageError("z")):
            with pytest.raises(CheckpointError) as caught, mapped("read", "/a", key="a"):
                raise error
            assert caught.value is error
