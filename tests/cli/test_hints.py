"""Hints for those who name a folder that is no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkeep.engine.listing import no_run
from shardkeep.storage.resolve import open_store


@pytest.mark.parametrize("there", [True, False])
def test_the_folder_of_all_runs_names_them(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "first").mkdir()
        (tmp_path / "first" / "run.json").write_text("{}")
    (tmp_path / "not a run ü").mkdir()
    error = no_run(open_store(tmp_path))
    assert ("first" in str(error.advice)) == there
