"""`StoreGroup`: the two-phase barrier that carries errors, over a `torch.distributed` key-value store.

Keys of phase number `s` of a group, below `shardkeep/<nonce>/<s>/`:

- `post/<rank>`: a rank's result. Only when its work is done and right; large ones with chunks below.
- `here`: rank 0 has done its own work and gathers.
- `verdict`: the outcome, set once, by whoever comes first: rank 0 when all went well, any rank that failed or gave up
  waiting otherwise. All ranks believe the one that is there, so that they agree whatever happens.
- `failures` and `failure/<i>`: how many failed besides those in the verdict, and how.
- `left/<rank>`: the rank has read a failed verdict. After a good one it removes its post instead.

Rank 0 waits for the posts and watches every pulse; the others wait for the verdict and watch rank 0's pulse. A
phase costs a fixed number of messages per rank. A rank takes part in a phase only after it has
read the verdict of the one before, so rank 0 forgets phase `s-1` when it has gathered phase `s`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from shardkeep.errors import CheckpointError, PeerFailure, UsageError
from shardkeep.knobs import get_knob
from shardkeep.ranks.channel import Channel, KeyValueStore, Patience, chunk_keys, clone_client
from shardkeep.ranks.messages import (
    INLINE_BYTES,
    Failure,
    FailureKind,
    Post,
    Verdict,
    decode_message,
    encode_message,
    error_of,
    failure_of,
    format_ranks,
    mismatch_of,
)
from shardkeep.ranks.pulse import Pulse, Watch

_OTHERS_GRACE_S: Final = 0.3
"""After a failure, how long to wait for ranks that fail alike, so that the report names them all."""

_FAREWELL_S: Final = 5.0
"""How long rank 0 stays for ranks that have yet to read the last verdict: it may host the store."""

_FAILURES_READ_COUNT: Final = 64
"""How many failures each rank reads and names; a file system that is down fails on all ranks at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    number: int
    name: str
    timeout_s: float

    def key(self, leaf: str) -> str:
        return f"{self.number}/{leaf}"


class StoreGroup:
    """The ranks of a job, talking through its store. One thread at a time; `clone` serves another thread.

    All ranks give the same `nonce`, which no earlier group on the same store may have had. The store is used
    through a client of the group's own. A lost rank is noticed after the knob PEER_SILENCE_S.
    """

    def __init__(
        self, store: KeyValueStore, rank: int, world_size: int, nonce: str, *, pulse: Pulse | None = None
    ) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is not in a world of {world_size}: expected 0 to {world_size - 1}")
        if not nonce or "/" in nonce:
            raise UsageError(f"nonce {nonce!r}: expected a text without '/', unique to this start of the job")
        silence_s = get_knob("PEER_SILENCE_S")
        self._rank = rank
        self._world_size = world_size
        self._others = tuple(other for other in range(world_size) if other != rank)
        # Kept: in the process that hosts the server, this is the server, and `destroy_process_group` lets go of it
        # while a save in the background still talks through it.
        self._origin = store
        self._channel = Channel(clone_client(store), prefix=f"shardkeep/{nonce}/")
        if pulse is None:
            pulse = Pulse(Channel(clone_client(store), prefix=f"shardkeep/{nonce}/"), rank=rank, silence_s=silence_s)
        self._pulse = pulse
        self._watch = Watch(
            Channel(self._channel.store, prefix=pulse.prefix),
            self._others if rank == 0 else (0,),
            silence_s=silence_s,
        )
        self._number = 0
        self._channels_count = 0
        self._litter: list[tuple[_Phase, Verdict]] = []
        self._busy = threading.Lock()
        self._pid = os.getpid()
        # Not `__del__`: this also runs before the interpreter tears down, when no thread may be left in a C call.
        self._closer = weakref.finalize(self, pulse.release)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def agree(
        self,
        name: str,
        work: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """Run one phase on every rank; see `Group.agree`.

        A failure reaches waiting ranks at once, also while others, rank 0 included, are still at work: those
        learn of it when their work is done. The wait of a rank begins when its own work is done and ends after
        `timeout_s` without rank 0, or 2 x `timeout_s` after that when rank 0 is there but does not decide.

        Raises:
            UsageError: ranks are in phases of different names, or the group is closed or in use.
        """
        limit_s = get_knob("BARRIER_TIMEOUT_S") if timeout_s is None else timeout_s
        if not name or not limit_s > 0:
            raise UsageError(f"phase {name!r} with timeout_s={limit_s!r}: expected a name and a positive number")
        with self._one_at_a_time(name):
            self._number += 1
            phase = _Phase(number=self._number, name=name, timeout_s=limit_s)
            with self._told_to_peers(phase):
                result = work()
                _check_bytes(result, "work", name)
            return self._lead(phase, result, decide) if self._rank == 0 else self._follow(phase, result)

    def clone(self) -> StoreGroup:
        """Return a group over the same ranks for another thread (collective: all ranks must call it)."""
        nonce = self.agree("group.clone", lambda: b"", lambda _: secrets.token_hex(8).encode()).decode()
        return StoreGroup(self._origin, self._rank, self._world_size, nonce, pulse=self._pulse.hold())

    def open_channel(self, name: str) -> Channel:
        """Return a client for another thread; the n-th calls of all ranks share their keys. Waits for none."""
        self._channels_count += 1
        prefix = f"{self._channel.prefix}{name}-{self._channels_count}/"
        return Channel(clone_client(self._channel.store), prefix=prefix)

    def close(self) -> None:
        """Stop the signs of life; harmless twice. Rank 0 stays until the others have read the last verdict."""
        if not self._closer.alive or os.getpid() != self._pid:
            return
        if self._rank == 0:
            with contextlib.suppress(PeerFailure):
                self._bid_farewell()
        self._closer()

    # Rank 0

    def _lead(self, phase: _Phase, own: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        with self._told_to_peers(phase, only_signals=True):
            self._channel.put(phase.key("here"), b"")
            if not self._await_posts(phase):
                return self._conclude(phase, self._get_verdict(phase))
            self._forget_older(phase)
            results = self._get_posts(phase, own)
        with self._told_to_peers(phase):
            payload = decide(results)
            _check_bytes(payload, "decide", phase.name)
        return self._publish(phase, payload)

    def _await_posts(self, phase: _Phase) -> bool:
        """Wait for every post. Return False when there is a verdict, a failure then, before that."""
        posts = [phase.key(f"post/{other}") for other in self._others]
        patience = Patience(phase.timeout_s, longest_pause_s=self._watch.every_s)
        while not self._channel.has_all(posts):
            if self._channel.has_all([phase.key("verdict")]):
                return False
            lost = self._watch.find_lost()
            gone = [rank for rank in sorted(lost) if not self._has_post(phase, rank)]
            if gone:
                self._fail(phase, *(self._failure(phase, rank, "lost", lost[rank]) for rank in gone))
                return False
            if patience.is_over:
                late = [rank for rank in self._others if not self._has_post(phase, rank)]
                text = f"within {phase.timeout_s:g} s of rank 0"
                if late:
                    self._fail(phase, *(self._failure(phase, rank, "late", text) for rank in late))
                    return False
            patience.pause()
        return True

    def _get_posts(self, phase: _Phase, own: bytes) -> list[bytes]:
        frames = self._channel.get_each([phase.key(f"post/{other}") for other in self._others])
        results = [own]
        elsewhere: dict[int, str] = {}
        for other, frame in zip(self._others, frames, strict=True):
            post, payload = decode_message(frame, Post, rank=other)
            if post.phase != phase.name:
                elsewhere[other] = post.phase
            elif post.chunk_count:
                payload = self._channel.get_chunks(phase.key(f"post/{other}"), post.chunk_count)
            results.append(payload)
        if elsewhere:
            self._conclude(phase, self._fail(phase, mismatch_of(phase.name, elsewhere)))
        return results

    def _publish(self, phase: _Phase, payload: bytes) -> bytes:
        key = phase.key("verdict")
        count = self._channel.put_chunks(key, payload) if len(payload) > INLINE_BYTES else 0
        verdict = Verdict(chunk_count=count)
        mine = encode_message(verdict, b"" if count else payload)
        current = self._channel.put_first(key, mine)
        if current != mine:  # a rank gave up while rank 0 decided
            self._channel.remove(chunk_keys(key, count))
            return self._conclude(phase, decode_message(current, Verdict, rank=0)[0])
        self._litter.append((phase, verdict))
        return payload

    def _forget_older(self, phase: _Phase) -> None:
        # ORDER: only with all posts of this phase seen has every rank read the verdicts before it.
        litter, self._litter = self._litter, []
        for old, verdict in litter:
            if old.number >= phase.number:
                continue
            keys = [old.key("here"), old.key("verdict"), *chunk_keys(old.key("verdict"), verdict.chunk_count)]
            if verdict.failures:  # on success each rank removed its own post
                keys.extend(self._failure_keys(old))
                for other in self._others:
                    keys.extend([old.key(f"left/{other}"), *self._post_keys(old, other)])
            self._channel.remove(keys)

    def _post_keys(self, phase: _Phase, rank: int) -> list[str]:
        key = phase.key(f"post/{rank}")
        if not self._channel.has_all([key]):
            return []
        post, _ = decode_message(self._channel.get(key), Post, rank=rank)
        return [key, *chunk_keys(key, post.chunk_count)]

    def _bid_farewell(self) -> None:
        if not self._litter:
            return
        phase, verdict = self._litter[-1]
        patience = Patience(_FAREWELL_S)
        dead = {failure.rank for failure in verdict.failures if failure.kind == "lost"}
        waiting = [rank for rank in self._others if rank not in dead]
        while waiting and not patience.is_over:
            lost = self._watch.find_lost()
            waiting = [rank for rank in waiting if rank not in lost and not self._has_left(phase, verdict, rank)]
            if waiting:
                patience.pause()
        if not waiting:
            self._forget_older(_Phase(number=self._number + 1, name="group.close", timeout_s=_FAREWELL_S))

    # Every other rank

    def _follow(self, phase: _Phase, result: bytes) -> bytes:
        key = phase.key(f"post/{self._rank}")
        count = self._channel.put_chunks(key, result) if len(result) > INLINE_BYTES else 0
        post = encode_message(Post(phase=phase.name, chunk_count=count), b"" if count else result)
        self._channel.put(key, post)
        with self._told_to_peers(phase, only_signals=True):
            verdict, payload = self._await_verdict(phase)
        if not verdict.failures:
            if verdict.chunk_count:
                payload = self._channel.get_chunks(phase.key("verdict"), verdict.chunk_count)
            # ORDER: chunks before the post, and all after the verdict: rank 0 reads posts until it has decided,
            # and stays in `close` until they are gone.
            self._channel.remove([*chunk_keys(key, count), key])
            return payload
        self._conclude(phase, verdict)
        raise AssertionError("a failed verdict raises")

    def _await_verdict(self, phase: _Phase) -> tuple[Verdict, bytes]:
        patience = Patience(phase.timeout_s, longest_pause_s=self._watch.every_s)
        rank_0_is_here = False
        while not self._channel.has_all([phase.key("verdict")]):
            lost = self._watch.find_lost()
            if lost:
                self._fail(phase, self._failure(phase, 0, "lost", lost[0]))
                break
            if patience.is_over:
                if rank_0_is_here or not self._channel.has_all([phase.key("here")]):
                    text = f"with a verdict within {phase.timeout_s:g} s of rank {self._rank}"
                    self._fail(phase, self._failure(phase, 0, "late", text))
                    break
                # Rank 0 has a whole timeout for the posts, counted from its own arrival, and then decides.
                rank_0_is_here = True
                patience = Patience(2 * phase.timeout_s, longest_pause_s=self._watch.every_s)
            patience.pause()
        return decode_message(self._channel.get(phase.key("verdict")), Verdict, rank=0)

    # Failures

    def _failure(self, phase: _Phase, rank: int, kind: FailureKind, text: str) -> Failure:
        return Failure(rank=rank, phase=phase.name, kind=kind, text=text)

    def _fail(self, phase: _Phase, *failures: Failure) -> Verdict:
        """Make the phase fail, unless it has a verdict; return the verdict that stands."""
        mine = Verdict(failures=failures)
        current, _ = decode_message(
            self._channel.put_first(phase.key("verdict"), encode_message(mine)), Verdict, rank=0
        )
        if current.failures and current != mine:
            for failure in failures:
                index = self._channel.count_up(phase.key("failures"))
                self._channel.put(phase.key(f"failure/{index}"), encode_message(failure))
        return current

    def _conclude(self, phase: _Phase, verdict: Verdict) -> bytes:
        """Raise what a failed verdict means to this rank."""
        failures = self._gather_failures(phase, verdict)
        raise error_of(phase.name, failures, own_rank=self._rank)

    def _gather_failures(self, phase: _Phase, verdict: Verdict) -> list[Failure]:
        """Return what failed, the ranks included that fail a moment later; note that this rank is done with it."""
        if self._others:
            time.sleep(_OTHERS_GRACE_S)
        keys = self._failure_keys(phase)[1 : 1 + _FAILURES_READ_COUNT]
        if not self._channel.has_all(keys):  # a rank died between counting and telling
            keys = [key for key in keys if self._channel.has_all([key])]
        told = [decode_message(frame, Failure, rank=0)[0] for frame in self._channel.get_each(keys)]
        self._leave(phase, verdict)
        return [*verdict.failures, *told]

    def _leave(self, phase: _Phase, verdict: Verdict) -> None:
        if self._rank == 0:
            self._litter.append((phase, verdict))
        else:
            self._channel.put(phase.key(f"left/{self._rank}"), b"")

    def _failure_keys(self, phase: _Phase) -> list[str]:
        key = phase.key("failures")
        if not self._channel.has_all([key]):
            return []
        return [key, *(phase.key(f"failure/{index + 1}") for index in range(int(self._channel.get(key))))]

    def _has_left(self, phase: _Phase, verdict: Verdict, rank: int) -> bool:
        """Return whether a rank has read the verdict: it removed its post, or left a note after a failure."""
        if verdict.failures:
            return self._channel.has_all([phase.key(f"left/{rank}")])
        return not self._has_post(phase, rank)

    def _get_verdict(self, phase: _Phase) -> Verdict:
        return decode_message(self._channel.get(phase.key("verdict")), Verdict, rank=0)[0]

    def _has_post(self, phase: _Phase, rank: int) -> bool:
        return self._channel.has_all([phase.key(f"post/{rank}")])

    @contextlib.contextmanager
    def _told_to_peers(self, phase: _Phase, *, only_signals: bool = False) -> Iterator[None]:
        """Tell the others about an exception in the block, and let it go on; `only_signals`: not about errors."""
        try:
            yield
        except BaseException as error:
            if not (only_signals and isinstance(error, Exception)):
                self._tell(phase, error)
            raise

    def _tell(self, phase: _Phase, error: BaseException) -> None:
        try:
            verdict = self._fail(phase, failure_of(error, rank=self._rank, phase=phase.name))
            if not isinstance(error, Exception):  # an interrupt: leave without delay
                self._leave(phase, verdict)
                return
            others = sorted({failure.rank for failure in self._gather_failures(phase, verdict)} - {self._rank})
            if others:
                error.add_note(f"phase {phase.name!r} also failed on {format_ranks(others)}")
        except CheckpointError as untold:
            error.add_note(f"rank {self._rank} could not tell the other ranks about this: {untold.message}")

    @contextlib.contextmanager
    def _one_at_a_time(self, name: str) -> Iterator[None]:
        if not self._closer.alive:
            raise UsageError(f"phase {name!r}: the group is closed", rank=self._rank)
        if os.getpid() != self._pid:
            raise UsageError(
                f"phase {name!r}: the group belongs to process {self._pid}, this is its fork {os.getpid()}",
                rank=self._rank,
                advice="save and restore in the process that connected, not in a forked worker",
            )
        if not self._busy.acquire(blocking=False):
            raise UsageError(
                f"phase {name!r}: the group is in a phase in another thread",
                rank=self._rank,
                advice="give each thread a group of its own with clone()",
            )
        try:
            yield
        finally:
            self._busy.release()


def _check_bytes(value: object, giver: str, name: str) -> None:
    if not isinstance(value, bytes):
        raise UsageError(f"phase {name!r}: {giver} returned {type(value).__name__}, expected bytes")
