"""The comparison of shown and real output sees what differs and lets pass what may differ."""

from __future__ import annotations

import pytest

from tests.docs.output import Digests, find_difference

A, B, C = "a" * 16, "b" * 16, "c" * 16


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ("step 3\n", "step 3"),
        ("loss 1.309", "loss 1.31"),
        ("took ... s", "took 3 s"),
        ("a\n...\nz", "a\nb\nc\nz"),
        (f"x {A}\ny {A}\nz {B}", f"x {B}\ny {B}\nz {C}"),
        ("A  B", "A     B"),
    ],
)
def test_same(shown: str, found: str) -> None:
    assert find_difference(shown, found, Digests()) is None


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ("step 3", "step 4"),
        ("loss 1.309", "loss 1.5"),
        ("a", "a\nb"),
        ("a\nb", "a"),
        ("a\n...\nz", "a\nb"),
        (f"x {A}\ny {A}", f"x {B}\ny {C}"),
        (f"x {A}\ny {B}", f"x {C}\ny {C}"),
    ],
)
def test_different(shown: str, found: str) -> None:
    assert find_difference(shown, found, Digests()) is not None
