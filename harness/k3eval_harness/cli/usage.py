"""``k3eval usage``: what calls cost, from a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from k3eval_harness.cli.common import fail, one_line_errors, print_json

if TYPE_CHECKING:
    from k3eval.meter.summary import Group
    from k3eval.results import Attempt


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("usage")(usage)


def usage(
    ledger: Annotated[
        Path | None,
        typer.Argument(
            help="A ledger (.sqlite or exported .jsonl) or the folder of a run.", show_default=False
        ),
    ] = None,
    scope: Annotated[str | None, typer.Option(help="Only rows of this budget scope.")] = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="Write every attempt to this file as JSON lines.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every attempt to this file as a table.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the sums as one JSON document.")] = False,
) -> None:
    """Print and export what calls cost: tokens and three costs, by host and model."""
    from k3eval.meter.ledger import totals
    from k3eval.meter.summary import find_ledger, groups, load_attempts, totals_to_json

    with one_line_errors():
        attempts = load_attempts(find_ledger(ledger), scope=scope)
        if jsonl is not None:
            _export(attempts, jsonl, "jsonl")
        if csv is not None:
            _export(attempts, csv, "csv")
        found = groups(attempts)
        if as_json:
            total = totals_to_json(totals(attempts))
            parts = [{"host": g.host, "model": g.model, **totals_to_json(g.totals)} for g in found]
            print_json({**total, "groups": parts})
        else:
            _print_table(found)


def _export(attempts: tuple[Attempt, ...], path: Path, kind: Literal["jsonl", "csv"]) -> None:
    from k3eval.meter.summary import export_attempts

    try:
        export_attempts(attempts, path, kind=kind)
    except OSError as error:
        raise fail(f"cannot write {path}: {error.strerror}") from error


def _print_table(found: tuple[Group, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    from k3eval.meter.pricing import plain

    table = Table(title="Usage by host and model")
    table.add_column("host / model")
    for name in (
        "calls",
        "attempts",
        "lost",
        "miss",
        "read",
        "write",
        "output",
        "billed",
        "computed",
        "ideal cache",
    ):
        table.add_column(name, justify="right")
    for group in found:
        total, used = group.totals, group.totals.usage
        counts = (
            total.calls,
            total.attempts,
            total.unknown,
            used.miss,
            used.cache_read,
            used.cache_write,
            used.output,
        )
        amounts = (total.cost.billed, total.cost.computed, total.cost.ideal_cache)
        table.add_row(
            f"{group.host} / {group.model}",
            *("-" if count is None else f"{count:,}" for count in counts),
            *("-" if amount is None else f"{plain(amount)} {total.cost.currency}" for amount in amounts),
        )
    Console().print(table if found else "the ledger has no rows")
