"""The time limit of a SLURM job, from the end time that SLURM gives to each job; needs no signal."""

from __future__ import annotations

import time

from shardkeep.manager.notices.metadata import BadAnswer
from shardkeep.manager.notices.watcher import Notice


class SlurmSource:
    """Announces the end `lead_s` seconds ahead.

    Args:
        end_time_s: when the job ends, in seconds since 1970; None: this is no SLURM job, or an older SLURM.
    """

    name = "slurm"
    pause_s = 1.0

    def __init__(self, end_time_s: float | None, *, lead_s: float) -> None:
        self._end_time_s = end_time_s
        self._lead_s = lead_s

    def poll(self) -> list[Notice]:
        if self._end_time_s is None:
            raise BadAnswer("SLURM_JOB_END_TIME is not set: not a job of SLURM 22.05 or later")
        left_s = self._end_time_s - time.time()
        return [Notice(kind="stop", reason="SLURM time limit", left_s=left_s)] if left_s <= self._lead_s else []

    def abort(self) -> None:
        """Do nothing: no call here waits."""
