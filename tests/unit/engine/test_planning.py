"""What a saver remembers from one save to the next, and what must make it plan anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardkeep.engine import attempt, planning
from shardkeep.engine.planning import PlanCache
from shardkeep.engine.recover import roll_forward
from shardkeep.engine.run import read_commit, scan_run
from shardkeep.engine.save import SaveOptions, Saver
from shardkeep.errors import PeerFailure, StorageError
from shardkeep.events import LogSink
from shardkeep.format.names import StepRef
from shardkeep.format.records import CommitRecord, PartRecord, decode_record
from shardkeep.ranks.base import Group
from shardkeep.ranks.single import SingleGroup
from tests.support.fake_state import FakeRun, FakeTensor, ThreadWorld, capture_fake, make_tensor


def vector(*values: float, per_rank: bool = False) -> FakeTensor:
    return make_tensor(np.array(values, dtype=np.float32), per_rank=per_rank)


SMALL = {"model/a": vector(1, 2, 3)}
LARGE = {**SMALL, "model/b": vector(4, 5)}


def saver_of(run: FakeRun, group: Group | None = None) -> Saver:
    return Saver(run.store, group or SingleGroup(), run_id=run.run_id, generation=run.generation)


def commit_of(run: FakeRun, step: int, *, attempt: int = 1) -> CommitRecord:
    return read_commit(run.store, StepRef(step=step, generation=run.generation, attempt=attempt))


@pytest.mark.parametrize("before", [None, SMALL], ids=["first save", "later save"])
def test_a_save_that_fails_as_it_opens_leaves_no_plan_of_another_structure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, FakeTensor] | None
) -> None:
    run = FakeRun(tmp_path)
    saver = saver_of(run)
    if before is not None:
        saver.save(1, lambda: capture_fake(before), SaveOptions())

    def refuse(generation: object) -> tuple[int, ...]:
        raise StorageError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(attempt, "list_generations", refuse)
        with pytest.raises(StorageError, match="not now"):
            saver.save(2, lambda: capture_fake(LARGE), SaveOptions())
    saver.save(2, lambda: capture_fake(LARGE), SaveOptions())
    assert sorted(commit_of(run, 2).facts.layout.tensors) == sorted(LARGE)


def test_a_rank_that_missed_a_plan_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path, world_size=2)

    def work(group: Group) -> None:
        saver = saver_of(run, group)
        saver.save(1, lambda: capture_fake(SMALL, group.rank, 2), SaveOptions())
        saver.save(2, lambda: capture_fake(LARGE, group.rank, 2), SaveOptions())
        if group.rank == 1:
            # As after a timeout: this rank never heard the last plan, the coordinator did.
            saver._cache = PlanCache()
        saver.save(3, lambda: capture_fake(LARGE, group.rank, 2), SaveOptions())

    ThreadWorld(2).run(work)
    plans = {
        decode_record(PartRecord, (run.folder(3) / f"part-r0000{rank}.json").read_bytes(), where="part").plan
        for rank in (0, 1)
    }
    assert plans == {commit_of(run, 3).plan}


def test_content_that_begins_to_differ_is_seen_between_ranks_of_different_structure(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, world_size=2)

    def work(group: Group) -> None:
        saver = saver_of(run, group)

        def state(value: float) -> dict[str, FakeTensor]:
            own = {"extra/only": vector(1)} if group.rank == 0 else {}
            return {"optimizer/shared": vector(value, value), **own}

        saver.save(1, lambda: capture_fake(state(0), group.rank, 2), SaveOptions())
        saver.save(2, lambda: capture_fake(state(0), group.rank, 2), SaveOptions())
        saver.save(3, lambda: capture_fake(state(group.rank), group.rank, 2), SaveOptions())

    ThreadWorld(2).run(work)
    assert [commit_of(run, step).facts.layout.per_rank for step in (1, 2, 3)] == [(), (), ("optimizer/shared",)]


def test_a_state_that_does_not_change_is_agreed_in_one_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path, world_size=2)
    seen: list[int] = []
    exchange = planning._exchange
    monkeypatch.setattr(planning, "_exchange", lambda group, *rest: seen.append(group.rank) or exchange(group, *rest))  # type: ignore[func-returns-value]

    def work(group: Group) -> None:
        saver = saver_of(run, group)
        own = {"extra/only": vector(1)} if group.rank == 0 else {}
        for step in (1, 2, 3):
            saver.save(step, lambda: capture_fake({**SMALL, **own}, group.rank, 2), SaveOptions())

    ThreadWorld(2).run(work)
    assert sorted(seen) == [0, 1]


def test_a_tensor_kept_per_rank_may_change_its_shape(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    saver = saver_of(run)
    for step, own in ((1, vector(1, 2, 3, per_rank=True)), (2, vector(1, 2, 3, 4, 5, per_rank=True))):
        saver.save(step, lambda own=own: capture_fake({**SMALL, "x/own": own}), SaveOptions())  # type: ignore[misc]
    part = decode_record(PartRecord, (run.folder(2) / "part-r00000.json").read_bytes(), where="part")
    assert part.per_rank["x/own"].shape == (5,)
    assert part.per_rank["x/own"].end - part.per_rank["x/own"].begin == 20


def test_holders_name_the_same_values_at_every_save(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    saver = saver_of(run)
    for step in (1, 2):
        saver.save(step, lambda: capture_fake(SMALL), SaveOptions())
    assert commit_of(run, 1).facts.holders == commit_of(run, 2).facts.holders


def test_facts_that_cannot_be_made_fail_on_all_ranks_at_once(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, world_size=2)

    def work(group: Group) -> type[BaseException]:
        options = SaveOptions(metrics={"loss": "low"})  # type: ignore[dict-item]  # what is tested
        try:
            saver_of(run, group).save(1, lambda: capture_fake(SMALL, group.rank, 2), options)
        except Exception as error:  # noqa: BLE001  # its kind is what is tested
            return type(error)
        raise AssertionError

    kinds = ThreadWorld(2).run(work)
    assert kinds[1] is PeerFailure
    assert not (run.folder(1) / "commit.json").exists()


def test_of_two_complete_tries_only_the_last_is_committed(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    for number, state in ((1, SMALL), (2, LARGE)):
        run.save(1, state)
        (run.folder(1, attempt=number) / "commit.json").unlink()
    view = scan_run(run.store)
    assert view is not None
    assert [ref.attempt for ref in roll_forward(run.store, view, LogSink())] == [2]
    view = scan_run(run.store)
    assert view is not None
    assert [ref.attempt for ref, folder in view.folders.items() if folder.committed] == [2]
