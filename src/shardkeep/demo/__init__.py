"""`shardkeep demo`: train, kill, resume and compare a small model. Torch is imported in the ranks alone."""

from __future__ import annotations

from shardkeep.demo.run import run_demo

__all__ = ["run_demo"]
