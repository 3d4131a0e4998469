"""The command line put together: the commands, the root options, errors of use in one line.

Command modules import only typer and the standard library at import time; everything heavy
(torch, docker, pandas, openai) is imported inside the command that needs it.
"""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from k3eval_harness.cli.common import Exit, fail, help_without_command, note

COMMAND_MODULES = (
    "run",
    "tasks",
    "bench",
    "report",
    "models",
    "model",
    "serve",
    "usage",
    "doctor",
)
"""Each is ``k3eval_harness.cli.NAME`` with a function ``register(app: typer.Typer) -> None``."""


class OneLineErrors(TyperGroup):
    """The root command: what the parser refuses is one line on stderr, not a block with the usage."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line and exit."""
        try:
            sys.exit(super().main(*args, **options | {"standalone_mode": False}))
        except typer.TyperException as error:
            sys.exit(fail(_parser_error(error)).exit_code)
        except typer.Abort:  # the end of the input at a prompt
            sys.exit(Exit.INTERRUPTED)


def _parser_error(error: typer.TyperException) -> str:
    """What is wrong with the command line, in one line, and where its help is."""
    context = getattr(error, "ctx", None)  # absent where an option lacks its value
    command = context.command_path if context else "k3eval"
    reason = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    return f"{reason[:1].lower()}{reason[1:]} (see `{command} --help`)"


app = typer.Typer(
    cls=OneLineErrors,
    name="k3eval",
    help="Measure Kimi K3 on your own repositories: pass rate, cost, decode speed at real context lengths.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain errors and help; rich alone costs 100 ms of start-up
    add_completion=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from k3eval import __version__

        print(f"k3eval {__version__}")  # noqa: T201 - what the option is for
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    help_without_command(context)


def _register() -> None:
    for name in COMMAND_MODULES:
        importlib.import_module(f"k3eval_harness.cli.{name}").register(app)


_register()


def start() -> None:
    """Run the command line of this process: never returns, raises SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal in ASCII is no reason to crash
    warnings.showwarning = _show_warning
    app()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning is a note to the user in one line, without the place in our sources."""
    note(str(message))
