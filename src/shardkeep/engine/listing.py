"""What a run holds, for people: its checkpoints from few and cheap reads, or every try with why it does not count."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from shardkeep.engine.run import (
    RunView,
    StepFolder,
    exists,
    is_void,
    list_generations,
    read_chain,
    read_marks,
    read_run_id,
    read_twice,
    record_limit,
    scan_run,
)
from shardkeep.errors import CheckpointError, Corrupt, IncompatibleFormat, NotFound
from shardkeep.format.names import (
    COMMIT_RECORD,
    PRUNE_INTENT,
    StepRef,
    find_part,
    find_step,
    format_generation,
)
from shardkeep.format.records import CommitBrief, GenerationRecord, decode_record
from shardkeep.plan.timeline import plan_timeline
from shardkeep.storage.base import Store

_LOOKED_AT: Final = 100
_SHOWN: Final = 5

State = Literal["committed", "uncommitted", "abandoned", "removing"]
"""`committed`: on the timeline, a resume may take it. The others do not count: the save never finished; the run went
on from an earlier step; its removal was decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One try at one step.

    Attributes:
        reason: why it does not count; empty for a committed one.
        brief: what its commit record says, or None without a readable one; `problem` then says why.
        size_bytes: its parts and shards as recorded, or, without a record, its files as found.
        marks: `latest` (a resume takes it), `parent` (the newest generation resumed from it), `held`, `quarantined`,
            `unhealthy`.
    """

    ref: StepRef
    state: State
    reason: str = ""
    brief: CommitBrief | None = None
    problem: str | None = None
    size_bytes: int = 0
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A run's entries, ascending by step. `head` is the newest claimed generation, 0 for none."""

    run_id: str
    head: int
    entries: tuple[Entry, ...]


def list_timeline(store: Store) -> Listing:
    """Return the committed steps that count. Reads one small record per step and lists no files.

    Raises:
        NotFound: no run. Corrupt: a record that decides which checkpoints count is damaged.
    """
    run_id = _get_run_id(store)
    chain = read_chain(store, list_generations(store), run_id)
    limit_bytes = record_limit()
    briefs = {ref: read_brief(store, ref, run_id, limit_bytes) for ref in _iter_candidates(store, chain)}
    parents = {number: record.parent for number, record in chain.items()}
    there = [ref for ref, (brief, problem) in briefs.items() if brief or problem]
    timeline = plan_timeline(parents, [ref for ref in there if not _is_pruned(store, ref, parents.values())])
    quarantined, held = read_marks(store)
    newest = _find_latest(timeline, quarantined)
    head = max(chain, default=0)
    parent = chain[head].parent if head else None
    entries = [
        _make_entry(ref, briefs[ref], _marks(ref, briefs[ref][0], newest, parent, quarantined, held))
        for ref in timeline
    ]
    return Listing(run_id=run_id, head=head, entries=tuple(entries))


def _get_run_id(store: Store) -> str:
    run_id = read_run_id(store)
    if run_id is None:
        if list_generations(store):
            scan_run(store)  # raises: generations without a run record
        raise no_run(store)
    return run_id


def no_run(store: Store) -> NotFound:
    """Return the error for a place that holds no run."""
    inside = _find_runs(store)
    advice = "check the path; it names the run's root"
    if inside:
        advice = f"name a run; inside of this folder are {', '.join(inside)}"
    return NotFound(f"{store.url}: there is no run here (no run.json)", advice=advice)


def _find_runs(store: Store) -> list[str]:
    """Return some runs right below; whoever names the folder of all runs means one of them."""
    found = []
    try:
        for name in store.list_folders("")[:_LOOKED_AT]:
            if exists(store, f"{name}/run.json"):
                found.append(name)
    except CheckpointError:
        return []  # a hint only
    return found[:_SHOWN]


def _iter_candidates(store: Store, chain: dict[int, GenerationRecord]) -> Iterator[StepRef]:
    limit: StepRef | None = None
    for number, record in sorted(chain.items(), reverse=True):
        for name in store.list_folders(f"{format_generation(number)}/"):
            ref = find_step(number, name)
            if ref is not None and (limit is None or ref.step <= limit.step):
                yield ref
        limit = record.parent


def read_brief(
    store: Store, ref: StepRef, run_id: str, limit_bytes: int | None = None
) -> tuple[CommitBrief | None, str | None]:
    """Return what the commit record says, or what is wrong with it; neither when there is none."""
    key = ref.key(COMMIT_RECORD)
    limit = record_limit() if limit_bytes is None else limit_bytes
    try:
        brief = read_twice(lambda: decode_record(CommitBrief, store.get(key, limit_bytes=limit), where=key))
    except NotFound:
        return None, None
    except (Corrupt, IncompatibleFormat) as error:
        return None, error.message
    if brief.ref != ref or brief.run_id != run_id:
        return None, f"{key}: is the commit record of {brief.ref} of run {brief.run_id}: it was moved or copied"
    return brief, None


def _is_pruned(store: Store, ref: StepRef, parents: Collection[StepRef | None]) -> bool:
    """Say whether a step's removal was decided; the intent on a parent may have come too late (see `is_void`)."""
    return exists(store, ref.key(PRUNE_INTENT)) and not (ref in parents and is_void(store, ref))


def _find_latest(timeline: tuple[StepRef, ...], quarantined: frozenset[StepRef]) -> StepRef | None:
    return next((ref for ref in reversed(timeline) if ref not in quarantined), None)


def _marks(
    ref: StepRef,
    brief: CommitBrief | None,
    latest: StepRef | None,
    parent: StepRef | None,
    quarantined: frozenset[StepRef],
    held: frozenset[StepRef],
) -> tuple[str, ...]:
    found = (
        ("latest", ref == latest),
        ("parent", ref == parent),
        ("held", ref in held),
        ("quarantined", ref in quarantined),
        ("unhealthy", brief is not None and not brief.facts.healthy),
    )
    return tuple(name for name, holds in found if holds)


def _make_entry(
    ref: StepRef,
    found: tuple[CommitBrief | None, str | None],
    marks: tuple[str, ...],
    state: State = "committed",
    reason: str = "",
    files_bytes: int = 0,
) -> Entry:
    brief, problem = found
    size_bytes = sum(part.size_bytes + part.shard_bytes for part in brief.parts) if brief else files_bytes
    return Entry(
        ref=ref, state=state, reason=reason, brief=brief, problem=problem, size_bytes=size_bytes, marks=marks
    )


def list_everything(store: Store) -> Listing:
    """Return every try at every step of every generation. Lists all files of the run.

    Raises:
        NotFound: no run. Corrupt: a record that decides which checkpoints count is damaged.
    """
    view = scan_run(store)
    if view is None:
        raise no_run(store)
    timeline = view.timeline
    on_timeline = frozenset(timeline)
    latest = _find_latest(timeline, view.quarantined)
    parent = view.generations[view.head].parent if view.head else None
    entries: list[Entry] = []
    for ref, folder in view.folders.items():
        brief = read_brief(store, ref, view.run_id) if folder.committed else (None, None)
        marks = _marks(ref, brief[0], latest, parent, view.quarantined, view.held)
        state, reason = _judge(folder, ref in on_timeline, view.generations, view.head)
        entries.append(_make_entry(ref, brief, marks, state, reason, sum(folder.files.values())))
    return Listing(run_id=view.run_id, head=view.head, entries=tuple(sorted(entries, key=lambda entry: entry.ref)))


def _judge(folder: StepFolder, counts: bool, chain: dict[int, GenerationRecord], head: int) -> tuple[State, str]:
    """Return a try's state and why it does not count."""
    ref = folder.ref
    if folder.pruning:
        return "removing", "its removal was decided; the next prune finishes it"
    if not folder.committed:
        parts = sum(find_part(name) is not None for name in folder.files)
        of = f" of {chain[ref.generation].world_size}" if ref.generation in chain else ""
        when = "it is being saved now, or was given up" if ref.generation == head else "its save never finished"
        return "uncommitted", f"no commit record, {parts}{of} parts: {when}"
    if counts:
        return "committed", ""
    if ref.generation not in chain:
        return "abandoned", f"generation {head} does not descend from generation {ref.generation}"
    children = [number for number, r in chain.items() if r.parent and r.parent.generation == ref.generation]
    if not children:
        return "abandoned", "a later try at this step took its place"
    parent = chain[children[0]].parent
    return "abandoned", f"generation {children[0]} went on from step {parent.step if parent else 0}"


def find_branch_step(store: Store, view: RunView, generation: int, step: int, attempt: int | None) -> StepRef:
    """Return a committed step of one generation, on the timeline or not: the last try unless one is named.

    Raises:
        NotFound: the generation has no such committed step; names those it has.
    """
    done = sorted(
        ref
        for ref, folder in view.folders.items()
        if ref.generation == generation and folder.committed and not folder.pruning
    )
    found = [ref for ref in done if ref.step == step and attempt in (None, ref.attempt)]
    if found:
        return found[-1]
    have = ", ".join(str(ref.step) for ref in done[-8:]) or "none"
    raise NotFound(
        f"{store.url}: generation {generation} has no committed step {step}; its newest ones are {have}",
        step=step,
        advice=f"shardkeep ls --all {store.url}",
    )
