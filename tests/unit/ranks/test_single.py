"""The group of one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardkeep.ranks.single import SingleGroup


def fail(*_: object) -> bytes:
    raise OSError("disk on fire")


def test_agree_decides_over_the_one_result() -> None:
    group = SingleGroup()
    assert (group.rank, group.world_size) == (0, 1)
    assert group.agree("p", lambda: b"x", lambda results: b"|".join([*results, b"v"])) == b"x|v"


def test_errors_stay_what_they_are() -> None:
    with pytest.raises(OSError, match="disk on fire"):
        SingleGroup().agree("p", fail, lambda _: b"")
    with pytest.raises(OSError, match="disk on fire"):
        SingleGroup().agree("p", lambda: b"", fail)


def test_clone_and_close() -> None:
    group = SingleGroup()
    twin = group.clone()
    group.close()
    group.close()
    assert twin.agree("p", lambda: b"1", lambda results: results[0], timeout_s=1) == b"1"


def test_connect_imports_no_torch_and_gives_the_group_of_one() -> None:
    code = (
        "import sys; from shardkeep.ranks.connect import connect; import shardkeep.ranks.store_group\n"
        "assert connect().world_size == 1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
