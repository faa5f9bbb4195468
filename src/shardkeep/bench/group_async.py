"""Group `async`: saves beside a training loop. Each has a process of its own, so that there is a first save."""

from __future__ import annotations

import statistics
from typing import Any, Final

from shardkeep.bench.group_files import Pool
from shardkeep.bench.registry import PEERS, list_peers
from shardkeep.bench.rounds import Field, order_round
from shardkeep.bench.session import Session

_LEAST_COMPUTE_S: Final = 0.2
_COMPUTE_COPIES: Final = 4.0


def measure_asynchronous(session: Session, pool: Pool) -> None:
    """Stalls, and what a whole save costs the loop; shardkeep's also with the copy overlapped."""
    field = Field(
        entry.name for entry in list_peers("async", session.options.peers) if entry.name not in session.absent
    )
    pool.begin(["raw"])
    pool.call("raw", "copy")
    compute_s = max(_LEAST_COMPUTE_S, _COMPUTE_COPIES * pool.call("raw", "copy"))
    session.facts["overlap_compute_s"] = compute_s
    for number in range(session.options.rounds + 1):
        workers = session.start_many(["shardkeep", *field.names])
        overlapping = session.start("shardkeep", mode="overlap")
        overlapping.call("begin")
        lost: dict[str, float] = {}
        for name in order_round(["shardkeep", *field.names], number):
            if name not in workers:
                field.drop(name)
                continue
            if name == "shardkeep":
                session.record("memcpy", "raw", number, pool.call("raw", "copy"))
            else:
                session.warmer.refill()
            found = _measure_one(session, name, workers[name], number)
            if found is None:
                field.drop(name)
                continue
            lost[name] = min(found["later"]["lost_s"], found["first"]["stall_s"])
        _measure_overlap(session, overlapping, number, compute_s)
        _settle(session, field, number, lost)


def _measure_one(session: Session, name: str, worker: Any, number: int) -> dict[str, Any] | None:
    place = session.place(f"async-{name}")
    check = {"check": session.digest, "sample": True} if number == 0 else {}
    found = session.tried(
        name, lambda: worker.call("measure_async", folder=str(place), **check), what="measure_async"
    )
    session.end(worker)
    session.remove(place)
    if found is None:
        return None
    for what, which, key in (
        ("async.first_stall", "first", "stall_s"),
        ("async.stall", "later", "stall_s"),
        ("async.first_lost", "first", "lost_s"),
        ("async.lost", "later", "lost_s"),
        ("async.durable", "later", "durable_s"),
    ):
        session.record(what, name, number, found[which][key])
    session.facts.setdefault("slowdown", {}).setdefault(name, []).append(found["later"]["slowdown"])
    if number == 0:
        session.facts.setdefault("memory", {}).setdefault("async", {})[name] = found["extra_bytes"]
        session.facts.setdefault("exact", {}).setdefault("async", {})[name] = found["is_exact"]
    return dict(found)


def _measure_overlap(session: Session, worker: Any, number: int, compute_s: float) -> None:
    place = session.place("overlap")
    found = worker.call("measure_overlap", folder=str(place), compute_s=compute_s)
    session.end(worker)
    session.remove(place)
    first, *later = found["waits_s"]
    session.record("overlap.first_stall", "shardkeep", number, first)
    session.record("overlap.stall", "shardkeep", number, statistics.median(later))


def _settle(session: Session, field: Field, number: int, lost: dict[str, float]) -> None:
    gone = field.settle(number, lost["shardkeep"], {name: value for name, value in lost.items() if name in PEERS})
    named = "warm-up" if number == 0 else f"round {number} of {session.options.rounds}"
    session.say(f"async, {named}: least of first stall and time lost: "
                + "  ".join(f"{name} {value:.2f}" for name, value in lost.items()) + " s")  # fmt: skip
    if gone:
        session.say(f"async: {', '.join(gone)} too slow to be the fastest, measured no more")
