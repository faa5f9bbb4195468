"""A run that a web server publishes: everything that reads works, nothing that writes does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from shardkeep.errors import Corrupt, Denied, NotFound, StorageError
from shardkeep.storage.posix import PosixStore
from shardkeep.storage.resolve import open_store
from tests.cli.runner import shardkeep
from tests.crash.jobs import digest, make_state, manage, save_at
from tests.support.proxy import run_proxy
from tests.support.servers import run_web


@pytest.fixture
def published(tmp_path: Path) -> Iterator[str]:
    root = tmp_path / "web" / "a run"
    with manage(PosixStore(root)) as manager:
        manager.resume(make_state(1))
        for step in (10, 20):
            save_at(manager, step)
    with run_web(tmp_path / "web") as port:
        yield f"http://127.0.0.1:{port}/a run"


def test_a_published_run_is_read_like_any_other(published: str) -> None:
    state = make_state(1)
    assert sk.load(published, state).ref.step == 20
    assert digest(state) == digest(make_state(20))
    with sk.open(published, step=10) as checkpoint:
        assert checkpoint.values()["note"] == {"step": 10}
    assert [entry["step"] for entry in shardkeep("ls", published, "--json").json["steps"]] == [10, 20]
    assert shardkeep("verify", f"{published}@10").code == 0
    assert shardkeep("show", published, "--json").json["step"] == 20
    assert shardkeep("diff", f"{published}@10", f"{published}@20").code == 1


def test_a_published_run_cannot_be_written(published: str) -> None:
    store = open_store(published)
    for call in (
        lambda: store.put("a", b"x"),
        lambda: store.put("a", b"x", if_absent=True),
        lambda: store.writer("a", 1),
        lambda: store.delete(["run.json"]),
        lambda: sk.save(published, make_state(1), overwrite=True),
    ):
        with pytest.raises(Denied, match="reading only"):
            call()
    assert store.head("run.json").size_bytes > 0


def test_ranges_and_ends(published: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * 100
    (tmp_path / "web" / "a run" / "blob").write_bytes(data)
    store = open_store(published)
    buffer = bytearray(1000)
    store.read_into("blob", 77, memoryview(buffer))
    assert buffer == data[77:1077]
    for offset, length in ((25_000, 1000), (25_600, 1), (30_000, 10), (25_601, 0)):
        with pytest.raises(Corrupt, match="25600"):
            store.read_into("blob", offset, memoryview(bytearray(length)))
    for call in (lambda: store.head("none"), lambda: store.get("none", limit_bytes=1)):
        with pytest.raises(NotFound):
            call()
    with pytest.raises(Corrupt):
        store.get("blob", limit_bytes=10)


def test_lists_hold_keys_only(published: str, tmp_path: Path) -> None:
    root = tmp_path / "web" / "a run"
    (root / ".hidden").write_text("x")
    (root / "with space").write_text("x")
    (root / "empty").mkdir()
    store = open_store(published)
    local = PosixStore(root)
    for prefix in ("", "g0001/", "g0001/step-00000010/", "g", "run", "none/"):
        assert store.list_objects(prefix) == local.list_objects(prefix), prefix
    assert store.list_folders("g0001/") == local.list_folders("g0001/")


def test_a_server_that_shows_no_folders_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "index.html").write_text("<a href='https://elsewhere/'>welcome</a><a href='../up/'>up</a>")
    with run_web(tmp_path) as port:
        assert open_store(f"http://127.0.0.1:{port}/run").list_folders("") == []
        with run_proxy(port) as proxy:
            proxy.plan = lambda method, path: (403, "Forbidden")
            with pytest.raises(Denied, match="HTTP 403") as caught:
                open_store(f"http://127.0.0.1:{proxy.port}/run").list_folders("")
            assert "autoindex" in str(caught.value)
            proxy.plan = lambda method, path: "internal"
            with pytest.raises(StorageError) as later:
                open_store(f"http://127.0.0.1:{proxy.port}/run").list_objects("")
            assert later.value.retryable


def test_an_index_that_is_too_large_is_refused_not_cut(published: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkeep.storage.http_store._MAX_PAGE_BYTES", 100)
    with pytest.raises(StorageError, match="larger than 100 bytes") as caught:
        open_store(published).list_folders("")
    assert not caught.value.retryable


def test_a_partial_read_over_http_fetches_what_it_needs(tmp_path: Path) -> None:
    big = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    sk.save(tmp_path / "run", {"model": {"big": big}})
    with run_web(tmp_path) as port, run_proxy(port) as proxy:
        with sk.open(f"http://127.0.0.1:{proxy.port}/run") as checkpoint:
            rows = checkpoint["model/big"][7:9]
        assert torch.equal(rows, big[7:9])
        assert sum(passed.got_bytes for passed in proxy.log) < 1 << 20
