"""A job: plan trials, run them with limits, write everything down, stop cleanly.

``run_job`` never raises for one trial's trouble and always leaves ``job.json``; Ctrl-C, a full budget or a
time limit stop it early with every finished trial kept and no container left.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from k3eval_harness.agent.protocol import AgentLimits
from k3eval_harness.engine.events import JobObserver
from k3eval_harness.results.schema import JobSummary
from k3eval_harness.task import Task

if TYPE_CHECKING:
    from k3eval import ModelRef


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What the user asked for."""

    tasks: tuple[Task, ...]
    agent: str
    """``oracle``, ``nop``, ``k3`` or ``module:Class``."""
    model: ModelRef | None
    """None = no model (oracle, nop). A local model without a base URL is served by the job itself."""
    attempts: int = 1
    concurrency: int = 1
    max_cost: Decimal | None = None
    """For the whole job."""
    timeout_s: float | None = None
    """For the whole job."""
    out: Path = Path("results/runs")
    """Parent of the job's folder."""
    seed: int = 0
    effort: str | None = None
    limits: AgentLimits = field(default_factory=AgentLimits)


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """One attempt at one task."""

    trial_id: str
    task: Task
    attempt: int
    seed: int


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What ``run_job`` would do; ``--dry-run`` shows it."""

    job_id: str
    trials: tuple[TrialPlan, ...]
    images: tuple[str, ...]
    """Image names, one per different environment."""
    worst_case_cost: Decimal | None
    """Limit on money where there is one; None = unlimited or free."""
    notes: tuple[str, ...]


def plan_job(config: JobConfig) -> JobPlan:
    """Check the configuration and lay out the trials; starts nothing and writes nothing.

    Raises UsageError or TaskError.
    """
    raise RuntimeError


def run_job(config: JobConfig, observer: JobObserver, cancel: threading.Event) -> JobSummary:
    """Run the job to its end and return what ``job.json`` says."""
    raise RuntimeError


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Whether a task measures what it should."""

    task: str
    valid: bool
    oracle_rewards: tuple[float | None, ...]
    """One per repeat; None = void."""
    nop_rewards: tuple[float | None, ...]
    problems: tuple[str, ...]
    """One line each; empty when valid."""
    wall_s: float


def validate_task(
    task: Task,
    repeat: int = 1,
    *,
    out: Path | None = None,
    observer: JobObserver | None = None,
    cancel: threading.Event | None = None,
) -> ValidationResult:
    """The oracle must pass and nop must fail, ``repeat`` times each."""
    raise RuntimeError
