"""shardkeep: sharded, verified, bit-exact checkpoints for PyTorch training runs.

Importing this package imports neither torch nor numpy; names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardkeep._version import __version__

if TYPE_CHECKING:
    from shardkeep.data.loader import ResumableLoader
    from shardkeep.data.mixture import Mixture
    from shardkeep.data.stream_loader import StreamLoader
    from shardkeep.data.streams import Filter, Pack, Shuffle
    from shardkeep.engine.checkpoint import Checkpoint
    from shardkeep.errors import (
        AlreadyExists,
        BarrierTimeout,
        CheckpointError,
        Corrupt,
        Denied,
        Fenced,
        IncompatibleFormat,
        NotBitExact,
        NotCommitted,
        NotFound,
        OutOfSpace,
        PeerFailure,
        StateChanged,
        StateMismatch,
        StorageError,
        Throttled,
        Unrecoverable,
        UnsupportedState,
        UsageError,
    )
    from shardkeep.events import Event, EventSink
    from shardkeep.format.values import register_type
    from shardkeep.manager.manager import CheckpointManager
    from shardkeep.manager.oneoff import load, open, save
    from shardkeep.manager.policies import Minutes, Steps, Tier
    from shardkeep.manager.preempt import EXIT_REQUEUE, Preemption
    from shardkeep.manager.resume import ResumeReport
    from shardkeep.plan.retention import Best, Keep
    from shardkeep.state.ddp import exact_ddp
    from shardkeep.state.gradients import Gradients
    from shardkeep.state.subclasses import register_tensor_type
    from shardkeep.state.wrappers import PerRank, Sharded

_HOMES = {
    "data.loader": ("ResumableLoader",),
    "data.mixture": ("Mixture",),
    "data.stream_loader": ("StreamLoader",),
    "data.streams": ("Filter", "Pack", "Shuffle"),
    "engine.checkpoint": ("Checkpoint",),
    "errors": (
        "AlreadyExists",
        "BarrierTimeout",
        "CheckpointError",
        "Corrupt",
        "Denied",
        "Fenced",
        "IncompatibleFormat",
        "NotBitExact",
        "NotCommitted",
        "NotFound",
        "OutOfSpace",
        "PeerFailure",
        "StateChanged",
        "StateMismatch",
        "StorageError",
        "Throttled",
        "Unrecoverable",
        "UnsupportedState",
        "UsageError",
    ),
    "events": ("Event", "EventSink"),
    "format.values": ("register_type",),
    "manager.manager": ("CheckpointManager",),
    "manager.oneoff": ("load", "open", "save"),
    "manager.policies": ("Minutes", "Steps", "Tier"),
    "manager.preempt": ("EXIT_REQUEUE", "Preemption"),
    "manager.resume": ("ResumeReport",),
    "plan.retention": ("Best", "Keep"),
    "state.ddp": ("exact_ddp",),
    "state.gradients": ("Gradients",),
    "state.subclasses": ("register_tensor_type",),
    "state.wrappers": ("PerRank", "Sharded"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CheckpointManager",
    "ResumableLoader",
    "Mixture",
    "StreamLoader",
    "Filter",
    "Shuffle",
    "Pack",
    "Steps",
    "Minutes",
    "Preemption",
    "EXIT_REQUEUE",
    "Keep",
    "Best",
    "Tier",
    "save",
    "load",
    "open",
    "Checkpoint",
    "ResumeReport",
    "PerRank",
    "Sharded",
    "Gradients",
    "exact_ddp",
    "register_type",
    "register_tensor_type",
    "Event",
    "EventSink",
    "CheckpointError",
    "UsageError",
    "NotFound",
    "NotCommitted",
    "IncompatibleFormat",
    "StateMismatch",
    "StateChanged",
    "UnsupportedState",
    "Corrupt",
    "Unrecoverable",
    "StorageError",
    "OutOfSpace",
    "Throttled",
    "AlreadyExists",
    "Denied",
    "PeerFailure",
    "BarrierTimeout",
    "Fenced",
    "NotBitExact",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'shardkeep' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"shardkeep.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"shardkeep.{name} needs torch, which is not installed: pip install torch", name="torch"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
