"""Journal segments: what is durable when, bounded, damaged, and read back by a later start."""

from __future__ import annotations

import time

import pytest

from shardkeep import knobs
from shardkeep.engine import journal
from shardkeep.engine.journal import JournalWriter, prune_journals, read_history
from shardkeep.engine.run import claim_generation, create_run
from shardkeep.errors import Corrupt
from shardkeep.events import Event
from shardkeep.format.journal import decode_segment, encode_line, encode_segment
from shardkeep.format.names import StepRef, find_journal, format_journal
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faults import Fault, FaultStore

PARENT = StepRef(10, 1)


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def make_run() -> tuple[MemoryStore, str]:
    store = MemoryStore()
    run_id = create_run(store)
    claim_generation(store, run_id, None, world_size=1, environment={})
    return store, run_id


def make_writer(store: object, run_id: str, generation: int = 1, sink: Sink | None = None) -> JournalWriter:
    return JournalWriter(store, sink or Sink(), run_id=run_id, generation=generation, world_size=1)  # type: ignore[arg-type]


def keys(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list_objects("") if "journal" in info.key]


def steps_of(store: MemoryStore, run_id: str, generation: int = 2) -> list[int]:
    return list(read_history(store, run_id=run_id, parent=PARENT, generation=generation).steps)


def test_names_are_exact() -> None:
    key = format_journal(2, 3, 1200)
    assert key == "g0002/journal-00003-00001200.jsonl"
    assert find_journal(key) == (2, 3, 1200)
    for near in (key + "x", key.replace("00003", "000003"), "journal-00003-00001200.jsonl", "g0002/x/" + key):
        assert find_journal(near) is None


def test_every_flush_makes_all_lines_durable_in_one_object() -> None:
    store, run_id = make_run()
    writer = make_writer(store, run_id)
    for step in range(8, 14):
        writer.add(step, {"metric/loss": float(step).hex()})
        assert writer.flush()
    assert keys(store) == ["g0001/journal-00006-00000013.jsonl"]
    assert writer.flush()
    assert len(keys(store)) == 1, "nothing new, nothing written"
    assert steps_of(store, run_id) == [11, 12, 13]


def test_lines_are_written_in_the_background_when_due() -> None:
    store, run_id = make_run()
    with knobs.override(JOURNAL_S=0.0):
        writer = make_writer(store, run_id)
        writer.add(11, {"metric/loss": "0x0p0"})
        deadline_s = time.monotonic() + 10
        while not keys(store) and time.monotonic() < deadline_s:
            time.sleep(0.005)
    assert steps_of(store, run_id) == [11]


def test_segments_are_finished_by_size_and_the_oldest_go() -> None:
    store, run_id = make_run()
    with knobs.override(JOURNAL_BYTES=700_000):
        writer = make_writer(store, run_id)
        for step in range(11, 31):
            writer.add(step, {"metric/x": "y" * 60_000})
            writer.flush()
    sizes = [info.size_bytes for info in store.list_objects("g0001/journal-")]
    assert sum(sizes) < 700_000 + journal.SEGMENT_BYTES + 60_000
    kept = steps_of(store, run_id)
    assert kept == list(range(kept[0], 31))
    assert 8 < len(kept) < 20
    assert len(sizes) == len({find_journal(key) for key in keys(store)})


def test_storage_that_refuses_is_reported_once_and_tried_again() -> None:
    store, run_id = make_run()
    broken = FaultStore(store, [Fault(kind="no_space", at_call=call) for call in (1, 2)])
    sink = Sink()
    writer = make_writer(broken, run_id, sink=sink)
    writer.add(11, {})
    assert not writer.flush()
    assert not writer.flush()
    assert [event.name for event in sink.events] == ["journal.failed"]
    assert writer.flush()
    assert steps_of(store, run_id) == [11]


def test_memory_is_bounded_while_storage_refuses() -> None:
    store, run_id = make_run()
    writer = make_writer(store, run_id)
    for step in range(11, 111):
        writer.add(step, {"metric/x": "y" * 100_000})
    assert writer._lines_bytes < 5 << 20
    assert writer._lines_bytes == sum(len(line) for _, line in writer._lines)
    writer.flush()
    kept = steps_of(store, run_id)
    assert kept == list(range(kept[0], 111))


def test_a_crash_between_a_segment_and_the_removal_of_the_one_before_is_harmless() -> None:
    store, run_id = make_run()
    for sequence, steps in ((1, (11,)), (2, (11, 12))):
        lines = [encode_line(step, {"metric/loss": "0x1p0"}) for step in steps]
        data = encode_segment(lines, run_id=run_id, generation=1, world_size=1, writer="")
        store.put(format_journal(1, sequence, steps[-1]), data)
    assert steps_of(store, run_id) == [11, 12]


def test_damage_is_left_out_and_named() -> None:
    store, run_id = make_run()
    writer = make_writer(store, run_id)
    writer.add(11, {"metric/loss": "0x1p0"})
    writer.flush()
    (key,) = keys(store)
    data = store.get(key, limit_bytes=1 << 20)
    for at in range(0, len(data), 7):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(Corrupt):
            decode_segment(flipped, where=key)
    with pytest.raises(Corrupt):
        decode_segment(data[:-5], where=key)
    store.put(key, data[:-5])
    history = read_history(store, run_id=run_id, parent=PARENT, generation=2)
    assert not history.steps
    assert key in history.left_out[0]


def test_a_segment_of_another_run_is_left_out() -> None:
    store, run_id = make_run()
    lines = [encode_line(11, {})]
    store.put(format_journal(1, 1, 11), encode_segment(lines, run_id="f" * 32, generation=1, world_size=1, writer=""))
    history = read_history(store, run_id=run_id, parent=PARENT, generation=2)
    assert not history.steps
    assert "of run" in history.left_out[0]


def test_the_earliest_generation_that_grew_out_of_the_checkpoint_counts() -> None:
    store, run_id = make_run()
    for generation, parent, steps in (
        (1, None, (11,)),
        (2, PARENT, (11, 12)),
        (3, StepRef(5, 1), (13,)),
    ):
        if generation > 1:
            store.put("g0001/step-00000005/commit.json", b"x")
            store.put("g0001/step-00000010/commit.json", b"x")
            assert claim_generation(store, run_id, parent, world_size=1, environment={}) is not None
        writer = make_writer(store, run_id, generation)
        for step in steps:
            writer.add(step, {"metric/by": str(generation)})
        writer.close()
    history = read_history(store, run_id=run_id, parent=PARENT, generation=4)
    assert {step: line.generation for step, line in history.steps.items()} == {11: 1, 12: 2}


def test_prune_removes_what_no_kept_checkpoint_needs() -> None:
    store, run_id = make_run()
    for generation, last in ((1, 20), (2, 40)):
        lines = [encode_line(last, {})]
        data = encode_segment(lines, run_id=run_id, generation=generation, world_size=1, writer="")
        store.put(format_journal(generation, 1, last), data)
    assert prune_journals(store, (1, 2), before=19) == 0
    assert prune_journals(store, (1, 2), before=20) == 1
    assert keys(store) == ["g0002/journal-00001-00000040.jsonl"]
