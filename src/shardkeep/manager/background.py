"""The one save that may be under way while training goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from shardkeep.engine.flight import Flight
from shardkeep.engine.save import Committed, SaveOptions, Saver
from shardkeep.errors import CheckpointError, PeerFailure, StateChanged, StorageError, UsageError
from shardkeep.events import Event, EventSink
from shardkeep.format.names import StepRef, is_asset
from shardkeep.manager.policies import Minutes, Steps
from shardkeep.plan.retention import Keep
from shardkeep.ranks.base import Group
from shardkeep.spec.tensors import Captured
from shardkeep.storage.base import Store

Mode = Literal["blocking", "async", "overlap"]
Busy = Literal["wait", "skip"]

MODES: Final[tuple[str, ...]] = get_args(Mode)
BUSY: Final[tuple[str, ...]] = get_args(Busy)


def check_options(
    *, save_every: object, keep: object, assets: Mapping[str, bytes] | None, mode: str, busy: str, tolerate: int
) -> None:
    """Refuse what a manager cannot work with, before it touches anything. Raises UsageError."""
    for name in assets or {}:
        if not is_asset(name):
            raise UsageError(f"assets[{name!r}]: expected a plain file name that shardkeep does not use itself")
    for option, value, known in (("mode", mode, MODES), ("busy", busy, BUSY)):
        if value not in known:
            raise UsageError(f"{option}={value!r}: expected one of {', '.join(map(repr, known))}")
    if tolerate < 0:
        raise UsageError(f"tolerate={tolerate}: expected 0 or more")
    if not isinstance(save_every, Steps | Minutes | int | None):
        raise UsageError(
            f"save_every={save_every!r}: expected a number of steps or None",
            advice="save_every=100 saves every 100 steps",
        )
    if not isinstance(keep, Keep | None):
        raise UsageError(
            f"keep={keep!r}: expected shardkeep.Keep(...) or None",
            advice="keep=shardkeep.Keep(last=3) keeps the newest three",
        )


def describe_commit(committed: Committed) -> Event:
    """Return the event of a committed checkpoint: its bytes, and where the coordinator's time went."""
    seconds = {f"{name}_s": round(value, 6) for name, value in committed.seconds.items()}
    unchanged_bytes = committed.unchanged_bytes
    more = f", {unchanged_bytes} of them unchanged and not written again" if unchanged_bytes else ""
    return Event(
        name="save.committed",
        text=f"{committed.ref} is committed ({committed.shard_bytes} bytes{more})",
        fields={
            "step": committed.ref.step,
            "total_bytes": committed.shard_bytes,
            "unchanged_bytes": unchanged_bytes,
            **seconds,
        },
    )


def describe_failure(error: CheckpointError, step: int, rank: int, failures_count: int) -> Event:
    """Return the event of a save that failed, the `failures_count`-th in a row."""
    return Event(
        name="save.failed",
        level="error",
        text=f"step {step} was not saved (failure {failures_count} in a row): {error}",
        fields={"step": step, "rank": rank, "failures_count": failures_count},
    )


def check_process(pid: int) -> None:
    """Refuse to save in a fork of the process that a manager belongs to. Raises UsageError."""
    if os.getpid() != pid:
        raise UsageError(
            f"the manager belongs to process {pid}, this is its fork {os.getpid()}",
            advice="save in the process that trains, not in a forked worker",
        )


class Tolerance:
    """How many saves in a row may fail before the run ends.

    Attributes:
        forgives: the last one that failed does not count.
    """

    def __init__(self, limit_count: int) -> None:
        self._limit_count = limit_count
        self.failures_count = 0
        self.forgives = False

    def passes(self, work: Callable[[], object]) -> bool:
        """Do what may fail a few times in a row; return whether it went well. Every failure was reported before."""
        try:
            work()
        except (StorageError, PeerFailure, StateChanged) as error:
            if isinstance(error, PeerFailure) and not error.transient:
                raise
            if self.forgives:
                return False
            self.failures_count += 1
            if self.failures_count > self._limit_count:
                raise
            return False
        return True

    def reset(self) -> None:
        """Begin to count anew: a save went well."""
        self.failures_count = 0


class BackgroundSaves:
    """Stages saves and lets one at a time go on in the background."""

    def __init__(self, saver: Saver, group: Group, events: EventSink, mode: Mode) -> None:
        from shardkeep.state.overlap import Hold, StepGate

        self._saver = saver
        self._group = group
        self._events = events
        self._overlaps = mode == "overlap"
        self._gate = StepGate()
        self._hold = Hold()
        self._landed: Flight[Committed] | None = None
        self._is_prepared = False

    @property
    def _flight(self) -> Flight[Committed] | None:
        """The save that has not landed yet. The saver knows it before its thread runs, which may ask here."""
        flight = self._saver.flight
        return None if flight is self._landed else flight

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Once, ahead of the first save: agree on the plan and begin to make the memory ready.

        Raises StateMismatch and UnsupportedState, as the save would. What may have passed until then is reported.
        """
        if self._is_prepared:
            return
        self._is_prepared = True
        try:
            self._saver.prepare(lambda: self._capture(state))
        except (StorageError, PeerFailure) as error:
            if isinstance(error, PeerFailure) and not error.transient:
                raise
            text = f"nothing was made ready ahead of the first save, which will take longer: {error}"
            fields: dict[str, str | int | float | bool | None] = {"rank": self._group.rank}
            self._events.emit(Event(name="save.not_prepared", level="warning", text=text, fields=fields))
        finally:
            self._hold.release()

    def is_busy(self) -> bool:
        """Say whether a save is under way on any rank (collective)."""
        flight = self._flight
        own = flight is not None and not flight.is_done
        return b"1" in self._group.agree(
            "save.busy", lambda: b"1" if own else b"0", lambda found: b"1" if b"1" in found else b"0"
        )

    def start(
        self,
        step: int,
        state: Mapping[str, Any],
        options: SaveOptions,
        stores: Sequence[Store],
        ended: Callable[[Committed | BaseException], None],
    ) -> StepRef:
        """Stage a save; the one before must have landed. See `Saver.stage`."""
        self._is_prepared = True

        def end(outcome: Committed | BaseException) -> None:
            self._hold.release()
            ended(outcome)

        flight = self._saver.stage(
            step,
            lambda: self._capture(state),
            options,
            stores=stores,
            confirm=lambda: self._hold.confirm(),
            ended=end,
        )
        if self._overlaps:
            self._gate.shut(flight.wait_staged, self._hold)
        return flight.ref

    def land(self) -> StepRef | None:
        """Wait for the save under way, if any; return what it committed or raise what went wrong, once."""
        flight = self._flight
        if flight is None:
            return None
        # ORDER: an interrupt of the wait must leave the flight where the next call finds it.
        flight.wait_ended()
        self._landed = flight
        try:
            return flight.wait().ref
        except StateChanged as error:
            self._stop_overlapping(str(error))
            raise
        except PeerFailure as error:
            if StateChanged.exit_code in error.exit_codes.values():
                # What one rank does to its parameters all of them do, sooner or later; each time costs a checkpoint.
                self._stop_overlapping(str(error))
            raise

    def _capture(self, state: Mapping[str, Any]) -> Captured:
        from shardkeep.state.capture import capture
        from shardkeep.state.overlap import Hold, defer, find_untrusted

        captured = capture(state)
        self._hold = Hold()
        if not self._overlaps:
            return captured
        reason = find_untrusted(state)
        if reason is not None:
            self._stop_overlapping(reason)
            return captured
        deferred, self._hold = defer(state, captured, self._gate)
        return deferred

    def _stop_overlapping(self, reason: str) -> None:
        if not self._overlaps:
            return
        self._overlaps = False
        self._gate.close()
        text = f"from now on everything is copied before training goes on (as with mode='async'): {reason}"
        self._events.emit(
            Event(name="save.not_overlapped", level="warning", text=text, fields={"rank": self._group.rank})
        )

    @property
    def waited_s(self) -> float:
        """Seconds that optimizers' steps have waited for copies so far."""
        return self._gate.waited_s

    def close(self) -> None:
        """Give back memory, hooks and connections, once the save under way has ended."""
        if self._flight is not None:
            self._flight.wait_ended()
        self._gate.close()
        self._saver.close()
