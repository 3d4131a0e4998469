"""What a job would do: its configuration, checked, and its trials laid out. Starts and writes nothing."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k3eval_harness.agent.protocol import AgentLimits
from k3eval_harness.agent.registry import make_agent
from k3eval_harness.errors import TaskError, UsageError
from k3eval_harness.journal import utc_now
from k3eval_harness.sandbox.images import image_repository
from k3eval_harness.task import Task, lint_task, unsupported

if TYPE_CHECKING:
    from k3eval import ModelRef

_ALPHABET: Final = string.ascii_letters + string.digits
_NAME_CHARS: Final = 32
MAX_TRIALS: Final = 100_000


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
    """Image names, one per different environment; a content hash is added as tag when they are built."""
    worst_case_cost: Decimal | None
    """The limit on money; zero when nothing costs money; None = no limit."""
    notes: tuple[str, ...]
    """Good to know."""
    warnings: tuple[str, ...]
    """What a real run says too: no limit on money; a remark on tasks, once for all that it holds for."""


def plan_job(config: JobConfig) -> JobPlan:
    """Check the configuration and lay out the trials; starts nothing and writes nothing.

    Raises UsageError or TaskError.
    """
    if not config.tasks:
        raise UsageError("no task given; see `k3eval tasks list`")
    if config.attempts < 1 or config.concurrency < 1:
        raise UsageError("attempts and concurrency must be at least 1")
    if len(config.tasks) * config.attempts > MAX_TRIALS:
        raise UsageError(f"more than {MAX_TRIALS} trials; run fewer tasks or attempts at a time")
    agent = make_agent(config.agent)
    if agent.needs_model and config.model is None:
        raise UsageError(f"agent {config.agent} needs a model, for example --model local/a")
    for task in config.tasks:
        reason = unsupported(task)
        if reason:
            raise TaskError(f"{task.path}: {reason}")
    trials = tuple(
        TrialPlan(_trial_id(task), task, attempt, config.seed + attempt - 1)
        for attempt in range(1, config.attempts + 1)
        for task in config.tasks
    )
    stamp = utc_now().strftime("%Y-%m-%d__%H-%M-%S")
    return JobPlan(
        job_id=f"{stamp}__{_random(4)}",
        trials=trials,
        images=tuple(dict.fromkeys(image_repository(task) for task in config.tasks)),
        worst_case_cost=_worst_case(config, len(trials)),
        notes=tuple(_notes(config)),
        warnings=tuple(_warnings(config)),
    )


def _trial_id(task: Task) -> str:
    """Harbor's form: the task's name cut to 32 characters, two underscores, seven random characters."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", task.short_name)[:_NAME_CHARS].strip("._-") or "task"
    return f"{name}__{_random(7)}"


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _worst_case(config: JobConfig, trials: int) -> Decimal | None:
    if config.model is None or config.model.provider == "local":
        return Decimal(0)
    limits = [config.max_cost]
    if config.limits.max_cost is not None:
        limits.append(config.limits.max_cost * trials)
    return min((limit for limit in limits if limit is not None), default=None)


def _notes(config: JobConfig) -> Iterator[str]:
    model = config.model
    if model is not None and model.provider == "local" and model.base_url is None:
        yield f"the local model {model.model} is served for the length of the run; it costs no money"


def _warnings(config: JobConfig) -> Iterator[str]:
    if _worst_case(config, 1) is None:
        yield "no limit on money: set --max-cost"
    tasks: dict[str, list[str]] = {}
    for task in config.tasks:
        for finding in lint_task(task):
            if finding.level != "info":
                tasks.setdefault(f"{finding.where}: {finding.message}", []).append(task.name)
    for remark, names in tasks.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}: {remark}"
