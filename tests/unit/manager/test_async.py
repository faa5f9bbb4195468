"""Saving while training goes on: the checkpoint is the state at the call, to the byte, and no failure is silent."""

from __future__ import annotations

import functools
import signal
import threading
import time
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep import knobs
from shardkeep.engine.checkpoint import Checkpoint
from shardkeep.engine.locate import find_checkpoint
from shardkeep.engine.run import scan_run
from shardkeep.engine.verify import verify_run
from shardkeep.errors import OutOfSpace, StateChanged, StorageError, UnsupportedState, UsageError
from shardkeep.events import Event
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faults import Call, Fault
from tests.support.held import (
    Held,
    Sink,
    change_all,
    change_by_step,
    differences,
    forward_backward,
    make_job,
    picture,
    resumed,
)

MODES = ["async", "overlap"]


def manage(store: Store, mode: str, **options: Any) -> sk.CheckpointManager:
    options.setdefault("events", Sink())
    return sk.CheckpointManager("unused", store=store, mode=mode, **options)  # type: ignore[arg-type]


def steps_of(store: Store) -> list[int]:
    view = scan_run(store)
    return [ref.step for ref in view.timeline] if view is not None else []


def open_checkpoint(store: Store, step: int) -> Checkpoint:
    return Checkpoint(store, find_checkpoint(store, step))


def check(store: Store, step: int, wanted: dict[str, Any], make: Any = make_job) -> None:
    assert not verify_run(store).listed
    found, got = resumed(store, make)
    assert found == step
    assert differences(got, wanted) == []


@pytest.mark.parametrize("by", ["save", "after_step"])
def test_async_is_the_state_at_the_call_whatever_changes_right_after_it(by: str) -> None:
    held, state = Held(), make_job()
    with manage(held.store, "async", save_every=2) as manager:
        manager.resume(state)
        manager.after_step(1, state)
        held.hold()
        forward_backward(state)
        wanted = picture(state)
        if by == "save":
            manager.save(2, state)
        else:
            assert manager.after_step(2, state)
        change_all(state)
        assert held.reached.wait(10)
        change_all(state)
        assert steps_of(held.inner) == []
        held.let_go()
        assert manager.wait() is not None
    check(held.inner, 2, wanted)


FLAVOURS = {
    "adamw": {},
    "adamw-fused": {"fused": True},
    "adamw-foreach": {"foreach": True, "amsgrad": True},
    "sgd": {"optimizer": torch.optim.SGD, "momentum": 0.9},
    "lbfgs": {"optimizer": torch.optim.LBFGS, "max_iter": 2},
    "tensor-lr": {"lr": torch.tensor(0.01)},
    "adafactor": {"optimizer": torch.optim.Adafactor},
}


def make_flavour(name: str) -> dict[str, Any]:
    options = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in FLAVOURS[name].items()
    }
    return make_job(**options)


@pytest.mark.parametrize("flavour", sorted(FLAVOURS))
def test_overlap_is_the_state_at_the_call_although_steps_follow_at_once(flavour: str) -> None:
    held, state, sink = Held(), make_flavour(flavour), Sink()
    with manage(held.store, "overlap", events=sink) as manager:
        manager.resume(state)
        for step in (1, 2, 3):
            manager.wait()
            held.hold()
            forward_backward(state)
            wanted = picture(state)
            manager.save(step, state)
            change_by_step(state)
            forward_backward(state)
            change_by_step(state)
            assert step not in steps_of(held.inner)
            held.let_go()
        manager.wait()
    assert "save.not_overlapped" not in sink.names()
    check(held.inner, 3, wanted, functools.partial(make_flavour, flavour))


class SlowCopies:
    """While in effect, copies of live tensors take their time, as large ones do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.02) -> None:
        from shardkeep.state.overlap import WatchedBytes

        self.began = threading.Event()
        plain = WatchedBytes.copy_out

        def copy_out(data: Any, start: int, out: memoryview) -> None:
            if threading.current_thread().name.startswith(("shardkeep-save", "shardkeep-stage")):
                self.began.set()
                time.sleep(pause_s)
            plain(data, start, out)

        monkeypatch.setattr(WatchedBytes, "copy_out", copy_out)


def test_only_the_step_waits_and_only_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    state, store = make_job(), MemoryStore()
    with manage(store, "overlap") as manager:
        manager.resume(state)
        manager.save(1, state)
        manager.wait()
        slow = SlowCopies(monkeypatch)
        change_by_step(state)
        wanted = picture(state)
        manager.save(2, state)
        assert slow.began.wait(10)
        forward_backward(state)
        change_by_step(state)
        assert manager._background is not None
        assert manager._background.waited_s > 0.02
        before_s = manager._background.waited_s
        forward_backward(state)
        change_by_step(state)
        assert manager._background.waited_s == before_s
    # The draws of this loop are no part of the wanted picture: it was taken before them.
    check(store, 2, wanted)


def through_version(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.add_(1)


def through_moments(state: dict[str, Any]) -> None:
    for slots in state["optimizer"].state.values():
        slots["exp_avg"].mul_(2)


def through_data(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.data.add_(1)


def through_numpy(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.detach().numpy()[...] += 1


def through_own_step(state: dict[str, Any]) -> None:
    """What the step of an optimizer does that nobody knows of."""
    other = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
    forward_backward(state)
    other.step()


CHANGES = [through_version, through_moments, through_data, through_numpy, through_own_step]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_outside_of_step_gives_the_checkpoint_up_and_the_next_ones_are_copied_at_once(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, store, sink = make_job(), MemoryStore(), Sink()
    with manage(store, "overlap", events=sink, save_every=1) as manager:
        manager.resume(state)
        assert manager.after_step(1, state)
        manager.wait()
        with monkeypatch.context() as patch:
            SlowCopies(patch, 0.05)
            change_by_step(state)
            assert manager.after_step(2, state)
            change(state)
            with pytest.raises(StateChanged, match=r"outside of its optimizer's step.*\n.*mode='async'") as caught:
                manager.wait()
        assert caught.value.key is not None
        assert steps_of(store) == [1]
        assert len(sink.named("save.not_overlapped")) == 1
        assert len(sink.named("save.failed")) == 1
        assert manager.wait() is None, "told once"
        change_by_step(state)
        wanted = picture(state)
        assert manager.after_step(2, state), "the same step can be saved again"
        change(state)
        change_all(state)
    assert steps_of(store) == [1, 2]
    assert len(sink.named("save.not_overlapped")) == 1
    check(store, 2, wanted)


def test_a_change_that_ends_after_its_copy_is_seen_by_the_next_step_or_the_receipt() -> None:
    """An operation raises the version when it ends: its tensor may be copied, torn, and looked at before that."""
    state, held = make_job(), Held()
    for with_step in (False, True):
        with manage(held.store, "overlap") as manager:
            manager.resume(state, fresh=True)
            held.hold()
            manager.save(1, state)
            assert held.reached.wait(10), "everything is copied, nothing is written"
            through_version(state)
            if with_step:
                forward_backward(state)
                change_by_step(state)
            held.let_go()
            with pytest.raises(StateChanged):
                manager.wait()
    assert steps_of(held.inner) == []
    assert not [call for call in held.store.log if call.verb == "put" and "/part-" in call.key]


def test_changes_after_a_step_that_passed_are_nobodys_business() -> None:
    state, held, sink = make_job(), Held(), Sink()
    with manage(held.store, "overlap", events=sink) as manager:
        manager.resume(state)
        held.hold()
        wanted = picture(state)
        manager.save(1, state)
        forward_backward(state)
        change_by_step(state)
        change_all(state)
        held.let_go()
        manager.wait()
    assert "save.not_overlapped" not in sink.names()
    check(held.inner, 1, wanted)


def test_exchanged_data_is_not_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    state, store, sink = make_job(), MemoryStore(), Sink()
    SlowCopies(monkeypatch)
    with manage(store, "overlap", events=sink) as manager:
        manager.resume(state)
        wanted = picture(state)
        manager.save(1, state)
        for parameter in state["model"].parameters():
            parameter.data = torch.full_like(parameter, 7.0)
        for slots in state["optimizer"].state.values():
            slots["exp_avg"] = torch.zeros_like(slots["exp_avg"])
        manager.wait()
    assert "save.not_overlapped" not in sink.names()
    check(store, 1, wanted)


class Sneaky(torch.optim.AdamW):
    """A step of its own beside that of its base."""


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.sub_(0.1)


def instance_step(state: dict[str, Any]) -> None:
    state["optimizer"].step = functools.partial(bare_step, state["optimizer"])


def class_step(state: dict[str, Any]) -> None:
    state["optimizer"].__class__ = type("Own", (Sneaky,), {"step": bare_step})


def no_optimizer(state: dict[str, Any]) -> None:
    del state["optimizer"], state["scheduler"]


@pytest.mark.parametrize("spoil", [instance_step, class_step, no_optimizer], ids=lambda spoil: spoil.__name__)
def test_steps_that_call_no_hooks_are_found_and_nothing_is_deferred(spoil: Any) -> None:
    state, store, sink = make_job(), MemoryStore(), Sink()
    spoil(state)
    with manage(store, "overlap", events=sink) as manager:
        manager.resume(state)
        manager.save(1, state)
        wanted = [parameter.detach().clone() for parameter in state["model"].parameters()]
        through_data(state)
        manager.save(2, state)
    assert len(sink.named("save.not_overlapped")) == 1
    with open_checkpoint(store, 1) as found:
        names = dict(state["model"].named_parameters())
        assert torch.equal(found["model/up.weight"].tensor(), wanted[list(names).index("up.weight")])


def test_a_class_that_overrides_step_and_a_schedule_in_front_of_it_are_trusted() -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.99)
            return super().step(closure)

    held, sink = Held(), Sink()
    make = functools.partial(make_job, optimizer=Own)
    state = make()
    with manage(held.store, "overlap", events=sink) as manager:
        manager.resume(state)
        wanted = picture(state)
        manager.save(1, state)
        forward_backward(state)
        change_by_step(state)
    assert "save.not_overlapped" not in sink.names()
    with open_checkpoint(held.inner, 1) as found:
        assert found["model/up.weight"].tensor().numpy().tobytes() == wanted["model/up.weight"][2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["step", pytest.param("around", marks=pytest.mark.slow)])
def test_compiled_steps_wait_too(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, state, sink = Held(), make_job(), Sink()
    optimizer = state["optimizer"]

    def around() -> None:
        optimizer.step()

    step = torch.compile(optimizer.step if how == "step" else around, backend="aot_eager")
    wanted: dict[str, Any] = {}
    with manage(held.store, "overlap", events=sink) as manager:
        manager.resume(state)
        SlowCopies(monkeypatch, 0.005)
        for number in range(1, 12):
            forward_backward(state)
            wanted = picture(state)
            manager.save(number, state)
            step()
        assert manager._background is not None
        assert manager._background.waited_s > 0.01
    assert "save.not_overlapped" not in sink.names()
    check(held.inner, 11, wanted)


def test_a_scaler_and_two_optimizers() -> None:
    def make() -> dict[str, Any]:
        state = make_job()
        state["second"] = torch.optim.SGD([state["noise"].requires_grad_()], lr=0.5, momentum=0.9)
        state["scaler"] = torch.amp.GradScaler("cpu")
        return state

    def steps(state: dict[str, Any]) -> None:
        scaler = state["scaler"]
        for optimizer in (state["optimizer"], state["second"]):
            optimizer.zero_grad()
        loss = state["model"](torch.randn(8, 5)).pow(2).mean() + state["noise"].pow(2).sum()
        scaler.scale(loss).backward()
        for optimizer in (state["optimizer"], state["second"]):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()

    def more(state: dict[str, Any]) -> dict[str, Any]:
        found = {"second": repr(state["second"].state_dict()), "scaler": repr(state["scaler"].state_dict())}
        return {**picture(state), **found}

    held, state, sink = Held(), make(), Sink()
    with manage(held.store, "overlap", events=sink) as manager:
        manager.resume(state)
        steps(state)
        held.hold()
        wanted = more(state)
        manager.save(1, state)
        steps(state)
        held.let_go()
    assert "save.not_overlapped" not in sink.names()
    again = make()
    steps(again)
    with manage(held.inner, "async") as manager:
        manager.resume(again)
    assert differences(more(again), wanted) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_regions_threads_and_the_trainers_own_settings(mode: str, region: Any) -> None:
    held, state = Held(), make_job()
    forward_backward(state)

    def settings() -> tuple[Any, ...]:
        parameters = list(state["model"].parameters())
        return (
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            [
                (id(p), p.requires_grad, p._version, p.grad.sum().item() if p.grad is not None else None)
                for p in parameters
            ],
            [module.training for module in state["model"].modules()],
        )

    with manage(held.store, mode, save_every=2) as manager:
        manager.resume(state)
        with region():
            before, wanted = settings(), picture(state)
            manager.after_step(1, state)
            assert (settings(), differences(picture(state), wanted)) == (before, [])
            assert manager.after_step(2, state)
            assert (settings(), differences(picture(state), wanted)) == (before, [])
        forward_backward(state)
        change_by_step(state)
    check(held.inner, 2, wanted)


# Failures


def failing(step: int, kind: Any = "no_space", times: int | None = 1) -> Fault:
    def when(call: Call) -> bool:
        return call.verb == "write_at" and f"step-{step:08d}" in call.key

    return Fault(kind=kind, when=when, times=times)


@pytest.mark.parametrize("mode", ["blocking", *MODES])
def test_a_failed_save_is_told_at_the_next_due_step_and_counted(mode: str) -> None:
    """Like google/orbax#605: save 2 of 5 fails; the list shows the others."""
    held, sink, state = Held(plan=[failing(2)]), Sink(), make_job()
    with manage(held.store, mode, save_every=1, events=sink, keep=sk.Keep(last=9)) as manager:
        manager.resume(state)
        for step in range(1, 6):
            forward_backward(state)
            change_by_step(state)
            begun = manager.after_step(step, state)
            assert begun == (mode != "blocking" or step != 2)
        assert manager.latest() in (4, 5)
    assert steps_of(held.inner) == [1, 3, 4, 5]
    (failed,) = sink.named("save.failed")
    assert failed.fields["step"] == 2
    assert failed.fields["failures_count"] == 1
    assert "injected" in failed.text
    check(held.inner, 5, resumed(held.inner, make_job)[1])
    assert not [key for _, key in held.store.calls if "step-00000002" in key and held.inner.list_objects(key)]


@pytest.mark.parametrize("mode", MODES)
def test_too_many_failures_in_a_row_raise_where_the_loop_is(mode: str) -> None:
    held, state = Held(plan=[failing(step) for step in (2, 3, 4)]), make_job()
    manager = manage(held.store, mode, save_every=1, tolerate=2)
    with pytest.raises(OutOfSpace):  # noqa: PT012  # whichever call it is
        with manager:
            manager.resume(state)
            for step in range(1, 6):
                manager.after_step(step, state)
    assert manager.step == 5
    assert steps_of(held.inner) == [1]


@pytest.mark.parametrize("where", ["wait", "close", "exit", "save"])
def test_a_failure_surfaces_wherever_the_loop_meets_it_first(where: str) -> None:
    held, state, sink = Held(plan=[failing(1)]), make_job(), Sink()
    manager = manage(held.store, "async", events=sink)
    manager.resume(state)
    manager.save(1, state)
    with pytest.raises(OutOfSpace):  # noqa: PT012  # whichever call it is
        if where == "exit":
            with manager:
                pass
        elif where == "save":
            manager.save(2, state)
        else:
            getattr(manager, where)()
    if where in ("wait", "save"):
        assert manager.wait() is None
        wanted = picture(state)
        manager.save(1, state)
        manager.close()
        check(held.inner, 1, wanted)
    manager.close()
    assert len(sink.named("save.failed")) == 1


def test_an_error_at_hand_matters_more_and_the_save_under_way_still_lands() -> None:
    held, state = Held(), make_job()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  # whichever call it is
        with manage(held.store, "async") as manager:
            manager.resume(state)
            held.hold()
            wanted = picture(state)
            manager.save(1, state)
            threading.Timer(0.2, held.let_go).start()
            raise ZeroDivisionError
    check(held.inner, 1, wanted)


def test_an_interrupt_while_waiting_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook: the save goes on, and the next one does not write over its memory."""

    held, state = Held(), make_job()
    with manage(held.store, "async") as manager:
        manager.resume(state)
        held.hold()
        wanted = picture(state)
        manager.save(1, state)
        main = threading.main_thread().ident
        assert main is not None
        for call in (manager.wait, lambda: manager.save(2, state)):
            threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                call()
        change_all(state)
        held.let_go()
        ref = manager.wait()
        assert ref is not None
        assert ref.step == 1
    check(held.inner, 1, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_in_the_copy_gives_up_and_the_next_save_is_right(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardkeep.state.hostbytes import TensorBytes

    state, store = make_job(), MemoryStore()
    plain, hits = TensorBytes.copy_out, []

    def copy_out(data: Any, start: int, out: memoryview) -> None:
        hits.append(start)
        if len(hits) == 4:
            raise KeyboardInterrupt
        plain(data, start, out)

    with manage(store, mode) as manager:
        manager.resume(state)
        with monkeypatch.context() as patch:
            patch.setattr(TensorBytes, "copy_out", copy_out)
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # whichever call it is
                manager.save(1, state)
                manager.wait()
        assert steps_of(store) == []
        wanted = picture(state)
        manager.save(1, state)
    check(store, 1, wanted)


def test_a_sink_that_raises_or_calls_back_harms_nothing() -> None:
    class Rude(Sink):
        def emit(self, event: Event) -> None:
            super().emit(event)
            if event.name == "save.committed":
                manager.latest()
                _ = manager.replay
                with pytest.raises(UsageError, match="wait for itself"):
                    manager.wait()
                with pytest.raises(UsageError, match="wait for itself"):
                    manager.save(9, state)
                refused.append(event.name)
            raise RuntimeError("a bug of the receiver")

    refused: list[str] = []
    sink, state, store = Rude(), make_job(), MemoryStore()
    with manage(store, "async", events=sink, save_every=1) as manager:
        manager.resume(state)
        for step in (1, 2):
            wanted = picture(state)
            assert manager.after_step(step, state)
    assert refused == ["save.committed"] * 2
    check(store, 2, wanted)


def test_what_follows_a_commit_may_fail_and_the_checkpoint_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkeep.manager.retain import Retention

    def explode(*_: Any) -> None:
        raise RuntimeError("a bug in what follows")

    state, store, sink = make_job(), MemoryStore(), Sink()
    with manage(store, "async", events=sink) as manager:
        manager.resume(state)
        monkeypatch.setattr(Retention, "after_save", explode)
        manager.save(1, state)
        ref = manager.wait()
        assert ref is not None
    assert steps_of(store) == [1]
    assert "RuntimeError: a bug" in sink.named("save.follow_up_failed")[0].text


# One in flight


def test_a_due_save_waits_for_the_one_before() -> None:
    held, state = Held(), make_job()
    with manage(held.store, "async", save_every=1) as manager:
        manager.resume(state)
        held.hold()
        manager.after_step(1, state)
        threading.Timer(0.3, held.let_go).start()
        began_s = time.monotonic()
        manager.after_step(2, state)
        assert time.monotonic() - began_s > 0.2
    assert steps_of(held.inner) == [1, 2]


def test_a_due_save_is_skipped_while_one_is_under_way_and_says_so() -> None:
    held, state, sink = Held(), make_job(), Sink()
    with manage(held.store, "async", save_every=1, busy="skip", events=sink) as manager:
        manager.resume(state)
        held.hold()
        assert manager.after_step(1, state)
        assert not manager.after_step(2, state)
        assert not manager.after_step(3, state)
        held.let_go()
        manager.wait()
        assert manager.after_step(4, state)
    assert steps_of(held.inner) == [1, 4]
    assert [event.fields["step"] for event in sink.named("save.skipped")] == [2, 3]


def test_old_checkpoints_go_in_the_background_while_the_loop_looks() -> None:
    held, state = Held(), make_job()
    with manage(held.store, "async", save_every=1, keep=sk.Keep(last=2), busy="skip") as manager:
        manager.resume(state)
        for step in range(1, 30):
            manager.after_step(step, state)
            for _ in range(3):
                newest = manager.latest()
                assert newest is None or newest <= step
                time.sleep(0.01)
        assert manager.wait() is not None
        saved = manager.latest()
    assert len(steps_of(held.inner)) == 2
    assert steps_of(held.inner)[-1] == saved
    assert not verify_run(held.inner).listed


def test_a_failed_prune_in_the_background_is_reported_and_caught_up() -> None:
    def when(call: Call) -> bool:
        return call.verb == "delete" and "step-" in call.key

    held, state, sink = Held(plan=[Fault(kind="no_space", when=when)]), make_job(), Sink()
    with manage(held.store, "async", save_every=1, keep=sk.Keep(last=1), events=sink) as manager:
        manager.resume(state)
        for step in range(1, 5):
            manager.after_step(step, state)
    assert len(sink.named("prune.failed")) == 1
    assert "save.failed" not in sink.names()
    assert steps_of(held.inner) == [4]


# Ahead of the first save


def test_the_first_step_that_is_not_saved_makes_the_memory_ready() -> None:
    state = make_job()
    with manage(MemoryStore(), "async", save_every=3) as manager:
        manager.resume(state)
        assert manager._saver is not None
        before = picture(state)
        assert not manager.after_step(1, state)
        assert differences(picture(state), before) == []
        ready = manager._saver._arena.size_bytes
        assert ready > sum(p.numel() * 4 for p in state["model"].parameters())
        manager.after_step(2, state)
        assert manager.after_step(3, state)
        assert manager._saver._arena.size_bytes == ready
        assert manager.step == 3


def test_memory_that_cannot_be_had_ahead_is_reported_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkeep.engine import hostmemory

    class NoMemory:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def mmap(self, *_: Any, **__: Any) -> Any:
            raise OSError(12, "Cannot allocate memory")

    real, state, sink, store = hostmemory.mmap, make_job(), Sink(), MemoryStore()
    with manage(store, "async", save_every=2, events=sink) as manager:
        manager.resume(state)
        with monkeypatch.context() as patch:
            patch.setattr(hostmemory, "mmap", NoMemory())
            assert not manager.after_step(1, state)
            assert manager.after_step(2, state)
            assert not manager.after_step(3, state)
            with pytest.raises(StorageError, match=r"no memory to stage[^\n]*\n.*mode='blocking'"):
                manager.wait()
        wanted = picture(state)
        assert manager.after_step(4, state)
    assert sink.names().count("save.not_prepared") == 1
    assert steps_of(store) == [4]
    check(store, 4, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_what_cannot_be_saved_is_told_at_the_first_step(mode: str) -> None:
    state = {**make_job(), "handle": object()}
    manager = manage(MemoryStore(), mode, save_every=100)
    with manager, pytest.raises(UnsupportedState, match="handle"):  # noqa: PT012  # whichever call it is
        manager.resume(make_job())
        manager.after_step(1, state)


def test_growing_state_gets_more_memory_and_the_rest_is_used_again() -> None:
    store, state, sizes = MemoryStore(), make_job(), []
    with manage(store, "async") as manager:
        manager.resume(state)
        assert manager._saver is not None
        for step in range(1, 5):
            if step == 3:
                state["noise"] = torch.randn(100_000)
            wanted = picture(state)
            manager.save(step, state)
            manager.wait()
            sizes.append(manager._saver._arena.size_bytes)
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3]
    assert sizes[2] > 400_000

    def make() -> dict[str, Any]:
        return {**make_job(), "noise": torch.zeros(100_000)}

    check(store, 4, wanted, make)


def test_a_tensor_that_is_let_go_is_not_kept_until_the_save_ends() -> None:
    import gc
    import weakref

    held, state = Held(), make_job()
    with manage(held.store, "async") as manager:
        manager.resume(state)
        held.hold()
        noise = weakref.ref(state["noise"].untyped_storage())
        manager.save(1, state)
        assert held.reached.wait(10)
        del state["noise"]
        gc.collect()
        assert noise() is None
        held.let_go()


def test_an_exception_that_is_kept_keeps_no_memory() -> None:
    import gc
    import mmap

    def maps() -> int:
        gc.collect()
        return sum(type(thing) is mmap.mmap for thing in gc.get_objects())

    kept: list[BaseException] = []
    before, state = maps(), make_job()
    held = Held(plan=[failing(step, times=None) for step in range(1, 9)])
    manager = manage(held.store, "async")
    manager.resume(state)
    for step in range(1, 9):
        state["noise"] = torch.randn(step * 10_000)
        with pytest.raises(StorageError) as caught:  # noqa: PT012  # whichever call it is
            manager.save(step, state)
            manager.wait()
        kept.append(caught.value)
    manager.close()
    assert maps() == before
    assert len(kept) == 8


def test_knobs_of_one_thread_are_enough() -> None:
    store, state = MemoryStore(), make_job()
    with knobs.override(STAGE_THREADS=1, IO_THREADS=1):
        with manage(store, "overlap") as manager:
            manager.resume(state)
            wanted = picture(state)
            manager.save(1, state)
            forward_backward(state)
            change_by_step(state)
    check(store, 1, wanted)
