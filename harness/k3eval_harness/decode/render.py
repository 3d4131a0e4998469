"""A sweep's result as lines of a table, for the terminal and for Markdown. Formats only."""

from __future__ import annotations

from decimal import Decimal

from k3eval_harness.decode.records import ContextRow, SweepResult
from k3eval_harness.decode.series import Spread
from k3eval_harness.progress import known_cost, money

COLUMNS = (
    "model",
    "context",
    "TTFT cold s",
    "TTFT warm s",
    "ms/token",
    "spread",
    "tok/s",
    "n",
    "1k tokens uncached",
    "1k tokens cached",
    "estimator error",
)
CACHED_NOTE = 0.2
"""Share of the cold prompts from which a cache is worth a note; the chat template alone is shared by all."""
FIGURES = COLUMNS[1:]
"""The right-aligned ones."""


def table_rows(result: SweepResult) -> list[tuple[str, ...]]:
    """One tuple of texts per row, in the order of ``COLUMNS``; a dash is an unknown figure."""
    return [_row(row) for row in result.rows]


def notes(result: SweepResult) -> list[str]:
    """What must be read beside the table, one statement a line."""
    provenance = (
        f"Prompts cut from {result.corpus.package} {result.corpus.version} "
        f"(sha256 {result.corpus.sha256[:12]}), {result.output_tokens} output tokens a call, "
        f"{result.repeats} repeats, seed {result.seed}; contexts are tokens as billed, 1k = 1024. "
        "ms/token: median over cold and warm calls; spread: quartiles."
    )
    lines = [provenance]
    if result.price_rows:
        lines.append(f"Prices: {', '.join(result.price_rows)}; one call that writes 1,000 tokens.")
        spent, currency = known_cost(result.costs), result.costs.currency
        lines.append(f"This sweep cost {money(spent, currency)}, the warm-up with it.")
    else:
        lines.append("No price is known for these models; the 1k columns are seconds of one such call.")
    lines.extend(_fit_line(result, index) for index in range(len(result.fits)))
    for twin in result.twin:
        bounds = _bounds(twin.ratio)
        lines.append(
            f"At {twin.context}: {result.models[1].name} needs {twin.ratio.median:.2f} times the seconds per "
            f"token of {result.models[0].name}{bounds} (n={twin.ratio.n})."
        )
    lines.extend(_warnings(result))
    return lines


def markdown(result: SweepResult) -> str:
    """The table with its command, models and notes."""
    head = [f"# Decode cost against context: {', '.join(m.name for m in result.models)}", ""]
    head += [f"    {result.command}", ""]
    models = [f"- {m.name}: {m.weights or 'weights not stated'}" for m in result.models]
    table = [_line(COLUMNS), "|" + "---|" * len(COLUMNS), *map(_line, table_rows(result))]
    p = result.provenance
    place = f"k3eval {p.k3eval_version}, {p.git_commit or 'no commit'}, Python {p.python}, {p.platform}"
    tail = [f"{note}\n" for note in notes(result)]
    when = f"Measured {result.finished_at:%Y-%m-%d}; {place}."
    return "\n".join([*head, *models, "", *table, "", *tail, when, ""])


def _row(row: ContextRow) -> tuple[str, ...]:
    speed = row.seconds_per_token
    return (
        row.model,
        "-" if row.prompt_tokens is None else str(row.prompt_tokens),
        _median(row.ttft_cold_s),
        _median(row.ttft_warm_s),
        f"{1000 * speed.median:.3g}" if speed else "-",
        f"{1000 * speed.q1:.3g} to {1000 * speed.q3:.3g}" if speed else "-",
        f"{1 / speed.median:.1f}" if speed and speed.median > 0 else "-",
        str(speed.n) if speed else "0",
        _price_or_seconds(row.cost_1k_uncached, row.seconds_1k_uncached, row.currency),
        _price_or_seconds(row.cost_1k_cached, row.seconds_1k_cached, row.currency),
        "-" if row.estimator_error is None else f"{row.estimator_error:.2%}",
    )


def _warnings(result: SweepResult) -> list[str]:
    lines: list[str] = []
    if result.stopped:
        lines.append(f"The sweep ended early ({result.stopped}); rows hold what was measured until then.")
    for row in result.rows:
        where = f"{row.model} at {row.context}"
        if row.failed:
            error = next(
                c.error for c in result.calls if c.error and (c.model, c.context) == (row.model, row.context)
            )
            lines.append(f"{where}: {row.failed} of {row.calls} calls failed: {error}")
        if row.void:
            reasons = ", ".join(f"{reason} ({n})" for reason, n in row.void.items())
            lines.append(f"{where}: not measured: {reasons}")
        if (row.cached_share_cold or 0) > CACHED_NOTE:
            lines.append(f"{where}: {row.cached_share_cold:.0%} of the cold prompts came from a cache.")
        if row.prompt_tokens is not None and abs(row.prompt_tokens - row.context) > 0.02 * row.context:
            lines.append(f"{where}: the model read {row.prompt_tokens} tokens.")
        short = [c.tokens.output for c in result.calls if c.error is None and c.model == row.model]
        if row.context == result.contexts[0] and any(n != result.output_tokens for n in short):
            lines.append(f"{row.model}: replies had {min(short)} to {max(short)} output tokens.")
    return lines


def _fit_line(result: SweepResult, index: int) -> str:
    model, fit = result.fits[index].model, result.fits[index].fit
    bounds = ""
    if fit.b_interval:
        low, high = fit.b_interval.low * 1e6, fit.b_interval.high * 1e6
        bounds = f" ({low:.3g} to {high:.3g})"
    return (
        f"{model}: {1000 * fit.a_s:.3g} ms per token, plus {fit.b_s_per_token * 1e6:.3g}{bounds} ms "
        f"for every 1,000 tokens of context (n={fit.n})."
    )


def _bounds(spread: Spread) -> str:
    if spread.interval is None:
        return ""
    return f" ({spread.interval.low:.2f} to {spread.interval.high:.2f} at {spread.interval.level:.0%})"


def _median(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.3g}"


def _price_or_seconds(amount: Decimal | None, seconds: float | None, currency: str) -> str:
    if amount is not None:
        return money(amount, currency)
    return "-" if seconds is None else f"{seconds:.3g} s"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
