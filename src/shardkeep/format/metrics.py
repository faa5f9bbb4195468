"""Numbers that the user gives with a save, as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

Metric = float | Literal["nan", "inf", "-inf"]
"""A number as JSON can hold it."""


def encode_metrics(metrics: Mapping[str, float]) -> dict[str, Metric]:
    """Return metrics as they are stored, ascending by name; a loss that is nan must not spoil the record."""
    return {name: _encode_metric(float(value)) for name, value in sorted(metrics.items())}


def _encode_metric(value: float) -> Metric:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def decode_metrics(stored: Mapping[str, Metric]) -> dict[str, float]:
    """Undo `encode_metrics`."""
    return {name: float(value) for name, value in stored.items()}
