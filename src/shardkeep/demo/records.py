"""What the ranks of the demo are told, and what they write down: one JSON line per step and per state. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from shardkeep.errors import Corrupt

LeaveOut = Literal["rng", "moment", "loader", "scheduler"]
Moment = Literal["trained", "restored"]

_LOG_NAME: Final = re.compile(r"g(\d{4})-rank-(\d{3})\.jsonl\Z", re.ASCII)


class Shape(Struct, frozen=True, kw_only=True):
    """How large the demo is.

    Attributes:
        layers_count, width, heads_count, context_bytes: of the model; `width` divides by `heads_count`.
        batch_count: windows of text per step over all ranks.
        windows_count: windows per epoch; no multiple of `batch_count`, so that an epoch ends in a smaller batch.
        stop: steps of a whole run; more than one epoch.
        save_every: steps between two saves.
        kill_step: the step whose save a rank does not survive; a multiple of `save_every`.
        reshard_step: the step that fewer ranks resume from; a later multiple.
        world_size, reshard_world_size: ranks of the runs, and of the resume on fewer.
    """

    layers_count: int
    width: int
    heads_count: int
    context_bytes: int
    batch_count: int
    windows_count: int
    stop: int
    save_every: int
    kill_step: int
    reshard_step: int
    world_size: int
    reshard_world_size: int


STANDARD: Final = Shape(
    layers_count=2,
    width=128,
    heads_count=4,
    context_bytes=64,
    batch_count=16,
    windows_count=408,
    stop=40,
    save_every=5,
    kill_step=25,
    reshard_step=30,
    world_size=4,
    reshard_world_size=2,
)
SMALL: Final = Shape(
    layers_count=1,
    width=32,
    heads_count=2,
    context_bytes=32,
    batch_count=6,
    windows_count=45,
    stop=12,
    save_every=3,
    kill_step=6,
    reshard_step=9,
    world_size=3,
    reshard_world_size=2,
)


SPOT: Final = Shape(
    layers_count=2,
    width=96,
    heads_count=4,
    context_bytes=64,
    batch_count=12,
    windows_count=204,
    stop=32,
    save_every=8,
    kill_step=16,
    reshard_step=24,
    world_size=2,
    reshard_world_size=3,
)
SPOT_SMALL: Final = Shape(
    layers_count=1,
    width=32,
    heads_count=2,
    context_bytes=32,
    batch_count=6,
    windows_count=45,
    stop=12,
    save_every=4,
    kill_step=8,
    reshard_step=8,
    world_size=2,
    reshard_world_size=1,
)


class Kill(Struct, frozen=True, kw_only=True):
    """The accident of the demo: `rank` dies within its second block of the save of `step`, once."""

    rank: int
    step: int
    marker: str


class TierConfig(Struct, frozen=True, kw_only=True):
    """A faster place before the root; see `shardkeep.Tier`."""

    url: str
    every: int
    keep: int = 1


class RankConfig(Struct, frozen=True, kw_only=True):
    """One training command, the same for all ranks of a run and for its restart.

    Attributes:
        root: the run's folder. logs: where the ranks write down what they did.
        save: whether to save at all. resume_step: the step to resume from; None: the newest.
        parent_pid: the process without which the ranks end.
        tiers: faster places; with them, saves go on in the background. grace_s: seconds from a signal to the kill.
        hash_every: after how many steps the state is written down; None: as often as it is saved.
    """

    root: str
    logs: str
    shape: Shape
    parent_pid: int
    save: bool = True
    resume_step: int | None = None
    kill: Kill | None = None
    leave_out: LeaveOut | None = None
    tiers: tuple[TierConfig, ...] = ()
    grace_s: float | None = None
    hash_every: int | None = None


class StartRecord(Struct, frozen=True, kw_only=True, tag="start", tag_field="kind"):
    """How a rank began."""

    step: int
    fresh: bool
    generation: int
    report: str
    parameters_count: int
    text_bytes: int
    files_count: int


class StepRecord(Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """One step on one rank; floats as hexadecimal text, which loses no bit."""

    step: int
    ids: tuple[int, ...]
    lr: str
    loss: str
    grad_norm: str


class StateRecord(Struct, frozen=True, kw_only=True, tag="state", tag_field="kind"):
    """SHA-256 of everything a rank holds after `step`; `tensors` (whole, gathered) on rank 0 alone."""

    step: int
    moment: Moment
    tensors: dict[str, str]
    tensor_bytes: dict[str, int]
    rng: dict[str, str]
    scheduler: str
    loader: str


Record = StartRecord | StepRecord | StateRecord


class RankLog:
    """A rank's lines of one start; each is on its way to the file when `write` returns, whatever happens then."""

    def __init__(self, folder: str, generation: int, rank: int) -> None:
        path = os.path.join(folder, f"g{generation:04d}-rank-{rank:03d}.jsonl")
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  # closed by `close`

    def write(self, record: Record) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_logs(folder: str | Path) -> dict[int, dict[int, list[Record]]]:
    """Return generation -> rank -> records. A last line without its end belongs to a killed rank and is left out."""
    found: dict[int, dict[int, list[Record]]] = {}
    decoder = msgspec.json.Decoder(Record)
    for path in sorted(Path(folder).iterdir()):
        match = _LOG_NAME.match(path.name)
        if match is None:
            continue
        try:
            records = [decoder.decode(line) for line in path.read_bytes().split(b"\n")[:-1]]
        except msgspec.MsgspecError as error:
            raise Corrupt(f"{path}: not a record of the demo: {error}", key=str(path)) from error
        found.setdefault(int(match[1]), {})[int(match[2])] = records
    return found


def count_steps(folder: str | Path) -> int:
    """Return the last step that rank 0 of the newest start wrote down, or 0; cheap enough to ask often."""
    paths = sorted(Path(folder).glob("g*-rank-000.jsonl"))
    if not paths:
        return 0
    last = 0
    for line in paths[-1].read_bytes().split(b"\n")[:-1]:
        found = re.match(rb'\{"kind":"st(?:ep|art)","step":(\d+)', line)
        last = int(found[1]) if found else last
    return last
