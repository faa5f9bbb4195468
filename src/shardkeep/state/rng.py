"""Random streams: Python, NumPy, torch CPU, every accelerator generator, DTensor's tracker, and generator objects.

Capturing draws nothing. Planning a restore parses every stream into throw-away generators, so that a stream that
cannot be restored is known before anything live is touched; restoring sets them all and names the one that fails.
A stream is stored as plain numbers and NumPy arrays: no class of torch or NumPy is needed to read it.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardkeep.errors import StateMismatch

_ACCELERATORS = ("cuda", "xpu")
_SAMPLED = 64
_GOLDEN = 0.6180339887498949
Setter = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RngPlan:
    """Streams parsed and ready to be set: `(name, setter)` in the order of restoring; nothing is set yet."""

    setters: tuple[tuple[str, Setter], ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def apply(self) -> tuple[str, ...]:
        """Set every stream; return the notes.

        Raises:
            StateMismatch: a stream refused its state; the message names it. Later streams are not set.
        """
        for name, setter in self.setters:
            try:
                setter()
            except Exception as error:
                raise StateMismatch(
                    f"the random stream {name} was not restored: {error}",
                    key=name,
                    advice="restore without RNG (and accept other draws), or from another checkpoint",
                ) from error
        return self.notes


def capture_rng() -> dict[str, Any]:
    """Return the state of every global stream of this process, copied; no stream moves.

    Accelerators are asked only when training has initialised them: asking must not create contexts.
    """
    captured: dict[str, Any] = {
        "python": _pack_python(random.getstate()),
        "numpy": _copy_tree(np.random.get_state(legacy=False)),
        "torch": _to_array(torch.get_rng_state()),
    }
    for kind in _ACCELERATORS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and module.is_initialized():
            captured[kind] = {
                "current": int(module.current_device()),
                "states": [_to_array(module.get_rng_state(index)) for index in range(module.device_count())],
            }
    if torch.backends.mps.is_available():
        captured["mps"] = _to_array(torch.mps.get_rng_state())
    tracked = _tracker_states()
    if tracked:
        captured["dtensor"] = {name: _to_array(state) for name, state in sorted(tracked.items())}
    return captured


def plan_rng(stored: Any) -> RngPlan:
    """Parse what `capture_rng` returned (read back from a checkpoint); touch nothing.

    Streams that were stored and do not exist here, or are damaged, are problems. A different number of
    accelerators is a note: the generator that the saving rank was using goes to the one in use now.
    """
    if not isinstance(stored, Mapping):
        return RngPlan(
            setters=(), problems=(f"rng: expected a table of streams, found {type(stored).__name__}",), notes=()
        )
    setters: list[tuple[str, Setter]] = []
    problems: list[str] = []
    notes: list[str] = []
    known: dict[str, Callable[[Any, list[str]], list[tuple[str, Setter]]]] = {
        "python": _plan_python,
        "numpy": _plan_numpy,
        "torch": _plan_torch,
        "mps": _plan_mps,
        "dtensor": _plan_tracker,
        **{kind: _accelerator_planner(kind) for kind in _ACCELERATORS},
    }
    for missing in sorted({"python", "numpy", "torch"} - set(stored)):
        problems.append(f"rng/{missing}: not stored")
    for name in sorted(stored, key=str):
        planner = known.get(name)
        if planner is None:
            problems.append(f"rng/{name}: this version knows no such stream")
            continue
        try:
            setters += planner(stored[name], notes)
        except Exception as error:  # noqa: BLE001  # every way a parser fails means one thing: damaged or foreign
            problems.append(f"rng/{name}: {error or type(error).__name__}")
    for kind in _ACCELERATORS:
        module = getattr(torch, kind, None)
        if kind not in stored and module is not None and module.is_available() and module.is_initialized():
            notes.append(f"rng/{kind}: not in use at the save; its generators keep their present state")
    return RngPlan(setters=tuple(setters), problems=tuple(problems), notes=tuple(notes))


def sample_streams(saved: Sequence[Any]) -> tuple[Any, ...]:
    """Return what some of the saving ranks stored as `rng`, enough to tell which streams all of them shared.

    Looks at up to 64 ranks, spread over the world at irregular distances, and stops when no stream is shared by those
    seen so far: a new rank among thousands must not read what thousands stored.

    Args:
        saved: by rank, None where a rank lacks it; each may be read when asked for.
    """
    count = len(saved)
    places = range(count) if count <= _SAMPLED else [int(count * (at * _GOLDEN % 1.0)) for at in range(_SAMPLED)]
    found: list[Mapping[str, Any]] = []
    shared: set[str] = set()
    for place in places:
        table = saved[place]
        if not isinstance(table, Mapping):
            continue
        if not found:
            shared = set(table)
        found.append(table)
        shared = {name for name in shared if _same(_current(found[0].get(name)), _current(table.get(name)))}
        if not shared:
            break
    return tuple(found)


def plan_derived(seed: int, generation: int, rank: int, saved: Sequence[Any]) -> RngPlan:
    """Plan the streams of a rank that did not exist at the save.

    A stream that two or more saving ranks all held in one state is shared by design (DTensor's random operations
    need the same device generator everywhere): the new rank joins it. All others are seeded from a hash of
    (seed, generation, rank, stream).

    Args:
        saved: what saving ranks stored as `rng`; see `sample_streams`.
    """
    present = capture_rng()
    derived: dict[str, Any] = {}
    shared: list[str] = []
    tables = [table for table in saved if isinstance(table, Mapping)]
    for name in sorted(set(present) | ({"dtensor"} if any("dtensor" in table for table in tables) else set())):
        states = [_current(table.get(name)) for table in tables]
        if len(states) > 1 and states[0] is not None and all(_same(states[0], other) for other in states[1:]):
            derived[name] = tables[0][name]
            shared.append(name)
        elif name in present:
            derived[name] = _derive(name, present[name], f"{seed}/{generation}/{rank}/{name}")
    plan = plan_rng(derived)
    joined = f"; it joined the streams that all ranks shared: {', '.join(shared)}" if shared else ""
    note = f"rank {rank} is new: its RNG was derived from seed {seed}, generation {generation}, rank {rank}{joined}"
    return RngPlan(setters=plan.setters, problems=plan.problems, notes=(note, *plan.notes))


def is_generator(thing: Any) -> bool:
    """Say whether `thing` is a random generator object that `capture_generator` can take."""
    return isinstance(thing, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)


def capture_generator(generator: Any) -> dict[str, Any]:
    """Return the state of one generator object, copied."""
    if isinstance(generator, torch.Generator):
        return {"generator": "torch", "device": generator.device.type, "state": _to_array(generator.get_state())}
    if isinstance(generator, np.random.Generator):
        return {"generator": "numpy", "state": _copy_tree(generator.bit_generator.state)}
    if isinstance(generator, np.random.RandomState):
        return {"generator": "numpy-legacy", "state": _copy_tree(generator.get_state(legacy=False))}
    return {"generator": "python", "state": _pack_python(generator.getstate())}


def plan_generator(generator: Any, stored: Any) -> Setter:
    """Return what puts `stored` (of `capture_generator`) into a live generator, checked on a throw-away one.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: stored for another kind of generator, or damaged.
    """
    live = capture_generator(generator)
    for field in ("generator", "device"):
        if stored.get(field) != live.get(field):
            raise ValueError(
                f"a generator of {field} {stored.get(field)!r} is stored, the live one has {live.get(field)!r}"
            )
    state = stored["state"]
    if isinstance(generator, torch.Generator):
        tensor = _to_tensor(state)
        torch.Generator(generator.device).set_state(tensor)
        return functools.partial(_set_torch, generator, tensor)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        type(bits)(0).state = state
        return lambda: setattr(bits, "state", state)
    if isinstance(generator, np.random.RandomState):
        _check_legacy(type(generator._bit_generator), state)
        return lambda: generator.set_state(state)
    unpacked = _unpack_python(state)
    random.Random(0).setstate(unpacked)
    return lambda: generator.setstate(unpacked)


def _plan_python(stored: Any, _notes: list[str]) -> list[tuple[str, Setter]]:
    state = _unpack_python(stored)
    random.Random(0).setstate(state)
    return [("rng/python", lambda: random.setstate(state))]


def _plan_numpy(stored: Any, _notes: list[str]) -> list[tuple[str, Setter]]:
    _check_legacy(_numpy_kind(), stored)
    return [("rng/numpy", lambda: np.random.set_state(stored))]


def _plan_torch(stored: Any, _notes: list[str]) -> list[tuple[str, Setter]]:
    state = _to_tensor(stored)
    torch.Generator().set_state(state)
    return [("rng/torch", lambda: torch.set_rng_state(state))]


def _plan_mps(stored: Any, _notes: list[str]) -> list[tuple[str, Setter]]:
    if not torch.backends.mps.is_available():
        raise ValueError("stored, and this process has no mps device")
    state = _to_tensor(stored)
    return [("rng/mps", lambda: torch.mps.set_rng_state(state))]


def _plan_tracker(stored: Any, _notes: list[str]) -> list[tuple[str, Setter]]:
    live = _tracker_states()
    if sorted(live) != sorted(stored):
        raise ValueError(
            f"DTensor's tracker has the streams {sorted(stored)} stored and {sorted(live)} live; "
            "seed it (torch.distributed.tensor.manual_seed) before the restore"
        )
    states = {name: _to_tensor(stored[name]).to(live[name].device) for name in sorted(stored)}
    return [("rng/dtensor", lambda: live.update(states))]


def _accelerator_planner(kind: str) -> Callable[[Any, list[str]], list[tuple[str, Setter]]]:
    def plan(stored: Any, notes: list[str]) -> list[tuple[str, Setter]]:
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            raise ValueError(f"stored, and this process has no {kind} device")
        states = [_to_tensor(state) for state in stored["states"]]
        targets = dict(enumerate(states))
        if len(states) != module.device_count():
            targets = {int(module.current_device()): states[int(stored["current"])]}
            notes.append(
                f"rng/{kind}: {len(states)} generators are stored and {module.device_count()} devices are visible; "
                f"the one in use at the save went to {kind}:{module.current_device()}, the others keep their state"
            )
        for index, state in targets.items():
            torch.Generator(f"{kind}:{index}").set_state(state)
        return [
            (f"rng/{kind}:{index}", lambda state=state, index=index: module.set_rng_state(state, index))  # type: ignore[misc]
            for index, state in sorted(targets.items())
        ]

    return plan


def _tracker_states() -> dict[str, torch.Tensor]:
    """Return the live streams of DTensor's tracker; newer torch keeps none and uses the device generator."""
    # Nothing is imported to ask: who uses DTensor has it loaded.
    loaded = sys.modules.get("torch.distributed.tensor._random")
    states = getattr(getattr(loaded, "_rng_tracker", None), "rng_states", None)
    return states if isinstance(states, dict) else {}


def _derive(name: str, present: Any, text: str) -> Any:
    """Return a state of the shape of `present`, seeded from a hash of `text`."""
    seed = int.from_bytes(hashlib.blake2b(f"shardkeep rng {text}".encode(), digest_size=8).digest(), "little") >> 1
    if name == "python":
        return _pack_python(random.Random(seed).getstate())
    if name == "numpy":
        return _numpy_kind()(seed).state
    if name == "torch":
        return _to_array(torch.Generator().manual_seed(seed).get_state())
    if name == "mps":
        return _to_array(torch.Generator("mps").manual_seed(seed).get_state())
    if name == "dtensor":
        return present
    states = [
        _to_array(torch.Generator(f"{name}:{index}").manual_seed(seed).get_state())
        for index in range(len(present["states"]))
    ]
    return {"current": present["current"], "states": states}


def _current(stored: Any) -> Any:
    """Return the part of a stream that ranks are compared by: of accelerators, the generator in use."""
    if isinstance(stored, Mapping) and "states" in stored and "current" in stored:
        return stored["states"][stored["current"]]
    return stored


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def _set_torch(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _numpy_kind() -> type[Any]:
    """Return the class of bit generator behind NumPy's global functions."""
    module: Any = np.random
    return type(module.get_bit_generator())


def _check_legacy(kind: type[Any], stored: Any) -> None:
    np.random.RandomState(kind(0)).set_state(stored)


def _pack_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def _unpack_python(stored: Any) -> tuple[Any, ...]:
    return (stored["version"], tuple(int(word) for word in stored["words"]), stored["gauss"])


def _to_array(state: torch.Tensor) -> np.ndarray[Any, Any]:
    return state.detach().cpu().numpy().copy()


def _to_tensor(stored: Any) -> torch.Tensor:
    array = np.array(stored, dtype=np.uint8)
    return torch.from_numpy(array)


def _copy_tree(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _copy_tree(child) for key, child in node.items()}
    return node.copy() if isinstance(node, np.ndarray) else node
