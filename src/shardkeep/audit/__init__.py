"""`shardkeep audit`: a training command run unbroken and broken, and where the two part. Needs no torch itself."""

from __future__ import annotations

from shardkeep.audit.options import AuditOptions
from shardkeep.audit.run import run_audit

__all__ = ["AuditOptions", "run_audit"]
