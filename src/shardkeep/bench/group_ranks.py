"""Group `ranks`: FSDP2 states on 4 and 2 gloo ranks, saved by 4 and loaded by 2."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

from shardkeep.bench.channel import Worker, WorkerConfig, WorkerFailed, find_port
from shardkeep.bench.registry import PEERS, list_peers
from shardkeep.bench.rounds import Field, order_round
from shardkeep.bench.session import Session

_SIDE_ROUNDS: Final = 1


class RankGroup:
    """The ranks of one job; each command goes to all of them."""

    def __init__(self, session: Session, world_size: int) -> None:
        port = find_port()
        self.workers = [self._start(session, world_size, rank, port) for rank in range(world_size)]

    @staticmethod
    def _start(session: Session, world_size: int, rank: int, port: int) -> Worker:
        config = WorkerConfig(
            contender="shardkeep",
            size_bytes=session.options.size_bytes,
            threads=1,
            rank=rank,
            world_size=world_size,
            port=port,
        )
        return session.launch(config, f"rank-{world_size}-{rank}")

    def call(self, do: str, **arguments: Any) -> list[Any]:
        """Return every rank's answer. Raises WorkerFailed with the first failure, after all have answered."""
        for worker in self.workers:
            worker.ask(do, **arguments)
        found: list[Any] = []
        failure: WorkerFailed | None = None
        for worker in self.workers:
            try:
                found.append(worker.receive())
            except WorkerFailed as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return found


def measure_ranks(session: Session) -> None:
    """Save on 4 ranks, load on 4 and on 2, and a few rounds of saves and loads on 2."""
    four, two = RankGroup(session, 4), RankGroup(session, 2)
    for job in (four, two):
        job.call("begin")
    peers = [entry.name for entry in list_peers("ranks", session.options.peers) if entry.name not in session.absent]
    field = Field(peers)
    for number in range(session.options.rounds + 1):
        times: dict[str, float] = {}
        for name in order_round(["raw", "shardkeep", *field.names], number):
            if name == "raw":
                _measure_raw(session, four, number)
                continue
            if name in PEERS:
                session.warmer.refill()
            measure = functools.partial(_measure_one, session, four, two, name, number)
            found = session.tried(name, lambda measure=measure: [measure()], what="ranks")  # type: ignore[misc]
            session.remove(session.place("ranks"))
            if found is None:
                field.drop(name)
            elif found[0] is not None:
                times[name] = found[0]
        gone = field.settle(number, times["shardkeep"], {n: t for n, t in times.items() if n in PEERS})
        shown = "  ".join(f"{name} {value:.2f}" for name, value in times.items())
        session.say(f"4 ranks, save + load on 2, {f'round {number}' if number else 'warm-up'}: {shown} s")
        if gone:
            session.say(f"4 ranks: {', '.join(gone)} too slow to be the fastest, measured no more")
    for worker in (*four.workers, *two.workers):
        session.end(worker)


def _measure_raw(session: Session, four: RankGroup, number: int) -> None:
    place = session.place("ranks")
    if session.direct:
        for do, what in (("raw_save", "ranks4.save"), ("raw_load", "ranks4.load")):
            session.record(what, "raw", number, _slowest(four.call(do, folder=str(place))))
    session.remove(place)


def _measure_one(session: Session, four: RankGroup, two: RankGroup, name: str, number: int) -> float | None:
    """Measure one contender; return what it took to save and to load on 2 ranks, None where it cannot."""
    place = session.place("ranks")
    saved = _slowest(four.call("save", who=name, folder=str(place)))
    session.record("ranks4.save", name, number, saved)
    reshard = functools.partial(_load, session, two, name, place, number, "ranks4.reshard_load")
    loaded = None if name in session.cannot else session.tried(name, reshard, what="reshard_load")
    if loaded is None:
        session.cannot.add(name)
    if number <= _SIDE_ROUNDS:
        _load(session, four, name, place, number, "ranks4.load")
        session.remove(place)
        session.record("ranks2.save", name, number, _slowest(two.call("save", who=name, folder=str(place))))
        _load(session, two, name, place, number, "ranks2.load")
    return None if loaded is None else saved + float(loaded)


def _load(session: Session, job: RankGroup, name: str, place: Path, number: int, what: str) -> float:
    if name in PEERS:
        session.warmer.refill()
    reshard = what == "ranks4.reshard_load"
    found = job.call("load", who=name, folder=str(place), reshard=reshard, check=number == 0)
    if number == 0:
        exact = all(answer["is_exact"] for answer in found)
        session.facts.setdefault("exact", {}).setdefault(what, {})[name] = exact
    session.record(what, name, number, _slowest(found))
    return _slowest(found)


def _slowest(answers: list[dict[str, float]]) -> float:
    return max(answer["took_s"] for answer in answers)
