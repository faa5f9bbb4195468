"""The command's frame: which commands there are, how errors look, and what the exit code is.

A command's module is imported when it runs, so that `shardkeep ls` loads little more than click.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from shardkeep._version import __version__
from shardkeep.cli.output import escape_lines, write_error, write_json
from shardkeep.errors import CheckpointError, UsageError

COMMANDS: Final = {
    "ls": "List a run's checkpoints.",
    "show": "Show what a checkpoint holds.",
    "verify": "Check that every byte is what was written.",
    "diff": "Compare two checkpoints or files of tensors.",
    "prune": "Remove checkpoints by rule, and what failed saves left.",
    "rollback": "Make the next resume go on from an earlier step.",
    "doctor": "Check before a run that its places and this machine will do.",
    "audit": "Run a training command killed and unkilled, and compare.",
    "bench": "Measure saves and loads against this machine and other libraries.",
    "demo": "Train, kill and resume a small model, and prove it exact.",
}

EXIT_INTERNAL: Final = 70
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE: Final = 141


class CommandGroup(click.Group):
    """Loads a command's module when it is asked for; its help comes from the table above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"shardkeep.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name not in COMMANDS and not name.startswith("-"):
            raise UsageError(f"there is no command {name!r}", advice=_suggest(name))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _suggest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"did you mean 'shardkeep {near[0]}'?" if near else "shardkeep --help lists the commands"


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.version_option(__version__, prog_name="shardkeep", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.pass_context
def group(ctx: click.Context, debug: bool) -> int:
    """Look at, check, compare and prune checkpoints of training runs.

    RUN is the path of a run's folder; RUN@STEP names one step of it. Every command takes --json.
    """
    if ctx.invoked_subcommand is None:
        write_error(ctx.get_help())
        return UsageError.exit_code
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; prints errors instead of raising them."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = given[: given.index("--")] if "--" in given else given
    reporter = _Reporter(as_json="--json" in options, debug="--debug" in options)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _invoke(given)
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except (KeyboardInterrupt, click.Abort):
        write_error("interrupted")
        return EXIT_INTERRUPTED
    except CheckpointError as error:
        return reporter.report(error)
    except click.ClickException as error:
        hint = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "shardkeep"
        return reporter.report(UsageError(error.format_message(), advice=f"{hint} --help"))
    except Exception as error:  # noqa: BLE001  # the frame's last resort: said briefly, in full with --debug
        return reporter.report_unexpected(error)
    return code


def _invoke(arguments: list[str]) -> int:
    try:
        with group.make_context("shardkeep", arguments) as ctx:
            result: Any = group.invoke(ctx)
    except click.exceptions.Exit as end:
        return end.exit_code
    return result if isinstance(result, int) else 0


class _Reporter:
    def __init__(self, *, as_json: bool, debug: bool) -> None:
        self._as_json = as_json
        self._debug = debug

    def report(self, error: CheckpointError) -> int:
        """Print an error for a person on stderr and, with --json, as the one document on stdout."""
        self._trace(error)
        text = str(error)
        if error.advice:
            text = text.removesuffix(f"\n  next: {error.advice}")
        lines = [f"error: {escape_lines(text)}"]
        if error.advice:
            lines.append(f"next: {escape_lines(error.advice)}")
        write_error(*lines)
        self._document(type(error).__name__, text, error.exit_code, error)
        return error.exit_code

    def report_unexpected(self, error: Exception) -> int:
        self._trace(error)
        text = f"{type(error).__name__}: {error}"
        lines = [f"error: shardkeep failed in a way it should not: {escape_lines(text)}"]
        if not self._debug:
            lines.append("next: run it again as 'shardkeep --debug ...' and report the traceback")
        write_error(*lines)
        self._document(type(error).__name__, text, EXIT_INTERNAL, None)
        return EXIT_INTERNAL

    def _trace(self, error: Exception) -> None:
        if self._debug:
            import traceback

            write_error(escape_lines("".join(traceback.format_exception(error)).rstrip()))

    def _document(self, kind: str, text: str, code: int, error: CheckpointError | None) -> None:
        if not self._as_json:
            return
        where = {name: getattr(error, name, None) for name in ("advice", "step", "rank", "key")}
        write_json({"error": {"type": kind, "message": text, "exit_code": code, **where}})
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
