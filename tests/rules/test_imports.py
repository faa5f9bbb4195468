"""What an import pulls in: the pure layers need neither torch nor anything that has an effect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "shardkeep"

# Standard modules were loaded before, by the interpreter or by msgspec; what counts is who asks for them now.
HOOK = """
import builtins, sys
FORBIDDEN = {forbidden!r}
real = builtins.__import__

def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    asker = (globals or {{}}).get("__name__", "")
    top = name.split(".")[0]
    everywhere = top in ("torch",)
    pure = asker.startswith(("shardkeep.spec", "shardkeep.format", "shardkeep.plan", "shardkeep.order"))
    if level == 0 and top in FORBIDDEN and (pure or everywhere):
        raise ImportError(f"{{asker}} asked for {{name}}")
    return real(name, globals, locals, fromlist, level)

builtins.__import__ = guarded
"""

EFFECTS = (
    "torch", "os", "io", "time", "random", "secrets", "socket", "subprocess", "pathlib", "shutil", "threading",
    "tempfile", "asyncio", "multiprocessing", "concurrent", "uuid", "datetime", "logging",
)  # fmt: skip


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def pure_modules() -> list[str]:
    found = [path for layer in ("spec", "format", "plan", "order") for path in (SOURCE / layer).glob("*.py")]
    names = [f"shardkeep.{path.parent.name}.{path.stem}".removesuffix(".__init__") for path in found]
    return sorted(names)


def test_pure_layers_load_and_work_without_torch_or_effects() -> None:
    assert len(pure_modules()) > 20
    run(
        HOOK.format(forbidden=EFFECTS)
        + "import importlib\n"
        + f"for name in {pure_modules()!r}:\n    importlib.import_module(name)\n"
        + "from shardkeep.plan.structure import HeldTensor, Holding, Structure, plan_layout\n"
        + "tensor = HeldTensor(key='m/w', section='m', name='w', dtype='float32', shape=(4,), role='state')\n"
        + "plan_layout([Holding(ranks=(0, 1), structure=Structure(tensors=(tensor,)))])\n"
        + "assert 'torch' not in sys.modules\n"
    )


def test_the_hook_sees_what_it_should() -> None:
    program = HOOK.format(forbidden=EFFECTS) + (
        "import types\n"
        "module = types.ModuleType('shardkeep.plan.evil')\n"
        "try:\n    exec('import os', module.__dict__)\n"
        "except ImportError as error:\n    print(error)\n"
    )
    assert run(program).strip() == "shardkeep.plan.evil asked for os"


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    run("import sys, shardkeep\nassert not {'torch', 'numpy', 'msgspec', 'click', 'rich'} & set(sys.modules)\n")


@pytest.mark.parametrize(
    "names",
    [
        "Keep Best Steps Event EventSink StorageError register_type",
        "Checkpoint CheckpointManager open save load ResumeReport",
    ],
)
def test_names_for_the_login_node_load_without_torch(names: str) -> None:
    run(
        HOOK.format(forbidden=("torch",))
        + "import shardkeep\n"
        + f"for name in {names.split()!r}:\n    getattr(shardkeep, name)\n"
        + "assert 'torch' not in sys.modules\n"
    )


def test_a_missing_torch_is_named() -> None:
    out = run(
        "import sys\nsys.modules['torch'] = None\nimport shardkeep\n"
        "try:\n    shardkeep.PerRank\nexcept ModuleNotFoundError as error:\n    print(error.name, error)\n"
    )
    assert out.startswith("torch shardkeep.PerRank needs torch")
