"""Where a broken run parts from an unbroken one, and what was not captured: from what both wrote down. Pure.

Three things are told apart. What differs before the first kill is the command's own doing: two runs of it are not
alike. What differs right after a resume, before any step, was not restored. What differs at a step first follows from
that, or from a kernel that does not repeat itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from shardkeep.errors import Corrupt
from shardkeep.manager.watch import Began, Line, Moment, Said, Stepped
from shardkeep.plan.replay import compare_values, explain

Kind = Literal["unrepeatable", "stream", "variable", "step", "length", "checkpoint"]
_ORDER: Final = ("unrepeatable", "stream", "variable", "step", "length", "checkpoint")
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One thing in which the broken run is not the unbroken one.

    Attributes:
        kind: `unrepeatable`: before any kill; `stream`, `variable`: not what it was right after a resume; `step`: a
            quantity of a step; `length`: how many steps there are; `checkpoint`: a tensor or value that was saved.
        start: which start of the command, from 1; None for checkpoints.
        step: the first step in question; for `stream` and `variable` the step that was resumed.
        quantity: its name. `expected`: of the unbroken run; `found`: of the broken one.
        cause: where to look, a sentence.
    """

    kind: Kind
    step: int
    quantity: str
    expected: str
    found: str
    cause: str
    start: int | None = None
    rank: int = 0

    @property
    def order(self) -> tuple[int, int, str]:
        """Causes before effects, and what shows first before what shows later."""
        restored = self.kind in ("stream", "variable")
        # What a resume at step k lost is there before step k + 1, and after whatever happened at step k.
        return self.step + 1 if restored else self.step, _ORDER.index(self.kind), self.quantity

    def __str__(self) -> str:
        restored = self.kind in ("stream", "variable")
        where = f"right after the resume at step {self.step}" if restored else f"at step {self.step}"
        rank = f", rank {self.rank}" if self.rank else ""
        return f"{self.quantity}, {where}{rank}: expected {self.expected}, found {self.found}; {self.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What one rank wrote down of one start.

    Attributes:
        began: step -> what was there when it went on from that step, right before the next one.
        resumed: the step that the newest process of it resumed.
    """

    world_size: int
    resumed: int
    began: Mapping[int, Moment]
    steps: Mapping[int, Moment]
    said: tuple[tuple[str, str], ...]

    @property
    def last(self) -> int:
        return max(self.steps, default=self.resumed)


def make_start(lines: Iterable[Line]) -> Start:
    """Put one rank's lines of one start together. Raises Corrupt: it never began."""
    began: dict[int, Moment] = {}
    steps: dict[int, Moment] = {}
    said: dict[tuple[str, str], None] = {}
    world_size, resumed = 1, 0
    for line in lines:
        if isinstance(line, Began):
            began[line.step], world_size, resumed = line.moment, line.world_size, line.step
        elif isinstance(line, Stepped):
            steps[line.step] = line.moment
        elif isinstance(line, Said):
            said[line.name, line.text] = None
    if not began and not steps:
        raise Corrupt("a rank wrote down neither a resume nor a step")
    return Start(world_size=world_size, resumed=resumed, began=began, steps=steps, said=tuple(said))


def find_losses(
    unbroken: Mapping[int, Start], starts: Sequence[Mapping[int, Start]], *, ignore: frozenset[str] = frozenset()
) -> list[Loss]:
    """Return everything in which the starts of the broken run differ from the unbroken run, causes first.

    Args:
        unbroken: by rank. starts: the broken run's, in order, each by rank; the first is the one before any kill.
        ignore: variables that are left out.

    A stream counts when both runs have it alike before the first kill; a variable when it also changes in the
    unbroken run, and after a resume is another one both before and after the next step. So clocks do not count.
    """
    found: dict[tuple[str, str], Loss] = {}
    for number, ranks in enumerate(starts, 1):
        for rank in sorted(ranks.keys() & unbroken.keys()):
            noisy = ignore | (find_noisy(unbroken[rank], starts[0][rank]) if rank in starts[0] else frozenset())
            for loss in _iter_losses(unbroken[rank], ranks[rank], number, rank, noisy):
                key = loss.kind, loss.quantity
                if key not in found or loss.order < found[key].order:
                    found[key] = loss
    return sorted(found.values(), key=lambda loss: loss.order)


def find_noisy(unbroken: Start, first: Start) -> frozenset[str]:
    """Return the variables and streams that differ between two runs of the command before either was killed."""
    pairs = [(unbroken.steps[step], first.steps[step]) for step in unbroken.steps.keys() & first.steps.keys()]
    pairs += [(unbroken.began[step], first.began[step]) for step in unbroken.began.keys() & first.began.keys()]
    tables = [table for a, b in pairs for table in ((a.variables, b.variables), (a.streams, b.streams))]
    return frozenset(name for a, b in tables for name in a if b.get(name) != a[name])


def _iter_losses(unbroken: Start, broken: Start, number: int, rank: int, noisy: frozenset[str]) -> Iterator[Loss]:
    same_world = unbroken.world_size == broken.world_size
    if number > 1:
        for step, moment in sorted(broken.began.items()):
            reference = unbroken.steps.get(step) or unbroken.began.get(step)
            if reference is not None:
                yield from _compare_began(
                    unbroken, broken, reference, moment, step, noisy, with_streams=same_world, place=(number, rank)
                )
    alike = 0
    for step in sorted(broken.steps.keys() & unbroken.steps.keys()):
        if step <= broken.resumed and number > 1:
            continue
        expected, now = unbroken.steps[step].values, broken.steps[step].values
        _, differing = compare_values(expected, now, same_world=same_world)
        for name in differing:
            yield Loss(
                kind="step" if number > 1 else "unrepeatable",
                step=step,
                quantity=name,
                expected=show(expected[name]),
                found=show(now[name]),
                cause=_explain(name, alike, broken) if number > 1 else _UNREPEATABLE,
                start=number,
                rank=rank,
            )
        if differing:
            return
        alike += 1


_UNREPEATABLE: Final = (
    "there was no kill before it, so two runs of the command are not alike: seed everything that draws, look at "
    "non-deterministic kernels (torch.use_deterministic_algorithms) and at threads"
)


def _compare_began(
    unbroken: Start,
    broken: Start,
    reference: Moment,
    moment: Moment,
    step: int,
    noisy: frozenset[str],
    *,
    with_streams: bool,
    place: tuple[int, int],
) -> Iterator[Loss]:
    number, rank = place
    streams = (reference.streams.keys() & moment.streams.keys()) - noisy if with_streams else set()
    for name in sorted(streams):
        if reference.streams[name] != moment.streams[name]:
            yield Loss(
                kind="stream",
                step=step,
                quantity=name,
                expected=reference.streams[name],
                found=moment.streams[name],
                cause="it was restored, and seeded anew or drawn from before the next step: seed and try things out "
                "before resume()",
                start=number,
                rank=rank,
            )
    for name in sorted((reference.variables.keys() & moment.variables.keys()) - noisy):
        if reference.variables[name] == moment.variables[name] or _is_constant(unbroken, name):
            continue
        after, expected = broken.steps.get(step + 1), unbroken.steps.get(step + 1)
        if after is not None and expected is not None:
            pair = after.variables.get(name), expected.variables.get(name)
            if None in pair or pair[0] == pair[1]:
                continue
        kind = moment.unsaved.get(name)
        yield Loss(
            kind="variable",
            step=step,
            quantity=name,
            expected=show(reference.variables[name]),
            found=show(moment.variables[name]),
            cause=f"it is not in the state{f' ({kind})' if kind else ''}: put it there",
            start=number,
            rank=rank,
        )


def _is_constant(unbroken: Start, name: str) -> bool:
    moments = [*unbroken.began.values(), *unbroken.steps.values()]
    return len({moment.variables[name] for moment in moments if name in moment.variables}) == 1


def _explain(quantity: str, alike: int, broken: Start) -> str:
    unsaved: dict[str, str] = {}
    for moment in [*broken.began.values(), *list(broken.steps.values())[:1]]:
        unsaved |= moment.unsaved
    suspects = [f"{name} ({kind}) is not in the state" for name, kind in sorted(unsaved.items())]
    cause = explain(quantity, alike_count=alike)
    return cause + (f"; {'; '.join(suspects[:_SHOWN])}" if suspects else "")


def find_length_loss(unbroken: Mapping[int, Start], starts: Sequence[Mapping[int, Start]]) -> Loss | None:
    """Return the loss of a broken run that ends at another step, or None."""
    expected = max(start.last for start in unbroken.values())
    found = max(start.last for start in starts[-1].values())
    if expected == found:
        return None
    return Loss(
        kind="length",
        step=min(expected, found),
        quantity="last step",
        expected=str(expected),
        found=str(found),
        cause="what decides when to stop (patience, a best value, a count of its own) is not in the state",
        start=len(starts),
    )


def show(text: str) -> str:
    """Return a recorded value for a person: a float by its number and its bits."""
    body = text.lstrip("-")
    if body.startswith("0x") and "p" in body:
        return f"{float.fromhex(text)!r} ({text})"
    return text if len(text) <= 60 else f"{text[:57]}..."
