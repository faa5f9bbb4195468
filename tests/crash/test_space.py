"""A save that does not fit is refused before its first byte; a tier that is too small is passed over."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep import knobs
from shardkeep.engine.tiers import Place, TieredStore
from shardkeep.errors import CheckpointError, OutOfSpace, PeerFailure
from shardkeep.ranks.base import Group
from shardkeep.ranks.single import SingleGroup
from shardkeep.storage.base import MeasuredStore, Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.posix import PosixStore
from shardkeep.storage.retry import RetryingStore
from shardkeep.testing.faults import FaultStore
from tests.crash.jobs import get_all, run_world
from tests.support.held import Sink

MODES = ["blocking", "async", "overlap"]


class Small(FaultStore):
    """A store that says how much it has left, and takes everything all the same."""

    def __init__(self, inner: Store, free_bytes: int | None) -> None:
        super().__init__(inner)
        self.free_bytes = free_bytes

    def find_free_bytes(self) -> int | None:
        return self.free_bytes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def make_state(size_bytes: int) -> dict[str, Any]:
    return {f"part{at}": torch.arange(size_bytes // 16, dtype=torch.int32) for at in range(4)}


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_written_where_a_save_does_not_fit(mode: Any) -> None:
    store = Small(MemoryStore(name="root"), None)
    state = make_state(1 << 20)
    with sk.CheckpointManager("unused", store=store, group=SingleGroup(), mode=mode, events=Sink()) as manager:
        manager.resume(state)
        manager.save(1, state)
        manager.wait()
        before_count = len(store.log)
        store.free_bytes = 1 << 20  # the header is more
        with pytest.raises(OutOfSpace, match=r"memory:root: step 2 of generation 1 needs 10\d{5} bytes") as caught:  # noqa: PT012  # whichever
            manager.save(2, state)
            manager.wait()
        assert "1048576 are free" in str(caught.value)
        assert "shardkeep doctor memory:root" in str(caught.value.advice)
        assert not [call for call in store.log[before_count:] if call.verb in ("put", "writer", "write_at")]
        store.free_bytes = 2 << 20
        manager.save(2, state)
        manager.wait()
    assert manager.latest() == 2


def test_of_many_shards_none_is_begun_on_a_real_disk_that_is_too_small(small_disk: Path) -> None:
    with (
        knobs.override(SHARD_BYTES=256 << 10),
        sk.CheckpointManager(small_disk / "run", group=SingleGroup()) as manager,
    ):
        manager.resume(make_state(16))
        with pytest.raises(OutOfSpace, match="this rank wrote nothing"):
            manager.save(1, make_state(2 << 20))
        assert not [path for path in small_disk.rglob("*") if "step-" in str(path)]
        manager.save(1, make_state(512 << 10))
    assert manager.latest() == 1


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_tier_that_is_too_small_is_passed_over_with_nothing_in_it(
    small_disk: Path, tmp_path: Path, mode: Any
) -> None:
    sink, state = Sink(), make_state(2 << 20)
    tiers = [sk.Tier(small_disk / "ram", every=1)]
    root = tmp_path / "root"
    with sk.CheckpointManager(
        root, tiers=tiers, save_every=1, mode=mode, tolerate=0, group=SingleGroup(), events=sink
    ) as manager:
        manager.resume(state)
        for step in (1, 2):
            manager.after_step(step, state)
    assert not [path for path in (small_disk / "ram").rglob("*") if "step-" in str(path)]
    assert "did not take a checkpoint" in sink.named("tier.degraded")[0].text
    assert "are free" in sink.named("tier.degraded")[0].text
    assert sk.CheckpointManager(root, group=SingleGroup()).latest() == 2


def test_what_does_not_fit_for_one_rank_is_told_to_all() -> None:
    disk = MemoryStore(name="disk")
    errors: list[CheckpointError | None] = [None, None]

    def body(store: Store, group: Group) -> None:
        state = {"own": sk.PerRank(torch.zeros(1 << 16))}
        with sk.CheckpointManager("unused", store=store, group=group, events=Sink()) as manager:
            manager.resume(state)
            try:
                manager.save(1, state)
            except CheckpointError as error:
                errors[group.rank] = error

    get_all(run_world([Small(disk, None), Small(disk, 1000)], body))
    assert isinstance(errors[1], OutOfSpace)
    assert isinstance(errors[0], PeerFailure)
    assert "OutOfSpace" in errors[0].causes[1]
    assert not [info.key for info in disk.list_objects("") if "step-" in info.key]


def test_wrappers_hand_on_what_a_store_knows(tmp_path: Path) -> None:
    known, unknown = Small(MemoryStore(), 7), MemoryStore()
    assert not isinstance(unknown, MeasuredStore)
    for inner, expected in ((known, 7), (unknown, None)):
        assert RetryingStore(inner).find_free_bytes() == expected
        assert TieredStore([Place(store=Small(unknown, 1), shared=True)], inner).find_free_bytes() == expected
    free_bytes = PosixStore(tmp_path / "none/yet").find_free_bytes()
    assert free_bytes is not None
    status = os.statvfs(tmp_path)
    own_count = status.f_bfree if os.geteuid() == 0 else status.f_bavail  # a save by root may take what is root's
    assert abs(free_bytes - own_count * status.f_frsize) < 1 << 30
    assert not (tmp_path / "none").exists()
