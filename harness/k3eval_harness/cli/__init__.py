"""The command line, ``k3eval``. One module a command: parse, call, render.

Command modules import only typer and the standard library at import time; everything heavy
(torch, docker, pandas, openai) is imported inside the command that needs it.
"""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from typing import TextIO

import typer

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

app = typer.Typer(
    name="k3eval",
    help="Measure Kimi K3 on your own repositories: pass rate, cost, decode speed at real context lengths.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain errors and help; rich alone costs 100 ms of start-up
    add_completion=False,
)


def _register() -> None:
    for name in COMMAND_MODULES:
        importlib.import_module(f"k3eval_harness.cli.{name}").register(app)


_register()


def main() -> None:
    """Entry point of the console script."""
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
    print(f"k3eval: note: {' '.join(str(message).split())}", file=sys.stderr)  # noqa: T201 - see above
