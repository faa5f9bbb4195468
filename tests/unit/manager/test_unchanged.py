"""Files of frozen tensors that did not change are cloned by the store: exact, self-contained, once on disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep import knobs
from shardkeep.engine.verify import verify_run
from shardkeep.errors import StorageError
from shardkeep.ranks.base import Group
from shardkeep.ranks.single import SingleGroup
from shardkeep.storage.base import Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.posix import PosixStore
from shardkeep.testing.faults import Call, Fault, FaultStore
from tests.crash.jobs import check_clean, get_all, run_world
from tests.support.adapters import make_adapted, same_state, train_to
from tests.support.held import Sink

MODES = ["blocking", "async", "overlap"]
BASE_BYTES = 10_000 * 257 * 4


@pytest.fixture(autouse=True)
def _no_pauses() -> Iterator[None]:
    with knobs.override(RETRY_BASE_S=0.0, RETRIES=1):
        yield


def manage(store: Store, group: Group | None = None, **options: Any) -> sk.CheckpointManager:
    options.setdefault("events", Sink())
    return sk.CheckpointManager("unused", store=store, group=group or SingleGroup(), **options)


def save_steps(
    store: Store,
    *steps: int,
    before: Callable[[int, dict[str, Any]], object] = lambda step, state: None,
    **options: Any,
) -> list[int]:
    """Resume, save these steps; return the bytes that each did not write again. `before` may change the state."""
    sink = Sink()
    with manage(store, events=sink, **options) as manager:
        state = make_adapted(0)
        manager.resume(state)
        for step in steps:
            train_to(state, step)
            before(step, state)
            manager.save(step, state)
            manager.wait()
    return [int(event.fields["unchanged_bytes"] or 0) for event in sink.named("save.committed")]


def frozen_files(root: Path) -> dict[int, Path]:
    return {int(path.parent.name[5:]): path for path in sorted(root.glob("g*/step-*/frozen-*"))}


def check_loads(
    store: Store, steps: tuple[int, ...], change: Callable[[dict[str, Any]], object] | None = None
) -> None:
    """Go back from step to step: each resume takes the run back to it."""
    for step in sorted(steps, reverse=True):
        found, expected = make_adapted(0), make_adapted(step)
        found["model"].base.weight.data.zero_()
        if change is not None:
            change(expected)
        with manage(store) as manager:
            assert manager.resume(found, step=step).step == step
        assert same_state(found, expected), step


@pytest.mark.parametrize("mode", MODES)
def test_five_saves_take_the_room_of_one_base_and_five_adapters(tmp_path: Path, mode: str) -> None:
    """LORA-3, MakazhanAlpamys/Soup#352: each checkpoint held a copy of the frozen base and filled the disk."""
    store, steps = PosixStore(tmp_path / "run"), (1, 2, 3, 4, 5)
    unchanged = save_steps(store, *steps, mode=mode)
    files = frozen_files(tmp_path / "run")
    size = files[1].stat().st_size
    assert size > BASE_BYTES
    assert unchanged == [0] + [size] * 4
    assert list(files) == list(steps)
    assert len({path.stat().st_ino for path in files.values()}) == 1
    used = int(
        subprocess.run(["du", "-sB1", str(tmp_path)], capture_output=True, text=True, check=True).stdout.split()[0]
    )
    assert used < size + 1_000_000
    check_loads(store, steps)


def test_every_checkpoint_stands_by_itself(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    save_steps(store, 1, 2, 3, keep=sk.Keep(last=2))
    files = frozen_files(tmp_path)
    assert list(files) == [2, 3]
    assert {path.stat().st_nlink for path in files.values()} == {2}
    check_clean(store)
    check_loads(store, (2, 3))


def _flip(element: int) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        bits = state["model"].base.weight.data.view(torch.int32).reshape(-1)
        bits[element] ^= 1

    return change


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", [0, 5_000, -1])
def test_a_frozen_tensor_that_changed_all_the_same_is_written(tmp_path: Path, mode: str, element: int) -> None:
    """One bit, past every counter of changes: what decides are the bytes."""
    store, change = PosixStore(tmp_path), _flip(element)
    unchanged = save_steps(store, 1, 2, 3, mode=mode, before=lambda step, state: change(state) if step == 2 else None)
    assert unchanged[:2] == [0, 0]
    assert unchanged[2] > BASE_BYTES
    inodes = [path.stat().st_ino for path in frozen_files(tmp_path).values()]
    assert inodes[0] != inodes[1] == inodes[2]
    check_loads(store, (2, 3), change)
    check_loads(store, (1,))


@pytest.mark.parametrize("mode", MODES)
def test_a_start_goes_on_from_the_files_of_its_parent(tmp_path: Path, mode: str) -> None:
    store = PosixStore(tmp_path)
    save_steps(store, 1, 2)
    assert save_steps(store, 3, 4, mode=mode, keep=sk.Keep(last=1))[0] > BASE_BYTES
    assert len({path.stat().st_ino for path in frozen_files(tmp_path).values()}) == 1
    check_clean(store)
    check_loads(store, (4,))


def test_each_rank_does_so_with_its_own_files(tmp_path: Path) -> None:
    store, sinks = PosixStore(tmp_path), [Sink(), Sink()]

    def body(rank_store: Store, group: Group) -> None:
        with manage(rank_store, group, events=sinks[group.rank]) as manager:
            state = make_adapted(0)
            state["own"] = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(9), requires_grad=False)})
            manager.resume(state)
            for step in (1, 2, 3):
                train_to(state, step)
                manager.save(step, state)

    with knobs.override(SHARD_BYTES=4 << 20):  # several files, dealt out
        get_all(run_world([store] * 2, body))
    unchanged = [int(event.fields["unchanged_bytes"] or 0) for event in sinks[0].named("save.committed")]
    assert unchanged[0] == 0
    assert unchanged[1] == unchanged[2] > BASE_BYTES
    check_clean(store)


def test_a_source_that_vanished_is_written_anew(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)

    def remove(step: int, state: dict[str, Any]) -> None:
        if step == 2:
            store.delete([str(frozen_files(tmp_path)[1].relative_to(tmp_path))])

    assert [number > 0 for number in save_steps(store, 1, 2, 3, before=remove)] == [False, False, True]
    check_loads(store, (2, 3))


@pytest.mark.parametrize("kind", ["io_error", "no_space", "lost_answer"])
def test_a_store_that_cannot_clone_is_written_to_and_soon_left_alone(kind: Any) -> None:
    inner = MemoryStore()
    store = FaultStore(inner, [Fault(kind=kind, when=lambda call: call.verb == "clone", times=None)])
    assert save_steps(store, 1, 2, 3, 4, 5) == [0] * 5
    steps = {call.key.partition("/")[2][:13] for call in store.log if call.verb == "clone"}
    assert steps == {"step-00000002", "step-00000003"}
    check_clean(inner)
    check_loads(inner, (1, 2, 3, 4, 5))


def test_one_failure_to_clone_is_no_reason_to_stop() -> None:
    """A file system that takes no more links to one file takes one to its successor."""
    inner = MemoryStore()
    store = FaultStore(inner, [Fault(kind="no_space", when=lambda call: call.verb == "clone", times=1)])
    assert [number > 0 for number in save_steps(store, 1, 2, 3)] == [False, False, True]
    check_loads(inner, (1, 2, 3))


def test_a_save_that_failed_is_no_source(tmp_path: Path) -> None:
    fails = Fault(kind="no_space", when=lambda call: call.verb == "put" and "2/part-" in call.key)
    store, sink = FaultStore(PosixStore(tmp_path), [fails]), Sink()
    change = _flip(3)
    with manage(store, events=sink) as manager:
        state = make_adapted(1)
        manager.resume(state)
        manager.save(1, state)
        change(state)
        with pytest.raises(StorageError):
            manager.save(2, state)
        change(state)  # back
        manager.save(3, state)
    assert [int(event.fields["unchanged_bytes"] or 0) > 0 for event in sink.named("save.committed")] == [False, True]
    assert len({path.stat().st_ino for path in frozen_files(tmp_path).values()}) == 1
    assert not list(tmp_path.glob("g*/step-00000002*"))
    with manage(store) as manager:
        manager.resume(make_adapted(0))
    check_clean(store)


def test_a_save_with_a_clone_that_fails_leaves_nothing(tmp_path: Path) -> None:
    fails = Fault(kind="no_space", when=lambda call: call.verb == "put" and "2/part-" in call.key)
    store = FaultStore(PosixStore(tmp_path), [fails])
    with manage(store) as manager:
        state = make_adapted(1)
        manager.resume(state)
        manager.save(1, state)
        with pytest.raises(StorageError):
            manager.save(2, state)
        assert any(call.verb == "clone" for call in store.log)
        assert list(frozen_files(tmp_path)) == [1]
        assert frozen_files(tmp_path)[1].stat().st_nlink == 1
        manager.save(2, state)
    check_clean(store)


def test_without_frozen_tensors_nothing_is_asked(tmp_path: Path) -> None:
    store = FaultStore(PosixStore(tmp_path))

    def thaw(step: int, state: dict[str, Any]) -> None:
        state["model"].base.requires_grad_(True)

    assert save_steps(store, 1, 2, before=thaw) == [0, 0]
    assert not [call for call in store.log if call.verb == "clone"]
    assert not frozen_files(tmp_path)


def test_an_average_marked_frozen_that_changes_each_time_is_looked_at_once(tmp_path: Path) -> None:
    """The first difference ends the look: what changes in every save costs next to nothing more."""
    store = FaultStore(PosixStore(tmp_path))

    def average(step: int, state: dict[str, Any]) -> None:
        state["model"].base.weight.data.mul_(0.5)

    assert save_steps(store, 1, 2, 3, before=average) == [0, 0, 0]
    assert not [call for call in store.log if call.verb == "clone"]
    check_clean(store)


class _Full(FaultStore):
    def find_free_bytes(self) -> int | None:
        return 1 << 20


def test_what_is_not_written_again_needs_no_room() -> None:
    inner = MemoryStore()
    save_steps(inner, 1)
    assert save_steps(_Full(inner), 2)[0] > BASE_BYTES


def test_between_tiers_it_is_cloned_too(tmp_path: Path) -> None:
    """The first save and its copies carry the base; after that only adapters move."""
    fast, root, sink = PosixStore(tmp_path / "fast"), PosixStore(tmp_path / "root"), Sink()
    tiers = [sk.Tier(str(tmp_path / "fast"), every=1, keep=2)]
    with manage(root, tiers=tiers, events=sink, save_every=1) as manager:
        state = make_adapted(0)
        manager.resume(state)
        for step in (1, 2, 3, 4):
            train_to(state, step)
            manager.after_step(step, state)
    copied = {event.fields["step"]: event.fields["copied_bytes"] for event in sink.named("tier.promoted")}
    assert list(copied) == [1, 2, 3, 4]
    assert int(copied[1] or 0) > BASE_BYTES
    assert max(int(copied[step] or 0) for step in (2, 3, 4)) < 100_000
    for place, steps in ((tmp_path / "fast", [3, 4]), (tmp_path / "root", [1, 2, 3, 4])):
        files = frozen_files(place)
        assert list(files) == steps
        assert len({path.stat().st_ino for path in files.values()}) == 1
    assert not verify_run(fast).listed
    check_clean(root)
    check_loads(root, (1, 2, 3, 4))


def test_a_tier_that_failed_between_is_no_source(tmp_path: Path) -> None:
    """Each place is compared with what it holds itself."""
    down = False

    def is_down(call: Call) -> bool:
        return down and call.verb in ("writer", "put", "clone") and "/step-" in call.key

    fast = FaultStore(PosixStore(tmp_path / "fast"), [Fault(kind="no_space", when=is_down, times=None)])
    root = PosixStore(tmp_path / "root")
    sink = Sink()
    with manage(root, tiers=[sk.Tier(fast, every=1, keep=9)], events=sink, save_every=9) as manager:
        state = make_adapted(0)
        manager.resume(state)
        for step in (1, 2, 3):
            train_to(state, step)
            down = step == 2
            manager.save(step, state)
    unchanged = [int(event.fields["unchanged_bytes"] or 0) > 0 for event in sink.named("save.committed")]
    assert unchanged == [False, False, True]
    assert list(frozen_files(tmp_path / "fast")) == [1, 3]
    assert os.path.samefile(*frozen_files(tmp_path / "fast").values())
    check_clean(root)
    check_loads(root, (1, 2, 3))
