"""Records for the tests of reports, progress and commands: small jobs with figures that are easy to check."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

from k3eval.errors import Cause
from k3eval_harness.results.schema import (
    AgentInfo,
    Costs,
    DecodeSample,
    JobSummary,
    ModelInfo,
    Outcome,
    PhaseTimes,
    Provenance,
    TaskInfo,
    TokenCounts,
    TrialRecord,
    TurnRecord,
)

START = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
PROVENANCE = Provenance(
    k3eval_version="0.1.0", git_commit="abc123", python="3.11.2", platform="Linux", engine_version="20.10"
)
MODEL = ModelInfo(name="local/a", provider="local", model="a", weights="random, seed 0")


def turn(index: int = 1, context: int = 2000, seconds_per_token: float | None = 0.01) -> TurnRecord:
    """A model call with 100 output tokens; ``None`` makes its decode sample void."""
    void = None if seconds_per_token is not None else "a single event"
    return TurnRecord(
        index=index,
        started_at=START,
        tokens=TokenCounts(miss=context - 500, cache_read=500, output_text=60, output_reasoning=40),
        costs=Costs(billed=Decimal("0.02"), computed=Decimal("0.025"), ideal_cache=Decimal("0.01")),
        decode=DecodeSample(
            context_tokens=context,
            output_tokens=100,
            token_events=100,
            ttft_s=0.5,
            decode_s=1.0,
            seconds_per_token=seconds_per_token,
            void_reason=void,
        ),
        model_seconds=1.5,
        tool_seconds=0.5,
    )


def trial(
    task: str = "one",
    attempt: int = 1,
    outcome: Outcome = Outcome.PASSED,
    *,
    cause: Cause | None = None,
    detail: str | None = None,
    turns: tuple[TurnRecord, ...] = (),
    digest: str = "d1",
    with_model: bool = True,
) -> TrialRecord:
    """One trial; its tokens are the sum of its turns, which all have the same shape."""
    n = len(turns)
    return TrialRecord(
        trial_id=f"{task}__{attempt}",
        job_id="job-1",
        task=TaskInfo(name=task, path=task, digest=digest),
        attempt=attempt,
        seed=0,
        agent=AgentInfo(name="k3", version="1"),
        model=MODEL if with_model else None,
        outcome=outcome,
        cause=cause,
        detail=detail,
        stop_reason="submitted" if outcome is not Outcome.VOID else "error",
        rewards={"reward": 1.0 if outcome is Outcome.PASSED else 0.0},
        turns=turns,
        tokens=TokenCounts(
            miss=sum(t.tokens.miss for t in turns),
            cache_read=500 * n if n else None,
            output_text=60 * n,
            output_reasoning=40 * n if n else None,
        ),
        costs=Costs(
            billed=Decimal("0.02") * n if n else None,
            computed=Decimal("0.025") * n if n else None,
            ideal_cache=Decimal("0.01") * n if n else None,
        ),
        phases=PhaseTimes(total_s=12.5),
        started_at=START,
        finished_at=START + timedelta(seconds=12),
        provenance=PROVENANCE,
    )


def summary(planned: int, **changes: object) -> JobSummary:
    """A job's summary; the counts matter less than ``planned`` and ``interrupted``."""
    fields: dict[str, object] = {
        "job_id": "job-1",
        "agent": "k3",
        "model": "local/a",
        "tasks": 2,
        "attempts": 1,
        "planned": planned,
        "passed": min(planned, 1),
        "failed": min(max(planned - 1, 0), 1),
        "void": 0,
        "score": 0.5,
        "score_interval": None,
        "coverage": 1.0,
        "worst_case_score": 0.5,
        "wall_s": 30.0,
        "started_at": START,
        "finished_at": START,
        "results_dir": "results/runs/job-1",
    }
    return JobSummary.model_validate(fields | changes)
