"""What `PosixStore` asks of the kernel, in which order, and what is left when it fails or kills in between.

The first half proves that the tests can see: drop one fsync from the store and one of them fails.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardkeep.errors import AlreadyExists, NotFound
from shardkeep.storage.posix import PosixStore
from tests.crash.strace import Outcome, run_traced

_PRELUDE = """
import mmap, os, sys, threading, time
from shardkeep.errors import CheckpointError
from shardkeep.storage.posix import PosixStore
store = PosixStore(sys.argv[1])
def attempt(work, *arguments, **options):
    try:
        return work(*arguments, **options)
    except CheckpointError as error:
        print(type(error).__name__, getattr(error, "retryable", None), error, flush=True)
        raise SystemExit(3)
block = memoryview(mmap.mmap(-1, 1 << 20))
block[:] = bytes(range(256)) * 4096
"""
_PUT_EXCLUSIVE = "attempt(store.put, 'g/a', b'new bytes', if_absent=True)"
_PUT_REPLACING = "attempt(store.put, 'g/a', b'new bytes')"
_WRITE = """
writer = attempt(store.writer, 'g/w', 20000)
assert os.stat(sys.argv[1] + '/g/w').st_size == 20000
attempt(writer.write_at, 0, block[:4096])
attempt(writer.write_at, 4096, block[4096:20000])
attempt(writer.finish)
"""
_WRITTEN = (bytes(range(256)) * 4096)[:20000]
_CLONE = "attempt(store.clone, 'g/w', 'h/w')"


def _trace(root: Path, code: str, *inject: str) -> Outcome:
    return run_traced(_PRELUDE + code, root, inject=inject)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


class TestOrder:
    def test_put_syncs_the_bytes_before_the_name_and_the_name_before_it_returns(self, root: Path) -> None:
        for code, publish in ((_PUT_EXCLUSIVE, "linkat"), (_PUT_REPLACING, "renameat")):
            done = _trace(root, code)
            assert done.status == 0, done.output
            written = done.find("pwrite64", "/g/.tmp-")
            synced = done.find("fsync", "/g/.tmp-", after=written)
            published = done.find(publish, '"a"', after=synced)
            done.find("fsync", f"{root}/g>", after=published)

    def test_a_clone_makes_its_name_durable_before_it_returns_and_writes_nothing(self, root: Path) -> None:
        PosixStore(root).put("g/w", b"bytes")
        done = _trace(root, _CLONE)
        assert done.status == 0, done.output
        made = done.find("fsync", f"{root}>", after=done.find("mkdirat", '"h"'))
        done.find("fsync", f"{root}/h>", after=done.find("linkat", '"w"', after=made))
        assert not [call for call in done.calls if call.name in ("pwrite64", "fallocate")]

    def test_new_folders_are_durable_before_anything_in_them(self, root: Path) -> None:
        for name, code in (("put", _PUT_EXCLUSIVE), ("writer", _WRITE)):
            done = _trace(root / name, code)
            made_root = done.find("mkdirat", f'"{name}"')
            synced_above = done.find("fsync", f"{root}>", after=made_root)
            made = done.find("mkdirat", '"g"', after=synced_above)
            synced = done.find("fsync", f"{root / name}>", after=made)
            assert synced < done.find("pwrite64")

    def test_a_folder_that_a_dead_process_made_is_made_durable_too(self, root: Path) -> None:
        (root / "g").mkdir(parents=True)
        done = _trace(root, _PUT_EXCLUSIVE)
        above = done.find("fsync", f"{root.parent}>")
        done.find("pwrite64", after=done.find("fsync", f"{root}>", after=above))

    def test_a_known_folder_is_not_synced_again(self, root: Path) -> None:
        done = _trace(root, f"{_PUT_EXCLUSIVE}\nstore.put('g/b', b'')")
        assert sum(call.name == "fsync" and f"{root}>" in call.arguments for call in done.calls) == 1

    def test_finish_syncs_the_bytes_then_the_folder(self, root: Path) -> None:
        done = _trace(root, _WRITE)
        assert done.status == 0, done.output
        reserved = done.find("fallocate", "/g/w>", "20000")
        last_write = done.find("pwrite64", "/g/w>", ", 16384", after=reserved)
        synced = done.find("fsync", "/g/w>", after=last_write)
        done.find("fsync", f"{root}/g>", after=synced)
        assert (root / "g/w").read_bytes() == _WRITTEN

    def test_identical_bytes_are_made_durable_before_they_count_as_ours(self, root: Path) -> None:
        PosixStore(root).put("g/a", b"new bytes")
        done = _trace(root, _PUT_EXCLUSIVE)
        refused = done.find("linkat")
        assert done.calls[refused].result == "-1"
        done.find("fsync", f"{root}/g>", after=done.find("fsync", f"{root}/g/a>", after=refused))

    def test_delete_is_durable_key_by_key(self, root: Path) -> None:
        store = PosixStore(root)
        for key in ("g/commit.json", "g/shard"):
            store.put(key, b"x")
        done = _trace(root, "store.delete(['g/commit.json', 'g/shard'])")
        record = done.find("unlinkat", '"commit.json"')
        synced = done.find("fsync", f"{root}/g>", after=record)
        shard = done.find("unlinkat", '"shard"', after=synced)
        synced = done.find("fsync", f"{root}/g>", after=shard)
        done.find("fsync", f"{root}>", after=done.find("unlinkat", '"g"', "AT_REMOVEDIR", after=synced))


class TestFailures:
    @pytest.mark.parametrize(("code", "before"), [(_PUT_EXCLUSIVE, None), (_PUT_REPLACING, b"old")])
    def test_put_whose_fsync_fails_leaves_what_was_there(self, root: Path, code: str, before: bytes | None) -> None:
        store = PosixStore(root)
        store.put("g/other", b"")
        if before is not None:
            store.put("g/a", before)
        # The first two fsyncs are those of folders that this process has not seen yet.
        done = _trace(root, code, "fsync:error=EIO:when=3")
        assert (done.status, done.output.split()[:2]) == (3, ["StorageError", "True"])
        assert f"{root}/g/a" in done.output
        assert _names(root) == (["other"] if before is None else ["a", "other"])
        if before is not None:
            assert store.get("g/a", limit_bytes=9) == before

    def test_put_whose_folder_cannot_be_synced_is_not_to_be_retried(self, root: Path) -> None:
        PosixStore(root).put("g/other", b"")
        for code in (_PUT_EXCLUSIVE, _PUT_REPLACING):
            done = _trace(root, code, "fsync:error=EIO:when=4")
            assert (done.status, done.output.split()[:2]) == (3, ["StorageError", "False"])
            assert PosixStore(root).get("g/a", limit_bytes=9) == b"new bytes"
            PosixStore(root).delete(["g/a"])

    @pytest.mark.parametrize(("when", "retryable"), [(3, "True"), (4, "False")])
    def test_finish_whose_fsync_fails_abandons_the_file(self, root: Path, when: int, retryable: str) -> None:
        PosixStore(root).put("g/other", b"")
        done = _trace(root, _WRITE, f"fsync:error=EIO:when={when}")
        assert (done.status, done.output.split()[:2]) == (3, ["StorageError", retryable])
        assert _names(root) == ["other"]
        assert sum(call.name == "fsync" and "/g/w>" in call.arguments for call in done.calls) == 1

    @pytest.mark.parametrize(
        ("rule", "error"),
        [
            ("fallocate:error=ENOSPC:when=1", "OutOfSpace"),
            ("fallocate:error=EDQUOT:when=1", "OutOfSpace"),
            ("pwrite64:error=ENOSPC:when=1", "OutOfSpace"),
            ("pwrite64:error=EDQUOT:when=2", "OutOfSpace"),
            ("pwrite64:error=EIO:when=2", "StorageError"),
            ("pwrite64:retval=0:when=2+", "StorageError"),
            ("fsync:error=ENOSPC:when=3", "OutOfSpace"),
            ("fsync:error=EROFS:when=3", "Denied"),
        ],
    )
    def test_writer_that_meets_an_error_raises_it_and_removes_the_file(
        self, root: Path, rule: str, error: str
    ) -> None:
        PosixStore(root).put("g/other", b"")
        done = _trace(root, _WRITE, rule)
        assert (done.status, done.output.split()[:1]) == (3, [error])
        assert f"{root}/g/w" in done.output
        assert _names(root) == ["other"]

    @pytest.mark.parametrize(
        "rule",
        [
            "fallocate:error=EOPNOTSUPP:when=1",
            "fallocate:error=EINTR:when=1..5",
            "pwrite64:error=EINVAL:when=1",
            "pwrite64:error=EINVAL:when=2",
            "pwrite64:error=EINTR:when=1..2",
            "fsync:error=EINVAL:when=1",
            "fsync:error=EINVAL:when=2",
            "fsync:error=EINVAL:when=4",
        ],
    )
    def test_writer_goes_on_where_the_file_system_can_do_less(self, root: Path, rule: str) -> None:
        (root / "g").mkdir(parents=True)
        done = _trace(root, _WRITE, rule)
        assert done.status == 0, done.output
        assert any("INJECTED" in call.arguments or call.result == "-1" for call in done.calls)
        assert (root / "g/w").read_bytes() == _WRITTEN

    @pytest.mark.parametrize("short_bytes", [512, 4096, 4097])
    def test_short_writes_go_on_where_they_stopped(self, root: Path, short_bytes: int) -> None:
        # The kernel is not asked to write what it claims to have written; what counts is where the next write begins.
        done = _trace(root, _WRITE, f"pwrite64:retval={short_bytes}:when=2")
        assert done.status == 0, done.output
        done.find("pwrite64", f", {4096 + short_bytes}", after=done.find("pwrite64", ", 4096"))
        assert (root / "g/w").read_bytes()[4096 + short_bytes :] == _WRITTEN[4096 + short_bytes :]

    @pytest.mark.parametrize(
        ("rule", "error", "retryable"),
        [
            ("linkat:error=EMLINK", "StorageError", "False"),
            ("linkat:error=EXDEV", "StorageError", "False"),
            ("linkat:error=EOPNOTSUPP", "StorageError", "False"),
            ("linkat:error=EPERM", "Denied", "False"),
            ("linkat:error=ENOSPC", "OutOfSpace", "False"),
            ("linkat:error=EIO", "StorageError", "True"),
            ("linkat:error=ENOENT", "NotFound", "None"),
            ("fsync:error=EIO:when=3+", "StorageError", "False"),
        ],
    )
    def test_a_clone_that_fails_says_whether_to_try_again(
        self, root: Path, rule: str, error: str, retryable: str
    ) -> None:
        PosixStore(root).put("g/w", b"bytes")
        done = _trace(root, _CLONE, rule)
        assert (done.status, done.output.split()[:2]) == (3, [error, retryable])
        assert PosixStore(root).get("g/w", limit_bytes=9) == b"bytes"

    @pytest.mark.parametrize("error", ["EPERM", "EOPNOTSUPP", "ENOSYS"])
    def test_exclusive_put_without_hard_links(self, root: Path, error: str) -> None:
        rule = f"linkat:error={error}"
        assert _trace(root, _PUT_EXCLUSIVE, rule).status == 0
        assert _trace(root, _PUT_EXCLUSIVE, rule).status == 0, "identical bytes"
        done = _trace(root, "attempt(store.put, 'g/a', b'other', if_absent=True)", rule)
        assert (done.status, done.output.split()[0]) == (3, "AlreadyExists")
        assert PosixStore(root).get("g/a", limit_bytes=9) == b"new bytes"
        assert _names(root) == ["a"]

    def test_exclusive_put_without_hard_links_leaves_no_torn_object_on_a_full_disk(self, root: Path) -> None:
        done = _trace(root, _PUT_EXCLUSIVE, "linkat:error=EPERM", "pwrite64:error=ENOSPC:when=2")
        assert (done.status, done.output.split()[0]) == (3, "OutOfSpace")
        assert _names(root) == []

    def test_abort_leaves_descriptors_to_the_thread_that_is_writing(self, root: Path) -> None:
        # Closed too early, a descriptor's number goes to the next file opened, and the late write into that file.
        code = """
writer = store.writer('g/w', 8192)
thread = threading.Thread(target=writer.write_at, args=(0, block[:8192]))
thread.start()
time.sleep(0.2)
writer.abort()
others = [os.open(f'{sys.argv[1]}/{number}', os.O_RDWR | os.O_CREAT) for number in range(4)]
thread.join()
assert [os.fstat(fd).st_size for fd in others] == [0] * 4
assert len(os.listdir('/proc/self/fd')) == 3 + 4 + 1, 'closed by the thread'
"""
        done = _trace(root, code, "pwrite64:delay_enter=800000:when=1")
        assert (done.status, done.output) == (0, "")
        assert _names(root) == []

    def test_delete_that_fails_says_so(self, root: Path) -> None:
        PosixStore(root).put("g/a", b"")
        done = _trace(root, "attempt(store.delete, ['g/a'])", "unlinkat:error=EACCES:when=1")
        assert (done.status, done.output.split()[0]) == (3, "Denied")
        done = _trace(root, "attempt(store.delete, ['g/a'])", "fsync:error=EIO:when=1")
        assert (done.status, done.output.split()[:2]) == (3, ["StorageError", "False"])


class TestKills:
    """SIGKILL at every watched call in turn: what is there afterwards is whole, and the work can be done again."""

    @pytest.mark.parametrize(
        ("code", "before"), [(_PUT_EXCLUSIVE, None), pytest.param(_PUT_REPLACING, b"old", marks=pytest.mark.slow)]
    )
    def test_put_is_all_or_nothing(self, root: Path, code: str, before: bytes | None) -> None:
        kills = 0
        for call in _every_call(root / "count", code):
            place = root / str(kills)
            store = PosixStore(place)
            if before is not None:
                store.put("g/a", before)
            done = _trace(place, code, f"{call[0]}:signal=KILL:when={call[1]}")
            if done.status == 0:  # a folder was there already: fewer calls than counted
                continue
            kills += 1
            assert _get(store, "g/a") in (before, b"new bytes"), call
            assert [info.key for info in store.list_objects("")] in ([], ["g/a"])
            store.put("g/a", b"new bytes", if_absent=_get(store, "g/a") != before)
            assert store.get("g/a", limit_bytes=9) == b"new bytes"
            store.delete(["g/a"])
        assert kills >= 6

    def test_kill_at_link_leaves_a_hidden_file_that_is_swept_when_it_is_old(self, root: Path) -> None:
        assert _trace(root, _PUT_EXCLUSIVE, "linkat:signal=KILL:when=1").status == -9
        store = PosixStore(root)
        assert [name[:5] for name in _names(root)] == [".tmp-"]
        assert store.list_objects("") == []
        with pytest.raises(NotFound):
            store.head("g/a")
        store.put("g/a", b"winner", if_absent=True)
        with pytest.raises(AlreadyExists):
            store.put("g/a", b"new bytes", if_absent=True)
        store.delete(["g/a"])
        assert [name[:5] for name in _names(root)] == [".tmp-"], "young: its process may live elsewhere"
        os.utime(root / "g" / _names(root)[0], (0, 0))
        store.delete(["g/a"])
        assert list(root.iterdir()) == []

    @pytest.mark.slow
    def test_killed_writer_leaves_an_object_that_can_be_deleted(self, root: Path) -> None:
        kills = 0
        for call in _every_call(root / "count", _WRITE):
            place = root / str(kills)
            assert _trace(place, _WRITE, f"{call[0]}:signal=KILL:when={call[1]}").status == -9
            kills += 1
            store = PosixStore(place)
            assert {info.key for info in store.list_objects("")} <= {"g/w"}
            store.delete(["g/w"])
            writer = store.writer("g/w", 3)
            writer.write_at(0, memoryview(b"new"))
            writer.finish()
            assert store.get("g/w", limit_bytes=3) == b"new"
        assert kills >= 6

    @pytest.mark.slow
    def test_killed_delete_never_takes_a_later_key_first(self, root: Path) -> None:
        keys = ["g/s/commit.json", "g/s/part", "g/t/shard"]
        delete = f"store.delete({keys!r})"
        seen = set()
        for number in range(1, 6):
            for name in ("unlinkat", "fsync"):
                store = PosixStore(root / f"{name}{number}")
                for key in keys:
                    store.put(key, b"x")
                _trace(root / f"{name}{number}", delete, f"{name}:signal=KILL:when={number}")
                left = [info.key for info in store.list_objects("")]
                assert left == keys[len(keys) - len(left) :]
                seen.add(len(left))
                store.delete(keys)
                assert list((root / f"{name}{number}").iterdir()) == []
        assert seen == {0, 1, 2, 3}


def _every_call(root: Path, code: str) -> list[tuple[str, int]]:
    """Return each watched call of the code, as its name and its number among those of that name."""
    root.parent.mkdir()
    done = _trace(root, code)
    assert done.status == 0, done.output
    names = [call.name for call in done.calls]
    return [(name, names[: index + 1].count(name)) for index, name in enumerate(names)]


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "g").iterdir()) if (root / "g").exists() else []


def _get(store: PosixStore, key: str) -> bytes | None:
    try:
        return store.get(key, limit_bytes=100)
    except NotFound:
        return None
