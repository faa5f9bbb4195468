"""Write the golden run of the present format version: `python -m tests.golden.make FOLDER`.

Two ranks, one step. Made once for each format version and committed; never made again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy

from shardkeep.engine.save import SaveOptions
from tests.support.fake_state import FakeRun, FakeTensor, make_tensor

STEP = 7
VALUES: dict[str, Any] = {
    "scheduler": {"last_epoch": 3, "base_lrs": [0.1, 0.2], 5: ("a", None, True)},
    "big": 1 << 80,
    "special": [float("inf"), -0.0],
}
METRICS = {"loss": 0.5, "gone": float("nan")}
ASSETS = {"config.json": b'{"layers": 1}\n'}


def make_state() -> dict[str, FakeTensor]:
    """Return whole, sharded, uneven, empty, scalar and per-rank tensors of several dtypes; no randomness.

    What both ranks hold whole is in one section, as the plan is free to choose who writes it.
    """

    def count(*shape: int, dtype: str = "float32") -> Any:
        size = int(numpy.prod(shape))
        return (numpy.arange(size) % 251).astype(dtype).reshape(shape)

    return {
        "model/embed.weight": make_tensor(count(9, 4), placement="S0"),
        "both/norm.weight": make_tensor(count(5), placement="R"),
        "both/half.weight": make_tensor(count(3, 5, dtype="uint16"), dtype="bfloat16"),
        "both/empty": make_tensor(count(0, 3)),
        "optimizer/exp_avg/embed.weight": make_tensor(count(9, 4), placement="S0"),
        "both/step": make_tensor(numpy.float32(11)),
        "both/mask": make_tensor(count(6, dtype="bool")),
        "extra/columns": make_tensor(count(4, 6, dtype="int64"), placement="S1"),
        "extra/own": make_tensor(count(5, dtype="int32"), per_rank=True),
    }


def write(root: Path) -> FakeRun:
    """Write the golden run under `root`."""
    run = FakeRun(root, world_size=2)
    run.save(STEP, make_state(), values=VALUES, options=SaveOptions(metrics=METRICS, assets=ASSETS))
    return run


if __name__ == "__main__":
    write(Path(sys.argv[1]))
