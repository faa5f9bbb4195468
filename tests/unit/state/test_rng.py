"""Random streams: captured without moving, restored exactly or refused by name."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shardkeep.errors import StateMismatch
from shardkeep.state.rng import capture_rng, plan_derived, plan_rng
from tests.support.roundtrip import load, save


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    """Leave the process's streams as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(()).item(),
    ]


def test_streams_return_exactly() -> None:
    random.gauss(0, 1)  # leaves half a pair behind
    np.random.randn()
    saved = save({})
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    load(saved, {})
    assert [draw() for _ in range(3)] == expected


def test_capture_and_planning_draw_nothing() -> None:
    before = capture_rng()
    saved = save({"x": 1})
    plan_rng(capture_rng())
    plan_derived(1, 2, 3, [])
    after = capture_rng()
    assert str(before) == str(after)
    assert np.array_equal(before["torch"], after["torch"])
    assert "rng" in saved.per_rank


def test_tracker_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor's own streams (older torch keeps them beside the device generator's)."""
    from torch.distributed.tensor import _random

    tracker = types.SimpleNamespace(rng_states={"parallel-rng": torch.arange(16, dtype=torch.uint8)})
    monkeypatch.setattr(_random, "_rng_tracker", tracker)
    saved = save({})
    tracker.rng_states["parallel-rng"] = torch.zeros(16, dtype=torch.uint8)
    load(saved, {})
    assert torch.equal(tracker.rng_states["parallel-rng"], torch.arange(16, dtype=torch.uint8))
    monkeypatch.setattr(_random, "_rng_tracker", None)
    with pytest.raises(StateMismatch, match="rng/dtensor: DTensor's tracker has the streams"):
        load(saved, {})


def _break_python(stored: dict[str, Any]) -> None:
    stored["python"]["words"] = stored["python"]["words"][:5]


def _break_numpy(stored: dict[str, Any]) -> None:
    stored["numpy"]["state"]["key"] = stored["numpy"]["state"]["key"][:7]


def _break_torch(stored: dict[str, Any]) -> None:
    stored["torch"] = stored["torch"][:100]


def _lose_torch(stored: dict[str, Any]) -> None:
    del stored["torch"]


def _foreign(stored: dict[str, Any]) -> None:
    stored["tpu"] = 1


@pytest.mark.parametrize(
    ("harm", "name"),
    [
        (_break_python, "rng/python"),
        (_break_numpy, "rng/numpy"),
        (_break_torch, "rng/torch"),
        (_lose_torch, "rng/torch"),
        (_foreign, "rng/tpu"),
    ],
)
def test_a_stream_that_cannot_be_restored(harm: Callable[[dict[str, Any]], None], name: str) -> None:
    """RNG-2, huggingface/accelerate#4283: exact mode refuses before anything moved, relaxed mode reports it."""
    stored = capture_rng()
    harm(stored)
    plan = plan_rng(stored)
    assert [problem.partition(":")[0] for problem in plan.problems] == [name]
    assert name not in [stream for stream, _ in plan.setters]


def test_exact_raises_and_relaxed_reports() -> None:
    """RNG-2: through a whole restore."""
    import json

    from shardkeep.format.values import decode_value, encode_value

    state = {"count": 1}
    saved = save(state)
    stored = decode_value(json.loads(saved.values["rng"]), "rng")
    _break_numpy(stored)
    saved.values["rng"] = json.dumps(encode_value(stored, "rng"))
    expected = torch.rand(4)
    live: dict[str, Any] = {"count": 0}
    with pytest.raises(StateMismatch, match="rng/numpy"):
        load(saved, live)
    assert live == {"count": 0}
    lines = load(saved, live, strict=False)
    assert any(line.startswith("rng/numpy") for line in lines)
    assert live == {"count": 1}
    assert torch.equal(torch.rand(4), expected)


def test_setting_names_the_stream_that_fails() -> None:
    plan = plan_rng(capture_rng())

    def fail() -> None:
        raise RuntimeError("no device")

    broken = type(plan)(setters=(*plan.setters, ("rng/cuda:0", fail)), problems=(), notes=())
    with pytest.raises(StateMismatch, match="rng/cuda:0 was not restored: no device"):
        broken.apply()


def test_new_ranks_derive() -> None:
    def streams(*origin: int, saved: tuple[Any, ...] = ()) -> list[float]:
        lines = plan_derived(*origin, saved).apply()
        assert f"rank {origin[2]} is new" in lines[0]
        return draw()

    base = streams(5, 2, 3)
    assert base == streams(5, 2, 3)
    for other in ((6, 2, 3), (5, 3, 3), (5, 2, 4)):
        assert all(a != b for a, b in zip(base, streams(*other), strict=True))


def test_new_ranks_join_streams_that_all_ranks_share() -> None:
    torch.manual_seed(11)
    saved = []
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        saved.append(capture_rng())
    expected = torch.rand(3)
    lines = plan_derived(1, 1, 2, saved).apply()
    assert "torch" in lines[0]
    assert torch.equal(torch.rand(3), expected)
    assert random.random() not in (random.Random(0).random(), random.Random(1).random())


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.rand((), generator=g).item()),
    "numpy": (np.random.default_rng, lambda g: float(g.random())),
    "philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda g: float(g.normal())),
    "legacy": (np.random.RandomState, lambda g: float(g.randn())),
    "python": (random.Random, lambda g: float(g.gauss(0, 1))),
}


@pytest.mark.parametrize("kind", sorted(GENERATORS))
def test_generators_in_the_state(kind: str) -> None:
    make, take = GENERATORS[kind]
    generator = make(3)
    take(generator)
    saved = save({"gen": [generator]})
    expected = [take(generator) for _ in range(3)]
    other = make(4)
    load(saved, {"gen": [other]})
    assert [take(other) for _ in range(3)] == expected
    wrong = make(4) if kind != "torch" else np.random.default_rng(0)
    wrong = np.random.Generator(np.random.SFC64(1)) if kind in ("numpy", "philox") else wrong
    if kind in ("numpy", "philox", "torch"):
        with pytest.raises(StateMismatch, match="gen/0: this generator cannot be restored"):
            load(saved, {"gen": [wrong]})


def test_derives_only_where_the_rank_is_new() -> None:
    saved = save({})
    expected = draw()
    load(saved, {}, rng_derivation=(1, 2, 0))
    assert draw() == expected
    lines = load(saved, {}, rank=1, world_size=2, rng_derivation=(1, 2, 1))
    assert any("rank 1 is new" in line for line in lines)
    assert draw() != expected
    # A rank that existed keeps its own, though the world has grown.
    load(saved, {}, rank=0, world_size=2, rng_derivation=(1, 2, 0))
    assert draw() == expected
