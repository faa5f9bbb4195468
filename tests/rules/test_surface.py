"""The public surface is frozen: a name comes or goes here first, on purpose."""

from __future__ import annotations

import shardkeep

PUBLIC = {
    "AlreadyExists",
    "BarrierTimeout",
    "Best",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "Corrupt",
    "Denied",
    "EXIT_REQUEUE",
    "Event",
    "EventSink",
    "Filter",
    "Fenced",
    "Gradients",
    "IncompatibleFormat",
    "Keep",
    "Minutes",
    "Mixture",
    "NotBitExact",
    "NotCommitted",
    "NotFound",
    "OutOfSpace",
    "Pack",
    "PeerFailure",
    "PerRank",
    "Preemption",
    "ResumableLoader",
    "ResumeReport",
    "Sharded",
    "Shuffle",
    "StateChanged",
    "StateMismatch",
    "Steps",
    "StorageError",
    "StreamLoader",
    "Throttled",
    "Tier",
    "Unrecoverable",
    "UnsupportedState",
    "UsageError",
    "__version__",
    "exact_ddp",
    "load",
    "open",
    "register_tensor_type",
    "register_type",
    "save",
}


def test_the_public_names_are_these_and_no_others() -> None:
    assert sorted(shardkeep.__all__) == sorted(PUBLIC)
    assert len(set(shardkeep.__all__)) == len(shardkeep.__all__)


def test_every_public_name_is_there_and_documented() -> None:
    for name in PUBLIC - {"EXIT_REQUEUE", "__version__"}:
        value = getattr(shardkeep, name)
        assert value.__name__ == name
        assert value.__module__.startswith("shardkeep.")
        assert (value.__doc__ or "").strip(), name
    assert shardkeep.EXIT_REQUEUE == 75
    assert shardkeep.__version__.count(".") >= 1
    assert set(dir(shardkeep)) >= PUBLIC


def test_other_names_are_not_there() -> None:
    for name in ("nothing", "torch", "_HOMES_", "Saver"):
        assert not hasattr(shardkeep, name)
