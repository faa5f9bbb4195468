"""The demo's parts: reading shards by name, the accident, the logs, the options."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from shardkeep.demo import shards
from shardkeep.demo.options import DemoOptions
from shardkeep.demo.records import RankLog, StepRecord, count_steps, read_logs
from shardkeep.demo.shards import parse_chunk_name, read_shards
from shardkeep.errors import Corrupt, UsageError
from shardkeep.spec.chunks import Chunk


def test_chunk_names() -> None:
    assert parse_chunk_name("a.b[0:64,32:64]") == ("a.b", Chunk((0, 32), (64, 32)))
    assert parse_chunk_name("step/a.b") == ("step/a.b", None)
    assert parse_chunk_name("a[3:5]") == ("a", Chunk((3,), (2,)))


@pytest.mark.parametrize("own", [False, True])
def test_tensors_are_put_together_from_chunks(tmp_path: Path, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = numpy.arange(24, dtype=numpy.float32).reshape(4, 6)
    save_file(
        {"w[0:2,0:6]": whole[:2].copy(), "b": numpy.float32([1, 2])}, tmp_path / "model-r00000-00001.safetensors"
    )
    save_file({"w[2:4,0:6]": whole[2:].copy()}, tmp_path / "model-r00001-00001.safetensors")
    save_file({"exp_avg/w": -whole}, tmp_path / "optimizer-r00000-00001.safetensors")
    if own:
        monkeypatch.setitem(sys.modules, "safetensors", None)  # as if it were not installed
    read = read_shards(tmp_path)
    assert read.reader == ("shardkeep's own parser" if own else "safetensors")
    assert (read.files_count, read.chunks_count) == (3, 4)
    assert sorted(read.tensors) == ["exp_avg/w", "weights/b", "weights/w"]
    assert (read.tensors["weights/w"] == whole).all()
    assert (read.tensors["exp_avg/w"] == -whole).all()


@pytest.mark.parametrize("second", ["w[1:4,0:6]", "w[3:4,0:6]", "w"])
def test_chunks_that_do_not_tile_are_refused(tmp_path: Path, second: str) -> None:
    rows = {"w[1:4,0:6]": 3, "w[3:4,0:6]": 1}.get(second, 4)
    save_file({"w[0:2,0:6]": numpy.zeros((2, 6), "f4")}, tmp_path / "model-r00000-00001.safetensors")
    save_file({second: numpy.zeros((rows, 6), "f4")}, tmp_path / "model-r00001-00001.safetensors")
    with pytest.raises(Corrupt, match="weights/w"):
        read_shards(tmp_path)
    assert shards.SECTIONS["model"] == "weights/"


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    log = RankLog(str(tmp_path), 1, 0)
    for step in (1, 2):
        log.write(StepRecord(step=step, ids=(1, 2), lr="1", loss="2", grad_norm="3"))
    log.close()
    path = tmp_path / "g0001-rank-000.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"step","st')
    (tmp_path / "other.txt").write_text("not a log")
    found = read_logs(tmp_path)
    assert [record.step for record in found[1][0]] == [1, 2]
    assert count_steps(tmp_path) == 2
    path.write_bytes(b"{}\n")
    with pytest.raises(Corrupt):
        read_logs(tmp_path)


ACCIDENT = """
import sys
from shardkeep.demo.accident import KillingStore
from shardkeep.demo.records import Kill
from shardkeep.storage.posix import PosixStore
root, key = sys.argv[1:]
store = KillingStore(PosixStore(root), Kill(rank=0, step=20, marker=root + "/marker"))
for number in (1, 2):
    writer = store.writer(key.format(number), 8192)
    writer.write_at(0, memoryview(b"x" * 8192))
    writer.finish()
print("alive")
"""


def test_the_accident_happens_within_one_save_and_once(tmp_path: Path) -> None:
    def run(key: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", textwrap.dedent(ACCIDENT), str(tmp_path), key]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert run("g0001/step-00000010/a{}").stdout == "alive\n"
    died = run("g0001/step-00000020/a{}")
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert died.stdout == ""
    folder = tmp_path / "g0001" / "step-00000020"
    assert (folder / "a1").read_bytes() == b"x" * 8192
    assert (folder / "a2").read_bytes()[:8192].count(b"x") == 4096
    assert run("g0002/step-00000020/a{}").stdout == "alive\n"


def test_options_are_checked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="empty or new"):
        DemoOptions(keep=tmp_path)
    with pytest.raises(UsageError, match="leave_out"):
        DemoOptions(leave_out="nothing")  # type: ignore[arg-type]
    DemoOptions(keep=tmp_path / "new")
