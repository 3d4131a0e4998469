"""What a running job shows: a live table on a terminal, else one plain line per finished trial on stderr.

``JobView`` folds the events into rows and totals; the observers only draw it. rich is imported on use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import IO, TYPE_CHECKING

from k3eval_harness.engine import events
from k3eval_harness.results.schema import Costs, JobSummary, Outcome, TokenCounts, TrialRecord, TurnRecord
from k3eval_harness.results.sums import sum_tokens

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

COLOURS = {Outcome.PASSED: "green", Outcome.FAILED: "red", Outcome.VOID: "yellow"}


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial as it is shown. Tokens and cost are those of its finished turns."""

    trial_id: str
    task: str
    attempt: int
    state: str = "queued"
    turn: int = 0
    context_tokens: int | None = None
    tokens: TokenCounts = field(default_factory=TokenCounts)
    billed: Decimal | None = None
    currency: str = "USD"
    tok_s: float | None = None
    """Decode speed of the call in flight, else of the last measured turn."""
    outcome: Outcome | None = None


class JobView:
    """The state of a job as its events tell it."""

    def __init__(self) -> None:
        self.started: events.JobStarted | None = None
        self.summary: JobSummary | None = None
        self.rows: dict[str, TrialRow] = {}
        self.records: list[TrialRecord] = []

    def apply(self, event: events.JobEvent) -> None:
        """Fold one event into the view."""
        if isinstance(event, events.JobStarted):
            self.started = event
        elif isinstance(event, events.JobFinished):
            self.summary = event.summary
        elif isinstance(event, events.TrialStarted):
            self.rows[event.trial_id] = TrialRow(event.trial_id, event.task, event.attempt, state="started")
        elif event.trial_id in self.rows:
            self.rows[event.trial_id] = self._next_row(self.rows[event.trial_id], event)
        if isinstance(event, events.TrialFinished):
            self.records.append(event.record)

    def _next_row(
        self,
        row: TrialRow,
        event: events.TrialPhase
        | events.TurnStarted
        | events.TokenTick
        | events.TurnFinished
        | events.TrialFinished,
    ) -> TrialRow:
        if isinstance(event, events.TrialPhase):
            return replace(row, state=event.phase)
        if isinstance(event, events.TurnStarted):
            context = row.context_tokens if event.context_tokens is None else event.context_tokens
            return replace(row, turn=event.turn, context_tokens=context)
        if isinstance(event, events.TokenTick):
            return replace(row, tok_s=row.tok_s if event.tok_s is None else event.tok_s)
        if isinstance(event, events.TurnFinished):
            return _after_turn(row, event.turn)
        record = event.record
        return replace(
            row,
            state=record.outcome.value,
            outcome=record.outcome,
            turn=len(record.turns) or row.turn,
            tokens=record.tokens,
            billed=known_cost(record.costs),
            currency=record.costs.currency,
        )

    def counts(self) -> dict[Outcome, int]:
        """Finished trials by outcome."""
        return {outcome: sum(r.outcome is outcome for r in self.records) for outcome in Outcome}


class PlainProgress:
    """One line of ``key=value`` pairs per finished trial; nothing else."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def on_event(self, event: events.JobEvent) -> None:
        """Print a finished trial."""
        if isinstance(event, events.TrialFinished):
            print(plain_line(event.record), file=self.stream, flush=True)


class LiveProgress:
    """A rich table that is redrawn in place: running trials, then the latest finished ones, then totals."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.view = JobView()

    def on_event(self, event: events.JobEvent) -> None:
        """Take one event; the display refreshes by itself."""
        self.view.apply(event)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield live_table(self.view, max_rows=max(4, console.height - 6))


@contextmanager
def progress(console: Console, live: bool) -> Iterator[events.JobObserver]:
    """The observer for this console: ``live`` when a person watches a terminal, else plain lines."""
    if not live:
        yield PlainProgress(console.file)
        return
    from rich.live import Live

    shown = LiveProgress(console)
    with Live(shown, console=console, refresh_per_second=4, transient=True):
        yield shown


def plain_line(record: TrialRecord) -> str:
    """A finished trial as ``key=value`` pairs; unknown is ``-`` and values hold no spaces."""
    tokens, cost = record.tokens, known_cost(record.costs)
    speeds = [t.decode.seconds_per_token for t in record.turns if t.decode.seconds_per_token]
    pairs: dict[str, object] = {
        "trial": record.trial_id,
        "task": record.task.name,
        "attempt": record.attempt,
        "outcome": record.outcome.value,
        "cause": record.cause or "-",
        "stop": record.stop_reason,
        "turns": len(record.turns),
        "miss": tokens.miss,
        "read": _or_dash(tokens.cache_read),
        "write": _or_dash(tokens.cache_write),
        "output": tokens.output,
        "cost": "-" if cost is None else f"{cost}{record.costs.currency}",
        "decode_tok_s": f"{len(speeds) / sum(speeds):.1f}" if speeds else "-",
        "wall_s": _or_dash(record.phases.total_s),
    }
    return "trial finished " + " ".join(
        f"{key}={''.join(str(value).split())}" for key, value in pairs.items()
    )


def live_table(view: JobView, max_rows: int) -> Table:
    """The table of a running job, at most ``max_rows`` trials long."""
    from rich.table import Table

    table = Table(title=_title(view), caption=_caption(view), title_justify="left", caption_justify="left")
    for name in ("task", "state"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("turn", "context", "miss", "read", "write", "output", "cost", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = list(view.rows.values())
    running = [row for row in rows if row.outcome is None]
    finished = [row for row in rows if row.outcome is not None]
    for row in [*running, *reversed(finished)][:max_rows]:
        table.add_row(*row_cells(row), style=COLOURS[row.outcome] if row.outcome else None)
    return table


def row_cells(row: TrialRow) -> tuple[str, ...]:
    """One row's texts, in the order of the live table's columns."""
    name = row.task if row.attempt == 1 else f"{row.task} #{row.attempt}"
    return (
        name,
        row.state,
        str(row.turn) if row.turn else "-",
        _or_dash(row.context_tokens),
        str(row.tokens.miss),
        _or_dash(row.tokens.cache_read),
        _or_dash(row.tokens.cache_write),
        str(row.tokens.output),
        money(row.billed, row.currency),
        f"{row.tok_s:.1f}" if row.tok_s else "-",
    )


def known_cost(costs: Costs) -> Decimal | None:
    """What the provider billed, else what the price table gives, else ``None``."""
    return costs.computed if costs.billed is None else costs.billed


def money(amount: Decimal | None, currency: str) -> str:
    """``$0.0123``; four decimals below one unit; ``-`` when unknown, never 0."""
    if amount is None:
        return "-"
    sign = {"USD": "$", "CNY": "¥"}.get(currency, f"{currency} ")
    return f"{sign}{amount:.2f}" if abs(amount) >= 1 or amount == 0 else f"{sign}{amount:.4f}"


def _after_turn(row: TrialRow, turn: TurnRecord) -> TrialRow:
    cost = known_cost(turn.costs)
    speed = turn.decode.seconds_per_token
    return replace(
        row,
        context_tokens=turn.tokens.prompt or row.context_tokens,
        tokens=sum_tokens((row.tokens, turn.tokens)),
        billed=row.billed if cost is None else cost + (row.billed or 0),
        currency=turn.costs.currency,
        tok_s=1 / speed if speed else row.tok_s,
    )


def _title(view: JobView) -> str:
    if view.started is None:
        return "planning"
    model = f", model {view.started.model}" if view.started.model else ""
    return f"{view.started.job_id}: agent {view.started.agent}{model}"


def _caption(view: JobView) -> str:
    counts, done = view.counts(), len(view.records)
    planned = view.started.planned if view.started else 0
    parts = [f"{done} of {planned} trials"] + [f"{n} {outcome.value}" for outcome, n in counts.items()]
    return ", ".join(parts)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else str(round(value, 2))
