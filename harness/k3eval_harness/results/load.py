"""Read a job's folder back, finished or not."""

from __future__ import annotations

import json
import os
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
    """Read ``job.json`` and every ``trial.json``.

    Raises UsageError when the folder holds neither, or one that cannot be read or is of another job.
    """
    layout = JobLayout(folder)
    summary = _read(layout.job_json, JobSummary) if os.path.lexists(layout.job_json) else None
    paths = (layout.trial(entry.name).trial_json for entry in sorted(folder.glob("*")))
    found = {path: _read(path, TrialRecord) for path in paths if os.path.lexists(path)}
    trials = tuple(sorted(found.values(), key=lambda record: (record.finished_at, record.trial_id)))
    job_id = summary.job_id if summary else next((record.job_id for record in trials), "")
    for path, record in found.items():
        if record.job_id != job_id:
            raise UsageError(
                f"{path}: not readable as TrialRecord: job_id is {record.job_id!r}, not {job_id!r} as in "
                + ("job.json" if summary else "the first trial")
            )
    planned = summary.planned if summary else _planned(layout, len(trials))
    if summary is None and not trials:
        if planned:
            raise UsageError(f"{folder}: this job ended before any of its {planned} trials did; run it again")
        raise UsageError(f"{folder}: no job.json and no trial here; give a folder below results/runs")
    return LoadedJob(folder, summary, trials, planned)


def _planned(layout: JobLayout, least: int) -> int:
    """From the lock file, which is written before the first trial."""
    if not layout.lock_json.is_file():
        return least
    try:
        return max(least, len(json.loads(layout.lock_json.read_bytes())["trials"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return least


def _read(path: Path, model: type[R]) -> R:
    refused = f"{path}: not readable as {model.__name__}: "
    if not path.is_file():  # a pipe would be waited for without end
        raise UsageError(f"{refused}no regular file")
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{refused}{error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise UsageError(refused + " ".join(filter(None, (where, reason)))) from error
