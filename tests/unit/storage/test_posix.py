"""What only a file system has: links, strange files, permissions, descriptors, direct I/O."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from pathlib import Path

import pytest

from shardkeep.errors import AlreadyExists, Denied, NotFound, StorageError, UsageError
from shardkeep.storage.folders import KnownFolders
from shardkeep.storage.posix import PosixStore
from shardkeep.testing.contract_support import make_bytes, run_threads, write_object

BLOCK_BYTES = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


class TestPlaces:
    def test_reading_makes_no_folder(self, store: PosixStore, root: Path) -> None:
        assert store.list_objects("") == store.list_folders("") == []
        store.delete(["a/b"])
        with pytest.raises(NotFound):
            store.get("a/b", limit_bytes=1)
        assert not root.exists()

    def test_objects_are_plain_files_at_their_keys(self, store: PosixStore, root: Path) -> None:
        store.put("g/s/a.json", b"{}")
        write_object(store, "g/s/b", b"bytes")
        assert (root / "g/s/a.json").read_bytes() == b"{}"
        assert (root / "g/s/b").read_bytes() == b"bytes"
        mask = os.umask(0)
        os.umask(mask)
        for name in ("a.json", "b"):
            assert stat.S_IMODE((root / "g/s" / name).stat().st_mode) == 0o666 & ~mask

    def test_delete_removes_empty_folders_up_to_the_root(self, store: PosixStore, root: Path) -> None:
        for key in ("g/s/a", "g/s/b", "g/c"):
            store.put(key, b"")
        store.delete(["g/s/a"])
        assert (root / "g/s").is_dir()
        store.delete(["g/s/b"])
        assert not (root / "g/s").exists()
        store.delete(["g/c"])
        assert list(root.iterdir()) == []

    def test_relative_root_stays_where_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        store = PosixStore("run")
        monkeypatch.chdir("/")
        store.put("a", b"x")
        assert (tmp_path / "run/a").read_bytes() == b"x"
        assert store.url == str(tmp_path / "run")

    def test_empty_root_is_refused(self) -> None:
        for root in ("", "a\0b"):
            with pytest.raises(UsageError):
                PosixStore(root)

    def test_file_where_a_folder_is_needed(self, store: PosixStore) -> None:
        store.put("a", b"")
        with pytest.raises(StorageError, match="ENOTDIR") as caught:
            store.put("a/b", b"")
        assert not caught.value.retryable
        store.put("f/g", b"")
        with pytest.raises(StorageError, match="EISDIR"):
            store.put("f", b"")
        for create in (lambda: store.writer("f", 1), lambda: store.put("f", b"", if_absent=True)):
            with pytest.raises(AlreadyExists):
                create()
        assert [info.key for info in store.list_objects("")] == ["a", "f/g"]


class TestLinks:
    """Nothing below the root is reached through a symbolic link; the root itself may be one."""

    @pytest.fixture
    def outside(self, tmp_path: Path, store: PosixStore, root: Path) -> Path:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_bytes(b"secret")
        store.put("g/a", b"inside")
        (root / "folder").symlink_to(outside)
        (root / "file").symlink_to(outside / "secret")
        (root / "g/dangling").symlink_to(outside / "nothing")
        return outside

    def test_links_are_neither_read_nor_listed(self, store: PosixStore, outside: Path) -> None:
        for key in ("folder/secret", "file", "g/dangling"):
            with pytest.raises(Denied, match="ELOOP"):
                store.get(key, limit_bytes=10)
            with pytest.raises(Denied):
                store.read_into(key, 0, memoryview(bytearray(1)))
            with pytest.raises(Denied):
                store.head(key)
        assert [info.key for info in store.list_objects("")] == ["g/a"]
        assert store.list_folders("") == ["g"]
        with pytest.raises(Denied):
            store.list_objects("folder/")

    def test_nothing_is_written_or_deleted_through_links(self, store: PosixStore, outside: Path, root: Path) -> None:
        for if_absent in (True, False):
            with pytest.raises(Denied):
                store.put("folder/new", b"", if_absent=if_absent)
        with pytest.raises(Denied):
            store.writer("folder/new", 1)
        with pytest.raises(Denied):
            store.delete(["folder/secret"])
        with pytest.raises(AlreadyExists):
            store.writer("g/dangling", 1)
        store.put("file", b"replaces the link")
        store.delete(["g/dangling"])
        assert sorted(path.name for path in outside.iterdir()) == ["secret"]
        assert (outside / "secret").read_bytes() == b"secret"
        assert (root / "file").read_bytes() == b"replaces the link"

    def test_the_root_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        PosixStore(tmp_path / "link").put("a", b"x")
        assert (tmp_path / "real/a").read_bytes() == b"x"


class TestStrangeFiles:
    def test_names_that_are_no_keys_are_not_listed(self, store: PosixStore, root: Path) -> None:
        store.put("g/a", b"")
        for name in (".tmp-1-abc", ".nfs0001", "with space", "é", "g/.tmp-1-abc", "a+b"):
            (root / name).write_bytes(b"")
        for name in ("lost+found", ".hidden"):
            (root / name).mkdir()
            (root / name / "a").write_bytes(b"")
        assert [info.key for info in store.list_objects("")] == ["g/a"]
        assert store.list_folders("") == ["g"]

    def test_fifos_and_folders_are_no_objects_and_do_not_hang(self, store: PosixStore, root: Path) -> None:
        store.put("g/a", b"")
        os.mkfifo(root / "g/pipe")
        for key in ("g/pipe", "g"):
            with pytest.raises(NotFound):
                store.get(key, limit_bytes=1)
        assert [info.key for info in store.list_objects("")] == ["g/a"]

    def test_too_long_a_path_is_refused_for_good(self, tmp_path: Path) -> None:
        store = PosixStore(tmp_path / ("x" * 300))
        with pytest.raises(StorageError, match="ENAMETOOLONG") as caught:
            store.put("a", b"")
        assert not caught.value.retryable
        assert caught.value.advice == "choose a shorter path for the run"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_read_only_folder_is_denied(self, store: PosixStore, root: Path) -> None:
        root.mkdir()
        root.chmod(0o500)
        with pytest.raises(Denied, match="EACCES"):
            store.put("a", b"")

    def test_young_temporary_files_keep_their_folder(self, store: PosixStore, root: Path) -> None:
        store.put("g/a", b"")
        temporary = root / "g/.tmp-1-abc"
        temporary.write_bytes(b"")
        store.delete(["g/a"])
        assert temporary.exists()
        os.utime(temporary, (0, 0))
        store.delete(["g/a"])
        assert not (root / "g").exists()


class TestWriter:
    @pytest.fixture(params=["aligned", "unaligned"])
    def memory(self, request: pytest.FixtureRequest) -> memoryview:
        shift = 0 if request.param == "aligned" else 100
        memory = memoryview(mmap.mmap(-1, 6 * BLOCK_BYTES))[shift : shift + 5 * BLOCK_BYTES + 777]
        memory[:] = make_bytes(len(memory))
        return memory

    @pytest.mark.parametrize("header_bytes", [0, 4096, 4097, 100])
    def test_header_full_blocks_and_tail_by_threads(
        self, store: PosixStore, root: Path, memory: memoryview, header_bytes: int
    ) -> None:
        writer = store.writer("g/w", header_bytes + len(memory))
        if header_bytes:
            writer.write_at(0, memoryview(b"h" * header_bytes))

        def work(index: int) -> None:
            for start in range(index * BLOCK_BYTES, len(memory), 2 * BLOCK_BYTES):
                writer.write_at(header_bytes + start, memory[start : start + BLOCK_BYTES])

        assert run_threads(work, 2) == [None, None]
        writer.finish()
        assert (root / "g/w").read_bytes() == b"h" * header_bytes + bytes(memory)
        back = memoryview(mmap.mmap(-1, 6 * BLOCK_BYTES))
        for shift in (0, 50):
            store.read_into("g/w", header_bytes, back[shift : shift + len(memory)])
            assert back[shift : shift + len(memory)] == memory

    def test_space_is_reserved_before_anything_is_written(self, store: PosixStore, root: Path) -> None:
        writer = store.writer("g/w", 3 << 20)
        status = (root / "g/w").stat()
        assert status.st_size == 3 << 20
        assert status.st_blocks * 512 >= 3 << 20
        writer.abort()
        assert not (root / "g/w").exists()

    def test_finish_while_a_write_goes_on_is_refused_and_closes_everything(self, store: PosixStore) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for ending in ("finish", "abort"):
            writer = store.writer("g/w", 64 << 20)
            memory = memoryview(mmap.mmap(-1, 64 << 20))
            thread = threading.Thread(target=_write_quietly, args=(writer, memory))
            thread.start()
            while writer._users_count == 0 and thread.is_alive():
                pass
            if ending == "abort":
                writer.abort()
            else:
                try:
                    writer.finish()
                except StorageError:
                    pass
                else:
                    store.delete(["g/w"])
            thread.join()
            assert store.list_objects("") == []
        assert len(os.listdir("/proc/self/fd")) == before

    def test_something_else_that_changes_the_size_is_noticed(self, store: PosixStore, root: Path) -> None:
        writer = store.writer("g/w", 10)
        writer.write_at(0, memoryview(bytes(10)))
        os.truncate(root / "g/w", 9)
        with pytest.raises(StorageError, match="expected 10 bytes, found 9"):
            writer.finish()
        assert store.list_objects("") == []

    def test_descriptors_do_not_leak_and_are_not_inherited(self, store: PosixStore) -> None:
        before = set(os.listdir("/proc/self/fd"))
        writer = store.writer("g/w", 8192)
        own = [int(fd) for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
        assert len(own) >= 2
        assert not any(os.get_inheritable(fd) for fd in own)
        with pytest.raises(StorageError):
            writer.finish()
        for call in (
            lambda: store.get("none", limit_bytes=1),
            lambda: store.get("g", limit_bytes=1),
            lambda: store.writer("g", 1),
            lambda: store.put("g", b""),
        ):
            with pytest.raises((StorageError, NotFound)):
                call()
        assert set(os.listdir("/proc/self/fd")) == before


def test_known_folders_are_bounded_and_keep_the_last_used() -> None:
    known = KnownFolders(limit=2)
    for name in ("a", "b", "a", "c"):
        known.add(name)
    assert ("a" in known, "b" in known, "c" in known) == (True, False, True)
    known.forget("a")
    assert "a" not in known


def _write_quietly(writer: object, memory: memoryview) -> None:
    try:
        writer.write_at(0, memory)  # type: ignore[attr-defined]
    except StorageError:
        return
