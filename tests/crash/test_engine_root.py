"""A root that goes away, or becomes another run's, under a job that goes on: nothing is said to be saved there."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from typing import Any

import pytest

import shardkeep as sk
from shardkeep.engine.verify import verify_run
from shardkeep.errors import Fenced, PeerFailure, StorageError, UsageError
from shardkeep.plan.retention import Keep
from shardkeep.ranks.base import Group
from shardkeep.storage.base import Store
from shardkeep.storage.posix import PosixStore
from tests.crash.jobs import Sink, committed, digest, make_state, manage, run_world, save_at


def test_a_root_that_was_removed_takes_no_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "run"
    events = Sink()
    manager = manage(PosixStore(root), keep=Keep(last=2), save_every=10, events=events)
    state = make_state(10)
    manager.resume(state)
    assert manager.after_step(10, state)
    shutil.move(root, tmp_path / "aside")
    # As any trouble of storage: told, and the run goes on.
    assert not manager.after_step(20, state)
    assert "save.failed" in events.names()
    assert manager.latest() is None
    shutil.rmtree(root, ignore_errors=True)
    shutil.move(tmp_path / "aside", root)
    assert manager.after_step(30, state)
    assert committed(PosixStore(root)) == [10, 30]
    assert not verify_run(PosixStore(root)).listed


def test_other_ranks_hear_of_it_as_of_any_trouble_of_storage(tmp_path: Path) -> None:
    def body(store: Store, group: Group) -> Any:
        manager = manage(store, group)
        manager.resume(make_state(1, group.rank))
        save_at(manager, 10)
        group.agree("test.remove", lambda: b"", lambda found: shutil.rmtree(tmp_path / "run") or b"")
        save_at(manager, 20)

    first, second = run_world([PosixStore(tmp_path / "run"), PosixStore(tmp_path / "run")], body)
    assert isinstance(first, StorageError)
    assert isinstance(second, PeerFailure)
    assert second.transient


def test_a_root_that_became_another_runs_is_left_alone(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for root, step in ((mine, 10), (other, 20)):
        manager = manage(PosixStore(root), keep=Keep(last=1))
        manager.resume(make_state(1))
        for at in (step, step + 1):
            if root is other or at == step:
                manager.save(at, make_state(at), healthy=at == step)
    manager = manage(PosixStore(mine), keep=Keep(last=1))
    assert manager.resume(make_state(1)).step == 10
    # The other has as many generations, so that numbers alone tell nothing.
    manage(PosixStore(other)).resume(make_state(1))
    before = committed(PosixStore(other))
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    with pytest.raises(Fenced, match="holds another run"):
        save_at(manager, 30)
    manager._places.retention.sweep(Keep(last=1))
    assert committed(PosixStore(mine)) == before == [20, 21]
    state = make_state(1)
    assert manage(PosixStore(mine)).resume(state).step == 21
    assert digest(state) == digest(make_state(21))


@pytest.mark.parametrize(
    "metrics", [{"loss": "x"}, {"loss": 10**400}, {"loss": None}, {1: 2.0}, {"\ud800": 1.0}, {"loss": [1, 2]}]
)
def test_metrics_that_are_no_numbers(tmp_path: Path, metrics: Any) -> None:
    with pytest.raises(UsageError, match="metric"):
        sk.save(tmp_path / "run", {"x": 1}, metrics=metrics)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="metric"):
        manage(PosixStore(tmp_path / "run")).save(1, {"x": 1}, metrics=metrics)


def test_no_memory_for_a_block_is_an_error_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sk.save(tmp_path / "run", make_state(1))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(StorageError, match="no memory for a block"):
        sk.save(tmp_path / "other", make_state(1))
    with pytest.raises(StorageError, match="no memory for a block"):
        sk.load(tmp_path / "run", make_state(2))


def test_a_root_that_is_no_path() -> None:
    with pytest.raises(UsageError, match="url None"):
        sk.save(None, {"x": 1})  # type: ignore[arg-type]  # what is tested
