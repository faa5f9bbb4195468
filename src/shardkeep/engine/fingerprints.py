"""Sampled fingerprints of plain tensors: do the ranks that hold a tensor whole hold the same one?

A sample, not a digest: it finds what differs by design (experts numbered from 0, BatchNorm under DDP), at a cost
of microseconds a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import xxhash

from shardkeep.format.records import LayoutTable
from shardkeep.spec.tensors import LocalTensor

_SAMPLE_BYTES: Final = 512
_SAMPLES: Final = 8


def fingerprint_tensors(tensors: Iterable[LocalTensor], *, skip: frozenset[str]) -> dict[str, str]:
    """Return key -> fingerprint (hex) of every tensor that several ranks may hold whole."""
    found: dict[str, str] = {}
    for tensor in tensors:
        plain = tensor.mesh is None and not tensor.explicit and not tensor.per_rank
        if plain and tensor.key not in skip:
            found[tensor.key] = _fingerprint(tensor)
    return found


def _fingerprint(tensor: LocalTensor) -> str:
    digest = xxhash.xxh3_64()
    for piece in tensor.pieces:
        size = piece.data.nbytes
        last = max(size - _SAMPLE_BYTES, 0)
        buffer = bytearray(min(size, _SAMPLE_BYTES))
        for start in sorted({last * at // (_SAMPLES - 1) for at in range(_SAMPLES)}):
            piece.data.copy_out(start, memoryview(buffer))
            digest.update(buffer)
    return digest.hexdigest()


def combine(found: Mapping[str, str], table: LayoutTable | None) -> dict[str, str]:
    """Return one digest over the fingerprints of each set of ranks that hold the same tensors whole.

    So that ranks that do not hold the same in all can still compare what they share.

    Args:
        table: of the last plan, which says who holds what; without one all go together.
    """
    groups: dict[str, list[str]] = {}
    for key, value in sorted(found.items()):
        record = table.tensors.get(key) if table is not None else None
        holders = ",".join(map(str, record.layout.meshes)) if record is not None else ""
        groups.setdefault(holders, []).append(f"{key}={value}")
    return {holders: xxhash.xxh3_128_hexdigest("\n".join(lines).encode()) for holders, lines in groups.items()}


def find_differing(tables: Sequence[tuple[int, Mapping[str, str]]]) -> dict[str, tuple[int, int]]:
    """Return the keys that not all tables agree on, each with two ranks that differ.

    Args:
        tables: `(rank, fingerprints)`; a key that a rank does not hold is not compared.
    """
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, table in tables:
        for key, value in table.items():
            known = first.setdefault(key, (rank, value))
            if known[1] != value:
                differing.setdefault(key, (known[0], rank))
    return dict(sorted(differing.items()))
