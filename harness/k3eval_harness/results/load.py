"""Read a job's folder back, finished or not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from k3eval_harness.errors import UsageError
from k3eval_harness.results.layout import JobLayout
from k3eval_harness.results.schema import JobSummary, Record, TrialRecord

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """What a job's folder holds."""

    root: Path
    summary: JobSummary | None
    """None when the job did not end by itself (killed): its finished trials are still there."""
    trials: tuple[TrialRecord, ...]
    """In the order in which they finished."""
    planned: int
    """Trials that the job set out to run."""


def load_job(folder: Path) -> LoadedJob:
    """Read ``job.json`` and every ``trial.json``. Raises UsageError when the folder holds neither."""
    layout = JobLayout(folder)
    summary = _read(layout.job_json, JobSummary) if layout.job_json.is_file() else None
    trials = tuple(
        sorted(
            (_read(path, TrialRecord) for path in folder.glob("*/trial.json")),
            key=lambda record: (record.finished_at, record.trial_id),
        )
    )
    planned = summary.planned if summary else _planned(layout, len(trials))
    if summary is None and not trials:
        if planned:
            raise UsageError(f"{folder}: this job ended before any of its {planned} trials did; run it again")
        raise UsageError(f"{folder}: no job.json and no trial here; give a folder below results/runs")
    return LoadedJob(folder, summary, trials, planned)


def _planned(layout: JobLayout, least: int) -> int:
    """From the lock file, which is written before the first trial."""
    try:
        return max(least, len(json.loads(layout.lock_json.read_bytes())["trials"]))
    except (OSError, ValueError, KeyError, TypeError):
        return least


def _read(path: Path, model: type[R]) -> R:
    try:
        return model.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: not readable as {model.__name__}: {where} {first['msg']}") from error
