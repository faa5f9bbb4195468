"""What a run needs of the machine it starts on: versions, memory, limits. Looks, and loads no library for it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import time
from collections.abc import Iterable
from functools import partial
from typing import Final

from shardkeep.engine.diagnosis import Check
from shardkeep.types import format_bytes

SUPPORTED: Final = {"python": (3, 11), "torch": (2, 6), "obstore": (0, 12)}
"""The oldest versions that work."""

LEAST_OPEN_FILES: Final = 1024
_SMALL_SHM_BYTES: Final = 64 << 20
_THEN_S: Final = 1_704_067_200  # 2024: a clock before it was never set

_say = partial(Check, place="machine")


def check_machine(*, size_bytes: int | None, remote: bool) -> Iterable[Check]:
    """Look at what all places have in common.

    Args:
        size_bytes: of a checkpoint, as far as this machine's ranks hold it; None: not known.
        remote: some place is an object store's.
    """
    yield check_version("python", platform.python_version())
    yield check_version("torch", find_version("torch"))
    if remote or find_version("obstore") is not None:
        yield check_version("obstore", find_version("obstore"))
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield _check_shared_memory()
    yield check_memory(find_free_memory(), size_bytes)
    if time.time() < _THEN_S:
        found = f"this host's clock says {time.strftime('%Y-%m-%d', time.gmtime())}"
        yield _say(what="clock", status="warn", found=found, advice="timedatectl status")


def find_version(name: str) -> str | None:
    """Return the version of an installed distribution, without loading it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_version(name: str, version: str | None) -> Check:
    """Hold a version against the oldest supported one."""
    least = SUPPORTED[name]
    wanted = ".".join(map(str, least))
    install = {"torch": f'pip install "torch>={wanted}"', "obstore": 'pip install "shardkeep[objects]"'}
    advice = install.get(name, f"install Python {wanted} or newer")
    if version is None:
        lacks = "not installed: the commands work without it, training does not"
        if name == "obstore":
            return _say(what=name, status="fail", found="not installed: object stores need it", advice=advice)
        return _say(what=name, status="warn", found=lacks, advice=advice)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None and (int(match[1]), int(match[2])) < least:
        return _say(what=name, status="fail", found=f"{version}: {wanted} or newer is supported", advice=advice)
    return _say(what=name, status="ok", found=f"{version} ({wanted} or newer is supported)")


def check_open_files(limit_count: int) -> Check:
    """Hold the limit on open files against what a save and loaders need."""
    if 0 <= limit_count < LEAST_OPEN_FILES:
        found = f"at most {limit_count} for a process; saves and loaders of large models need more"
        return _say(what="open files", status="warn", found=found, advice=f"ulimit -n {LEAST_OPEN_FILES * 4}")
    count = "any number" if limit_count < 0 else f"at most {limit_count}"
    return _say(what="open files", status="ok", found=f"{count} for a process")


def _check_shared_memory() -> Check:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        found = f"/dev/shm: {error.strerror}; workers of loaders and memory tiers need it"
        return _say(what="shared memory", status="warn", found=found, advice="mount -t tmpfs tmpfs /dev/shm")
    return check_shared_memory(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def check_shared_memory(total_bytes: int, free_bytes: int) -> Check:
    """Hold the size of /dev/shm against what workers of loaders need."""
    found = f"/dev/shm holds {format_bytes(total_bytes)}, {format_bytes(free_bytes)} are free"
    if total_bytes <= _SMALL_SHM_BYTES:
        advice = "docker run --shm-size=8g ... (Kubernetes: an emptyDir with medium: Memory on /dev/shm)"
        lacks = f"{found}: too little for workers of loaders and memory tiers"
        return _say(what="shared memory", status="warn", found=lacks, advice=advice)
    return _say(what="shared memory", status="ok", found=found)


def check_memory(free_bytes: int | None, size_bytes: int | None) -> Check:
    """Hold free host memory against a checkpoint's image, which asynchronous saves keep."""
    if free_bytes is None:
        return _say(what="memory", status="ok", found="how much is free is not known here")
    found = f"{format_bytes(free_bytes)} are free"
    if size_bytes is not None and free_bytes < size_bytes:
        lacks = f'{found}: mode="async" and "overlap" need {format_bytes(size_bytes)} where this node holds all of it'
        return _say(what="memory", status="warn", found=lacks, advice='use mode="blocking", or more nodes')
    return _say(what="memory", status="ok", found=found)


def find_free_memory() -> int | None:
    """Return the bytes that processes here can still take: of the machine, or of their control group if less."""
    found = [free for free in (_read_meminfo(), _read_group()) if free is not None]
    return min(found, default=None)


def _read_meminfo() -> int | None:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _read_group() -> int | None:
    """Return what a control group (version 2) has left, page cache that can be given up included."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            path = next((line[3:].strip() for line in file if line.startswith("0::")), None)
        if path is None:
            return None
        folder = f"/sys/fs/cgroup{path}".rstrip("/")
        limit_bytes, used_bytes = (
            int(_read(f"{folder}/memory.{name}")) for name in ("max", "current")
        )  # "max": none
        cached = [line.split()[1] for line in _read(f"{folder}/memory.stat").splitlines() if "inactive_file" in line]
        return max(limit_bytes - used_bytes + sum(map(int, cached)), 0)
    return None


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
