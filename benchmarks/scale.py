"""What plan, proof, commit, restart and resharding of the largest jobs cost: `python benchmarks/scale.py [--json]`.

The jobs are Llama-3, GPT-3 and DeepSeek-V3 shapes widened to the parameters, on FSDP2 with tensor, pipeline and
expert parallelism; their metadata is made without tensors, and the package's own functions are timed over it.
"""

from __future__ import annotations

import argparse
import json
import sys

from shardkeep.bench.scale import find_worst, measure_big_ms, measure_job, measure_ls_ms, plan_jobs
from shardkeep.bench.scale_jobs import make_job

BARS = {
    "scale.commit_s": 5.0,
    "scale.restart_plan_s": 0.5,
    "scale.reshard_plan_s": 10.0,
    "scale.proof_s": 10.0,
    "cli.ls_ms": 200.0,
}
COLUMNS = ("merge_s", "proof_s", "commit_s", "restart_plan_s", "reshard_plan_s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--params", type=float, default=1e12)
    parser.add_argument("--named", action="store_true", help="also a job with every expert by name: 180,000 tensors")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    jobs = plan_jobs(arguments.ranks, int(arguments.params))
    measured = {job.name: measure_job(job) for job in jobs}
    figures = {**find_worst(measured.values()), "cli.ls_ms": measure_ls_ms()}
    if arguments.named:
        job = make_job("deepseek-named", jobs[-1].topology, int(arguments.params))
        measured[job.name] = measure_job(job)
    show_ms = measure_big_ms(jobs[0])
    if arguments.json:
        print(json.dumps({"figures": figures, "jobs": measured, "big": show_ms}, indent=1))
        return 0
    print(f"{'job':40} {'params':>9} {'tensors':>8} {'record':>9}", *(f"{name:>15}" for name in COLUMNS))
    for name, found in measured.items():
        record = f"{found['commit_bytes'] / 1e6:.1f} MB"
        numbers = (f"{found[column]:15.3f}" for column in COLUMNS)
        print(f"{name:40} {found['params']:9.2e} {found['tensors']:8.0f} {record:>9}", *numbers)
    for name, milliseconds in show_ms.items():
        print(f"{name} of {jobs[0].name}: {milliseconds:.0f} ms")
    for name, figure in figures.items():
        print(f"{name:24} {figure:10.3f}   bar {BARS[name]:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
