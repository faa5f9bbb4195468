"""Every tunable in one place: its unit, default and environment override.

Knobs change speed, patience and limits, never what is written or promised. Each is read when used, from
`SHARDKEEP_<NAME>`; tests set them through `override`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shardkeep.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One integer or float setting. `minimum` is inclusive."""

    name: str
    default: float
    unit: str
    minimum: float
    purpose: str


def _knob(name: str, default: float, unit: str, minimum: float, purpose: str) -> Knob:
    return Knob(name=name, default=default, unit=unit, minimum=minimum, purpose=purpose)


KNOBS: Final = {
    knob.name: knob
    for knob in (
        _knob("BARRIER_TIMEOUT_S", 1800.0, "s", 0.1, "how long a rank waits for its peers in one phase"),
        _knob("PEER_SILENCE_S", 60.0, "s", 0.2, "how long a rank may show no sign of life before it counts as lost"),
        _knob("IO_THREADS", 4, "threads", 1, "threads that write or read blocks of one checkpoint per rank"),
        _knob(
            "STAGE_THREADS",
            2,
            "threads",
            1,
            "threads that copy a rank's state into host memory for an asynchronous save",
        ),
        _knob("SHARD_BYTES", 5_000_000_000, "bytes", 1 << 20, "size at which a new shard file is begun"),
        _knob("RETRIES", 4, "tries", 0, "repeats of a retryable call to a file system before its error is raised"),
        _knob("RETRY_BUDGET_S", 120.0, "s", 0.0, "how long trouble of an object store is waited out, per request"),
        _knob("REQUEST_TIMEOUT_S", 60.0, "s", 0.1, "how long one request to an object store may take"),
        _knob("RETRY_BASE_S", 0.2, "s", 0.0, "first pause between retries; doubles each time, with jitter"),
        _knob("RECORD_BYTES", 1 << 30, "bytes", 1 << 10, "largest JSON record or digest file that is read"),
        _knob(
            "NOTICE_POLL_S",
            0.2,
            "s",
            0.01,
            "how often a rank looks whether another asks for a save; ranks / 2000 where that is more",
        ),
        _knob("JOURNAL_S", 5.0, "s", 0.0, "how long a step's line in the journal may wait to be made durable"),
        _knob("JOURNAL_BYTES", 64 << 20, "bytes", 0, "finished segments of one start's journal that are kept"),
    )
}

_overrides: dict[str, float] = {}


def get_knob(name: str) -> float:
    """Return the knob's value: test override, else environment, else default.

    Raises:
        UsageError: the environment holds something that is not a number at or above the minimum.
    """
    knob = KNOBS[name]
    if name in _overrides:
        return _overrides[name]
    text = os.environ.get(f"SHARDKEEP_{name}")
    if text is None:
        return knob.default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not knob.minimum <= value < math.inf:
        raise UsageError(
            f"SHARDKEEP_{name}={text!r}: expected a number of {knob.unit}, at least {knob.minimum:g}",
            advice=f"unset SHARDKEEP_{name} to use the default, {knob.default:g}",
        )
    return value


def get_int(name: str) -> int:
    """Return a knob that counts things."""
    return int(get_knob(name))


FOREIGN: Final = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED")
"""Variables of other libraries that decide whether a run repeats itself; recorded, never acted on."""


def read_foreign() -> dict[str, str]:
    """Return those of FOREIGN that are set."""
    return {name: os.environ[name] for name in FOREIGN if name in os.environ}


CLOUD: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_ALLOW_HTTP",
    "AWS_CONDITIONAL_PUT",
    "AWS_CONFIG_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_DEFAULT_PROFILE",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_ENDPOINT",
)
"""Variables of the services' own tools: where an object store is, how to sign on. Their values are never shown."""


def read_cloud() -> dict[str, str]:
    """Return those of CLOUD that are set to something."""
    return {name: os.environ[name] for name in CLOUD if os.environ.get(name)}


def read_local_rank() -> int:
    """Return which of the ranks of its node this process is, as launchers say, or 0."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        text = os.environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text)
    return 0


def read_slurm_end_time() -> float | None:
    """Return when SLURM ends this job, in seconds since 1970, or None where it does not say."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isascii() and text.isdigit() else None


_METADATA: Final = {
    "aws": "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "azure": "AZURE_POD_IDENTITY_AUTHORITY_HOST",
    "gcp": "GCE_METADATA_HOST",
}


def read_metadata_address(cloud: str) -> str | None:
    """Return where a cloud's metadata service is, by the variable that the cloud's own tools read, or None."""
    return os.environ.get(_METADATA[cloud]) or None


def read_audit() -> tuple[str, int | None] | None:
    """Return the folder for records, and the step to die at, that `shardkeep audit` gave to this process, or None.

    No knob: set by the audit for the starts that it makes, and by nobody else.
    """
    folder = os.environ.get("SHARDKEEP_AUDIT")
    if not folder or not os.path.isdir(folder):
        return None
    step = os.environ.get("SHARDKEEP_AUDIT_KILL_STEP", "")
    return folder, int(step) if step.isascii() and step.isdigit() else None


@contextlib.contextmanager
def override(**values: float) -> Iterator[None]:
    """Set knobs for the length of a `with` block; for tests, one process at a time."""
    unknown = sorted(set(values) - set(KNOBS))
    if unknown:
        raise UsageError(f"no such knob: {', '.join(unknown)}; there are {', '.join(sorted(KNOBS))}")
    before = dict(_overrides)
    _overrides.update(values)
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)
