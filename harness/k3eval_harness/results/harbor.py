"""The files of Harbor's own result layout, so that its viewer and tools can read a k3eval job.

Shapes follow Harbor 0.25: JobConfig, JobLock (schema 3), JobResult, TrialConfig, TrialLock (schema 2),
TrialResult. A void trial appears as an exception there; what Harbor has no place for is in ``trial.json``.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from k3eval import __version__
from k3eval_harness.results.schema import Costs, Outcome, TrialRecord
from k3eval_harness.results.sums import sum_costs, sum_tokens

Json = dict[str, object]

_NAMESPACE: Final = uuid.UUID("6f0e3f5c-6d5e-5b52-9c0b-2f4d5f0a7b11")
_EXCEPTIONS: Final[Mapping[str, str]] = {
    "model": "ModelError",
    "provider": "ApiError",
    "sandbox": "EnvironmentError",
    "verifier": "VerifierError",
    "harness": "AgentError",
    "user": "CancelledError",
    "budget": "BudgetExceededError",
}
_RETRY: Final[Json] = {"max_retries": 0, "wait_multiplier": 1.0, "min_wait_sec": 1.0, "max_wait_sec": 60.0}


def stable_id(name: str) -> str:
    """A UUID that depends on the k3eval id only."""
    return str(uuid.uuid5(_NAMESPACE, name))


def agent_config(agent: str, model: str | None) -> Json:
    """AgentConfig: ``module:Class`` is an import path, anything else a name."""
    key = "import_path" if ":" in agent else "name"
    return {key: agent, "model_name": model, "kwargs": {}}


def task_config(task_path: Path, family: str | None) -> Json:
    """TaskConfig of a local task."""
    return {"path": str(task_path), "source": family}


def trial_config(
    trial_id: str,
    job_id: str,
    trials_dir: Path,
    task_path: Path,
    family: str | None,
    agent: str,
    model: str | None,
) -> Json:
    """TrialConfig."""
    return {
        "task": task_config(task_path, family),
        "trial_name": trial_id,
        "trials_dir": str(trials_dir),
        "agent": agent_config(agent, model),
        "environment": {"type": "docker", "delete": True},
        "verifier": {},
        "artifacts": [],
        "job_id": stable_id(job_id),
    }


def trial_lock(
    name: str, digest: str, task_path: Path, family: str | None, agent: str, model: str | None
) -> Json:
    """TrialLock: what the trial resolved to, with the task's content digest."""
    return {
        "schema_version": 2,
        "task": {
            "name": name,
            "type": "local",
            "digest": f"sha256:{digest}",
            "source": family,
            "path": str(task_path),
        },
        "agent": agent_config(agent, model),
        "environment": {"type": "docker", "delete": True},
        "verifier": {"environment_mode": "separate"},
    }


def job_config(
    job_id: str,
    jobs_dir: Path,
    attempts: int,
    concurrency: int,
    agent: str,
    model: str | None,
    tasks: Sequence[Json],
) -> Json:
    """JobConfig."""
    return {
        "job_name": job_id,
        "jobs_dir": str(jobs_dir),
        "n_attempts": attempts,
        "n_concurrent_trials": concurrency,
        "agents": [agent_config(agent, model)],
        "tasks": list(tasks),
    }


def job_lock(created_at: datetime, concurrency: int, trial_locks: Sequence[Json]) -> Json:
    """JobLock; ``harbor.version`` is null because Harbor did not run this job."""
    return {
        "schema_version": 3,
        "created_at": created_at.isoformat(),
        "harbor": {"version": None},
        "n_concurrent_trials": concurrency,
        "retry": _RETRY,
        "trials": list(trial_locks),
    }


def trial_result(record: TrialRecord, trial_dir: Path, task_path: Path, config: Json) -> Json:
    """TrialResult."""
    model = record.model
    info = None if model is None else {"name": model.model, "provider": model.provider}
    times = _phase_times(record)
    return {
        "id": stable_id(f"{record.job_id}/{record.trial_id}"),
        "task_name": record.task.name,
        "trial_name": record.trial_id,
        "trial_uri": trial_dir.resolve().as_uri(),
        "task_id": {"path": str(task_path)},
        "source": record.task.family,
        "task_checksum": record.task.digest,
        "config": config,
        "agent_info": {"name": record.agent.name, "version": record.agent.version, "model_info": info},
        "agent_result": _agent_result(record),
        "verifier_result": {"rewards": record.rewards} if record.rewards else None,
        "verifier_environment_mode": "separate",
        "exception_info": _exception(record),
        "started_at": record.started_at.isoformat(),
        "finished_at": record.finished_at.isoformat(),
        **times,
    }


def job_result(
    job_id: str,
    records: Sequence[TrialRecord],
    planned: int,
    running: int,
    started_at: datetime,
    now: datetime,
) -> Json:
    """JobResult of a job, finished or under way."""
    finished = len(records) >= planned or not running
    pending = max(0, planned - len(records) - running)
    tokens = sum_tokens(record.tokens for record in records)
    turns = any(record.turns for record in records)
    return {
        "id": stable_id(job_id),
        "started_at": started_at.isoformat(),
        "updated_at": now.isoformat(),
        "finished_at": now.isoformat() if finished else None,
        "n_total_trials": planned,
        "stats": {
            "n_completed_trials": len(records),
            "n_errored_trials": sum(_exception(record) is not None for record in records),
            "n_running_trials": running,
            "n_pending_trials": pending,
            "n_cancelled_trials": sum(record.cause == "user" for record in records),
            "n_retries": 0,
            "n_input_tokens": tokens.prompt if turns else None,
            "n_cache_tokens": tokens.cache_read if turns else None,
            "n_output_tokens": tokens.output if turns else None,
            "cost_usd": _dollars(sum_costs(record.costs for record in records if record.turns)),
            "evals": _evals(records),
        },
    }


def _agent_result(record: TrialRecord) -> Json | None:
    if not record.turns:
        return None
    return {
        "n_input_tokens": record.tokens.prompt,
        "n_cache_tokens": record.tokens.cache_read,
        "n_output_tokens": record.tokens.output,
        "cost_usd": _dollars(record.costs),
        "metadata": {"k3eval_version": __version__, "stop_reason": record.stop_reason},
    }


def _exception(record: TrialRecord) -> Json | None:
    if record.outcome is Outcome.VOID:
        kind = _EXCEPTIONS[record.cause or "harness"]
    elif record.stop_reason == "time_limit":
        kind = "AgentTimeoutError"
    else:
        return None
    return {
        "exception_type": kind,
        "exception_message": record.detail or record.stop_reason,
        "exception_traceback": "",
        "occurred_at": record.finished_at.isoformat(),
    }


def _evals(records: Sequence[TrialRecord]) -> Json:
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        parts = (
            record.agent.name,
            record.model.name if record.model else None,
            record.task.family or "adhoc",
        )
        groups.setdefault("__".join(part for part in parts if part), []).append(record)
    return {key: _eval_stats(group) for key, group in groups.items()}


def _eval_stats(records: Sequence[TrialRecord]) -> Json:
    rewards: dict[str, dict[str, list[str]]] = {}
    exceptions: dict[str, list[str]] = {}
    for record in records:
        for key, value in record.rewards.items():
            rewards.setdefault(key, {}).setdefault(f"{value:g}", []).append(record.trial_id)
        exception = _exception(record)
        if exception is not None:
            exceptions.setdefault(str(exception["exception_type"]), []).append(record.trial_id)
    valid = [record for record in records if record.outcome is not Outcome.VOID]
    passed = sum(record.outcome is Outcome.PASSED for record in valid)
    return {
        "n_trials": sum(bool(record.rewards) for record in records),
        "n_errors": sum(len(names) for names in exceptions.values()),
        "metrics": [{"mean": passed / len(valid)}] if valid else [],
        "pass_at_k": {},
        "reward_stats": rewards,
        "exception_stats": exceptions,
    }


def _phase_times(record: TrialRecord) -> Json:
    phases = record.phases
    names = (
        ("environment_setup", (phases.image_s, phases.sandbox_start_s)),
        ("agent_setup", (0.0,)),
        ("agent_execution", (phases.agent_s,)),
        ("verifier", (phases.capture_s, phases.grade_s)),
    )
    times: Json = {}
    at = record.started_at
    for name, parts in names:
        known = [part for part in parts if part is not None]
        if not known:
            times[name] = None
            continue
        end = at + timedelta(seconds=sum(known))
        times[name] = {"started_at": at.isoformat(), "finished_at": end.isoformat()}
        at = end
    return times


def _dollars(costs: Costs) -> float | None:
    best = costs.billed if costs.billed is not None else costs.computed
    return float(best) if best is not None and costs.currency == "USD" else None
