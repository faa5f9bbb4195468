"""One run in several places: where a save goes, what is copied on, what counts at the next start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep import knobs
from shardkeep.engine.run import list_generations, list_step_folders, read_marks, scan_run
from shardkeep.engine.verify import verify_run
from shardkeep.errors import StorageError, UsageError
from shardkeep.ranks.single import SingleGroup
from shardkeep.storage.base import ObjectWriter, Store
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faults import Call, Fault, FaultStore
from tests.crash.jobs import digest, make_state
from tests.support.held import Sink

MODES = ["blocking", "async"]


@pytest.fixture(autouse=True)
def _no_pauses() -> Any:
    with knobs.override(RETRY_BASE_S=0.0, RETRIES=1):
        yield


class Switched:
    """A store that is down while it is told to be."""

    def __init__(self, name: str, *, only_shards: bool = False, kind: Any = "io_error") -> None:
        self.inner = MemoryStore(name=name)
        self.down = False
        self._only_shards = only_shards
        self.store = FaultStore(self.inner, [Fault(kind=kind, when=self._fails, times=None)])

    def _fails(self, call: Call) -> bool:
        return self.down and (not self._only_shards or (call.verb in ("writer", "put") and "/step-" in call.key))


class Held(FaultStore):
    """A store whose shards wait, and nothing else, while it is held."""

    def __init__(self, name: str) -> None:
        self.inner = MemoryStore(name=name)
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()
        super().__init__(self.inner)

    def writer(self, key: str, size_bytes: int) -> ObjectWriter:
        if not self._open.is_set():
            self.reached.set()
            assert self._open.wait(30), "the test never let it go"
        return super().writer(key, size_bytes)

    def hold(self) -> None:
        self.reached.clear()
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()


def manage(root: Store, tiers: Sequence[sk.Tier] = (), **options: Any) -> sk.CheckpointManager:
    options.setdefault("events", Sink())
    return sk.CheckpointManager("unused", store=root, group=SingleGroup(), tiers=tiers, **options)


def tier(store: Any, every: int = 1, **options: Any) -> sk.Tier:
    return sk.Tier(store, every=every, **options)


def steps_in(store: Store) -> list[int]:
    folders = [f for n in list_generations(store) for f in list_step_folders(store, n).values()]
    assert all(folder.committed and not folder.pruning for folder in folders), "a half checkpoint"
    return sorted(folder.ref.step for folder in folders)


def check_whole(*stores: Store) -> None:
    for store in stores:
        assert not verify_run(store).listed


def go(manager: sk.CheckpointManager, first: int, last: int) -> None:
    for step in range(first, last + 1):
        manager.after_step(step, make_state(step))


def run(root: Store, tiers: Sequence[sk.Tier], last: int, **options: Any) -> tuple[int, Sink]:
    """Start, check that what is resumed is the state of its step, save up to `last` and end; the step resumed."""
    sink, state = Sink(), make_state(999)
    with manage(root, tiers, events=sink, **{"save_every": 4, **options}) as manager:
        step = manager.resume(state).step
        assert not step or digest(state) == digest(make_state(step))
        go(manager, step + 1, last)
    return step, sink


def settle(manager: sk.CheckpointManager) -> None:
    """Wait until the save under way has landed, and what was sent on has arrived or cannot."""
    manager.wait()
    arrive(manager)


def arrive(manager: sk.CheckpointManager) -> None:
    places = manager._places
    deadline_s = time.monotonic() + 20
    while places._done_count < places._sent_count:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("mode", MODES)
def test_a_save_goes_to_the_fastest_due_place_and_from_there_to_the_slower_ones(mode: str) -> None:
    ram, disk, root = MemoryStore(name="ram"), MemoryStore(name="disk"), MemoryStore(name="root")
    _, sink = run(root, [tier(ram), tier(disk, 2, keep=2)], 9, mode=mode, keep=sk.Keep(last=1))
    assert (steps_in(ram), steps_in(disk), steps_in(root)) == ([9], [6, 8], [8])
    check_whole(ram, disk, root)
    promoted = [(event.fields["step"], event.fields["tier"]) for event in sink.named("tier.promoted")]
    assert promoted == [(2, 1), (4, 1), (4, 2), (6, 1), (8, 1), (8, 2)]
    assert not sink.named("tier.degraded")


def test_a_save_that_no_faster_place_wants_goes_to_the_root_at_once() -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")
    _, sink = run(root, [tier(ram, 3)], 4)
    assert (steps_in(ram), steps_in(root)) == ([3], [4])
    assert not sink.named("tier.promoted")


def test_the_first_save_of_a_start_without_a_resume_goes_to_a_tier_too() -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")
    with manage(root, [tier(ram)]) as manager:
        go(manager, 1, 2)
        manager.save(3, make_state(3))
    assert (steps_in(ram), steps_in(root)) == ([3], [3])


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_stays_in_its_tier_until_the_slower_places_have_it(mode: str) -> None:
    ram, root = MemoryStore(name="ram"), Switched("root", only_shards=True)
    sink = Sink()
    with manage(root.store, [tier(ram)], save_every=4, mode=mode, events=sink) as manager:
        manager.resume(make_state(0))
        root.down = True
        go(manager, 1, 7)
        settle(manager)
        assert (steps_in(ram), steps_in(root.inner)) == ([4, 7], [])
        assert sink.named("tier.degraded")
        root.down = False
        go(manager, 8, 9)
    assert (steps_in(ram), steps_in(root.inner)) == ([9], [4, 8])
    check_whole(ram, root.inner)
    assert not sink.named("tier.behind")


@pytest.mark.parametrize("kind", ["no_space", "io_error"])
@pytest.mark.parametrize("mode", MODES)
def test_a_tier_that_fails_is_passed_over_and_comes_back(mode: str, kind: str) -> None:
    ram, disk, root = Switched("ram", only_shards=True, kind=kind), MemoryStore(name="disk"), MemoryStore(name="root")
    sink = Sink()
    tiers = [tier(ram.store), tier(disk, 2)]
    with manage(root, tiers, save_every=4, mode=mode, tolerate=0, events=sink) as manager:
        manager.resume(make_state(0))
        ram.down = True
        go(manager, 1, 5)
        settle_failed(manager)
        assert (steps_in(disk), steps_in(root)) == ([4], [4])
        assert [event.fields["tier"] for event in sink.named("tier.degraded")] == [0, 0]
        ram.down = False
        go(manager, 6, 7)
    assert (steps_in(ram.inner), steps_in(disk), steps_in(root)) == ([7], [6], [4])
    check_whole(ram.inner, disk, root)


def settle_failed(manager: sk.CheckpointManager) -> None:
    """As `settle`, where the last save may have failed in the only tier that was due."""
    with contextlib.suppress(StorageError):
        manager.wait()
    arrive(manager)


def test_a_tier_that_is_down_at_the_start_is_used_when_it_is_back() -> None:
    ram, root, sink = Switched("ram"), MemoryStore(name="root"), Sink()
    ram.down = True
    with manage(root, [tier(ram.store)], save_every=2, tolerate=0, events=sink) as manager:
        manager.resume(make_state(0))
        go(manager, 1, 3)
        ram.down = False
        go(manager, 4, 5)
    assert (steps_in(ram.inner), steps_in(root)) == ([5], [2, 4])
    names = sink.names()
    assert "tier.ignored" in names
    assert "tier.degraded" in names
    assert run(root, [tier(ram.store)], 6)[0] == 5


def test_failures_of_the_root_still_end_the_run() -> None:
    ram, root = MemoryStore(name="ram"), Switched("root", only_shards=True)
    with manage(root.store, [tier(ram, 10)], save_every=1, tolerate=1) as manager:
        manager.resume(make_state(0))
        root.down = True
        assert not manager.after_step(1, make_state(1))
        with pytest.raises(StorageError):
            manager.after_step(2, make_state(2))
        root.down = False


def test_a_tier_in_the_way_of_a_real_file_system_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    root, sink = tmp_path / "root", Sink()
    tiers = [sk.Tier(tmp_path / "file", every=1)]
    with sk.CheckpointManager(root, save_every=1, tiers=tiers, events=sink, group=SingleGroup()) as manager:
        manager.resume(make_state(0))
        go(manager, 1, 2)
    assert sink.named("tier.degraded")
    assert sk.CheckpointManager(root, group=SingleGroup()).latest() == 2


def test_an_in_flight_save_is_never_pruned_by_the_sweep_of_the_one_before() -> None:
    ram, root = Held("ram"), Held("root")
    with manage(root, [tier(ram)], save_every=4, mode="async") as manager:
        manager.resume(make_state(0))
        go(manager, 1, 3)
        root.hold()
        go(manager, 4, 4)
        manager.wait()
        assert root.reached.wait(10)  # step 4 is on its way to the root, its sweep comes after that
        ram.hold()
        go(manager, 5, 5)
        assert ram.reached.wait(10)
        ram.inner.put("g0001/step-00000005/model-r00000-00009.safetensors", b"a file of the save under way")
        root.let_go()
        arrive(manager)
        keys = [info.key for info in ram.inner.list_objects("g0001/step-00000005/")]
        ram.let_go()
        manager.wait()
    assert "g0001/step-00000005/model-r00000-00009.safetensors" in keys
    assert steps_in(ram.inner) == [5]


def test_copies_keep_below_the_rate() -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")
    disk = MemoryStore(name="disk")
    state = {"big": torch.zeros(1 << 18)}  # 1 MiB
    with manage(root, [tier(ram), tier(disk, rate_mib_s=4.0)]) as manager:
        manager.resume(state)
        began_s = time.monotonic()
        for step in (1, 2, 3):
            state["big"].fill_(step)  # the same bytes again would not be copied
            manager.save(step, state)
        settle(manager)
        # What goes first waits for nothing.
        assert 0.45 < time.monotonic() - began_s < 5
    assert steps_in(disk) == [3]


# Restarts


def test_a_checkpoint_in_the_memory_tier_alone_is_resumed_and_promoted_by_the_restart() -> None:
    ram, disk, root = MemoryStore(name="ram"), MemoryStore(name="disk"), MemoryStore(name="root")
    tiers = [tier(ram), tier(disk, 2)]
    run(root, tiers, 7)
    assert (steps_in(ram), steps_in(disk), steps_in(root)) == ([7], [6], [4])
    step, sink = run(root, tiers, 7)
    assert step == 7
    assert (steps_in(ram), steps_in(disk), steps_in(root)) == ([7], [6], [4, 7])
    assert [event.fields["step"] for event in sink.named("tier.promoted")] == [7]
    check_whole(root)


def test_the_newest_counts_wherever_it_is_and_a_lost_tier_gives_way_to_the_next() -> None:
    ram, disk, root = MemoryStore(name="ram"), MemoryStore(name="disk"), MemoryStore(name="root")
    run(root, [tier(ram), tier(disk, 2)], 7)
    assert run(root, [tier(MemoryStore(name="new")), tier(disk, 2)], 7)[0] == 6
    assert run(MemoryStore(name="other"), [], 0)[0] == 0
    assert run(root, [], 0)[0] == 6  # which the start before brought home


def test_the_fastest_copy_is_read() -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")
    run(root, [tier(ram)], 4)
    calls = FaultStore(root)
    assert run(calls, [tier(ram)], 4)[0] == 4
    assert not [call for call in calls.log if "/step-" in call.key and call.verb in ("get", "read_into")]


def damage(store: MemoryStore, name: str, *, cut: bool = False) -> None:
    keys = [info.key for info in store.list_objects("") if name in info.key and "/step-" in info.key]
    assert keys
    for key in keys:
        data = bytearray(store.get(key, limit_bytes=1 << 20))
        data[len(data) // 2] ^= 4
        store.put(key, bytes(data[:-1] if cut else data))


@pytest.mark.parametrize("name", ["model-", "digests-", "part-", "commit.json"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_copy_gives_way_to_the_next_one_which_is_not_blamed(name: str, cut: bool) -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")
    run(root, [tier(ram)], 8)
    damage(ram, name, cut=cut)
    step, sink = run(root, [tier(ram)], 9)
    assert step == 8
    assert read_marks(root) == (frozenset(), frozenset())
    if name == "model-" and not cut:
        assert [event.fields["step"] for event in sink.named("tier.damaged")] == [8]
        assert "model-r00000-00001.safetensors" in sink.named("tier.damaged")[0].text


def test_a_step_whose_only_copy_is_damaged_gives_way_to_the_one_before() -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")
    run(root, [tier(ram)], 7)
    damage(ram, "model-")
    assert run(root, [tier(ram)], 7)[0] == 4
    assert steps_in(ram) == [7]
    check_whole(ram, root)


def test_a_damaged_copy_is_not_copied_on() -> None:
    ram, root, sink = Held("ram"), Held("root"), Sink()
    with manage(root, [tier(ram)], save_every=4, mode="async", events=sink) as manager:
        manager.resume(make_state(0))
        go(manager, 1, 3)
        settle(manager)
        root.hold()
        go(manager, 4, 4)
        manager.wait()
        assert root.reached.wait(10)
        damage(ram.inner, "step-00000004/model-")
        root.let_go()
        settle(manager)
        assert "is not copied there" in sink.named("tier.degraded")[-1].text
        go(manager, 5, 8)
    assert steps_in(root.inner) == [8]
    assert not sink.named("tier.behind")


def test_a_tier_of_another_run_is_named_and_left_alone() -> None:
    ram, one, other = MemoryStore(name="ram"), MemoryStore(name="one"), MemoryStore(name="other")
    run(one, [tier(ram)], 5)
    before = [info.key for info in ram.list_objects("")]
    step, sink = run(other, [tier(ram)], 5)
    assert step == 0
    assert "memory:ram holds checkpoints of another run" in sink.named("tier.ignored")[0].text
    assert [info.key for info in ram.list_objects("")] == before
    assert steps_in(other) == [4]


def test_of_two_new_runs_with_the_same_tier_one_gets_it() -> None:
    ram, one, other = MemoryStore(name="ram"), MemoryStore(name="one"), MemoryStore(name="other")
    sink = Sink()
    with (
        manage(one, [tier(ram)], save_every=2) as first,
        manage(other, [tier(ram)], save_every=2, events=sink) as late,
    ):
        first._places.look(first.group)
        late._places.look(late.group)  # both find it empty
        first.resume(make_state(0))
        go(first, 1, 3)
        late.resume(make_state(0))
        go(late, 1, 3)
    assert (steps_in(ram), steps_in(one), steps_in(other)) == ([3], [2], [2])
    assert "another run" in sink.named("tier.ignored")[0].text


def test_a_place_is_given_once(tmp_path: Path) -> None:
    for url in (tmp_path, f"{tmp_path}/", f"{tmp_path}/x/..", f"file://{tmp_path}"):
        with pytest.raises(UsageError, match="is given twice"):
            sk.CheckpointManager(tmp_path, tiers=[sk.Tier(url, every=1)], group=SingleGroup())
    for options in (
        {"every": 0},
        {"every": None},
        {"every": False},
        {"every": 1, "keep": 0},
        {"every": 1, "scope": "x"},
        {"every": 1, "rate_mib_s": 0},
    ):
        with pytest.raises(UsageError):
            sk.Tier(tmp_path, **options)  # type: ignore[arg-type]


def test_a_tier_by_the_clock_takes_some_steps_and_the_root_its_own() -> None:
    ram, root, sink = MemoryStore(name="ram"), MemoryStore(name="root"), Sink()
    tiers = [sk.Tier(ram, every=sk.Minutes(0.05 / 60), keep=100)]
    with manage(root, tiers, save_every=20, events=sink) as manager:
        manager.resume(make_state(0))
        began_s = time.monotonic()
        for step in range(1, 41):
            manager.after_step(step, make_state(step))
            time.sleep(0.01)
        took_s = time.monotonic() - began_s
    assert steps_in(root) == [20, 40]
    assert 3 <= len(steps_in(ram)) <= took_s / 0.05
    check_whole(ram, root)


def test_a_root_by_the_clock_gets_its_checkpoints_through_the_tier_by_the_clock() -> None:
    ram, root, sink = MemoryStore(name="ram"), MemoryStore(name="root"), Sink()
    tiers = [sk.Tier(ram, every=sk.Minutes(0.05 / 60), keep=100)]
    with manage(root, tiers, save_every=sk.Minutes(0.2 / 60), events=sink) as manager:
        manager.resume(make_state(0))
        for step in range(1, 41):
            manager.after_step(step, make_state(step))
            time.sleep(0.01)
    assert steps_in(root)
    assert set(steps_in(root)) < set(steps_in(ram))
    assert [event.fields["step"] for event in sink.named("tier.promoted")] == steps_in(root)


def test_a_restart_brings_the_one_it_goes_on_from_and_no_older_one_to_a_tier_by_the_clock() -> None:
    ram, disk, root = MemoryStore(name="ram"), MemoryStore(name="disk"), MemoryStore(name="root")
    tiers = [tier(ram, keep=3), sk.Tier(disk, every=sk.Minutes(60), keep=5)]
    run(root, tiers, 7, save_every=100)
    assert (steps_in(ram), steps_in(disk), steps_in(root)) == ([5, 6, 7], [], [])
    step, sink = run(root, tiers, 8, save_every=100)
    assert step == 7
    assert (steps_in(disk), steps_in(root)) == ([7], [7])
    assert [event.fields["tier"] for event in sink.named("tier.promoted")] == [1, 2]
    check_whole(disk, root)


def test_going_back_over_tiers_and_what_was_left_behind_makes_room() -> None:
    ram, disk, root = MemoryStore(name="ram"), MemoryStore(name="disk"), MemoryStore(name="root")
    tiers = [tier(ram), tier(disk, 2, keep=3)]
    run(root, tiers, 9)
    state = make_state(999)
    with manage(root, tiers, save_every=4) as manager:
        assert manager.resume(state, step=6).step == 6
        assert digest(state) == digest(make_state(6))
        go(manager, 7, 7)
    assert (steps_in(ram), steps_in(root)) == ([7], [4, 6, 8])
    assert manager.latest() == 7
    assert run(root, tiers, 7)[0] == 7
    view = scan_run(root)
    assert view is not None
    assert [ref.step for ref in view.timeline] == [4, 6, 7]


def test_what_a_slower_place_removed_by_its_rule_is_not_copied_there_again() -> None:
    disk, root = MemoryStore(name="disk"), MemoryStore(name="root")
    tiers = [tier(disk, 1, keep=6)]
    run(root, tiers, 8, save_every=2, keep=sk.Keep(last=1))
    step, sink = run(root, tiers, 8, save_every=2, keep=sk.Keep(last=1))
    assert step == 8
    assert not sink.named("tier.promoted")


# The end of a start


def test_close_ends_when_the_root_stays_down_and_the_next_start_goes_on() -> None:
    ram, root, sink = MemoryStore(name="ram"), Switched("root", only_shards=True), Sink()
    manager = manage(root.store, [tier(ram)], save_every=2, events=sink)
    manager.resume(make_state(0))
    root.down = True
    go(manager, 1, 6)
    settle(manager)
    before_count = len(sink.named("tier.degraded"))
    began_s = time.monotonic()
    manager.close()
    # A place that is down costs each round one try, however much waits for it.
    assert len(sink.named("tier.degraded")) == before_count + 2
    assert time.monotonic() - began_s < 5
    (event,) = sink.named("tier.behind")
    assert all(f"step {step} of" in event.text for step in (2, 4, 6))
    assert "shardkeep-promote" not in [one.name for one in threading.enumerate()]
    manager.close()
    root.down = False
    assert run(root.store, [tier(ram)], 6, save_every=2)[0] == 6
    assert steps_in(root.inner) == [2, 4, 6]


def test_an_exception_in_the_with_block_brings_checkpoints_home_all_the_same() -> None:
    ram, root = MemoryStore(name="ram"), MemoryStore(name="root")
    with contextlib.suppress(ZeroDivisionError), manage(root, [tier(ram)], save_every=4, mode="async") as manager:
        manager.resume(make_state(0))
        go(manager, 1, 4)
        raise ZeroDivisionError
    assert (steps_in(ram), steps_in(root)) == ([4], [4])


_SCRIPT = """
import sys, shardkeep as sk
from tests.crash.jobs import make_state
ram = sk.Tier(sys.argv[1] + "/ram", every=1)
manager = sk.CheckpointManager(sys.argv[1] + "/root", save_every=2, mode="async", tiers=[ram])
manager.resume(make_state(0))
for step in range(1, 5):
    manager.after_step(step, make_state(step))
"""


def test_a_process_that_ends_without_close_brings_its_checkpoints_home_and_ends(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT, str(tmp_path)], check=True, timeout=60)
    assert sk.CheckpointManager(tmp_path / "root", group=SingleGroup()).latest() == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_save_before_the_machine_is_taken_goes_where_it_outlives_the_node(mode: str) -> None:
    ram, shared, root = MemoryStore(name="ram"), MemoryStore(name="shared"), MemoryStore(name="root")
    tiers = [tier(ram), tier(shared, 100, scope="shared")]
    with manage(root, tiers, save_every=100, mode=mode) as manager:
        manager.resume(make_state(0))
        go(manager, 1, 2)
        assert not manager.should_stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop
        go(manager, 3, 3)
        assert manager.exit_code == sk.EXIT_REQUEUE
        assert steps_in(shared) == [3]
    assert (steps_in(ram), steps_in(root)) == ([2], [3])


def test_a_save_by_the_program_counts_before_the_end_when_it_has_arrived_where_it_lasts() -> None:
    ram, root, sink = MemoryStore(name="ram"), Held("root"), Sink()
    with manage(root, [tier(ram)], events=sink, mode="async") as manager:
        manager.resume(make_state(0))
        assert not manager.should_stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop
        root.hold()
        manager.save(1, make_state(1))
        threading.Timer(0.3, root.let_go).start()
        manager.after_step(1, make_state(1))
        assert steps_in(root.inner) == [1]
        assert sink.named("preempt.saved")
