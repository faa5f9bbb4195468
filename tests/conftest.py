"""Shared settings of all tests: one thread per process, so that runs are quick on small machines and repeatable."""

from __future__ import annotations

import os

from hypothesis import settings

# Before torch is imported anywhere; the forkserver and every other child inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Torch's store looks up the name of every peer that connects; a resolver that drops packets costs 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

settings.register_profile("shardkeep", deadline=None, print_blob=True)
settings.load_profile("shardkeep")
