"""Finding the group of this job: the one place that knows how torch.distributed was started.

Torch is never imported here. A process that has not imported it cannot have initialised `torch.distributed`.

A store can outlive a start of the job (`torchrun` restarts workers under an agent that keeps hosting it), and
torch does not always keep the keys of two starts apart. So every `connect` agrees on a nonce that no earlier one
can have had, by question and answer: each rank asks with a token it has just drawn, rank 0 answers under that
token, the rank confirms under the nonce. What an earlier start left under any of these keys is a token or nonce of
then, which nobody of now accepts.
"""

from __future__ import annotations

import secrets
import sys
from typing import Any, Final

from shardkeep.errors import BarrierTimeout, UsageError
from shardkeep.knobs import get_knob
from shardkeep.ranks.base import Group
from shardkeep.ranks.channel import Channel, KeyValueStore, Patience, clone_client
from shardkeep.ranks.messages import format_ranks
from shardkeep.ranks.single import SingleGroup
from shardkeep.ranks.store_group import StoreGroup

_PREFIX: Final = "shardkeep/connect/"
_ADVICE: Final = "call shardkeep on every rank of the job; look at the logs of the ranks that are missing"


def connect() -> Group:
    """Return the group of all ranks of the job: the default process group's, or the group of one without it.

    Collective where `torch.distributed` is initialised: every rank calls it, as often as every other.

    Raises:
        BarrierTimeout: ranks did not call it within the knob BARRIER_TIMEOUT_S.
        UsageError: the default process group has no store (MPI).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return SingleGroup()
    rank, world_size = int(distributed.get_rank()), int(distributed.get_world_size())
    if world_size == 1:
        return SingleGroup()
    store = _get_default_store(distributed)
    nonce = agree_nonce(clone_client(store), rank, world_size, timeout_s=get_knob("BARRIER_TIMEOUT_S"))
    return StoreGroup(store, rank, world_size, nonce)


def agree_nonce(store: KeyValueStore, rank: int, world_size: int, *, timeout_s: float) -> str:
    """Return a text that all ranks of this start share and no earlier start has had (collective)."""
    channel = Channel(store, prefix=_PREFIX)
    if rank == 0:
        return _lead(channel, world_size, timeout_s)
    return _follow(channel, rank, timeout_s)


def _follow(channel: Channel, rank: int, timeout_s: float) -> str:
    token = secrets.token_hex(8)
    channel.put(f"ask/{rank}", token.encode())
    patience = Patience(timeout_s)
    while not channel.has_all([f"answer/{token}"]):
        if patience.is_over:
            raise BarrierTimeout(
                f"rank 0 did not connect within {timeout_s:g} s of rank {rank}", missing=(0,), advice=_ADVICE
            )
        patience.pause()
    nonce = channel.get(f"answer/{token}").decode()
    # The question stays until the next one replaces it: rank 0 may be about to read it.
    channel.put(f"confirm/{nonce}/{rank}", b"")
    return nonce


def _lead(channel: Channel, world_size: int, timeout_s: float) -> str:
    nonce = secrets.token_hex(8)
    waiting = list(range(1, world_size))
    answered: dict[int, list[str]] = {rank: [] for rank in waiting}
    patience = Patience(timeout_s)
    while waiting:
        for rank in waiting:
            _answer(channel, rank, nonce, answered[rank])
        confirmed = [rank for rank in waiting if answered[rank] and channel.has_all([f"confirm/{nonce}/{rank}"])]
        waiting = [rank for rank in waiting if rank not in set(confirmed)]
        if waiting and patience.is_over:
            _forget(channel, nonce, answered)
            raise BarrierTimeout(
                f"{format_ranks(waiting)} did not connect within {timeout_s:g} s of rank 0",
                missing=waiting,
                advice=_ADVICE,
            )
        if waiting:
            patience.pause()
    _forget(channel, nonce, answered)
    return nonce


def _answer(channel: Channel, rank: int, nonce: str, answered: list[str]) -> None:
    """Answer a rank's question if it is new: the one found first may be a leftover of an earlier start."""
    if not channel.has_all([f"ask/{rank}"]):
        return
    token = channel.get(f"ask/{rank}").decode()
    if token in answered:
        return
    # ORDER: look for the confirmation after reading the question: a confirmed rank asks for its next `connect`.
    if answered and channel.has_all([f"confirm/{nonce}/{rank}"]):
        return
    channel.put(f"answer/{token}", nonce.encode())
    answered.append(token)


def _forget(channel: Channel, nonce: str, answered: dict[int, list[str]]) -> None:
    for rank, tokens in sorted(answered.items()):
        channel.remove([f"confirm/{nonce}/{rank}", *(f"answer/{token}" for token in tokens)])


def _get_default_store(distributed: Any) -> KeyValueStore:
    """Return the store behind the default process group; torch has no public name for it."""
    try:
        store: KeyValueStore | None = distributed.distributed_c10d._get_default_store()
    except AttributeError as error:
        raise UsageError(
            "this version of torch hides the store of its default process group",
            advice="use a version of torch that shardkeep supports",
        ) from error
    if store is None:
        raise UsageError(
            f"the process group of backend {distributed.get_backend()!r} has no store to talk through",
            advice="initialise torch.distributed with the env://, tcp:// or file:// method, or pass a store",
        )
    return store
