"""`shardkeep bench`: this machine's limits, shardkeep against them, and against every other library installed.

Everything is measured in turns within one run, since shared machines drift, and what counts are ratios of what was
measured in the same round. The parent process orchestrates and holds no tensor; workers measure.
"""

from __future__ import annotations

from shardkeep.bench.bars import BARS, GROUPS, Bar
from shardkeep.bench.options import BenchOptions
from shardkeep.bench.run import BenchResult, run_bench

__all__ = ["BARS", "GROUPS", "Bar", "BenchOptions", "BenchResult", "run_bench"]
