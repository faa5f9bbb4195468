"""What the process runs on, for the record: a resume elsewhere can then say what is different."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardkeep import knobs
from shardkeep._version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentChange:
    """One thing that is not as it was at the save and can change bits; None where it was not there."""

    name: str
    before: str | None
    now: str | None
    advice: str

    def __str__(self) -> str:
        return f"{self.name} was {self.before or 'not there'} and is {self.now or 'not there'}"


_INSTALL: Final = "install the version of the save"
_SAME_HARDWARE: Final = "use the hardware of the save"

BIT_CHANGING: Final = {
    "torch": _INSTALL,
    "numpy": f"{_INSTALL}, where NumPy prepares samples",
    "cuda": _INSTALL,
    "hip": _INSTALL,
    "cudnn": _INSTALL,
    "nccl": _INSTALL,
    "cpu": f"{_SAME_HARDWARE}, or set ATEN_CPU_CAPABILITY to the lower of the two in both",
    "devices": _SAME_HARDWARE,
    "threads": "call torch.set_num_threads, or set OMP_NUM_THREADS (torchrun sets it to 1)",
    "deterministic_algorithms": "call torch.use_deterministic_algorithms",
    "fill_uninitialized_memory": "set torch.utils.deterministic.fill_uninitialized_memory",
    "cudnn_deterministic": "set torch.backends.cudnn.deterministic",
    "cudnn_benchmark": "set torch.backends.cudnn.benchmark",
    "matmul_precision": "call torch.set_float32_matmul_precision",
    "cudnn_tf32": "set torch.backends.cudnn.allow_tf32",
    "reduced_precision_reduction": "set torch.backends.cuda.matmul.allow_fp16/bf16_reduced_precision_reduction",
    "attention": "call torch.backends.cuda.enable_flash_sdp, enable_mem_efficient_sdp, enable_math_sdp",
    "default_dtype": "call torch.set_default_dtype",
    **{name: f"set the environment variable {name} before the start" for name in knobs.FOREIGN},
}
"""What can change the bits of a step, and what to do to have it as it was."""


def describe_environment() -> dict[str, str]:
    """Return versions, settings and the host; torch's only where it is loaded already."""
    found = {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "shardkeep": __version__,
        **knobs.read_foreign(),
    }
    for name in ("torch", "numpy"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", "unknown"))
    if "torch" in found:
        # Loaded, so that this import costs nothing; who lists checkpoints on a login node has no torch.
        from shardkeep.state.surroundings import describe_torch

        found.update(describe_torch())
    return found


def compare_environments(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[EnvironmentChange, ...]:
    """Return what differs and can change bits, versions first.

    A setting that the older record does not know is no change: it was written before shardkeep recorded it. A
    foreign variable that is not there was not set.
    """
    if not before:
        return ()
    return tuple(
        EnvironmentChange(name=name, before=before.get(name), now=now.get(name), advice=advice)
        for name, advice in BIT_CHANGING.items()
        if before.get(name) != now.get(name) and (name in knobs.FOREIGN or (name in before and name in now))
    )
