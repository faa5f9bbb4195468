"""`doctor` on an S3 service: it tries what a run would do, and leaves the bucket as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkeep.storage.resolve import open_store
from tests.cli.runner import shardkeep
from tests.crash.jobs import make_state, manage, save_at


def test_a_service_is_tried_and_left_as_it_was(s3: str, tmp_path: Path) -> None:
    found = shardkeep("doctor", s3, "--tier", tmp_path / "tier", "--size", "1GiB", "--json")
    statuses = {one["what"]: one["status"] for one in found.json["checks"] if one["place"] == "root"}
    assert found.code == 0, found.out
    wanted = ("run", "write", "exclusive create", "read", "remove", "sharing", "space")
    assert statuses == dict.fromkeys(wanted, "ok")
    assert open_store(s3).list_objects("") == []
    with manage(open_store(s3)) as manager:
        manager.resume(make_state(1))
        save_at(manager, 10)
    before = open_store(s3).list_objects("")
    found = shardkeep("doctor", s3, "--json")
    assert found.code == 0
    assert found.json["size_bytes"] > 0
    assert open_store(s3).list_objects("") == before


def test_a_service_that_refuses_is_told(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    found = shardkeep("doctor", s3, "--json")
    assert found.code == 1
    (failed,) = [one for one in found.json["checks"] if one["status"] == "fail"]
    assert failed["place"] == "root"
    assert failed["advice"]
