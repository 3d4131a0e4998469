"""What a running job shows: plain lines for machines, a table for people."""

from __future__ import annotations

import io
from decimal import Decimal
from pathlib import Path

import pytest
from rich.console import Console
from surface_samples import summary, trial, turn

from k3eval_harness.engine import events
from k3eval_harness.progress import JobView, live_table, money, plain_line, progress
from k3eval_harness.results.schema import Outcome, TokenCounts, TrialRecord


def job_events() -> list[events.JobEvent]:
    first, second = turn(1, 1500, 0.02), turn(2, 2500, 0.04)
    done = trial("one", turns=(first, second))
    return [
        events.JobStarted("job-1", 2, "k3", "local/a", Path("results/runs/job-1")),
        events.TrialStarted("one__1", "one", 1),
        events.TrialPhase("one__1", "agent"),
        events.TurnStarted("one__1", 1, 1400),
        events.TokenTick("one__1", 10, 48.0),
        events.TurnFinished("one__1", first),
        events.TurnStarted("one__1", 2, None),
        events.TurnFinished("one__1", second),
        events.TrialFinished("one__1", done),
        events.TrialStarted("two__1", "two", 2),
        events.TrialPhase("two__1", "sandbox"),
    ]


def test_a_view_folds_the_events_of_each_trial() -> None:
    view = JobView()
    for event in job_events()[:5]:
        view.apply(event)
    row = view.rows["one__1"]
    assert (row.state, row.turn, row.context_tokens, row.tok_s) == ("agent", 1, 1400, 48.0)
    for event in job_events()[5:8]:
        view.apply(event)
    row = view.rows["one__1"]
    assert (row.turn, row.context_tokens) == (2, 2500)
    assert row.tokens == TokenCounts(miss=3000, cache_read=1000, output_text=120, output_reasoning=80)
    assert row.billed == Decimal("0.04")
    assert row.tok_s == pytest.approx(25.0)
    for event in job_events()[8:]:
        view.apply(event)
    assert view.rows["one__1"].outcome is Outcome.PASSED
    assert view.counts()[Outcome.PASSED] == 1
    assert view.rows["two__1"].state == "sandbox"


def test_the_live_table_shows_running_trials_first_and_fits() -> None:
    view = JobView()
    for event in job_events():
        view.apply(event)
    screen = Console(width=140, file=io.StringIO())
    screen.print(live_table(view, max_rows=1))
    text = screen.file.getvalue()  # type: ignore[attr-defined]  # the StringIO given above
    assert "two #2" in text
    assert "1 of 2 trials, 1 passed, 0 failed, 0 void" in text
    assert "$0.04" not in text


def test_live_progress_draws_and_leaves_nothing_behind() -> None:
    screen = Console(width=140, height=30, file=io.StringIO(), force_terminal=True)
    with progress(screen, live=True) as observer:
        for event in job_events():
            observer.on_event(event)
        screen.print("a note above the table")
    text = screen.file.getvalue()  # type: ignore[attr-defined]  # the StringIO given above
    assert "agent k3, model local/a" in text
    assert "a note above the table" in text


def test_quiet_progress_is_one_line_per_finished_trial() -> None:
    screen = Console(file=io.StringIO())
    with progress(screen, live=False) as observer:
        for event in [*job_events(), events.JobFinished(summary(planned=2))]:
            observer.on_event(event)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]  # the StringIO given above
    assert len(lines) == 1
    pairs = dict(pair.split("=", 1) for pair in lines[0].removeprefix("trial finished ").split())
    assert pairs["outcome"] == "passed"
    assert (pairs["miss"], pairs["read"], pairs["write"], pairs["output"]) == ("3000", "1000", "-", "200")
    assert pairs["cost"] == "0.04USD"
    assert pairs["decode_tok_s"] == "33.3"


@pytest.mark.parametrize("record", [trial(outcome=Outcome.VOID, cause="sandbox"), trial("with space")])
def test_plain_lines_of_trials_without_a_model_call(record: TrialRecord) -> None:
    line = plain_line(record)
    assert "cost=- decode_tok_s=-" in line
    assert line.count("=") == len(line.split()) - 2


@pytest.mark.parametrize(
    ("amount", "currency", "text"),
    [
        (None, "USD", "-"),
        (Decimal(0), "USD", "$0.00"),
        (Decimal("0.01234"), "USD", "$0.0123"),
        (Decimal("12.345"), "CNY", "¥12.34"),
        (Decimal("0.5"), "EUR", "EUR 0.5000"),
    ],
)
def test_money(amount: Decimal | None, currency: str, text: str) -> None:
    assert money(amount, currency) == text
