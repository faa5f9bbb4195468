"""The digest of one whole tensor; the same for a live one and for one put together from files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def digest_tensor(dtype: str, shape: Sequence[int], data: bytes) -> str:
    """Return SHA-256 over dtype, shape and row-major bytes, in hexadecimal."""
    return hashlib.sha256(f"{dtype}{list(shape)}".encode() + data).hexdigest()
