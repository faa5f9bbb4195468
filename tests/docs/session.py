"""Runs a page's blocks in its folder: Python in one process that lasts for the page, commands one by one."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import traceback
import types
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support import ranks


class Session:
    """One page's process and folder; use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(ranks._PRELOAD)
        self._context = context
        self._python: tuple[Any, Connection] | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self._python is not None:
            process, pipe = self._python
            process.kill()
            process.join()
            pipe.close()

    def run_python(self, code: str, name: str) -> str:
        """Run a block after those before it; return what it printed.

        Raises:
            AssertionError: it raised; the text holds the traceback.
        """
        if self._python is None:
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, str(self.folder)))
            process.start()
            theirs.close()
            self._python = process, mine
        pipe = self._python[1]
        pipe.send((code, name))
        assert pipe.poll(60), f"{name} still runs after 60 s"
        printed, trace = pipe.recv()
        assert trace is None, f"{name} raised:\n{trace}\nafter it printed:\n{printed}"
        return str(printed)

    def run_ranks(self, code: str, name: str, world_size: int) -> str:
        """Run a block on real ranks; return what rank 0 printed."""
        return str(ranks.run_ranks(_run_on_rank, world_size, code, name, str(self.folder))[0])

    def run_command(self, command: str) -> tuple[int, str]:
        """Return a command's exit code and output. `python FILE` runs in a process that has torch loaded already."""
        words = shlex.split(command)
        if words[0] == "python" and words[1].endswith(".py"):
            return self._run_script(words[1:])
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            words, cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110
        )
        return done.returncode, done.stdout

    def _run_script(self, words: list[str]) -> tuple[int, str]:
        out = self.folder / ".printed"
        process = self._context.Process(target=_run_script, args=(words, str(self.folder), str(out)))
        process.start()
        process.join(60)
        assert process.exitcode is not None, f"{' '.join(words)} still runs after 60 s"
        printed = out.read_text()
        out.unlink()
        if process.exitcode < 0:
            return 128 - process.exitcode, printed + f"{signal.strsignal(-process.exitcode)}\n"
        return process.exitcode, printed


def _serve(pipe: Connection, folder: str) -> None:
    _prepare(folder)
    names = _make_page()
    while True:
        try:
            code, name = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(code, name, names))


def _make_page() -> dict[str, Any]:
    """Return the names of a new module; dataclasses look for theirs in `sys.modules`."""
    sys.modules["page"] = types.ModuleType("page")
    return vars(sys.modules["page"])


def _run(code: str, name: str, names: dict[str, Any]) -> tuple[str, str | None]:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec", dont_inherit=True), names)
    except BaseException:  # noqa: BLE001  # everything goes to the test
        return printed.getvalue(), traceback.format_exc()
    return printed.getvalue(), None


def _run_on_rank(rank: int, world_size: int, code: str, name: str, folder: str) -> str:
    import torch.distributed as dist

    os.chdir(folder)
    printed, trace = _run(code, name, _make_page())
    if trace is not None:
        raise AssertionError(f"{name} raised on rank {rank}:\n{trace}")
    dist.barrier()  # a rank that ends early would break the others' connecting
    return printed


def _run_script(words: list[str], folder: str, out: str) -> None:
    _prepare(folder)
    with open(out, "w") as printed:
        os.dup2(printed.fileno(), 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # for the life of this process
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        sys.stdout.flush()


def _prepare(folder: str) -> None:
    import torch

    os.chdir(folder)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
