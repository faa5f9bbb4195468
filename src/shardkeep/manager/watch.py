"""What a start under `shardkeep audit` writes down, and how it dies at the step it is told to.

One file per rank in the folder that the audit names, one JSON line per thing that happened. Not a part of the run:
nothing here goes into its root, and a start outside an audit has no watch.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
from msgspec import Struct

from shardkeep import knobs
from shardkeep.errors import Corrupt
from shardkeep.events import Event, EventSink

_FILE_NAME: Final = re.compile(r"rank-(\d{5})\.jsonl\Z", re.ASCII)
_EVENTS: Final = ("guard.", "replay.differs", "replay.save_differs", "resume.inexact", "resume.environment")


class Moment(Struct, frozen=True, kw_only=True):
    """What a rank held at one moment.

    Attributes:
        values: `samples/<loader>`, `lr/<optimizer>`, `metric/<name>` of the step, as text.
        streams: digests of its random streams, by name.
        variables: of the script, beside the state: name -> digest or plain value.
        unsaved: live objects beside the state: name -> type.
    """

    values: dict[str, str]
    streams: dict[str, str]
    variables: dict[str, str]
    unsaved: dict[str, str]


class Began(Struct, frozen=True, kw_only=True, tag="began"):
    """A start, right before its first step: the last such line counts."""

    step: int
    world_size: int
    moment: Moment


class Stepped(Struct, frozen=True, kw_only=True, tag="step"):
    step: int
    moment: Moment


class Said(Struct, frozen=True, kw_only=True, tag="event"):
    """A warning of a guard or of the replay proof."""

    name: str
    text: str


Line = Began | Stepped | Said


class Watch:
    """The watch of one rank; it follows one manager."""

    def __init__(self, folder: Path, kill_step: int | None) -> None:
        from shardkeep.state.observe import Observer

        self._folder = folder
        self._kill_step = kill_step
        self._observer = Observer()
        self._rank = 0
        self._world_size = 1
        self._state: Mapping[str, Any] = {}
        self._step = 0
        self._stepped = False

    def begin(self, step: int, state: Mapping[str, Any], *, rank: int, world_size: int) -> None:
        """Write down what is there after a resume; again before the loop, where that is known."""
        self._rank, self._world_size, self._state, self._step = rank, world_size, state, step
        self._stepped = False
        self.before_loop()

    def before_loop(self) -> None:
        """Write it down once more: what was set between the resume and the loop counts. Draws nothing."""
        if not self._stepped:
            moment = self._look(self._state, {}, _caller())
            self._write(Began(step=self._step, world_size=self._world_size, moment=moment))

    def take(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Write a step down, once; and die there, if this start is to."""
        if self._stepped and step <= self._step:
            return
        self._step, self._stepped = step, True
        self._write(Stepped(step=step, moment=self._look(state, metrics, _caller())))
        if step == self._kill_step:
            os.kill(os.getpid(), signal.SIGKILL)

    def _look(self, state: Mapping[str, Any], metrics: Mapping[str, Any], frame: FrameType | None) -> Moment:
        from shardkeep.state.observe import digest_streams
        from shardkeep.state.variables import VariableReader

        reader = VariableReader(state)
        reader.read(frame)
        return Moment(
            values=self._observer.observe(state, metrics),
            streams=digest_streams(),
            variables=reader.values,
            unsaved=reader.unsaved,
        )

    def emit(self, event: Event) -> None:
        """Write an event down if it says something about exactness."""
        if event.name.startswith(_EVENTS):
            self._write(Said(name=event.name, text=event.text))

    def _write(self, line: Line) -> None:
        # Unbuffered, so that nothing is lost to the kill; not durable, since only processes die here.
        with open(self._folder / f"rank-{self._rank:05d}.jsonl", "ab", buffering=0) as file:
            file.write(msgspec.json.encode(line) + b"\n")


class WatchedSink:
    """Hands events on, and to the watch."""

    def __init__(self, inner: EventSink, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def emit(self, event: Event) -> None:
        self._watch.emit(event)
        self._inner.emit(event)


def find_watch() -> Watch | None:
    """Return the watch of this process, or None outside an audit."""
    wish = knobs.read_audit()
    return None if wish is None else Watch(Path(wish[0]), wish[1])


def read_watch(folder: Path) -> dict[int, Sequence[Line]]:
    """Return what the ranks of one start wrote down, by rank. Raises Corrupt."""
    found: dict[int, Sequence[Line]] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE_NAME.match(path.name)
        if match is None:
            continue
        try:
            # A line that the kill of a neighbour cut short is no line.
            lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
            found[int(match[1])] = [msgspec.json.decode(line, type=Line) for line in lines]
        except msgspec.MsgspecError as error:
            raise Corrupt(f"{path}: malformed line: {error}") from None
    return found


def _caller() -> FrameType | None:
    """Return the frame that called into this class."""
    return sys._getframe(2)
