"""Shared by the commands: exit codes, one-line errors, JSON output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import typer

_SHOWN = 200


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    THRESHOLD = 1
    USAGE = 2
    VOID = 3
    BUDGET = 4
    INTERRUPTED = 130


def fail(message: str, code: Exit = Exit.USAGE) -> typer.Exit:
    """Print one line on stderr and return the exit, to be raised by the caller."""
    print(f"k3eval: {message}", file=sys.stderr)  # noqa: T201 - the command line's own output
    return typer.Exit(int(code))


def note(message: str) -> None:
    """Print one line on stderr that asks for attention and stops nothing."""
    print(f"k3eval: note: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201 - see above


def out_option(help_text: str) -> Any:  # typer's own options have no better type
    """The option ``--out``: a path, never the empty text, which would mean the current folder."""
    return typer.Option("--out", help=help_text, parser=_out_path, metavar="PATH")


def _out_path(text: str | Path) -> Path:
    if not str(text).strip():
        raise typer.BadParameter("a path is needed, not an empty text")
    return Path(text)


def help_without_command(context: typer.Context) -> None:
    """Callback of a group of commands: named alone it shows its help, on stderr, and exits as misuse does."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)  # noqa: T201 - the command line's own output
        raise typer.Exit(int(Exit.USAGE))


def print_json(data: object) -> None:
    """Print one JSON document on stdout."""
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    json.dump(data, sys.stdout, ensure_ascii=ascii_only, indent=2)
    sys.stdout.write("\n")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the project's own errors into one line on stderr and the right exit code.

    The local backend's errors derive from ``ValueError``, ``OSError`` or its ``LocalError`` and are
    caught by the commands that call it, so that this module needs neither torch nor the backend.
    """
    from k3eval.errors import K3EvalError
    from k3eval_harness.errors import Cancelled, HarnessError

    try:
        yield
    except Cancelled as error:
        raise fail(error.message, Exit.INTERRUPTED) from error
    except (HarnessError, K3EvalError) as error:
        code = {"budget": Exit.BUDGET, "user": Exit.USAGE}.get(error.cause, Exit.VOID)
        raise fail(" ".join(error.message.split()), code) from error
    except OSError as error:
        # what no part foresaw: a full disk, a name longer than the file system takes
        place = f"{str(error.filename)[:_SHOWN]}: " if error.filename else ""
        raise fail(f"{place}{error.strerror or error}", Exit.VOID) from error
    except KeyboardInterrupt:
        raise fail("interrupted", Exit.INTERRUPTED) from None
