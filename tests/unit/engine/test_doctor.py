"""What `doctor` makes of stores that misbehave and of figures; on real places it is tested as a command."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from shardkeep.engine.diagnosis import Check
from shardkeep.engine.doctor import check_slots, check_space
from shardkeep.engine.machine import (
    SUPPORTED,
    check_memory,
    check_open_files,
    check_shared_memory,
    check_version,
    find_free_memory,
)
from shardkeep.engine.probe import probe_place
from shardkeep.storage.base import Capabilities, ObjectInfo
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.posix import PosixStore
from shardkeep.storage.survey import find_kind, is_shareable, list_missing
from shardkeep.testing.faults import Fault, FaultKind, FaultStore

GIB = 1 << 30


def statuses(checks: Iterable[Check]) -> dict[str, str]:
    return {check.what: check.status for check in checks}


def test_a_good_store_passes_and_is_left_empty() -> None:
    store = MemoryStore()
    found = probe_place("root", store, None)
    assert statuses(found) == dict.fromkeys(("write", "exclusive create", "read", "remove"), "ok")
    assert store.list_objects("") == []


class Replacing(MemoryStore):
    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        super().put(key, data)


class ByProtocol(MemoryStore):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exclusive_create=False, write_offsets_multiple_bytes=1, shared=True)


class Blind(MemoryStore):
    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        return super().list_objects(prefix)[:1]


class Forgetful(MemoryStore):
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        super().read_into(key, offset, buffer)
        buffer[-1] = 1


class Sticky(MemoryStore):
    def delete(self, keys: Iterable[str]) -> None:
        list(keys)


@pytest.mark.parametrize(
    ("store", "what", "status", "text"),
    [
        (Replacing(), "exclusive create", "fail", "a second create replaced the first"),
        (ByProtocol(), "exclusive create", "warn", "without conditional writes"),
        (Blind(), "read", "fail", "two objects were written, the list shows 1"),
        (Forgetful(), "read", "fail", "not what was written"),
        (Sticky(), "remove", "fail", "2 objects are still listed"),
    ],
)
def test_a_store_that_does_not_keep_its_word_is_found(store: MemoryStore, what: str, status: str, text: str) -> None:
    found = probe_place("root", store, None)
    (check,) = [check for check in found if check.what == what]
    assert (check.status, text in check.found) == (status, True)
    assert check.advice


@pytest.mark.parametrize("kind", ["no_space", "io_error"])
@pytest.mark.parametrize("verb", ["put", "writer", "write_at", "finish", "get", "read_into", "list_objects"])
def test_a_store_that_fails_is_told_with_a_next_step_and_cleaned(verb: str, kind: FaultKind) -> None:
    inner = MemoryStore()
    store = FaultStore(inner, [Fault(kind=kind, when=lambda call: call.verb == verb, times=None)])
    last = probe_place("root", store, None)[-1]
    assert last.status == "fail"
    assert last.advice
    assert inner.list_objects("") == []


class Skewed(PosixStore):
    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        os.utime(os.path.join(self.url, key), (0, 1000))


def test_a_server_with_another_clock_is_told(tmp_path: Path) -> None:
    found = probe_place("root", Skewed(tmp_path / "run"), str(tmp_path / "run"))
    assert statuses(found)["clock"] == "warn"
    assert statuses(found)["remove"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_folders_that_somebody_uses_meanwhile_stay(tmp_path: Path) -> None:
    class Busy(PosixStore):
        def list_objects(self, prefix: str) -> list[ObjectInfo]:
            (tmp_path / "a/other").mkdir(exist_ok=True)
            return super().list_objects(prefix)

    probe_place("root", Busy(tmp_path / "a/b/run"), str(tmp_path / "a/b/run"))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "a/other"]


def test_kinds_of_file_systems(tmp_path: Path) -> None:
    assert find_kind("/proc/self") == "proc"
    assert find_kind(str(tmp_path)) == find_kind(str(tmp_path / "none/yet")) not in (None, "proc")
    assert [is_shareable(kind) for kind in ("nfs4", "fuse.gcsfuse", "lustre", "ext4", "tmpfs", None)] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    assert list_missing(str(tmp_path / "a/b")) == (str(tmp_path / "a/b"), str(tmp_path / "a"))
    assert list_missing(str(tmp_path)) == ()


@pytest.mark.parametrize(
    ("place", "keep", "there", "free", "status"),
    [
        ("root", 3, 0, 4 * GIB, "ok"),
        ("root", 3, 0, 4 * GIB - 1, "fail"),
        ("tier 0", 3, 0, 4 * GIB - 1, "warn"),
        ("root", 3, 2, 2 * GIB, "ok"),
        ("root", 3, 2, 2 * GIB - 1, "fail"),
        ("root", 3, 9, GIB, "ok"),
        ("root", None, 0, 100 * GIB, "ok"),
        ("root", None, 0, 3 * GIB, "warn"),
        ("root", None, 0, GIB - 1, "fail"),
        ("root", 3, 0, None, "ok"),
    ],
)
def test_space_is_held_against_what_is_kept(
    place: str, keep: int | None, there: int, free: int | None, status: str
) -> None:
    check = check_space(place, keep, there, GIB, free)
    assert check.status == status
    assert (check.advice is None) == (status == "ok")


def test_space_without_a_size_and_slots_in_memory() -> None:
    unknown = check_space("root", 3, 0, None, GIB)
    assert (unknown.status, "--size" in str(unknown.advice)) == ("warn", True)
    assert check_slots("tier 0", 1, GIB, 2 * GIB).status == "ok"
    assert check_slots("tier 0", 1, GIB, 2 * GIB - 1).status == "fail"
    assert check_slots("tier 0", 1, GIB, None).status == "ok"


def test_limits_of_the_machine() -> None:
    assert [check_open_files(count).status for count in (256, 1024, -1)] == ["warn", "ok", "ok"]
    assert [check_shared_memory(size, 0).status for size in (64 << 20, 8 * GIB)] == ["warn", "ok"]
    assert [check_memory(free, GIB).status for free in (GIB - 1, GIB, None)] == ["warn", "ok", "ok"]
    free_bytes = find_free_memory()
    assert free_bytes is not None
    assert 0 < free_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("torch", "2.6.0", "ok"),
        ("torch", "2.13.0+cpu", "ok"),
        ("torch", "2.5.1", "fail"),
        ("torch", "1.13.1", "fail"),
        ("torch", None, "warn"),
        ("obstore", "0.9.0", "fail"),
        ("obstore", None, "fail"),
        ("python", "3.11.0", "ok"),
    ],
)
def test_versions(name: str, version: str | None, status: str) -> None:
    check = check_version(name, version)
    assert (check.status, check.advice is None) == (status, status == "ok")


def test_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {"python": project["requires-python"], "torch": extras["torch"][0], "obstore": extras["objects"][0]}
    found = {name: tuple(map(int, re.findall(r"\d+", text.split(">=")[1]))) for name, text in wanted.items()}
    assert found == SUPPORTED
