"""What a ledger says in short: sums by host and model, read from SQLite or from an exported JSONL file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from k3eval.errors import ConfigError
from k3eval.jsontypes import JsonObject, read_json
from k3eval.meter.ledger import Ledger, attempt_from_json, totals, write_rows
from k3eval.meter.pricing import plain
from k3eval.results import Attempt, Totals

LEDGER_NAME: Final = "ledger.sqlite"


@dataclass(frozen=True, slots=True)
class Group:
    """The calls to one model at one host."""

    host: str
    model: str
    totals: Totals


def find_ledger(path: str | os.PathLike[str] | None) -> Path:
    """Return the ledger that a user means: a file, the folder of a run, or the default; ``ConfigError`` if
    none.
    """
    found = Ledger.default_path() if path is None else Path(path).expanduser()
    if found.is_dir():
        found = found / LEDGER_NAME
    if not found.is_file():
        raise ConfigError(f"no ledger at {found}: name a ledger file or the folder of a run")
    return found


def load_attempts(path: Path, *, scope: str | None = None) -> tuple[Attempt, ...]:
    """Read the rows of a ledger file, or of a ``.jsonl`` export."""
    if path.suffix == ".jsonl":
        rows = []
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            try:
                rows.append(attempt_from_json(read_json(line)))
            except (ValueError, ConfigError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
        return tuple(row for row in rows if scope is None or row.scope == scope)
    with Ledger(path) as ledger:
        return tuple(ledger.attempts(scope=scope))


def export_attempts(attempts: Iterable[Attempt], out: Path, *, kind: Literal["csv", "jsonl"]) -> int:
    """Write rows to a file, whole or not at all; return how many."""
    part = out.with_name(out.name + ".part")
    try:
        with part.open("w", encoding="utf-8", newline="") as stream:
            count = write_rows(attempts, stream, kind=kind)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return count


def groups(attempts: Iterable[Attempt]) -> tuple[Group, ...]:
    """Sum rows up by host and model."""
    found: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        found.setdefault((attempt.served_by or attempt.host, attempt.model), []).append(attempt)
    return tuple(Group(host, model, totals(rows)) for (host, model), rows in sorted(found.items()))


def totals_to_json(total: Totals) -> JsonObject:
    """Return sums as JSON: amounts as strings, unknown as null."""
    usage = total.usage
    return {
        "calls": total.calls,
        "attempts": total.attempts,
        "unknown": total.unknown,
        "tokens": {
            "miss": usage.miss,
            "cache_read": usage.cache_read,
            "cache_write": usage.cache_write,
            "output_text": usage.output_text,
            "output_reasoning": usage.output_reasoning,
        },
        "costs": [
            {
                "currency": cost.currency,
                "billed": plain(cost.billed),
                "computed": plain(cost.computed),
                "ideal_cache": plain(cost.ideal_cache),
            }
            for cost in total.by_currency
        ],
    }
