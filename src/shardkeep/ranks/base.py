"""The `Group` protocol: how the ranks of a job talk about a checkpoint.

It is a control channel of its own, never a device collective, so that no training step waits for it and it
works from a background thread. All ranks make the same calls in the same order. Rank 0 is the
coordinator. Every wait has a timeout and names the ranks it waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Group(Protocol):
    """The ranks that save and restore together."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def agree(
        self,
        name: str,
        work: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """Run one phase on every rank: work, then one verdict for all.

        Each rank runs `work()`. The coordinator gathers the results by rank and runs `decide(results)`; what it
        returns is returned on every rank. An exception in anyone's `work` or in `decide` reaches every
        rank: the failing rank raises its own exception, all others a PeerFailure that names each failed
        rank and its cause (when all ranks fail alike, each raises its own). Nobody returns a
        verdict before everybody's work is done; a failure is raised as soon as it is known, while others may still
        work.

        Raises:
            PeerFailure: another rank failed; BarrierTimeout: some ranks did not arrive in `timeout_s`
                (default: the knob BARRIER_TIMEOUT_S).
        """

    def clone(self) -> Group:
        """Return a group over the same ranks for another thread (collective: all ranks must call it)."""

    def close(self) -> None:
        """Give back connections; harmless twice."""
