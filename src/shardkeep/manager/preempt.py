"""Saves that no step count asks for: before the machine is taken away, and by the clock.

A signal or a notice on one rank becomes a request, the ranks agree on the tick where it takes effect
(`agreement`), and from there on `should_stop` is true and the next `after_step` saves, whatever the policy says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from shardkeep.errors import UsageError
from shardkeep.events import Event, EventSink
from shardkeep.knobs import read_local_rank
from shardkeep.manager.agreement import Agreement, Asked
from shardkeep.manager.clocks import Clocks
from shardkeep.manager.policies import Minutes, Steps, Tier
from shardkeep.manager.signals import SignalHandlers, check_signals
from shardkeep.ranks.base import Group
from shardkeep.ranks.notice import Kind, open_board

if TYPE_CHECKING:
    from shardkeep.manager.notices.watcher import Notice, Watcher

EXIT_REQUEUE: Final = 75
"""The exit code of a run that saved because it was told to stop, and has more to do: EX_TEMPFAIL of sysexits.h."""

Source = Literal["aws", "gcp", "azure", "slurm"]
SOURCES: Final[tuple[str, ...]] = get_args(Source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """What announces the end of this start, and how much time there is then.

    Attributes:
        signals: names of signals to handle, from the first `steps`, `after_step` or `should_stop` to `close`.
        grace_s: seconds from a signal to the kill, as the launcher is set up; None: not known. It changes what is
            reported, not what is done.
        watch: whose notices to poll for: `"aws"`, `"gcp"`, `"azure"`, and `"slurm"`, the job's time limit, which is
            announced `grace_s` (120 s when None) ahead.
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    grace_s: float | None = None
    watch: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        check_signals(self.signals)
        if self.grace_s is not None and not self.grace_s > 0:
            raise UsageError(f"grace_s={self.grace_s!r}: expected seconds above 0, or None")
        if isinstance(self.watch, str) or not set(self.watch) <= set(SOURCES):
            raise UsageError(
                f"watch={self.watch!r}: expected some of {', '.join(map(repr, SOURCES))}",
                advice='watch=("aws",) polls for the notices of AWS',
            )


PREEMPTION: Final = Preemption()
"""What a manager does by default."""


class Lookout:
    """Looks out for requests on behalf of a manager. Calls that are ticks say so: all ranks make them alike.

    Nothing happens before the first call that needs it: a manager that is only asked for its checkpoints handles no
    signals.

    Attributes:
        clocked: tiers that take the step last asked about by the clock, by number; the same on all ranks.
    """

    def __init__(
        self,
        preemption: Preemption | None,
        every: Steps | Minutes | None,
        events: EventSink,
        tiers: Sequence[Tier] = (),
    ) -> None:
        if preemption is not None and not isinstance(preemption, Preemption):
            raise UsageError(
                f"preemption={preemption!r}: expected shardkeep.Preemption(...), or None to leave signals alone",
                advice='preemption=shardkeep.Preemption(signals=("SIGTERM",), grace_s=30)',
            )
        self._options = preemption
        self._every = every
        self._root = len(tiers)
        rules = enumerate([*(tier.rule for tier in tiers), every])
        self._clocks = Clocks({number: rule for number, rule in rules if isinstance(rule, Minutes)})
        self._events = events
        self._group: Group | None = None
        self._pid = os.getpid()
        self._agreement: Agreement | None = None
        self._handlers: SignalHandlers | None = None
        self._watchers: list[Watcher] = []
        self._stop: Asked | None = None
        self._told = False
        self._due: set[int] = set()
        self.clocked: frozenset[int] = frozenset()
        self._saved = False
        self._begun: int | None = None

    @property
    def must_save(self) -> bool:
        """Whether the run is to stop and has not yet saved for that."""
        return self._stop is not None and not self._saved

    @property
    def is_done(self) -> bool:
        """Whether the run is to stop and has saved for that."""
        return self._stop is not None and self._saved

    @property
    def exit_code(self) -> int:
        return EXIT_REQUEUE if self._stop is not None else 0

    def begin(self, group: Group) -> None:
        """Start to look out, once. All ranks call it, in the same order as their other calls; none is waited for."""
        if self._group is not None or (self._options is None and not self._clocks):
            return
        self._group = group
        board = open_board(group)
        if board is None and group.world_size > 1:
            text = f"signals and clocks are ignored: a {type(group).__name__} gives no means to agree on a step"
            self._say("preempt.off", text, level="warning")
            return
        self._agreement = Agreement(board, on_asked=self._report_asked, events=self._events)
        self._clocks.start()
        if self._options is not None:
            self._handle_signals(self._options)
            self._watch(self._options)

    def _handle_signals(self, options: Preemption) -> None:
        self._handlers = SignalHandlers(options.signals, self._note_signal)
        for problem in self._handlers.install():
            self._say("preempt.no_signal", problem, level="warning")

    def _watch(self, options: Preemption) -> None:
        if options.watch and read_local_rank() == 0:  # one per node: services limit how often a machine may ask
            from shardkeep.manager.notices.watcher import start_watchers

            self._watchers = start_watchers(
                options.watch, self._note_notice, self._events, grace_s=options.grace_s, rank=self._rank
            )

    def tick(self, group: Group) -> bool:
        """Pass a tick; return whether the run is to stop. Raises as `Agreement.tick`."""
        self.begin(group)
        if self._agreement is not None and os.getpid() == self._pid:  # a fork has no part in it
            self._ask_by_clock()
            for asked in self._agreement.tick():
                self._take_effect(asked)
        return self._stop is not None

    def is_due(self, group: Group, step: int) -> bool:
        """Pass a tick at the end of a step; return whether the root gets it, by the policy or by a request."""
        self.tick(group)
        if self._stop is not None and not self._told:
            self._told = True
            self._report_agreed(self._stop, step)
        due, self._due = self._due, set()
        self.clocked = frozenset(due - {self._root})
        return self._root in due or self.must_save or (self._every is not None and self._every.is_due(step))

    def save(self, step: int, save: Callable[[], bool], wait: Callable[[], bool]) -> bool:
        """Save by `save`; when the run is to stop, also `wait` until it is durable. Return whether all went well.

        A save to stop that failed is tried again at the next step.
        """
        by_itself = self.must_save and self._begun == step  # the program saved this step before
        done = by_itself or save()
        if done and self.must_save:
            done = wait()
            if done:
                self.saved(step)
        return done

    def begun(self, step: int | None) -> None:
        """Take note that a save of a step went well or is under way; None: it failed after all."""
        self._begun = step

    def saved(self, step: int) -> None:
        """Take note that a step is committed where it outlives this start."""
        if not self.must_save:
            return
        assert self._stop is not None
        self._saved = True
        left_s = self._stop.left_s
        text = f"step {step} is saved, as asked by {self._stop.reason}{_format_left(left_s)}; this start can end"
        if self._rank == 0:
            late = left_s is not None and left_s < 0
            self._say("preempt.saved", text, level="warning" if late else "info", step=step, left_s=_rounded(left_s))

    def close(self) -> None:
        """Put signal handlers back and end the threads. Harmless twice."""
        if self._handlers is not None:
            self._handlers.restore()
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.stop()
        if self._agreement is not None:
            self._agreement.close()

    def _ask_by_clock(self) -> None:
        if not self._clocks or self._rank != 0 or self._stop is not None:
            return
        place = self._clocks.find_due()
        if place is not None:
            self._ask("save", "the clock", place=place)

    def _note_signal(self, name: str) -> None:
        """Called in a signal handler."""
        grace_s = self._options.grace_s if self._options is not None else None
        self._ask("stop", name, None if grace_s is None else time.monotonic() + grace_s)

    def _note_notice(self, notice: Notice) -> None:
        """Called by the threads of watchers."""
        self._ask(notice.kind, notice.reason, None if notice.left_s is None else time.monotonic() + notice.left_s)

    def _ask(self, kind: Kind, reason: str, deadline_s: float | None = None, place: int | None = None) -> None:
        if self._agreement is not None:
            asked = Asked(kind=kind, rank=self._rank, reason=reason, deadline_s=deadline_s, place=place)
            self._agreement.ask(asked)

    def _take_effect(self, asked: Asked) -> None:
        if asked.kind == "save" and asked.place is not None:
            self._due |= self._clocks.take(asked.place)
        elif asked.kind == "save":
            self._due.add(self._root)
            self._clocks.restart(self._root)
        elif self._stop is None or (not self._told and _is_sooner(asked, self._stop)):
            self._stop = asked

    def _report_asked(self, asked: Asked) -> None:
        if asked.place is not None:
            return
        what = "to stop" if asked.kind == "stop" else "for a save"
        text = f"{asked.reason} on rank {asked.rank} asks {what}{_format_left(asked.left_s)}"
        left_s = _rounded(asked.left_s)
        self._say("preempt.requested", text, level="warning", reason=asked.reason, kind=asked.kind, left_s=left_s)

    def _report_agreed(self, stop: Asked, step: int) -> None:
        if self._rank == 0:
            where = f"{stop.reason} on rank {stop.rank}"
            text = f"all ranks save step {step} and stop, as asked by {where}{_format_left(stop.left_s)}"
            left_s = _rounded(stop.left_s)
            self._say("preempt.agreed", text, level="warning", step=step, reason=stop.reason, left_s=left_s)

    @property
    def _rank(self) -> int:
        return self._group.rank if self._group is not None else 0

    def _say(self, name: str, text: str, *, level: str, **fields: str | int | float | None) -> None:
        asker: dict[str, str | int | float | bool | None] = {"rank": self._rank, **fields}
        self._events.emit(Event(name=name, level=level, text=text, fields=asker))


class Preemptible:
    """What a manager says about the end of this start."""

    _lookout: Lookout

    @property
    def group(self) -> Group:
        raise NotImplementedError

    @property
    def should_stop(self) -> bool:
        """Whether this start is to end: a signal or notice came to some rank, and all have agreed to heed it.

        Ask it on all ranks alike, wherever the program can break: all of them get the same answer, and asking costs
        next to nothing. Once it is true it stays so; the next `after_step` saves, and `steps` ends after that.

        Raises:
            BarrierTimeout: some rank wants to stop and others do not answer; names them.
            PeerFailure: the ranks cannot talk any more.
        """
        return self._lookout.tick(self.group)

    @property
    def preempted(self) -> bool:
        """Whether `should_stop` was true; asks nobody."""
        return self._lookout.exit_code != 0

    @property
    def exit_code(self) -> int:
        """What the program should exit with: EXIT_REQUEUE after it was told to stop, else 0."""
        return self._lookout.exit_code


def _is_sooner(one: Asked, other: Asked) -> bool:
    return one.deadline_s is not None and (other.deadline_s is None or one.deadline_s < other.deadline_s)


def _format_left(left_s: float | None) -> str:
    if left_s is None:
        return ""
    return f", with {left_s:.1f} s left" if left_s >= 0 else f", {-left_s:.1f} s too late"


def _rounded(left_s: float | None) -> float | None:
    return None if left_s is None else round(left_s, 3)
