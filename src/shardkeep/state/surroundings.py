"""Settings and versions of torch that decide whether a step gives the same bits. Reads only; touches no device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def describe_torch() -> dict[str, str]:
    """Return name -> text. Accelerators are asked only when training has initialised them."""
    found: dict[str, str] = {}
    for name, read in _READERS.items():
        # What a version of torch does not have, or refuses to say, is left out: this is a description.
        try:
            value = read()
        except Exception:  # noqa: BLE001  # private or changing attributes of torch fail in any way
            continue
        if value is not None:
            found[name] = str(value)
    return found


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _nccl() -> str | None:
    if not _uses_cuda():
        return None
    cuda: Any = torch.cuda  # without types in torch
    version = cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _devices() -> str | None:
    """Return the kind of accelerator in use. Not their number: ranks see another one than the job has."""
    return str(torch.cuda.get_device_name(torch.cuda.current_device())) if _uses_cuda() else "cpu"


def _uses_cuda() -> bool:
    cuda: Any = torch.cuda
    return bool(cuda.is_available() and cuda.is_initialized())


def _cudnn() -> str | None:
    cudnn: Any = torch.backends.cudnn
    return str(cudnn.version()) if _uses_cuda() else None


def _on_cuda(read: Callable[[], object]) -> Callable[[], object]:
    return lambda: read() if _uses_cuda() else None


def _attention() -> str:
    cuda: Any = torch.backends.cuda
    kinds = {
        "flash": cuda.flash_sdp_enabled,
        "memory-efficient": cuda.mem_efficient_sdp_enabled,
        "math": cuda.math_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
    }
    return "+".join(name for name, read in kinds.items() if read()) or "none"


def _reduced() -> str:
    matmul: Any = torch.backends.cuda.matmul
    return (
        f"fp16 {matmul.allow_fp16_reduced_precision_reduction}, bf16 {matmul.allow_bf16_reduced_precision_reduction}"
    )


_READERS: dict[str, Callable[[], object]] = {
    "cuda": lambda: torch.version.cuda,
    "hip": lambda: torch.version.hip,
    "cudnn": _cudnn,
    "nccl": _nccl,
    "cpu": lambda: torch.backends.cpu.get_cpu_capability(),
    "devices": _devices,
    "threads": torch.get_num_threads,
    "deterministic_algorithms": _deterministic,
    "fill_uninitialized_memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    "cudnn_deterministic": _on_cuda(lambda: torch.backends.cudnn.deterministic),
    "cudnn_benchmark": _on_cuda(lambda: torch.backends.cudnn.benchmark),
    "matmul_precision": torch.get_float32_matmul_precision,
    "cudnn_tf32": _on_cuda(lambda: torch.backends.cudnn.allow_tf32),
    "reduced_precision_reduction": _on_cuda(_reduced),
    "attention": _on_cuda(_attention),
    "default_dtype": lambda: torch.get_default_dtype(),
}
