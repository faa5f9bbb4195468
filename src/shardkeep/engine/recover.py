"""What a start does before anything else: finish commits that only lacked their record, and judge what is there.

The rules, for one try at a step: every part present at a size that its own record confirms, no commit record, no
prune intent -> the commit record follows from the parts and is written again. It is the same record, byte for byte,
that the coordinator would have written, so that both may try.
"""

from __future__ import annotations

import contextlib
from functools import partial

from shardkeep.engine.reader import check_part
from shardkeep.engine.run import WRITER, RunView, StepFolder, read_commit, read_twice, record_limit
from shardkeep.engine.writer import summarize_part
from shardkeep.errors import AlreadyExists, Corrupt, IncompatibleFormat, NotFound
from shardkeep.events import Event, EventSink
from shardkeep.format.names import COMMIT_RECORD, StepRef, find_part, format_digests, format_part
from shardkeep.format.records import CommitRecord, Facts, PartRecord, PartSummary, decode_record, encode_record
from shardkeep.plan.checks import check_facts
from shardkeep.storage.base import Store


def roll_forward(store: Store, view: RunView, events: EventSink) -> tuple[StepRef, ...]:
    """Commit every complete try of the newest generation that lacks only its record; return them, ascending.

    Of several tries at one step only the last: the others would stay for good, committed and on no timeline.
    Only the newest generation can matter: what older ones left beyond their commits is on no timeline.
    """
    done: list[StepRef] = []
    committed = {ref.step for ref, folder in view.folders.items() if folder.committed and ref.generation == view.head}
    for ref in sorted(view.folders, reverse=True):
        folder = view.folders[ref]
        if ref.generation != view.head or folder.committed or folder.pruning or ref.step in committed:
            continue
        record = find_commit(store, folder, view.run_id)
        if record is None:
            continue
        # Another version of shardkeep, whose name is in the record, may have come first: just as well.
        with contextlib.suppress(AlreadyExists):
            store.put(ref.key(COMMIT_RECORD), encode_record(record, writer=WRITER), if_absent=True)
        events.emit(
            Event(
                name="recover.rolled_forward",
                text=f"{ref}: all parts were durable, so it was committed at this start",
                fields={"step": ref.step, "generation": ref.generation},
            )
        )
        done.append(ref)
        committed.add(ref.step)
    return tuple(sorted(done))


def find_commit(store: Store, folder: StepFolder, run_id: str) -> CommitRecord | None:
    """Return the commit record that follows from the parts of a folder, or None when they are not complete."""
    ref = folder.ref
    ranks = sorted(rank for name in folder.files if (rank := find_part(name)) is not None)
    if not ranks or ranks != list(range(len(ranks))):
        return None
    first: PartRecord | None = None
    summaries: list[PartSummary] = []
    for rank in ranks:
        try:
            part, summary = read_twice(partial(_read_part, store, ref, rank))
        except (Corrupt, NotFound):
            return None
        first = first or part
        expected = (run_id, ref, rank, len(ranks), first.plan)
        if (part.run_id, part.ref, part.rank, part.world_size, part.plan) != expected:
            return None
        sizes = {shard.name: shard.size_bytes for shard in part.shards}
        sizes[format_digests(rank)] = part.digests.size_bytes
        if any(folder.files.get(name) != size for name, size in sizes.items()):
            return None
        summaries.append(summary)
    assert first is not None
    if (
        first.facts is None
        or not _can_be(first.facts, len(ranks), ref)
        or any(folder.files.get(n) != a.size_bytes for n, a in first.facts.assets.items())
    ):
        return None
    return CommitRecord(
        run_id=run_id,
        ref=ref,
        world_size=len(ranks),
        plan=first.plan,
        parts=tuple(summaries),
        facts=first.facts,
    )


def _can_be(facts: Facts, world_size: int, ref: StepRef) -> bool:
    """Say whether a commit record with these facts could be read again."""
    try:
        check_facts(facts, world_size, where=ref.key(format_part(0)))
    except (Corrupt, IncompatibleFormat):
        return False
    return True


def _read_part(store: Store, ref: StepRef, rank: int) -> tuple[PartRecord, PartSummary]:
    key = ref.key(format_part(rank))
    data = store.get(key, limit_bytes=record_limit())
    part = check_part(decode_record(PartRecord, data, where=key), key)
    return part, summarize_part(part, data)


def find_missing(folder: StepFolder, commit: CommitRecord) -> str | None:
    """Return the first part of a committed step that is missing or has another size, or None. Reads nothing."""
    for rank, summary in enumerate(commit.parts):
        name = format_part(rank)
        found = folder.files.get(name)
        if found != summary.size_bytes:
            return f"{folder.ref.key(name)}: expected {summary.size_bytes} bytes, found {found or 'no such file'}"
    return None


def choose_steps(store: Store, view: RunView, *, step: int | None = None) -> tuple[StepRef, ...]:
    """Return the committed steps to try, newest first: those on the timeline that are not quarantined.

    Args:
        step: only this one.

    Raises:
        NotFound: the timeline has no such step.
    """
    timeline = view.timeline
    if step is None:
        return tuple(ref for ref in reversed(timeline) if ref not in view.quarantined)
    for ref in timeline:
        if ref.step == step:
            return (ref,)
    have = ", ".join(str(ref.step) for ref in timeline[-8:]) or "none"
    raise NotFound(
        f"{store.url}: no committed step {step}; the newest ones are {have}",
        step=step,
        advice=f"shardkeep ls {store.url}",
    )


def confirm_commit(store: Store, view: RunView, ref: StepRef) -> CommitRecord:
    """Return a step's commit record after a look at its parts' sizes. Raises Corrupt, NotCommitted."""
    commit = read_commit(store, ref, run_id=view.run_id)
    missing = find_missing(view.folders[ref], commit) if ref in view.folders else None
    if missing:
        raise Corrupt(f"{missing}, though {ref} is committed", step=ref.step)
    return commit
