"""Sizes and habits of the source: short modules, short functions, everything documented, no surprises at import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shardkeep"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
PURE = ("spec", "format", "plan", "order")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def test_there_is_something_to_look_at() -> None:
    assert len(MODULES) > 50
    assert {name_of(path).split("/")[0] for path in MODULES} >= {*PURE, "engine", "manager"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_MODULE_LINES
    tree = parse(path)
    assert ast.get_docstring(tree) or path.name == "_version.py", "a module says what it owns"
    if len(tree.body) > 1:
        assert "from __future__ import annotations" in text


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions(parse(path))}
    assert {name: count for name, count in lengths.items() if count > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_pickle_and_no_global_randomness(path: Path) -> None:
    """The demo's training script stands for a user's, so it seeds; what other libraries do is what they do."""
    for node in ast.walk(parse(path)):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        assert not {name.split(".")[0] for name in names} & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
        if isinstance(node, ast.Call) and not name_of(path).startswith(("demo/train.py", "bench/contenders/")):
            called = ast.unparse(node.func)
            assert called not in {
                "random.seed", "np.random.seed", "numpy.random.seed", "torch.manual_seed", "torch.load", "torch.save",
                "eval", "exec", "breakpoint",
            }  # fmt: skip


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "knobs.py"], ids=name_of)
def test_the_environment_is_read_by_the_knobs_alone(path: Path) -> None:
    """The launcher's rendezvous variables are no settings of ours."""
    text = path.read_text(encoding="utf-8")
    if name_of(path) in {"ranks/connect.py"}:
        return
    assert "os.environ" not in text
    assert "os.getenv" not in text


@pytest.mark.parametrize("path", [p for p in MODULES if name_of(p).split("/")[0] in PURE], ids=name_of)
def test_pure_modules_hold_no_state(path: Path) -> None:
    for node in parse(path).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = [] if value is None else node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[union-attr]
        mutable = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
        final = isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation)
        assert not mutable or final or ast.unparse(targets[0]) == "__all__", ast.unparse(node)
        assert not any(isinstance(inner, ast.Global) for inner in ast.walk(node))
