"""Tiers before a root on an S3 service: killed anywhere, what is committed anywhere stays whole and comes home."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import shardkeep as sk
from shardkeep.storage.resolve import open_store
from tests.crash.jobs import digest, make_state
from tests.crash.test_tiers_kill import Ignored, strike, whole_steps
from tests.support.servers import Server


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("where", "kind", "at"), [("ram", "kill", 60), ("root", "torn", 40), ("root", "kill", 64)])
def test_one_rank_sampled(s3: str, seaweed: Server, tmp_path: Path, where: str, kind: Any, at: int) -> None:
    assert strike(str(tmp_path), 1, 0, where, kind, at, root=s3, env=seaweed.env)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world_size", "victim", "where", "kind", "stride"),
    [(1, 0, "ram", "kill", 7), (1, 0, "root", "kill", 3), (1, 0, "root", "torn", 3), (2, 1, "root", "kill", 17)],
)
def test_killed_at_many_calls(
    s3: str, seaweed: Server, tmp_path: Path, world_size: int, victim: int, where: str, kind: Any, stride: int
) -> None:
    at = 1
    while strike(str(tmp_path / f"{at}"), world_size, victim, where, kind, at, root=f"{s3}/{at}", env=seaweed.env):
        at += stride
    assert at > 30


def test_a_lost_node_goes_on_from_the_service(s3: str, tmp_path: Path) -> None:
    """The tier is one step ahead; on another node, without it, the newest on the service is the one."""

    def start(last: int) -> int:
        state = make_state(999)
        tiers = [sk.Tier(tmp_path / "ram", every=1)]
        with sk.CheckpointManager(s3, save_every=3, tiers=tiers, mode="async", events=Ignored()) as manager:
            step = manager.resume(state).step
            assert not step or digest(state) == digest(make_state(step))
            for at in range(step + 1, last + 1):
                manager.after_step(at, make_state(at))
        return step

    assert start(4) == 0
    assert start(5) == 4
    assert whole_steps(open_store(s3)) == [3, 4]
    shutil.rmtree(tmp_path / "ram")
    assert start(7) == 4
    assert whole_steps(open_store(s3)) == [3, 4, 6]
