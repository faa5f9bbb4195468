"""What the record says of the surroundings, and which differences are worth a warning."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shardkeep import knobs
from shardkeep.engine.environment import BIT_CHANGING, compare_environments, describe_environment


def test_the_record_holds_what_decides_bits() -> None:
    found = describe_environment()
    assert found["torch"] == torch.__version__
    assert found["threads"] == str(torch.get_num_threads())
    assert found["deterministic_algorithms"] == "off"
    assert found["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert {"numpy", "matmul_precision", "default_dtype", "fill_uninitialized_memory", "devices"} <= set(found)
    assert all(isinstance(text, str) and text for text in found.values())
    assert compare_environments(found, describe_environment()) == ()


def test_settings_are_those_of_the_moment() -> None:
    before = describe_environment()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    try:
        now = describe_environment()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    changes = {change.name: change for change in compare_environments(before, now)}
    assert set(changes) == {"deterministic_algorithms", "matmul_precision"}
    assert str(changes["matmul_precision"]) == "matmul_precision was highest and is high"
    assert "set_float32_matmul_precision" in changes["matmul_precision"].advice


def test_only_what_can_change_bits_is_a_change() -> None:
    before = {"host": "a", "pid": "1", "torch": "2.5.0", "threads": "4"}
    now = {"host": "b", "pid": "2", "torch": "2.6.0", "threads": "4", "cpu": "AVX2"}
    (change,) = compare_environments(before, now)
    assert (change.name, change.before, change.now) == ("torch", "2.5.0", "2.6.0")
    assert compare_environments({}, now) == (), "an older record says nothing"
    assert all(BIT_CHANGING.values())


def test_a_foreign_variable_that_came_or_went_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = describe_environment()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert knobs.read_foreign()["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    (change,) = compare_environments(before, describe_environment())
    assert str(change) == "CUBLAS_WORKSPACE_CONFIG was not there and is :4096:8"


def test_describing_loads_no_torch() -> None:
    code = (
        "import sys; from shardkeep.engine.environment import describe_environment as d; "
        "assert 'torch' not in d(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
