"""Watches for what a training script does around a resume that makes it another run; each is said once, with its fix.

A guard never raises and changes nothing: the run goes on, and who reads the events knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkeep.events import Event, EventSink

_SHOWN = 4


class Guards:
    """The guards of one start on one rank; what is the same on all ranks is said by rank 0 alone."""

    def __init__(self, events: EventSink, rank: int) -> None:
        self._events = events
        self._rank = rank
        self._said: set[str] = set()
        self._resumed = False
        self._first_step_done = False
        self._keys: dict[str, str] | None = None
        self._streams: dict[str, str] = {}
        self._seed: int | None = None
        self._positions: dict[str, Any] = {}
        self._loaders: dict[str, Any] = {}
        self._known_loaders: frozenset[int] = frozenset()

    def before_resume(self, state: Mapping[str, Any]) -> None:
        """Look at the loaders before a restore positions them."""
        from shardkeep.state.observe import find_loaders

        for key, loader in find_loaders(state).items():
            if getattr(loader, "last_batch_ids", None) is not None:
                self._warn(
                    "guard.loader_consumed",
                    f"{key}: it gave batches before resume(), which an uninterrupted run would not have taken; what "
                    f"iterates over it now is ended by the restore. Build {key}, resume, and only then iterate",
                    key=key,
                )

    def after_resume(self, state: Mapping[str, Any], *, fresh: bool) -> None:
        """Remember what was restored; call it last in a resume."""
        from shardkeep.state.observe import (
            digest_streams,
            find_copies,
            find_forgotten,
            find_loaders,
            find_refused,
            initial_seed,
            list_keys,
        )

        self._resumed = not fresh
        self._keys = list_keys(state)
        self._known_loaders = frozenset(id(value) for value in state.values())
        self._loaders = find_loaders(state)
        self._known_loaders |= {id(loader) for loader in self._loaders.values()}
        self._positions = {key: loader.cursor for key, loader in self._loaders.items()}
        for key, why in (find_refused(state) if fresh else {}).items():
            self._warn("guard.not_saveable", f"every save will be refused as long as this is so: {why}", key=key)
        for key in find_copies(state):
            self._warn(
                "guard.state_copy",
                f"{key}: what an optimizer's state_dict() returned, which is a copy: a resume does not reach the "
                "optimizer. Put the optimizer itself into the state",
                key=key,
            )
        for key, names in find_forgotten(state).items():
            shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            self._warn(
                "guard.optimizer_incomplete",
                f"{key}: {len(names)} trainable parameters are in no optimizer of the state, so they never change: "
                f"{shown}. Give them to the optimizer, put their optimizer into the state, or call "
                "requires_grad_(False) on them",
                key=key,
            )
        # Last: what is above must not be what moves a stream.
        self._streams = digest_streams() if self._resumed else {}
        self._seed = initial_seed()

    def before_loop(self, loader: Any) -> None:
        """Compare random streams and positions with the restored ones, before the first batch is taken."""
        if not self._resumed or self._first_step_done:
            return
        from shardkeep.state.observe import digest_streams, initial_seed

        now = digest_streams()
        moved = sorted(name for name, digest in self._streams.items() if now.get(name, digest) != digest)
        if moved:
            what = "seeded anew" if initial_seed() != self._seed else "seeded anew or drawn from"
            self._warn_reseeded(f"{', '.join(moved)}: {what} between resume() and the first batch")
        for key, live in self._loaders.items():
            if live.cursor != self._positions[key]:
                self._warn(
                    "guard.loader_consumed",
                    f"{key}: it gave batches between resume() and the loop, which the loop now misses. Take them "
                    "from another loader, or before resume()",
                    key=key,
                )
        if id(loader) not in self._known_loaders:
            self._warn(
                "guard.loader_missing",
                f"the loader of steps(), a {type(loader).__name__}, is not in the state that was resumed: its "
                "position is not saved, and this start takes samples from its beginning. Put a ResumableLoader, or "
                "any loader with state_dict and load_state_dict, into the state",
            )

    def at_step(self, state: Mapping[str, Any]) -> None:
        """Look once, after the first step: for loops that do not use `steps()`."""
        if self._first_step_done or self._keys is None:
            return
        self._first_step_done = True
        self.at_save(state)
        from shardkeep.state.observe import initial_seed

        if self._resumed and initial_seed() != self._seed:
            self._warn_reseeded("rng/torch: seeded anew between resume() and the end of the first step")

    def at_save(self, state: Mapping[str, Any]) -> None:
        """Compare what is saved with what was restored, by name."""
        if not self._resumed or self._keys is None:
            return
        from shardkeep.state.observe import list_keys

        now = list_keys(state)
        if not now:
            return
        for key in sorted(now.keys() - self._keys.keys()):
            self._warn(
                "guard.state_added",
                f"{key}: in the state now, not in the state that was resumed, so it began anew at this start. Put it "
                "into the state before resume()",
                key=key,
            )
        for key in sorted(self._keys.keys() - now.keys()):
            self._warn(
                "guard.state_missing",
                f"{key}: restored at this start, not in the state any more, so it is not saved. Give resume(), "
                "after_step() and save() the same state",
                key=key,
            )

    def _warn_reseeded(self, what: str) -> None:
        # On every rank: streams are each rank's own.
        self._warn(
            "guard.reseeded",
            f"{what}, so that random draws are not those of an uninterrupted run. Seed, build and try out everything "
            "before resume(), which puts the streams back last",
            everywhere=True,
        )

    def _warn(self, name: str, text: str, *, key: str = "", everywhere: bool = False) -> None:
        if f"{name} {key}" in self._said or (self._rank != 0 and not everywhere):
            return
        self._said.add(f"{name} {key}")
        self._events.emit(
            Event(name=name, level="warning", text=text, fields={"rank": self._rank, "key": key or None})
        )
