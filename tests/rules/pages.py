"""Pages of the documentation that follow from the code: `python -m tests.rules.pages` writes them again."""

from __future__ import annotations

from pathlib import Path

from shardkeep.knobs import KNOBS

DOCS = Path(__file__).resolve().parents[2] / "docs"

_KNOBS_HEAD = """\
# Knobs

Settings of speed, patience and limits. None changes what is written or promised. Each is read from the
environment when it is used; unset, the default holds. A value that is no number, or is below the minimum, is a
`UsageError` that names the variable.

| environment variable | default | unit | at least | what it is |
|---|---|---|---|---|
"""


def format_knobs() -> str:
    """Return the text of `docs/knobs.md`."""
    rows = [
        (f"`SHARDKEEP_{knob.name}`", _number(knob.default), knob.unit, _number(knob.minimum), knob.purpose)
        for knob in sorted(KNOBS.values(), key=lambda knob: knob.name)
    ]
    return _KNOBS_HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else str(value)


if __name__ == "__main__":
    (DOCS / "knobs.md").write_text(format_knobs(), encoding="utf-8")
