"""Real full disks and real power cuts: small file systems mounted for the test (as root; skipped elsewhere)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardkeep.errors import NotFound, OutOfSpace
from shardkeep.storage.posix import PosixStore
from shardkeep.testing.contract_support import make_bytes, write_object

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
_NO_LOG_FLUSH = 2  # what is only in memory, the journal's buffer included, is lost


def _run(*command: str) -> None:
    if os.geteuid() != 0 or shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} needs root and to be installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()[:200]}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    _run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount))
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


class TestFullDisk:
    """The case of bghira/SimpleTuner#2353: the disk fills up during a save."""

    def test_writer_that_does_not_fit_is_refused_at_once_and_leaves_nothing(self, small_disk: Path) -> None:
        store = PosixStore(small_disk / "run")
        with pytest.raises(OutOfSpace) as caught:
            store.writer("g/w", 2 << 20)
        assert not caught.value.retryable
        assert str(small_disk / "run/g/w") in str(caught.value)
        assert caught.value.advice is not None
        assert store.list_objects("") == []
        assert _used_bytes(small_disk) < 64 << 10

    def test_put_that_does_not_fit_leaves_the_old_object_and_no_temporary_file(self, small_disk: Path) -> None:
        store = PosixStore(small_disk / "run")
        store.put("g/a", b"old")
        for if_absent in (False, True):
            with pytest.raises(OutOfSpace):
                store.put("g/b" if if_absent else "g/a", bytes(2 << 20), if_absent=if_absent)
        assert [path.name for path in (small_disk / "run/g").iterdir()] == ["a"]
        assert store.get("g/a", limit_bytes=3) == b"old"

    def test_after_space_was_freed_saving_works_again(self, small_disk: Path) -> None:
        store = PosixStore(small_disk / "run")
        write_object(store, "g1/w", make_bytes(700_000))
        with pytest.raises(OutOfSpace):
            write_object(store, "g2/w", make_bytes(700_000))
        store.delete(["g1/w"])
        write_object(store, "g2/w", make_bytes(700_000))
        assert [info.key for info in store.list_objects("")] == ["g2/w"]


class _Machine:
    """A file system in a file that can lose its power."""

    def __init__(self, image: Path, mount: Path) -> None:
        self.mount = mount
        self._image = image

    def start(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.mount))

    def stop(self) -> None:
        subprocess.run(["umount", str(self.mount)], check=True)

    def cut_power(self) -> None:
        """Lose everything that is not durable, then start again."""
        fd = os.open(self.mount, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)
        self.stop()
        self.start()


@pytest.fixture(params=["ext4", "xfs"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Machine]:
    image = tmp_path / "disk.img"
    (tmp_path / "mount").mkdir()
    with image.open("wb") as file:
        file.truncate(320 << 20)
    _run(f"mkfs.{request.param}", "-q", str(image))
    machine = _Machine(image, tmp_path / "mount")
    machine.start()
    yield machine
    with contextlib.suppress(subprocess.CalledProcessError):
        machine.stop()


@pytest.mark.slow
class TestPowerCut:
    def test_what_is_durable_on_return_is_there_after_a_power_cut(self, machine: _Machine) -> None:
        data = make_bytes((1 << 20) + 77)
        steps: list[tuple[Callable[[PosixStore], None], str, bytes | None]] = [
            (lambda store: store.put("g1/a", b"exclusive", if_absent=True), "g1/a", b"exclusive"),
            (lambda store: store.put("g1/a", b"replaced"), "g1/a", b"replaced"),
            (lambda store: write_object(store, "g1/s/w", data, 1 << 16), "g1/s/w", data),
            (lambda store: store.delete(["g1/a"]), "g1/a", None),
            (lambda store: store.delete(["g1/s/w"]), "g1/s/w", None),
        ]
        for work, key, expected in steps:
            work(PosixStore(machine.mount / "run"))
            machine.cut_power()
            found: bytes | None = None
            with contextlib.suppress(NotFound):
                found = PosixStore(machine.mount / "run").get(key, limit_bytes=2 << 20)
            assert found == expected, key

    def test_the_cut_is_real(self, machine: _Machine) -> None:
        (machine.mount / "not synced").write_bytes(b"x" * 100_000)
        machine.cut_power()
        path = machine.mount / "not synced"
        assert not path.exists() or path.stat().st_size == 0


def _used_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
