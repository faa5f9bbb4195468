"""What the process runs on, for the record: a resume elsewhere can then say what is different."""

from __future__ import annotations

import os
import platform
import socket
import sys

from shardkeep._version import __version__


def describe_environment() -> dict[str, str]:
    """Return versions and the host; torch's only where it is loaded already."""
    found = {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "shardkeep": __version__,
    }
    for name in ("torch", "numpy"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", "unknown"))
    return found
