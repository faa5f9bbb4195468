"""The frame around all commands: errors, exit codes, what is imported, how fast it starts."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shardkeep import __version__
from shardkeep.cli.main import COMMANDS
from shardkeep.cli.output import escape, format_table
from shardkeep.engine.run import WRITER, claim_generation, create_run
from shardkeep.format.names import StepRef
from shardkeep.format.records import CommitRecord, Facts, LayoutTable, PartSummary, encode_metrics, encode_record
from shardkeep.storage.posix import PosixStore
from shardkeep.types import format_bytes
from tests.cli.runner import shardkeep
from tests.support.fake_state import FakeRun, small_state

BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
from shardkeep.cli.main import main
code = main(sys.argv[1:])
print(sorted(set(LOADED) & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


def run_blocked(*arguments: object, blocked: tuple[str, ...] = ("torch",)) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that cannot import `blocked`; its last line on stderr names heavy modules."""
    script = f"BLOCKED = {blocked!r}\nLOADED = ('torch', 'numpy', 'rich', 'multiprocessing')\n{BLOCKER}"
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    made = FakeRun(tmp_path_factory.mktemp("run"))
    made.save(10, small_state(1))
    made.save(20, small_state(2))
    return made


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("ls", "RUN"), 0),
        (("ls", "--all", "RUN"), 0),
        (("show", "RUN", "--tree", "--shards", "--values"), 0),
        (("verify", "RUN"), 0),
        (("diff", "RUN@10", "RUN@20"), 1),
        (("prune", "RUN", "--keep-last", "1"), 0),
        (("rollback", "RUN", "10"), 0),
    ],
)
def test_every_command_works_where_torch_cannot_be_imported(
    run: FakeRun, arguments: tuple[str, ...], code: int
) -> None:
    """torchsnapshot#43 and others: a login node has no torch."""
    done = run_blocked(*(text.replace("RUN", str(run.root)) for text in arguments))
    assert done.returncode == code, done.stderr
    assert "torch" not in done.stderr.splitlines()[-1]


def test_ls_loads_nothing_heavy(run: FakeRun) -> None:
    done = run_blocked("ls", run.root)
    assert done.stderr.splitlines()[-1] == "[]"


def test_demo_says_that_it_needs_torch() -> None:
    done = run_blocked("demo")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the demo trains a model and needs torch")
    assert "next: pip install torch" in done.stderr


def test_a_url_says_which_extra_it_needs() -> None:
    done = run_blocked("ls", "s3://bucket/run", blocked=("obstore",))
    assert done.returncode == 64
    assert done.stderr.startswith("error: s3:// URLs need obstore, which is not installed")
    assert 'next: pip install "shardkeep[objects]"' in done.stderr


def make_synthetic_run(root: Path, step_count: int) -> None:
    store = PosixStore(root)
    run_id = create_run(store)
    claim_generation(store, run_id, None, world_size=1, environment={})
    for number in range(step_count):
        ref = StepRef(step=number * 10, generation=1)
        facts = Facts(
            layout=LayoutTable(meshes=(), tensors={}),
            holders=(),
            metrics=encode_metrics({"loss": 1.0 / (number + 1)}),
            created_at="2026-01-01T00:00:00+00:00",
        )
        record = CommitRecord(
            run_id=run_id,
            ref=ref,
            world_size=1,
            plan="0" * 64,
            parts=(PartSummary(100, "0" * 64, 1000, 1),),
            facts=facts,
        )
        path = root / ref.key("commit.json")
        path.parent.mkdir(parents=True)
        path.write_bytes(encode_record(record, writer=WRITER))


def test_ls_of_a_thousand_checkpoints_is_quick(tmp_path: Path) -> None:
    """200 ms on an idle machine. Processor time is measured, the best of three, with room for a busy one."""
    make_synthetic_run(tmp_path, 1000)
    spent: list[float] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "shardkeep.cli.main", "ls", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert len(done.stdout.splitlines()) == 1002
    assert "latest" in done.stdout.splitlines()[1000]
    assert min(spent) < 0.45, spent


def test_version_and_help() -> None:
    assert shardkeep("--version").out == f"shardkeep {__version__}\n"
    help_text = shardkeep("--help")
    assert help_text.code == 0
    assert all(f"  {name} " in help_text.out for name in COMMANDS)
    assert shardkeep("verify", "--help").code == 0


def test_no_command_shows_the_help_as_a_usage_error() -> None:
    result = shardkeep()
    assert result.code == 64
    assert "Commands:" in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("lss",), "did you mean 'shardkeep ls'?"),
        (("verfy", "x"), "did you mean 'shardkeep verify'?"),
        (("qqqq",), "shardkeep --help"),
        (("ls",), "Missing argument 'RUN'"),
        (("ls", "x", "--nope"), "No such option"),
        (("prune", "x", "--keep-last", "-1"), "-1"),
        (("verify", "x", "--step", "many"), "expected a step number"),
        (("verify", "x@10", "--step", "20"), "given twice"),
        (("ls", ""), "expected a path"),
        (("ls", "ftp://bucket/run"), "there is no store for 'ftp'"),
    ],
)
def test_usage_errors_exit_with_64_and_say_what_to_type(arguments: tuple[str, ...], text: str) -> None:
    result = shardkeep(*arguments)
    assert result.code == 64
    assert result.err.startswith("error: ")
    assert "\nnext: " in result.err
    assert text in result.err
    assert result.out == ""


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune"])
def test_no_run_exits_with_10(tmp_path: Path, command: str) -> None:
    result = shardkeep(command, tmp_path / "nothing")
    assert (result.code, result.out) == (10, "")
    assert "there is no run here" in result.err
    assert not (tmp_path / "nothing").exists()


def test_with_json_an_error_is_the_document(run: FakeRun) -> None:
    result = shardkeep("show", run.root, "--step", "15", "--json")
    assert result.code == 10
    assert result.json["error"]["type"] == "NotFound"
    assert result.json["error"]["exit_code"] == 10
    assert result.json["error"]["step"] == 15
    assert result.err.startswith("error: ")
    assert shardkeep("ls", "--json").json["error"]["exit_code"] == 64


def test_an_unexpected_error_is_brief_and_debug_shows_all(run: FakeRun) -> None:
    script = textwrap.dedent(
        """
        import sys
        import shardkeep.cli.ls as ls
        import shardkeep.cli.main as main
        def fail(**options):
            raise ZeroDivisionError("boom")
        ls.command.callback = fail
        sys.exit(main.main(sys.argv[1:]))
        """
    )
    command = [sys.executable, "-c", script]
    brief = subprocess.run([*command, "ls", "x", "--json"], capture_output=True, text=True, check=False)
    assert brief.returncode == 70
    assert "Traceback" not in brief.stderr
    assert "ZeroDivisionError: boom" in brief.stderr
    assert json.loads(brief.stdout)["error"]["type"] == "ZeroDivisionError"
    full = subprocess.run([*command, "--debug", "ls", "x"], capture_output=True, text=True, check=False)
    assert full.returncode == 70
    assert "Traceback" in full.stderr


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_a_closed_pipe_is_quiet(run: FakeRun, extra: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "shardkeep.cli.main", "ls", str(run.root), *extra]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `| head` does when it has seen enough
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == ""


def test_an_interrupt_exits_with_130() -> None:
    script = textwrap.dedent(
        """
        import sys
        import shardkeep.cli.ls as ls
        import shardkeep.cli.main as main
        def interrupt(**options):
            raise KeyboardInterrupt
        ls.command.callback = interrupt
        sys.exit(main.main(["ls", "x"]))
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_output_in_a_plain_encoding_does_not_fail(tmp_path: Path) -> None:
    root = tmp_path / "läuf\u202e"
    FakeRun(root).save(1, small_state())
    done = subprocess.run(
        [sys.executable, "-m", "shardkeep.cli.main", "show", str(root)],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1", "PATH": ""},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u202e" in done.stdout


def test_escape_leaves_no_control_characters() -> None:
    hostile = "a\x1b[31m\x07b\u202ec\ud800\n\u2028ä"
    assert escape(hostile) == "a\\x1b[31m\\x07b\\u202ec\\ud800\\n\\u2028ä"
    assert escape("plain/name.weight") == "plain/name.weight"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 10**12, "4.5 TiB"), (1 << 70, "1024.0 EiB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_format_table_aligns_and_escapes() -> None:
    assert format_table(["A", "B"], [["x\n", "1"], ["yy", "22"]], right="B") == [
        "A     B",
        "x\\n   1",
        "yy   22",
    ]
