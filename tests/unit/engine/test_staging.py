"""Images of shard files in memory: at once and later, byte for byte what a blocking save writes."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from shardkeep import knobs
from shardkeep.engine import staging
from shardkeep.engine.flight import Flight
from shardkeep.engine.save import Committed, SaveOptions, Saver
from shardkeep.errors import PeerFailure, StateChanged, StorageError
from shardkeep.plan.shards import ShardPlan
from shardkeep.ranks.base import Group
from shardkeep.ranks.single import SingleGroup
from shardkeep.spec.tensors import Captured
from tests.support.fake_state import BufferBytes, FakeRun, ThreadWorld, capture_fake, small_state


def saver_of(run: FakeRun, group: Group | None = None) -> Saver:
    return Saver(run.store, group or SingleGroup(), run_id=run.run_id, generation=run.generation)


def shards_of(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".bin")
    }


def spoil(captured: Captured, keys: Any) -> None:
    for tensor in captured.tensors:
        if keys(tensor.key):
            for piece in tensor.pieces:
                assert isinstance(piece.data, BufferBytes)
                piece.data.data[:] = bytes(len(piece.data.data))


@pytest.mark.parametrize("threads", [1, 3])
def test_staged_files_are_those_of_a_blocking_save_whatever_changes_meanwhile(tmp_path: Path, threads: int) -> None:
    run = FakeRun(tmp_path)
    run.save(1, small_state())
    captured = capture_fake(small_state())
    deferred = frozenset(t.key for t in captured.tensors if t.key.startswith("optimizer"))
    saver = saver_of(run)
    go = threading.Event()
    hold = {t.key: t.pieces[0].data for t in captured.tensors if t.key in deferred}

    class Late(BufferBytes):
        def copy_out(self, start: int, out: memoryview) -> None:
            go.wait(10)
            super().copy_out(start, out)

    tensors = tuple(
        dataclasses.replace(t, pieces=(dataclasses.replace(t.pieces[0], data=Late(bytes(hold[t.key].data))),))
        if t.key in deferred
        else t
        for t in captured.tensors
    )
    late = dataclasses.replace(captured, tensors=tensors, deferred=deferred)
    with knobs.override(STAGE_THREADS=threads):
        flight = saver.stage(2, lambda: late, SaveOptions())
        assert not flight.is_staged
        spoil(late, lambda key: key not in deferred)
        go.set()
        flight.wait_staged()
        spoil(late, lambda key: True)
        flight.wait()
    saver.close()
    assert shards_of(run.folder(2)) == shards_of(run.folder(1))


def test_images_begin_at_pages_and_do_not_meet() -> None:
    @dataclasses.dataclass
    class Plan:
        size_bytes: int

    plans: Any = [Plan(1), Plan(4096), Plan(4097), Plan(0), Plan(5)]
    starts, end = staging.place_images(plans)
    assert starts == [0, 4096, 8192, 16384, 16384]
    assert end == 16384 + 4096
    assert all(isinstance(plan, Plan | ShardPlan) for plan in plans)


def test_a_copy_that_fails_lets_the_state_change_at_once_and_is_told_on_every_rank(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, world_size=2)
    state = small_state(placement="S0")

    class Torn(BufferBytes):
        def copy_out(self, start: int, out: memoryview) -> None:
            raise StateChanged("model/x: was changed")

    def work(group: Group) -> list[str]:
        saver = saver_of(run, group)
        told = []
        for broken in ("first", "deferred", "confirm", ""):
            captured = capture_fake(state, group.rank, 2)
            if group.rank == 1 and broken in ("first", "deferred"):
                tensors = tuple(
                    dataclasses.replace(
                        t, pieces=tuple(dataclasses.replace(p, data=Torn(bytes(p.data.nbytes))) for p in t.pieces)
                    )
                    for t in captured.tensors
                )
                deferred = frozenset(t.key for t in tensors) if broken == "deferred" else frozenset()
                captured = dataclasses.replace(captured, tensors=tensors, deferred=deferred)

            def confirm(broken: str = broken) -> None:
                if broken == "confirm" and group.rank == 1:
                    raise StateChanged("model/x: was changed")

            ends: list[Committed | BaseException] = []
            flight: Flight[Committed] = saver.stage(
                5, lambda found=captured: found, SaveOptions(), confirm=confirm, ended=ends.append
            )
            flight.wait_staged()
            try:
                flight.wait()
                told.append("saved")
            except (StateChanged, PeerFailure) as error:
                told.append(type(error).__name__)
                assert ends == [error]  # noqa: PT017  # one of several outcomes
        saver.close()
        return told

    assert ThreadWorld(2).run(work) == [
        ["PeerFailure"] * 3 + ["saved"],
        ["StateChanged"] * 3 + ["saved"],
    ]
    assert [path.parent.name for path in sorted(tmp_path.rglob("commit.json"))] == ["step-00000005.4"]


def test_a_flight_that_nobody_waited_for_is_not_written_over(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    saver = saver_of(run)
    flights = [saver.stage(step, lambda n=step: capture_fake(small_state(n)), SaveOptions()) for step in (1, 2, 3)]
    saver.close()
    assert all(flight.is_done for flight in flights)
    for step in (1, 2, 3):
        other = FakeRun(tmp_path / f"other{step}")
        other.save(step, small_state(step))
        assert shards_of(run.folder(step)) == shards_of(other.folder(step))


def test_staging_without_memory_writes_nothing_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(tmp_path)
    saver = saver_of(run)
    with monkeypatch.context() as patch:

        def take(*_: object) -> memoryview:
            raise StorageError("no memory to stage")

        patch.setattr(staging.Arena, "take", take)
        flight = saver.stage(1, lambda: capture_fake(small_state()), SaveOptions())
        with pytest.raises(StorageError, match="no memory"):
            flight.wait()
    saver.stage(1, lambda: capture_fake(small_state()), SaveOptions()).wait()
    saver.close()
    assert shards_of(run.folder(1, attempt=1)) or shards_of(run.folder(1, attempt=2))
