"""How close a blocking save and a load come to this machine's disk: `make bench ARGS="--mib 1024 --rounds 5"`.

Raw limit and shardkeep take turns in one run, after a warm-up; medians of the paired ratios are what counts, because
disks of shared machines drift. Raw moves as many bytes with O_DIRECT, two threads and 8 MiB blocks from memory that
was touched before, and fsyncs. shardkeep does all it always does: digests, fsync of files and folders, commit record
on the way out; verification of every byte on the way in, into a live model and optimizer, the page cache dropped.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shardkeep as sk

BLOCK_BYTES = 8 << 20
THREADS = 2


def make_state(mib: int) -> dict[str, object]:
    """Return a model with Adam moments, `mib` MiB in all, every page touched."""
    width = 1024
    layers = max(1, mib // 3 // (width * width * 4 // (1 << 20)))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"model": model, "optimizer": optimizer}


def run_raw(path: Path, size_bytes: int, *, write: bool) -> float:
    """Move `size_bytes` with O_DIRECT and return the seconds it took."""
    flags = os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY
    fd = os.open(path, flags | os.O_DIRECT, 0o644)
    buffers = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(THREADS)]
    for buffer in buffers:
        buffer[:] = os.urandom(1 << 16) * (BLOCK_BYTES >> 16)
    offsets = iter(range(0, size_bytes, BLOCK_BYTES))
    lock = threading.Lock()

    def work(buffer: memoryview) -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            if write:
                os.pwrite(fd, buffer, offset)
            else:
                os.preadv(fd, [buffer], offset)

    begin = time.monotonic()
    threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if write:
        os.fsync(fd)
    took_s = time.monotonic() - begin
    os.close(fd)
    return took_s


def drop_cache(folder: Path) -> None:
    """Evict a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=None, help="a folder on the disk to measure")
    options = parser.parse_args()
    state = make_state(options.mib)
    work = Path(tempfile.mkdtemp(prefix="shardkeep-bench-", dir=options.dir))
    rows: list[tuple[float, float, float, float]] = []
    try:
        for number in range(options.rounds + 1):
            folder = work / "run"
            saved = timed(lambda folder=folder: sk.save(folder, state))  # type: ignore[misc]
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            raw = work / "raw"
            size -= size % BLOCK_BYTES
            raw_write = run_raw(raw, size, write=True)
            drop_cache(folder)
            raw_read = run_raw(raw, size, write=False)
            loaded = timed(lambda folder=folder: sk.load(folder, state))  # type: ignore[misc]
            shutil.rmtree(folder)
            raw.unlink()
            if number:  # the first round warms up
                rows.append((raw_write, saved, raw_read, loaded))
                print(f"round {number}: " + "  ".join(f"{value:.2f} s" for value in rows[-1]), file=sys.stderr)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"state {size / (1 << 20):.0f} MiB, {options.rounds} rounds, medians")
    print(f"{'':24}{'raw':>8}{'shardkeep':>11}{'raw / ours':>12}")
    for name, raw_at, ours_at in (("save, durable", 0, 1), ("load, cold, verified", 2, 3)):
        raw_s = statistics.median(row[raw_at] for row in rows)
        ours_s = statistics.median(row[ours_at] for row in rows)
        ratio = statistics.median(row[raw_at] / row[ours_at] for row in rows)
        print(f"{name:24}{raw_s:>6.2f} s{ours_s:>9.2f} s{ratio:>12.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
