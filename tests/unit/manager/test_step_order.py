"""Steps only go up: what is saved below the step that a later start goes on from would be lost without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkeep.errors import UsageError
from shardkeep.storage.posix import PosixStore
from tests.crash.jobs import committed, make_state, manage, save_at


def test_a_job_that_counts_from_its_own_start_is_told(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    manager = manage(store)
    manager.resume(make_state(1))
    save_at(manager, 10)
    save_at(manager, 30)
    again = manage(store, save_every=5)
    state = make_state(1)
    assert again.resume(state).step == 30
    with pytest.raises(UsageError, match="step 5: this start is at step 30 already"):
        again.after_step(5, state)
    assert committed(store) == [10, 30]
    # The step that was resumed may be saved again, and what comes after it; not one below the last save.
    save_at(again, 30)
    save_at(again, 40)
    with pytest.raises(UsageError, match="step 35: this start is at step 40 already"):
        save_at(again, 35)
    assert manage(store).resume(make_state(1)).step == 40
    # A fresh start, and one from an older step, count from there.
    old = manage(store)
    assert old.resume(make_state(1), step=10).step == 10
    save_at(old, 20)
    fresh = manage(store)
    fresh.resume(make_state(1), fresh=True)
    save_at(fresh, 1)
    assert manage(store).resume(make_state(1)).step == 1
