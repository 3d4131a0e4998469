"""``k3eval usage``: what calls cost, from a ledger."""

from __future__ import annotations

from decimal import Decimal
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
            _print_groups(found)


def _export(attempts: tuple[Attempt, ...], path: Path, kind: Literal["jsonl", "csv"]) -> None:
    from k3eval.meter.summary import export_attempts

    try:
        export_attempts(attempts, path, kind=kind)
    except OSError as error:
        raise fail(f"cannot write {path}: {error.strerror}") from error


def _print_groups(found: tuple[Group, ...]) -> None:
    from k3eval_harness.cli.render import say

    say("\n".join(_block(group) for group in found) if found else "the ledger has no rows")


def _block(group: Group) -> str:
    """One host and model in four lines that fit a narrow terminal."""
    total, used, cost = group.totals, group.totals.usage, group.totals.cost
    tokens = {
        "miss": used.miss,
        "read": used.cache_read,
        "write": used.cache_write,
        "output": used.output,
    }
    costs = {"billed": cost.billed, "computed": cost.computed, "ideal cache": cost.ideal_cache}
    counts = {"calls": total.calls, "attempts": total.attempts, "lost": total.unknown}
    return "\n".join(
        [
            f"{group.host} / {group.model}",
            "  count   " + _row({name: f"{count:,}" for name, count in counts.items()}),
            "  tokens  " + _row({name: "-" if n is None else f"{n:,}" for name, n in tokens.items()}),
            "  cost    " + _row({name: _amount(amount, cost.currency) for name, amount in costs.items()}),
        ]
    )


def _row(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _amount(amount: Decimal | None, currency: str) -> str:
    from k3eval.meter.pricing import plain

    return "-" if amount is None else f"{plain(amount)} {currency}"
