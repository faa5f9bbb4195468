"""What a person names on the command line: a run, a step of it, or plain files of tensors."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from shardkeep.engine.listing import find_branch_step, no_run
from shardkeep.engine.locate import choose_step
from shardkeep.engine.run import RunView, scan_run
from shardkeep.errors import NotFound, UsageError
from shardkeep.format.names import StepRef, find_generation, find_step
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import is_remote, open_store
from shardkeep.storage.retry import RetryingStore

_STEP: Final = re.compile(r"(?:g(\d{1,9})/)?(?:step-)?(\d{1,15})(?:\.([1-9]\d{0,5}))?\Z", re.ASCII)
STEP_HELP: Final = "a step number, 'latest', or gNNNN/STEP for a step of one generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which step of a run is meant: the latest one when `step` is None, else one of the timeline or a generation."""

    step: int | None = None
    generation: int | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A place as typed: its URL, and the step where one was given with it (`RUN@STEP`, a step's own folder)."""

    url: str
    selection: Selection | None = None


def parse_selection(text: str) -> Selection:
    """Return the step that `text` names.

    Raises:
        UsageError: no step is written like this.
    """
    if text == "latest":
        return Selection()
    match = _STEP.match(text)
    if not match or (match[3] and not match[1]):
        raise UsageError(f"step {text!r}: expected {STEP_HELP}", advice="shardkeep ls RUN shows the steps there are")
    return Selection(
        step=int(match[2]),
        generation=int(match[1]) if match[1] else None,
        attempt=int(match[3]) if match[3] else None,
    )


def parse_target(text: str) -> Target:
    """Split `RUN@STEP`, and take the folder of a step within a run for that step."""
    url, at, step = text.rpartition("@")
    if at and url and (step == "latest" or _STEP.match(step)) and not os.path.exists(text):
        return Target(url=url, selection=parse_selection(step))
    head, _, name = text.rstrip("/").rpartition("/")
    root, _, folder = head.rpartition("/")
    generation = find_generation(folder)
    ref = find_step(generation, name) if generation is not None else None
    # A service is not asked: no run lies in a folder with a step's name.
    if ref is not None and (is_remote(root) or os.path.exists(os.path.join(root or ".", "run.json"))):
        return Target(
            url=root or ".", selection=Selection(step=ref.step, generation=ref.generation, attempt=ref.attempt)
        )
    return Target(url=text)


def choose_selection(target: Target, option: str | None, *, name: str = "--step") -> Selection:
    """Return the step meant by a target and an option together.

    Raises:
        UsageError: both name one.
    """
    if option is not None and target.selection is not None:
        raise UsageError(f"the step was given twice, with the run and with {name}", advice=f"leave {name} out")
    return parse_selection(option) if option is not None else target.selection or Selection()


def open_run(url: str) -> Store:
    """Return the store of a run; transient trouble is waited out."""
    return RetryingStore(open_store(url))


def get_view(store: Store) -> RunView:
    """Return the run as it is now. Raises NotFound when there is none."""
    view = scan_run(store)
    if view is None:
        raise no_run(store)
    return view


def find_ref(store: Store, selection: Selection) -> StepRef:
    """Return the committed step a selection names.

    Raises:
        NotFound: no run or no such step. NotCommitted: only saves that never finished.
    """
    view = get_view(store)
    if selection.generation is not None and selection.step is not None:
        return find_branch_step(store, view, selection.generation, selection.step, selection.attempt)
    return choose_step(store, view, "latest" if selection.step is None else selection.step)


def require_local(path: str) -> None:
    """Refuse a path that is not there, in words that fit any kind of target."""
    if not os.path.exists(path):
        raise NotFound(f"{path}: no such file or folder", advice="check the path")
