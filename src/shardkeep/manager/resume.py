"""How a start finds its place: recover, choose, claim, restore, and fall back where a checkpoint is damaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import Struct

from shardkeep.engine.environment import EnvironmentChange, compare_environments, describe_environment
from shardkeep.engine.recover import choose_steps, confirm_commit, roll_forward
from shardkeep.engine.restore import Restored, agree_intact, restore
from shardkeep.engine.run import (
    claim_generation,
    create_run,
    read_commit,
    read_generation,
    scan_run,
    write_mark,
)
from shardkeep.engine.tiers import TieredStore
from shardkeep.errors import Corrupt, NotCommitted, NotFound, UsageError
from shardkeep.events import Event, EventSink
from shardkeep.format.names import StepRef
from shardkeep.format.records import CommitRecord
from shardkeep.manager.overrides import Overrides
from shardkeep.ranks.base import Group
from shardkeep.storage.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What a resume did.

    Attributes:
        step: optimizer steps done; 0 for a fresh start.
        fresh: nothing was restored.
        generation: the number of this start.
        parent: the checkpoint that was restored, or None.
        bytes_read: what this rank read from storage.
        overrides: what was changed on purpose: name -> what it was and is.
        environment: what differs from the surroundings of the save and can change bits.
        lines: everything a person should know, one sentence each.
    """

    step: int
    fresh: bool
    generation: int
    parent: StepRef | None
    bytes_read: int
    lines: tuple[str, ...]
    overrides: Mapping[str, str] = field(default_factory=dict)
    environment: tuple[EnvironmentChange, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Claim(Struct, kw_only=True):
    """The coordinator's choice, the same on every rank."""

    run_id: str
    generation: int
    nonce: str
    parent: StepRef | None
    lines: tuple[str, ...]
    passed_over: tuple[tuple[int, StepRef], ...] = ()


def resume_run(
    store: Store,
    group: Group,
    events: EventSink,
    state: Mapping[str, Any],
    *,
    fresh: bool,
    step: int | None,
    cast: bool,
    overrides: Overrides,
) -> tuple[ResumeReport, Claim]:
    """Claim a generation and restore its parent; on damage pass over to the next older complete checkpoint.

    Raises:
        NotFound: the step that was asked for does not exist. Corrupt: every checkpoint is damaged, or the one
            that was asked for. StateMismatch: the live state does not fit; nothing was restored. StorageError:
            storage failed; transient trouble never makes a resume fall back.
    """
    lines: list[str] = []
    while True:
        claim = claim_next(store, group, events, fresh=fresh, step=step)
        lines += claim.lines
        if claim.parent is None:
            return _add_differences(_report(claim, lines, 0), overrides, {}), claim
        try:
            restored, notes = restore_step(store, group, claim, state, cast=cast, overrides=overrides)
        except Corrupt as error:
            if _pass_over(store, claim.parent, error, events, lines) is not None:
                continue
            _quarantine(store, group, events, claim, error)
            if step is not None:
                raise
            lines.append(f"{claim.parent} is damaged and was passed over: {error.message.splitlines()[0]}")
            continue
        events.emit(_describe_restored(restored))
        report = _report(claim, lines + list(notes), restored.bytes_read)
        return _add_differences(report, overrides, restored.commit.facts.environment), claim


def _describe_restored(restored: Restored) -> Event:
    """Return the event of a restored checkpoint: the bytes that this rank read, and where its time went."""
    seconds = {f"{name}_s": round(value, 6) for name, value in restored.seconds.items()}
    return Event(
        name="restore.read",
        text=f"{restored.commit.ref} is restored ({restored.bytes_read} bytes read)",
        fields={"step": restored.commit.ref.step, "read_bytes": restored.bytes_read, **seconds},
    )


def _add_differences(report: ResumeReport, overrides: Overrides, before: Mapping[str, str]) -> ResumeReport:
    """Make the overrides, and say what else is not as it was."""
    done = overrides.apply()
    environment = compare_environments(before, describe_environment())
    lines = [f"{name} was overridden: {text}" for name, text in done.items()]
    lines += overrides.notes()
    lines += [f"{change}, which can change bits; to have it as it was: {change.advice}" for change in environment]
    return replace(report, lines=(*report.lines, *lines), overrides=done, environment=environment)


def _report(claim: Claim, lines: list[str], bytes_read: int) -> ResumeReport:
    step = claim.parent.step if claim.parent else 0
    where = f"resumed from {claim.parent}" if claim.parent else "fresh start: there is no checkpoint to resume from"
    return ResumeReport(
        step=step,
        fresh=claim.parent is None,
        generation=claim.generation,
        parent=claim.parent,
        bytes_read=bytes_read,
        lines=(f"{where}; this is generation {claim.generation}", *dict.fromkeys(lines)),
    )


def check_resume(state: object, *, again: bool) -> None:
    """Refuse what cannot be resumed, and a second resume. Raises UsageError."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"resume() was given a {type(state).__name__}; expected a dict of names",
            advice='pass the whole state, such as {"model": model, "optimizer": optimizer, "loader": loader}',
        )
    if again:
        raise UsageError(
            "resume() or save() was called before on this manager; nothing was changed",
            advice="call resume() once, before the first save; to go back to a checkpoint, make a new "
            "CheckpointManager and resume with that",
        )


def claim_first(store: Store, group: Group, events: EventSink) -> Claim:
    """Claim a run for a start that saves without a resume. Raises UsageError when there are checkpoints already."""

    def refuse(_found: list[bytes]) -> bytes:
        view = scan_run(store)
        if view is not None and view.timeline:
            raise UsageError(
                f"{store.url}: the run has checkpoints (the newest is {view.timeline[-1]}), and this start "
                "did not say how it goes on",
                advice="call manager.resume(state) before the first save, or resume(state, fresh=True)",
            )
        return b""

    group.agree("save.first", lambda: b"", refuse)
    return claim_next(store, group, events, fresh=True, step=None)


def claim_next(store: Store, group: Group, events: EventSink, *, fresh: bool, step: int | None) -> Claim:
    """Choose a parent, claim the next generation for it, and check that all ranks see the same root."""
    if fresh and step is not None:
        raise UsageError("resume(fresh=True, step=...) contradict each other: a fresh start has no step")
    verdict = group.agree(
        "resume.claim",
        lambda: b"",
        lambda found: msgspec.json.encode(_claim(store, events, fresh=fresh, step=step, world_size=group.world_size)),
    )
    claim = msgspec.json.decode(verdict, type=Claim)
    if isinstance(store, TieredStore):
        for tier, ref in claim.passed_over:
            store.discount(tier, [ref])  # the coordinator did; all ranks leave the same copies alone

    def look() -> bytes:
        try:
            nonce = read_generation(store, claim.generation).nonce
        except NotFound:
            nonce = "nothing"
        if nonce != claim.nonce:
            raise UsageError(
                f"{store.url}: rank {group.rank} does not see what rank 0 just wrote there: the root is not shared",
                rank=group.rank,
                advice="give a path on a file system that all nodes mount, or an object store's URL",
            )
        return b""

    group.agree("resume.look", look, lambda found: b"")
    return claim


def _claim(store: Store, events: EventSink, *, fresh: bool, step: int | None, world_size: int) -> Claim:
    if step is not None and scan_run(store) is None:
        raise NotFound(f"{store.url}: there is no run here, so no step {step}", advice="check the path")
    run_id = create_run(store)
    lines: list[str] = []
    passed: list[tuple[int, StepRef]] = []
    while True:
        parent = None if fresh else _choose(store, events, run_id, step, lines, passed)
        record = claim_generation(store, run_id, parent, world_size=world_size, environment=describe_environment())
        if record is not None:
            break
        lines.append(f"{parent} was removed while this start chose it")
    if fresh:
        lines.append("a fresh start was asked for; earlier checkpoints stay, on a timeline of their own")
    return Claim(
        run_id=run_id,
        generation=record.generation,
        nonce=record.nonce,
        parent=parent,
        lines=tuple(lines),
        passed_over=tuple(passed),
    )


def _pass_over(store: Store, ref: StepRef, error: Exception, events: EventSink, lines: list[str]) -> int | None:
    """Leave the copy of a checkpoint alone that was just read; return its tier, or None where the root's was it."""
    tier = store.pass_over(ref) if isinstance(store, TieredStore) else None
    if isinstance(store, TieredStore) and tier is not None:
        url = store.tiers[tier].store.url
        lines.append(f"the copy of {ref} in {url} is damaged and was passed over: {str(error).splitlines()[0]}")
        events.emit(Event(name="tier.damaged", level="error", text=lines[-1], fields={"step": ref.step}))
    return tier


def _choose(
    store: Store,
    events: EventSink,
    run_id: str,
    step: int | None,
    lines: list[str],
    passed: list[tuple[int, StepRef]],
) -> StepRef | None:
    """Return the checkpoint to resume from, or None when there never was one."""
    view = scan_run(store)
    if view is None or not view.generations:
        return None
    for ref in roll_forward(store, view, events):
        lines.append(f"{ref}: all its parts were durable, so it was committed now")
        view = scan_run(store) or view
    damaged: list[str] = []
    for ref in choose_steps(store, view, step=step):
        try:
            confirm_commit(store, view, ref)
        except (Corrupt, NotCommitted):
            # Looked at twice, so that a slip of the transport is not taken for damage.
            try:
                confirm_commit(store, view, ref)
            except (Corrupt, NotCommitted) as error:
                if (tier := _pass_over(store, ref, error, events, lines)) is not None:
                    passed.append((tier, ref))
                    return _choose(store, events, run_id, step, lines, passed)
                damaged.append(f"{ref}: {error.message}")
                events.emit(Event(name="resume.damaged", level="error", text=damaged[-1], fields={"step": ref.step}))
                write_mark(store, run_id, "quarantine", ref, error.message)
                lines.append(f"{ref} is damaged and was passed over: {error.message}")
                continue
        return ref
    if view.timeline:
        known = damaged or [f"{ref}: quarantined earlier" for ref in view.timeline]
        raise Corrupt(
            f"{store.url}: there are checkpoints, and none can be read; nothing was started or removed\n  - "
            + "\n  - ".join(known),
            advice=f"shardkeep verify {store.url}; or start anew with resume(fresh=True)",
        )
    if tries := [ref for ref, folder in view.folders.items() if not folder.committed]:
        lines.append(f"{len(tries)} saves that were never completed do not count ({tries[-1]} is the last)")
    return None


def restore_step(
    store: Store, group: Group, claim: Claim, state: Mapping[str, Any], *, cast: bool, overrides: Overrides
) -> tuple[Restored, tuple[str, ...]]:
    """Restore the claim's parent; return what was read and what a person should know."""
    from shardkeep.state.restore import plan_restore

    assert claim.parent is not None
    parent = claim.parent
    found: list[CommitRecord] = []

    def read() -> bytes:
        found.append(read_commit(store, parent, run_id=claim.run_id))
        return b""

    # A phase of its own: a rank that cannot read the record must not leave the others waiting in the next one.
    agree_intact(group, "resume.commit", read)
    notes: list[str] = []
    narrowed = overrides.narrow()
    origin = (int(claim.run_id[:15], 16), claim.generation, group.rank)
    done = restore(
        store,
        group,
        found[0],
        lambda catalog: overrides.accept(plan_restore(narrowed, catalog, cast=cast), catalog),
        lambda plan: notes.extend(plan.finish(rng_derivation=origin)),
    )
    return done, (*notes, *done.notes)


def _quarantine(store: Store, group: Group, events: EventSink, claim: Claim, error: Corrupt) -> None:
    assert claim.parent is not None
    parent = claim.parent

    def mark(found: list[bytes]) -> bytes:
        write_mark(store, claim.run_id, "quarantine", parent, error.message)
        events.emit(Event(name="resume.damaged", level="error", text=str(error), fields={"step": parent.step}))
        return b""

    group.agree("resume.quarantine", lambda: b"", mark)


def list_inexact(state: Mapping[str, Any]) -> list[str]:
    """Return what in a state keeps a resume from being exact, one sentence each."""
    from shardkeep.state.ddp import find_inexact_ddp

    return list(find_inexact_ddp(state))
