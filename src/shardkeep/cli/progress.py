"""Progress on stderr: a bar where a person watches, nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from shardkeep.cli.output import escape


@contextlib.contextmanager
def show_progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the bytes done since its last call; may be called from several threads."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.markup import escape as escape_markup
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape_markup(escape(title)), total=total_bytes)
        yield lambda count: progress.advance(task, count)
