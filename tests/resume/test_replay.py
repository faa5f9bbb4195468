"""Steps taken again are compared with what was recorded; whatever a resume leaves out, the proof names it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep import knobs
from shardkeep.engine.locate import find_checkpoint
from shardkeep.events import Event
from shardkeep.format.names import format_part
from shardkeep.format.records import PartRecord, decode_record
from shardkeep.plan.replay import ReplayReport
from shardkeep.ranks.single import SingleGroup
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faults import Call, Fault, FaultStore
from tests.support.training import build, step_once

SAVED, CRASHED = 4, 9
Mutation = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Sink:
    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def named(self, prefix: str) -> list[Event]:
        return [event for event in self.events if event.name.startswith(prefix)]


def nothing(state: dict[str, Any]) -> None:
    pass


def train(
    store: Store,
    stop: int,
    *,
    saves: tuple[int, ...] = (),
    resume: int | None = None,
    spoil: Mutation = nothing,
    before_first: Mutation = nothing,
    override: dict[str, Any] | None = None,
    as_tensor: bool = False,
    mode: Any = "blocking",
) -> tuple[ReplayReport, Sink]:
    """One start of the job: resume, spoil what was restored, train to `stop`, saving at `saves`."""
    state, sink = build("plain", 1), Sink()
    manager = sk.CheckpointManager("unused", store=store, group=SingleGroup(), events=sink, mode=mode)
    with manager:
        if override is not None and override.get("scheduler") == "live":
            override = {"scheduler": state["scheduler"]}
        manager.resume(state, step=resume, override=override)
        spoil(state)
        first = True
        for step, batch in manager.steps(state["loader"], stop=stop):
            if first:
                before_first(state)
            first = False
            loss = step_once(state, batch)
            random.random(), np.random.rand()
            manager.after_step(step, state, loss=torch.tensor(loss) if as_tensor else loss)
            if step in saves:
                manager.save(step, state)
        manager.wait()
        return manager.replay, sink


@pytest.fixture
def store() -> MemoryStore:
    """A run that saved steps 4 and 8 and went on to 9; a resume of 4 finds 5 to 9 recorded and 8 saved."""
    made = MemoryStore()
    report, _ = train(made, CRASHED, saves=(SAVED, 8))
    assert report.status == "nothing recorded"
    return made


@pytest.mark.parametrize("mode", ["blocking", "async", "overlap"])
def test_an_exact_resume_is_proved_identical(store: MemoryStore, mode: str) -> None:
    report, sink = train(store, CRASHED, saves=(8,), resume=SAVED, mode=mode)
    assert report.status == "identical"
    assert (report.compared_count, report.expected_count, report.last) == (5, 5, 9)
    assert report.quantities == ("samples/loader", "lr/optimizer", "metric/loss")
    assert "replayed 5 steps, identical (samples of loader, lr of optimizer, loss" in str(report)
    names = [event.name for event in sink.named("replay")]
    if mode != "blocking":
        # A save in the background is compared when it is committed, which may be after the last step.
        names[1:] = sorted(names[1:], reverse=True)
    assert names == ["replay.begun", "replay.save_identical", "replay.identical"]
    assert "bit for bit what generation 1 saved" in report.saved[0]
    assert not sink.named("guard")


def test_a_crash_that_closes_nothing_loses_only_what_was_not_flushed() -> None:
    made = MemoryStore()
    state = build("plain", 1)
    with knobs.override(JOURNAL_S=1000.0):
        manager = sk.CheckpointManager("unused", store=made, group=SingleGroup(), events=Sink())
        manager.resume(state)
        for step, batch in manager.steps(state["loader"], stop=7):
            loss = step_once(state, batch)
            random.random(), np.random.rand()
            manager.after_step(step, state, loss=loss)
            if step in (4, 6):
                manager.save(step, state)
    report, _ = train(made, 7, resume=4, saves=(6,))
    assert (report.status, report.expected_count, report.last) == ("identical", 2, 6)
    report, _ = train(made, 7, resume=6)
    assert report.status == "identical", "generation 2 recorded step 7"
    assert report.generations == (2,)


def test_nothing_recorded_is_not_called_a_proof(store: MemoryStore) -> None:
    made = MemoryStore()
    train(made, 4, saves=(4,))
    report, sink = train(made, 8)
    assert report.status == "nothing recorded"
    assert "identical" not in str(report)
    assert [event.name for event in sink.named("replay")] == ["replay.nothing"]


def test_a_replay_that_stops_early_says_how_far_it_came(store: MemoryStore) -> None:
    report, sink = train(store, 7, resume=SAVED)
    assert report.compared_count == 3
    assert "replayed 3 steps of 5 recorded ones, identical" in str(report)
    assert sink.events[-1].name == "replay.unfinished"


def zero_moments(state: dict[str, Any]) -> None:
    for table in state["optimizer"].state.values():
        table["exp_avg"].zero_()


def reset_step_counts(state: dict[str, Any]) -> None:
    for table in state["optimizer"].state.values():
        table["step"].fill_(1)


def nudge_weight(state: dict[str, Any]) -> None:
    with torch.no_grad():
        next(state["model"].parameters()).view(-1)[0] += 1e-6


def skip_batch(state: dict[str, Any]) -> None:
    next(iter(state["loader"]))


def rewind_schedule(state: dict[str, Any]) -> None:
    state["scheduler"].last_epoch -= 1
    state["scheduler"].base_lrs = [2e-2]


def reseed_torch(state: dict[str, Any]) -> None:
    torch.manual_seed(100)


def reseed_python(state: dict[str, Any]) -> None:
    random.seed(200)


def reseed_numpy(state: dict[str, Any]) -> None:
    np.random.seed(300)


@pytest.mark.parametrize(
    ("spoil", "step", "quantity", "cause"),
    [
        (skip_batch, 5, "samples/loader", "other samples"),
        (rewind_schedule, 5, "lr/optimizer", "schedule"),
        (reseed_torch, 5, "metric/loss", "random draws"),
        (nudge_weight, 5, "metric/loss", "weights"),
        (zero_moments, 6, "metric/loss", "optimizer moments"),
        (reset_step_counts, 6, "metric/loss", "optimizer moments"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_a_resume_left_out_is_named_at_the_first_step_it_shows(
    store: MemoryStore, spoil: Mutation, step: int, quantity: str, cause: str
) -> None:
    """Spoiled behind the guards' back, once the loop has begun."""
    in_loop = spoil if spoil is not skip_batch else nothing
    report, sink = train(
        store, CRASHED, resume=SAVED, before_first=in_loop, spoil=nothing if in_loop is spoil else spoil
    )
    assert report.divergence is not None
    assert (report.divergence.step, report.divergence.quantity) == (step, quantity)
    assert cause in report.divergence.cause
    assert report.status == "differs"
    (warning,) = sink.named("replay.differs")
    assert warning.level == "warning"
    assert f"step {step} is not what generation 1 recorded" in warning.text


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_parts_say_what_led_to_them_although_saves_between_them_failed(mode: str) -> None:
    """Each part has a digest of the steps since the last committed one; a failed save must not cut them short."""
    runs = []
    for failing in (False, True):
        made = MemoryStore()

        def when(call: Call, failing: bool = failing) -> bool:
            return failing and call.verb == "write_at" and "step-00000004" in call.key

        faulty = FaultStore(made, [Fault(kind="no_space", when=when)])
        state = build("plain", 1)
        with sk.CheckpointManager(
            "unused",
            store=faulty,
            group=SingleGroup(),
            events=Sink(),
            mode=mode,
            save_every=2,  # type: ignore[arg-type]
        ) as manager:
            manager.resume(state)
            for step, batch in manager.steps(state["loader"], stop=6):
                manager.after_step(step, state, loss=step_once(state, batch))
        key = find_checkpoint(made, 6).ref.key(format_part(0))
        part = decode_record(PartRecord, made.get(key, limit_bytes=1 << 20), where=key)
        assert part.journal is not None
        counts = {count for count, _ in part.journal.digests.values()}
        runs.append((part.journal.since, counts))
    assert runs == [(4, {2}), (2, {4})]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (reseed_python, "random streams rng/python"),
        (reseed_numpy, "random streams rng/numpy"),
        (zero_moments, "optimizer/exp_avg"),
        (reseed_torch, "rng/torch"),
        (nudge_weight, "steps before it (metric/loss)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_step_saved_again_names_streams_tensors_and_steps(store: MemoryStore, spoil: Mutation, words: str) -> None:
    report, sink = train(store, CRASHED, saves=(8,), resume=SAVED, before_first=spoil)
    assert report.saved_differ
    assert report.status == "differs"
    assert words in report.saved[0]
    (warning,) = sink.named("replay.save_differs")
    assert warning.fields["step"] == 8
    if spoil in (reseed_python, reseed_numpy):
        assert report.divergence is None, "no step draws from it"
        assert "tensors" not in report.saved[0]


def test_losses_on_cpu_tensors_count_as_numbers() -> None:
    made = MemoryStore()
    train(made, CRASHED, saves=(SAVED,), as_tensor=True)
    report, _ = train(made, CRASHED, resume=SAVED, as_tensor=True)
    assert "metric/loss" in report.quantities


def test_an_override_is_made_listed_and_not_held_against_the_run(store: MemoryStore) -> None:
    moments: list[torch.Tensor] = []

    def look(state: dict[str, Any]) -> None:
        assert [group["lr"] for group in state["optimizer"].param_groups] == [1e-4]
        assert state["scheduler"].last_epoch == SAVED
        moments.extend(table["exp_avg"].abs().sum() for table in state["optimizer"].state.values())

    report, sink = train(store, CRASHED, saves=(6,), resume=SAVED, spoil=look, override={"optimizer/lr": 1e-4})
    assert all(moment > 0 for moment in moments)
    assert moments
    assert report.status == "not compared"
    assert "optimizer/lr was changed on purpose" in str(report)
    (done,) = sink.named("resume.done")
    assert "optimizer/lr was overridden: " in done.text
    assert "-> 0.0001" in done.text
    assert "scheduler goes on with its own rates" in done.text
    overrides = find_checkpoint(store, 6).facts.overrides
    assert list(overrides) == ["optimizer/lr"]
    assert overrides["optimizer/lr"].endswith(" -> 0.0001")


def test_a_schedule_of_this_start_takes_the_place_of_the_stored_one(store: MemoryStore) -> None:
    def look(state: dict[str, Any]) -> None:
        assert state["scheduler"].last_epoch == 0
        assert state["optimizer"].param_groups[0]["lr"] == 1e-2, "the rate that this schedule began with"
        assert state["loader"].consumed == 48

    train(store, SAVED + 1, resume=SAVED, spoil=look, override={"scheduler": "live"})


def test_surroundings_that_can_change_bits_are_reported_and_suspected(store: MemoryStore) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        report, sink = train(store, CRASHED, resume=SAVED, before_first=nudge_weight)
    finally:
        torch.set_float32_matmul_precision(before)
    (event,) = sink.named("resume.environment")
    assert event.level == "warning"
    assert "torch.set_float32_matmul_precision" in event.text
    assert report.divergence is not None
    assert "known to differ: matmul_precision was highest and is high" in report.divergence.cause
