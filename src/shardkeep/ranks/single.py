"""The group of one: no peers, no store, no waiting, no torch."""

from __future__ import annotations

from collections.abc import Callable


class SingleGroup:
    """A `Group` of world size 1. Errors of `work` and `decide` leave `agree` as they are."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def agree(
        self,
        name: str,  # the protocol's; there is no peer to compare it with
        work: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        *,
        timeout_s: float | None = None,  # nobody to wait for
    ) -> bytes:
        """Run `work`, then `decide` over its one result."""
        return decide([work()])

    def clone(self) -> SingleGroup:
        """Return another group of one."""
        return SingleGroup()

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""
