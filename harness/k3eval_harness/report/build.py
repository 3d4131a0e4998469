"""What is said about one job, computed from its trials alone, so that an interrupted job can be reported too.

Scores are over valid trials, with coverage and the worst case beside them; the numbers here are what the
renderers show, they compute nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final, Literal

from k3eval_harness import stats
from k3eval_harness.decode.series import ContextReach, DecodeSeries, context_reach, decode_series
from k3eval_harness.report.claims import CLAIMS, Claim
from k3eval_harness.results.schema import (
    Costs,
    Interval,
    JobSummary,
    ModelInfo,
    Outcome,
    Provenance,
    Record,
    TokenCounts,
    TrialRecord,
)
from k3eval_harness.results.sums import sum_costs, sum_tokens

REPORT_SCHEMA: Final = "k3eval-report-1"
COMPLETE: Final = "complete"


class TaskRow(Record):
    """All attempts at one task."""

    task: str
    passed: int
    failed: int
    void: int
    turns: float | None
    """Median model calls of a valid attempt; null for agents without a model."""
    tokens: TokenCounts
    costs: Costs
    wall_s: float | None
    """Median seconds of an attempt."""
    detail: str | None
    """Why the last attempt that did not pass did not."""


class PassRate(Record):
    """Unbiased estimates over the tasks with at least ``k`` valid attempts."""

    k: int
    any_passes: float
    """pass@k"""
    all_pass: float
    """pass^k"""
    tasks: int


class JobReport(Record):
    """The report of one job; ``k3eval report --format json`` prints it."""

    schema_version: Literal["k3eval-report-1"] = REPORT_SCHEMA
    job_id: str
    agent: str
    model: ModelInfo | None
    state: str
    """``complete``, or what is missing."""
    planned: int
    passed: int
    failed: int
    void: int
    missing: int
    """Planned trials without a result."""
    score: float | None
    score_interval: Interval | None
    coverage: float | None
    worst_case_score: float | None
    pass_rates: tuple[PassRate, ...]
    void_causes: dict[str, int]
    void_details: tuple[str, ...]
    stop_reasons: dict[str, int]
    tokens: TokenCounts
    costs: Costs
    model_seconds: float
    tool_seconds: float
    decode: DecodeSeries
    contexts: ContextReach | None
    """Which context lengths the model calls really had; null for agents without a model."""
    tasks: tuple[TaskRow, ...]
    agent_versions: tuple[str, ...]
    provenance: tuple[Provenance, ...]
    """One entry; more where trials were run by different set-ups."""
    wall_s: float | None
    claims: tuple[Claim, ...] = CLAIMS


def build_report(
    trials: Sequence[TrialRecord], summary: JobSummary | None, name: str, planned: int = 0
) -> JobReport:
    """Report on a job's finished trials. ``summary`` is ``None`` where the job never came to its end.

    ``name`` and ``planned`` (trials) stand in for what the summary would say.
    """
    outcomes = Counter(trial.outcome for trial in trials)
    passed, failed, void = (outcomes[o] for o in (Outcome.PASSED, Outcome.FAILED, Outcome.VOID))
    planned = max(summary.planned if summary else planned, len(trials))
    groups = task_results(trials)
    turns = [turn for trial in trials for turn in trial.turns]
    return JobReport(
        job_id=summary.job_id if summary else (trials[0].job_id if trials else name),
        agent=summary.agent if summary else (trials[0].agent.name if trials else "unknown"),
        model=next((t.model for t in trials if t.model), None),
        state=_state(summary, planned - len(trials), planned),
        planned=planned,
        passed=passed,
        failed=failed,
        void=void,
        missing=planned - len(trials),
        score=passed / (passed + failed) if passed + failed else None,
        score_interval=stats.score_interval(groups),
        coverage=(passed + failed) / planned if planned else None,
        worst_case_score=passed / planned if planned else None,
        pass_rates=pass_rates(groups),
        void_causes=_count(t.cause or "unknown" for t in trials if t.outcome is Outcome.VOID),
        void_details=tuple(
            f"{t.task.name}: {' '.join(t.detail.split())}"
            for t in trials
            if t.outcome is Outcome.VOID and t.detail
        ),
        stop_reasons=_count(t.stop_reason for t in trials),
        tokens=sum_tokens(t.tokens for t in trials),
        costs=total_costs(trials),
        model_seconds=sum(turn.model_seconds for turn in turns),
        tool_seconds=sum(turn.tool_seconds for turn in turns),
        decode=decode_series(turn.decode for turn in turns),
        contexts=context_reach(turn.tokens.prompt for turn in turns if turn.tokens.prompt > 0),
        tasks=tuple(_task_row(task, [t for t in trials if t.task.name == task]) for task in groups),
        agent_versions=tuple(sorted({t.agent.version for t in trials})),
        provenance=tuple(dict.fromkeys(t.provenance for t in trials)),
        wall_s=summary.wall_s if summary else None,
    )


def task_results(trials: Sequence[TrialRecord]) -> dict[str, list[float]]:
    """Each task's valid results, 1.0 passed and 0.0 failed, by task name in order; void gives no entry."""
    groups: dict[str, list[float]] = {name: [] for name in sorted({t.task.name for t in trials})}
    for trial in trials:
        if trial.outcome is not Outcome.VOID:
            groups[trial.task.name].append(1.0 if trial.outcome is Outcome.PASSED else 0.0)
    return groups


def pass_rates(groups: dict[str, list[float]]) -> tuple[PassRate, ...]:
    """pass@k and pass^k for k = 1, 2, 4 ... as far as some task has that many valid attempts."""
    rates: list[PassRate] = []
    most = max((len(values) for values in groups.values()), default=0)
    k = 1
    while k <= most:
        counts = [(len(values), round(sum(values))) for values in groups.values() if len(values) >= k]
        rates.append(
            PassRate(
                k=k,
                any_passes=sum(stats.pass_at_k(n, c, k) for n, c in counts) / len(counts),
                all_pass=sum(stats.pass_hat_k(n, c, k) for n, c in counts) / len(counts),
                tasks=len(counts),
            )
        )
        k *= 2
    return tuple(rates)


def total_costs(trials: Sequence[TrialRecord]) -> Costs:
    """Cost of the trials that called a model; a view that one of them does not know is unknown.

    Different currencies are not added: then every view is unknown and the currency ``mixed``.
    """
    costs = [t.costs for t in trials if t.turns or t.costs != Costs()]
    if len({c.currency for c in costs}) > 1:
        return Costs(currency="mixed")
    return sum_costs(costs)


def _task_row(task: str, trials: Sequence[TrialRecord]) -> TaskRow:
    outcomes = Counter(t.outcome for t in trials)
    turns = [len(t.turns) for t in trials if t.outcome is not Outcome.VOID and t.turns]
    walls = [t.phases.total_s for t in trials if t.phases.total_s is not None]
    details = [t.detail for t in trials if t.outcome is not Outcome.PASSED and t.detail]
    return TaskRow(
        task=task,
        passed=outcomes[Outcome.PASSED],
        failed=outcomes[Outcome.FAILED],
        void=outcomes[Outcome.VOID],
        turns=median(turns) if turns else None,
        tokens=sum_tokens(t.tokens for t in trials),
        costs=total_costs(trials),
        wall_s=median(walls) if walls else None,
        detail=details[-1] if details else None,
    )


def _state(summary: JobSummary | None, missing: int, planned: int) -> str:
    without = f"{missing} of {planned} trials have no result" if missing else ""
    if summary is None:
        return ", ".join(filter(None, ("not finished: the job wrote no summary", without)))
    if summary.interrupted:
        return ": ".join(filter(None, ("interrupted", without)))
    return without or COMPLETE


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
