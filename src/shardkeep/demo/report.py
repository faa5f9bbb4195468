"""What a person sees of the demo: progress on stderr while it runs, the result on stdout. Decides nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardkeep.demo.compare import Difference, Row
from shardkeep.demo.records import Shape

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything the demo found; `verdict` follows from the rows alone."""

    shape: Shape
    facts: dict[str, Any]
    rows: tuple[Row, ...]
    first: Difference | None
    phases: tuple[tuple[str, float], ...]
    elapsed_s: float

    @property
    def bit_identical(self) -> bool:
        return bool(self.rows) and all(row.identical for row in self.rows)


@dataclass(slots=True, kw_only=True)
class Progress:
    """Says on stderr what goes on: one line per event, and a bar where a person watches."""

    console: Console
    begin_s: float = field(default_factory=time.monotonic)
    phases: list[tuple[str, float]] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.console.print(f"[{self.elapsed_s:5.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.begin_s

    @contextlib.contextmanager
    def phase(self, name: str, text: str, total_count: int) -> Iterator[Callable[[int], None]]:
        """Time a phase; yields what takes the steps done so far."""
        self.say(text)
        start_s = time.monotonic()
        with self._bar(total_count) as advance:
            yield advance
        self.phases.append((name, time.monotonic() - start_s))

    @contextlib.contextmanager
    def _bar(self, total_count: int) -> Iterator[Callable[[int], None]]:
        if not self.console.is_terminal or total_count < 2:
            yield lambda done: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("          step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Bars(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task("", total=total_count)
            yield lambda done: bars.update(task, completed=done)


def start_progress() -> Progress:
    from rich.console import Console

    return Progress(console=Console(stderr=True))


def make_document(result: Result) -> dict[str, Any]:
    """Return the result as plain JSON values; keys are only ever added."""
    return {
        "bit_identical": result.bit_identical,
        "first_difference": _describe(result.first),
        "rows": [
            {
                "group": row.group,
                "quantity": row.quantity,
                "identical": row.identical,
                "count": row.count,
                "unit": row.unit,
                "bytes": row.total_bytes,
                "first_difference": _describe(row.first),
            }
            for row in result.rows
        ],
        **result.facts,
        "steps": result.shape.stop,
        "world_size": result.shape.world_size,
        "reshard_world_size": result.shape.reshard_world_size,
        "phases": [{"name": name, "elapsed_s": round(elapsed_s, 3)} for name, elapsed_s in result.phases],
        "elapsed_s": round(result.elapsed_s, 3),
    }


def _describe(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {
        "quantity": difference.quantity,
        "step": difference.step,
        "moment": difference.moment,
        "where": difference.where,
        "expected": difference.expected,
        "found": difference.found,
    }


def write_document(result: Result) -> None:
    """Write the one JSON document to stdout."""
    import json

    sys.stdout.write(json.dumps(make_document(result), indent=2, allow_nan=False) + "\n")


def write_table(result: Result) -> None:
    """Write the result for a person to stdout: a table, the first difference if there is one, the verdict last."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=110, color_system=None)
    table = Table(box=box.ROUNDED if console.is_terminal else None, pad_edge=console.is_terminal, header_style="bold")
    table.add_column("compared")
    table.add_column("quantity")
    table.add_column("how many", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("identical")
    for at, row in enumerate(result.rows):
        begins = at == 0 or result.rows[at - 1].group != row.group
        if begins and at:
            table.add_section() if console.is_terminal else table.add_row()
        table.add_row(
            row.group if begins else "",
            row.quantity,
            f"{row.count:,} {row.unit if row.count != 1 else row.unit.removesuffix('s')}",
            "" if row.total_bytes is None else f"{row.total_bytes:,}",
            "[green]yes[/]" if row.identical else "[bold red]NO[/]",
        )
    console.print()
    console.print(table)
    console.print()
    compared = sum(row.total_bytes or 0 for row in result.rows)
    console.print(
        f"{len(result.rows)} quantities, {compared:,} bytes of tensors compared by SHA-256; {result.elapsed_s:.0f} s",
        markup=False,
    )
    if result.first is not None:
        console.print(f"first difference: {result.first}", markup=False, soft_wrap=True, style="red")
    console.file.flush()
    sys.stdout.write(f"bit-identical: {'yes' if result.bit_identical else 'no'}\n")
