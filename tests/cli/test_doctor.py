"""`doctor`: what it finds in real places, and that it leaves none of it changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkeep.cli.main import main
from shardkeep.storage.survey import find_kind
from tests.cli.runner import Result, shardkeep
from tests.support.fake_state import FakeRun, small_state

MEMORY = Path("/dev/shm")
in_memory = pytest.mark.skipif(find_kind(str(MEMORY)) != "tmpfs", reason="/dev/shm is no tmpfs here")


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def check(found: Result, place: str, what: str) -> tuple[str, str, str | None]:
    (one,) = [one for one in found.json["checks"] if (one["place"], one["what"]) == (place, what)]
    return one["status"], one["found"], one["advice"]


def make_run(root: Path, *steps: int) -> FakeRun:
    run = FakeRun(root)
    for step in steps:
        run.save(step, small_state(step))
    return run


def test_a_place_that_is_not_there_yet_is_checked_and_not_made(tmp_path: Path) -> None:
    root, tier = tmp_path / "new/run", tmp_path / "tier"
    found = shardkeep("doctor", root, "--tier", tier, "--size", "1MiB", "--keep", 2, "--json")
    assert found.code == 0
    assert tree(tmp_path) == {}
    document = found.json
    assert (document["root"], document["tiers"], document["size_bytes"]) == (str(root), [str(tier)], 1 << 20)
    assert document["fail_count"] == 0
    assert document["ok_count"] + document["warn_count"] == len(document["checks"])
    for place in ("root", "tier 0"):
        for what in ("run", "write", "exclusive create", "read", "direct I/O", "clock", "remove"):
            assert check(found, place, what)[0] == "ok", what
    assert "3 are needed" in check(found, "root", "space")[1]
    assert "2 are needed" in check(found, "tier 0", "space")[1]
    status, text, advice = check(found, "tier 0", "medium")
    assert (status, "the same file system as the root" in text) == ("warn", True)
    assert advice
    assert "cannot be seen from one process" in check(found, "root", "sharing")[1]


def test_a_run_that_is_there_gives_the_size_and_is_left_as_it_is(tmp_path: Path) -> None:
    make_run(tmp_path, 10, 20)
    before = tree(tmp_path)
    sizes = {entry["step"]: entry["size_bytes"] for entry in shardkeep("ls", tmp_path, "--json").json["steps"]}
    newest = shardkeep("doctor", tmp_path, "--json")
    assert (newest.code, newest.json["size_bytes"]) == (0, sizes[20])
    assert "with 2 checkpoints, the newest of step 20" in check(newest, "root", "run")[1]
    assert shardkeep("doctor", tmp_path, "--like", 10, "--json").json["size_bytes"] == sizes[10]
    # Two are there already: of three, one and the one being written are to come.
    assert "2 are needed" in check(shardkeep("doctor", tmp_path, "--keep", 3, "--json"), "root", "space")[1]
    missing = shardkeep("doctor", tmp_path, "--like", 15)
    assert missing.code == 10
    assert "no step 15" in missing.err
    assert tree(tmp_path) == before


def test_a_root_that_is_too_small_fails_and_a_tier_warns(tmp_path: Path) -> None:
    found = shardkeep("doctor", tmp_path / "run", "--tier", tmp_path / "tier", "--size", "900TiB", "--json")
    assert found.code == 1
    status, text, advice = check(found, "root", "space")
    assert status == "fail"
    assert "room for 0 more of 900.0 TiB; 1 are needed" in text
    assert advice
    assert check(found, "tier 0", "space")[0] == "warn"
    assert check(found, "machine", "memory")[0] == "warn"


def test_what_is_in_the_way_of_a_root_fails_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = shardkeep("doctor", tmp_path / "file/run", "--json")
    assert found.code == 1
    status, text, advice = check(found, "root", "write")
    assert (status, "ENOTDIR" in text) == ("fail", True)
    assert advice
    text = shardkeep("doctor", tmp_path / "file/run").out
    assert re.search(r"^  fail  write: cannot write .*ENOTDIR.*\n        next: \S", text, re.MULTILINE)
    assert "1 failure" in text.splitlines()[-1]


def test_a_tier_that_another_run_left_is_told(tmp_path: Path) -> None:
    make_run(tmp_path / "one", 1)
    make_run(tmp_path / "other", 1)
    before = tree(tmp_path)
    found = shardkeep("doctor", tmp_path / "one", "--tier", tmp_path / "other", "--json")
    status, text, advice = check(found, "tier 0", "run")
    assert (found.code, status) == (0, "warn")
    assert "another run" in text
    assert advice is not None
    assert advice.startswith(f"rm -r {tmp_path / 'other'}")
    assert "whose that is" in check(shardkeep("doctor", "--tier", tmp_path / "one", "--json"), "tier 0", "run")[1]
    assert tree(tmp_path) == before


@in_memory
def test_memory_is_told_from_disk_and_its_slots_from_its_room(tmp_path: Path) -> None:
    place = MEMORY / f"shardkeep-test-{os.getpid()}"
    found = shardkeep("doctor", place, "--json")
    status, text, advice = check(found, "root", "sharing")
    assert (status, "memory of this node" in text) == ("warn", True)
    assert advice
    found = shardkeep("doctor", tmp_path, "--tier", place, "--size", "1TiB", "--keep", 1, "--keep", 3, "--json")
    assert found.code == 1
    status, text, _ = check(found, "tier 0", "memory")
    assert status == "fail"
    assert "4 slots take 4.0 TiB" in text
    assert check(found, "tier 0", "medium")[:2] == ("ok", "on tmpfs, host memory")
    fine = shardkeep("doctor", "--tier", place, "--size", "1MiB", "--json")
    assert (fine.code, check(fine, "tier 0", "memory")[0]) == (0, "ok")
    assert not place.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_run_of_another_user_is_told(tmp_path: Path) -> None:
    make_run(tmp_path, 1)
    assert check(shardkeep("doctor", tmp_path, "--json"), "root", "owner")[0] == "ok"
    os.chown(tmp_path / "run.json", 12345, -1)
    status, text, _ = check(shardkeep("doctor", tmp_path, "--json"), "root", "owner")
    assert (status, "uid 12345" in text) == ("warn", True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--size", "1GiB", "--like", "3"), "one of them"),
        (("--size", "big"), "size 'big'"),
        (("--size", "0"), "more than nothing"),
        (("--keep", "0"), "--keep"),
        (("--keep", "1", "--keep", "1"), "given 2 times for 1 place"),
        (("--tier", "{root}/"), "is given twice"),
    ],
)
def test_wrong_arguments_touch_nothing(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    found = shardkeep("doctor", tmp_path, *(word.format(root=tmp_path) for word in arguments))
    assert found.code == 64
    assert text in found.err
    assert tree(tmp_path) == {}
    assert shardkeep("doctor", "--like", "3").code == 64


def test_an_address_that_names_no_store_fails_and_the_others_are_looked_at(tmp_path: Path) -> None:
    found = shardkeep("doctor", "ftp://host/run", "--tier", tmp_path, "--json")
    assert found.code == 1
    assert check(found, "root", "address")[0] == "fail"
    assert check(found, "tier 0", "write")[0] == "ok"


def test_the_machine_alone_can_be_looked_at(capsys: Any) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "this machine"
    assert [line.split()[1] for line in lines[1:3]] == ["python:", "torch:"]


def test_it_works_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from shardkeep.cli.main import main; "
        f"sys.exit(main(['doctor', {str(tmp_path)!r}, '--size', '1MiB']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
