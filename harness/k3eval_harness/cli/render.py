"""Consoles and tables of the commands. rich is imported on use."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 160
"""Columns where the output is no terminal: wide enough that no cell is cut."""


def console(*, stderr: bool = False) -> Console:
    """A console on stdout, or on stderr for progress and notes."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def watched() -> bool:
    """Whether a person watches: both streams are terminals, so that a live display disturbs nobody."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    title: str | None = None,
) -> None:
    """A table on stdout; the columns named in ``right`` are figures. Texts are shown without markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)


def say(text: str) -> None:
    """One or more lines on stdout, without markup."""
    console().print(text, markup=False)


def write_text(text: str, out: Path | None) -> None:
    """Write a document to ``out``, whole or not at all, else to stdout.

    Raises:
        UsageError: the file cannot be written.
    """
    if out is None:
        sys.stdout.write(text)
        return
    from k3eval_harness.errors import UsageError

    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; choose another --out") from None
