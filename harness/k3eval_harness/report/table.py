"""A job's report on the terminal: one row a task, then score, tokens, cost and decode speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3eval_harness.progress import known_cost, money
from k3eval_harness.report.build import COMPLETE, JobReport, TaskRow

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("task", "passed", "failed", "void", "turns", "miss", "read", "write", "output", "cost", "seconds")
PROMPT_COLUMNS = ("miss", "read", "write")
"""Left out on a narrow terminal, where task names would be cut to pieces; the line below has their sums."""
WIDE = 100
"""Columns of a terminal that has room for all."""


def print_report(console: Console, report: JobReport) -> None:
    """Print the table and the summary lines."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = [name for name in COLUMNS if console.width >= WIDE or name not in PROMPT_COLUMNS]
    for name in shown:
        table.add_column(name, justify="left" if name == "task" else "right", overflow="fold")
    for row in report.tasks:
        cells = dict(zip(COLUMNS, _cells(row), strict=True))
        table.add_row(*(Text(cells[name]) for name in shown))
    console.print(table)
    console.print()
    for line in summary_lines(report):
        console.print(line, markup=False)


def summary_lines(report: JobReport) -> tuple[str, ...]:
    """What a reader must know beside the table; plain text, one statement a line."""
    lines = [_score_line(report)]
    if report.state != COMPLETE:
        lines.append(f"State: {report.state}.")
    if report.void_causes:
        lines.append(
            "Void (not in the score): " + ", ".join(f"{c} {n}" for c, n in report.void_causes.items())
        )
        lines.extend(f"  {line}" for line in report.void_details[:5])
    if report.model and report.model.weights:
        lines.append(f"Model {report.model.name}, weights: {report.model.weights}.{_random(report)}")
    if report.contexts:
        t, c = report.tokens, report.costs
        lines.append(
            f"Tokens: {t.miss} miss, {_known(t.cache_read)} read, {_known(t.cache_write)} written, "
            f"{t.output} output. Context up to {report.contexts.largest} (median {report.contexts.median})."
        )
        lines.append(
            f"Cost: billed {money(c.billed, c.currency)}, computed {money(c.computed, c.currency)}, "
            f"with a perfect prefix cache {money(c.ideal_cache, c.currency)}."
        )
        lines.append(_decode_line(report))
    return tuple(lines)


def _random(report: JobReport) -> str:
    random = report.model is not None and (report.model.weights or "").startswith("random")
    return " Random weights solve nothing: this shows the machinery and its speed." if random else ""


def _score_line(report: JobReport) -> str:
    if report.score is None:
        return f"No valid trial of {report.planned}: there is no score."
    interval = report.score_interval
    bounds = f" ({interval.low:.3f} to {interval.high:.3f}, {interval.method})" if interval else ""
    return (
        f"Score {report.score:.3f}{bounds}: {report.passed} passed, {report.failed} failed, "
        f"{report.void} void; coverage {report.coverage or 0:.0%}."
    )


def _decode_line(report: JobReport) -> str:
    bins = report.decode.bins
    if not bins:
        reasons = ", ".join(f"{reason} {n}" for reason, n in report.decode.void.items())
        return f"Decode: no reply could be measured ({reasons})."
    parts = [
        f"{1 / b.seconds_per_token.median:.1f} tok/s at {b.low}-{b.high - 1} (n={b.seconds_per_token.n})"
        for b in bins
        if b.seconds_per_token.median > 0
    ]
    return "Decode: " + ", ".join(parts)


def _cells(row: TaskRow) -> tuple[str, ...]:
    tokens, costs = row.tokens, row.costs
    return (
        row.task,
        str(row.passed),
        str(row.failed),
        str(row.void),
        "-" if row.turns is None else f"{row.turns:g}",
        str(tokens.miss),
        _known(tokens.cache_read),
        _known(tokens.cache_write),
        str(tokens.output),
        money(known_cost(costs), costs.currency),
        "-" if row.wall_s is None else f"{row.wall_s:.1f}",
    )


def _known(value: int | None) -> str:
    return "-" if value is None else str(value)
