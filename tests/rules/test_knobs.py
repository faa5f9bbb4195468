"""Every knob is documented, has a sane default, can be set, and says what is wrong with a bad value."""

from __future__ import annotations

import pytest

from shardkeep import knobs
from shardkeep.errors import UsageError
from tests.rules.pages import DOCS, format_knobs


def test_the_page_is_up_to_date() -> None:
    page = (DOCS / "knobs.md").read_text(encoding="utf-8")
    assert page == format_knobs(), "write it again: python -m tests.rules.pages"
    for name in knobs.KNOBS:
        assert f"`SHARDKEEP_{name}`" in page


@pytest.mark.parametrize("knob", knobs.KNOBS.values(), ids=lambda knob: knob.name)
def test_knobs(knob: knobs.Knob, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"SHARDKEEP_{knob.name}"
    monkeypatch.delenv(variable, raising=False)
    assert knob.default >= knob.minimum
    assert knob.purpose
    assert knob.unit
    assert knobs.get_knob(knob.name) == knob.default
    if knob.unit in ("s", "bytes"):
        assert knob.name.endswith("_S" if knob.unit == "s" else "_BYTES")
    monkeypatch.setenv(variable, str(knob.minimum))
    assert knobs.get_knob(knob.name) == knob.minimum
    for bad in ("", "x", "nan", "-1", str(knob.minimum - 1)):
        monkeypatch.setenv(variable, bad)
        with pytest.raises(UsageError, match=variable) as caught:
            knobs.get_knob(knob.name)
        assert "unset" in str(caught.value)
    with knobs.override(**{knob.name: knob.minimum + 1}):
        assert knobs.get_knob(knob.name) == knob.minimum + 1


def test_overrides_nest_and_end() -> None:
    with knobs.override(RETRIES=1):
        with knobs.override(RETRIES=2, IO_THREADS=3):
            assert (knobs.get_int("RETRIES"), knobs.get_int("IO_THREADS")) == (2, 3)
        assert knobs.get_int("RETRIES") == 1
    assert knobs.get_knob("RETRIES") == knobs.KNOBS["RETRIES"].default
    with pytest.raises(UsageError, match="no such knob: TYPO"), knobs.override(TYPO=1):
        pass
