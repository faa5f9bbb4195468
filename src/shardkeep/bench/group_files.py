"""Groups `save`, `load` and `partial`: blocking calls of one process, with files on the disk."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

from shardkeep.bench.channel import Worker
from shardkeep.bench.gpt import EMBEDDING
from shardkeep.bench.registry import EVERYONE, PEERS, Entry, list_peers
from shardkeep.bench.rounds import Field, order_round
from shardkeep.bench.session import Session

_PARTIAL_ROUNDS: Final = 2
_WAVE_FILES: Final = 4
"""Peers' checkpoints that lie on the disk at a time, beside shardkeep's."""


class Pool:
    """Workers that stay for several groups, one for each contender, begun when first asked for."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._workers: dict[str, Worker] = {}

    def begin(self, names: list[str]) -> list[str]:
        """Begin workers at the same time; return those that could."""
        new = self._session.start_many([name for name in names if name not in self._workers])
        self._workers.update(new)
        return [name for name in names if name in self._workers]

    def call(self, name: str, do: str, **arguments: Any) -> Any:
        """Ask one of them; None when a peer fails."""
        what = "" if do == "begin" else do
        return self._session.tried(name, lambda: self._workers[name].call(do, **arguments), what=what)

    def close(self) -> None:
        for worker in self._workers.values():
            self._session.end(worker)
        self._workers = {}


def measure_limits(session: Session, pool: Pool) -> None:
    """Fill the state, and measure one-thread memcpy and digests."""
    pool.begin(["raw"])
    session.digest = pool.call("raw", "fill")
    pool.call("raw", "copy")  # touches the place that it copies to
    session.facts["limits_s"] = {
        "memcpy": [pool.call("raw", "copy") for _ in range(3)],
        "digest": [pool.call("raw", "digest") for _ in range(3)],
    }


def measure_save(session: Session, pool: Pool) -> None:
    """Blocking saves until everything is durable."""
    names = [entry.name for entry in list_peers("save", session.options.peers)]
    field = Field([name for name in pool.begin(["raw", "shardkeep", *names]) if name in PEERS], by_kind=True)
    for number in range(session.options.rounds + 1):
        times: dict[str, float] = {}
        for name in order_round(["raw", "shardkeep", *field.names], number):
            if name in PEERS:
                session.warmer.refill()
            place = session.place(name)
            found = pool.call(name, "save", folder=str(place), sample=number == 0)
            session.remove(place)
            if found is None:
                field.drop(name)
                continue
            times[name] = found["took_s"]
            session.record("save", name, number, found["took_s"])
            session.facts.setdefault("disk_bytes", {})[name] = found["disk_bytes"]
            if number == 0:
                session.facts.setdefault("memory", {}).setdefault("save", {})[name] = found["extra_bytes"]
        _settle(session, field, number, times, "save")


def _settle(session: Session, field: Field, number: int, times: dict[str, float], what: str) -> None:
    ours = times.get("shardkeep", 0.0)
    gone = field.settle(number, ours, {name: value for name, value in times.items() if name in PEERS})
    named = "warm-up" if number == 0 else f"round {number} of {session.options.rounds}"
    shown = "  ".join(f"{name} {value:.2f}" for name, value in times.items())
    session.say(f"{what}, {named}: {shown} s")
    if gone:
        session.say(f"{what}: {', '.join(gone)} too slow to be the fastest, measured no more")


def measure_load(session: Session, pool: Pool) -> None:
    """Full loads into live tensors, cold and warm, in waves that fit on the disk."""
    peers = list_peers("load", session.options.peers)
    files = list(dict.fromkeys(entry.files for entry in peers if entry.name not in session.absent))
    waves = [files[at : at + _WAVE_FILES] for at in range(0, len(files), _WAVE_FILES)] or [[]]
    ours = session.place("load-shardkeep")
    pool.begin(["raw", "shardkeep"])
    pool.call("shardkeep", "save", folder=str(ours))
    for at, wave in enumerate(waves):
        places = {name: place for name in wave if (place := _write_files(session, pool, name)) is not None}
        readers = pool.begin([entry.name for entry in peers if entry.files in places])
        places["shardkeep"] = ours
        first = at * session.options.rounds
        _run_loads(session, pool, readers, places, first, cold=True)
        _run_loads(
            session,
            pool,
            [name for name in readers if f"{name} load" not in session.absent],
            places,
            first,
            cold=False,
        )
        for name in wave:
            session.remove(session.place(f"load-{name}"))
    session.remove(ours)


def _write_files(session: Session, pool: Pool, files: str) -> Path | None:
    """Let whoever can write files of a kind do it, asked for by the user or not."""
    writer = next(e for e in EVERYONE.values() if e.files == files and "save" in e.abilities)
    place = session.place(f"load-{files}")
    if not pool.begin([writer.name]):
        return None
    session.warmer.refill()
    return place if pool.call(writer.name, "save", folder=str(place)) is not None else None


def _run_loads(
    session: Session, pool: Pool, readers: list[str], places: dict[str, Path], first: int, *, cold: bool
) -> None:
    what = "load.cold" if cold else "load.warm"
    field = Field(readers)
    field.know(session.seconds.get(what, {}))
    for number in range(session.options.rounds + 1):
        times: dict[str, float] = {}
        if number and readers and not field.names:
            break  # nobody left in this wave who could be the fastest
        for name in order_round([*(["raw"] if cold else []), "shardkeep", *field.names], number):
            files = "shardkeep" if name == "raw" else EVERYONE[name].files
            if name in PEERS:
                session.warmer.refill()
            check = {"digest": session.digest, "sample": True} if number == 0 and cold and name != "raw" else {}
            found = pool.call(name, "load", folder=str(places[files]), cold=cold, **check)
            if found is None:
                field.drop(name)
                continue
            times[name] = found["took_s"]
            session.record(what, name, first + number if number else 0, found["took_s"])
            if check:
                session.facts.setdefault("memory", {}).setdefault("load", {}).setdefault(name, found["extra_bytes"])
                session.facts.setdefault("exact", {}).setdefault("load", {})[name] = found["is_exact"]
        _settle(session, field, number, times, what.replace(".", ", "))


def measure_partial(session: Session, pool: Pool) -> None:
    """One large tensor, and a quarter of its rows, from a cold page cache: bytes read for bytes asked."""
    entries: list[Entry] = [EVERYONE["shardkeep"], *list_peers("partial", session.options.peers)]
    piece = next(p for p in session.shape.pieces if (p.parameter, p.role) == (EMBEDDING, "model"))
    rows = piece.shape[0] // 4
    asked = {"tensor": piece.size_bytes, "rows": rows * piece.size_bytes // piece.shape[0]}
    for name in pool.begin([entry.name for entry in entries]):
        place = session.place(f"partial-{name}")
        if pool.call(name, "save", folder=str(place)) is None:
            continue
        ratios: dict[str, list[float]] = {}
        for number in range(min(session.options.rounds, _PARTIAL_ROUNDS) + 1):
            for what, count in (("tensor", None), ("rows", rows)):
                found = pool.call(name, "load_part", folder=str(place), key=piece.key, rows=count)
                if found is None:
                    continue
                session.record(f"partial.{what}", name, number, found["took_s"])
                if number:  # the first time modules are read too
                    ratios.setdefault(what, []).append(found["read_bytes"] / asked[what])
        session.remove(place)
        if ratios:
            found = {what: statistics.median(values) for what, values in ratios.items()}
            session.facts.setdefault("partial", {})[name] = found
            session.say(f"partial, {name}: " + "  ".join(f"{w} {v:.3f}" for w, v in found.items()) + " read per byte")
