"""From trial records to ``job.json``: a pure function."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from k3eval.errors import Cause
from k3eval_harness.results.schema import JobSummary, Outcome, TrialRecord
from k3eval_harness.results.sums import sum_costs, sum_tokens
from k3eval_harness.stats import score_interval


def summarise(
    records: Sequence[TrialRecord],
    *,
    job_id: str,
    agent: str,
    model: str | None,
    tasks: int,
    attempts: int,
    planned: int,
    wall_s: float,
    started_at: datetime,
    finished_at: datetime,
    results_dir: str,
    stopped_by: Cause | None = None,
    stop_detail: str | None = None,
) -> JobSummary:
    """Count, score and add up. Void trials are in no score; ``worst_case_score`` counts them as failed."""
    counts = Counter(record.outcome for record in records)
    passed, failed = counts[Outcome.PASSED], counts[Outcome.FAILED]
    valid = passed + failed
    groups: dict[str, list[float]] = {}
    for record in records:
        if record.outcome is not Outcome.VOID:
            groups.setdefault(record.task.name, []).append(float(record.outcome is Outcome.PASSED))
    speeds = [
        turn.decode.seconds_per_token
        for record in records
        for turn in record.turns
        if turn.decode.seconds_per_token is not None
    ]
    return JobSummary(
        job_id=job_id,
        agent=agent,
        model=model,
        tasks=tasks,
        attempts=attempts,
        planned=planned,
        passed=passed,
        failed=failed,
        void=counts[Outcome.VOID],
        score=passed / valid if valid else None,
        score_interval=score_interval(groups),
        coverage=valid / planned if planned else None,
        worst_case_score=passed / planned if planned else None,
        void_causes=dict(Counter(record.cause for record in records if record.cause is not None)),
        tokens=sum_tokens(record.tokens for record in records),
        costs=sum_costs(record.costs for record in records if record.turns),
        decode_median_s_per_token=statistics.median(speeds) if speeds else None,
        decode_samples=len(speeds),
        wall_s=wall_s,
        started_at=started_at,
        finished_at=finished_at,
        interrupted=stopped_by == "user",
        stopped_by=stopped_by,
        stop_detail=stop_detail,
        results_dir=results_dir,
    )
