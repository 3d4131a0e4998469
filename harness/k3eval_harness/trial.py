"""One trial as a state machine: image, sandbox, agent, capture, grade, done.

Each phase writes its intent before it acts and its result after. Whatever goes wrong ends here, as a void
outcome with its cause; ``trial.json`` is written in every case and no container is left.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from k3eval.errors import Cause, K3EvalError
from k3eval_harness.agent.protocol import Agent, AgentContext, AgentLimits, AgentListener, AgentResult
from k3eval_harness.artifacts import keep_artifacts
from k3eval_harness.errors import (
    AgentError,
    BudgetError,
    Cancelled,
    HarnessError,
    SandboxError,
    SizeLimitExceeded,
    TaskError,
)
from k3eval_harness.grade import CapturedPath, Grade, capture, capture_paths, grade
from k3eval_harness.hooks import run_collect_hooks, wait_healthy
from k3eval_harness.journal import Journal, utc_now
from k3eval_harness.results.layout import TrialLayout, append_line, write_json, write_text
from k3eval_harness.results.schema import (
    AgentInfo,
    ModelInfo,
    Outcome,
    PhaseTimes,
    Provenance,
    StopReason,
    TaskInfo,
    TrialRecord,
    TurnRecord,
)
from k3eval_harness.results.sums import sum_costs, sum_tokens
from k3eval_harness.sandbox.images import BuiltImage
from k3eval_harness.sandbox.protocol import Sandbox, SandboxLimits, SandboxProvider, SandboxSpec
from k3eval_harness.task import Task
from k3eval_harness.task.env import resolve_env

if TYPE_CHECKING:
    from k3eval import K3, Message

DEFAULT_AGENT_SECONDS: Final = 4 * 3600.0
"""Longest life of an agent's container when neither task nor user sets a limit."""
_MARGIN_SECONDS: Final = 900.0
_INJECT_SECONDS: Final = 60.0

T = TypeVar("T")


class Phase(StrEnum):
    """Where a trial is."""

    IMAGE = "image"
    SANDBOX = "sandbox"
    AGENT = "agent"
    CAPTURE = "capture"
    GRADE = "grade"
    DONE = "done"


class TrialListener(AgentListener, Protocol):
    """Hears how a trial gets on."""

    def phase(self, phase: Phase) -> None:
        """The trial entered ``phase``."""


class ImageSource(Protocol):
    """Where task images come from."""

    def ensure(self, task: Task, target: str | None = None, log_file: Path | None = None) -> BuiltImage:
        """The image, built when it is missing."""

    def copy_out(self, image: BuiltImage, paths: Sequence[str], into: Path) -> None:
        """Copy files of an image to a host folder, flat."""


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """What one trial needs, fixed before it starts."""

    trial_id: str
    job_id: str
    task: Task
    attempt: int
    seed: int
    agent: Agent
    limits: AgentLimits
    layout: TrialLayout
    images: ImageSource
    provider: SandboxProvider
    stop: threading.Event
    """Set when the job ends early."""
    stopped_by: Callable[[], HarnessError]
    """Why ``stop`` is set."""
    listener: TrialListener
    provenance: Provenance
    max_cpus: float
    model: ModelInfo | None = None
    new_client: Callable[[], K3] | None = None
    now: Callable[[], datetime] = utc_now


@dataclass(slots=True)
class _Progress:
    """What is known so far; becomes the record."""

    started_at: datetime
    seconds: dict[Phase, float] = field(default_factory=dict)
    image: BuiltImage | None = None
    result: AgentResult | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    grade: Grade | None = None
    outcome: Outcome = Outcome.VOID
    cause: Cause | None = "harness"
    detail: str | None = None
    stop_reason: StopReason = "error"


class Trial:
    """Runs once."""

    def __init__(self, setup: TrialSetup) -> None:
        self._setup = setup
        setup.layout.make()
        self._journal = Journal(setup.layout.journal, setup.now)
        self._progress = _Progress(started_at=setup.now())

    def run(self) -> TrialRecord:
        """Run the trial to its end. Never raises but for a full disk while the record is written."""
        setup, progress = self._setup, self._progress
        start = time.monotonic()
        self._log(f"trial {setup.trial_id}: task {setup.task.name}, agent {setup.agent.name}")
        with self._journal.act(
            "trial", task=setup.task.name, attempt=setup.attempt, agent=setup.agent.name
        ) as act:
            self._run_phases()
            record = self._record(time.monotonic() - start)
            write_json(setup.layout.trial_json, record)
            act.details = {"outcome": record.outcome.value, "cause": record.cause}
        self._log(f"{record.outcome.value}" + (f": {progress.detail}" if progress.detail else ""))
        setup.listener.phase(Phase.DONE)
        return record

    def _run_phases(self) -> None:
        progress = self._progress
        try:
            with tempfile.TemporaryDirectory(prefix="k3eval-trial-") as folder:
                image = progress.image = self._phase(Phase.IMAGE, self._build_image)
                captured = self._work(image, Path(folder))
                verdict = progress.grade = self._phase(Phase.GRADE, lambda: self._grade(image, captured))
            progress.outcome, progress.cause = verdict.outcome, None
            progress.detail = verdict.detail if verdict.outcome is Outcome.FAILED else None
        except SizeLimitExceeded as error:
            # the agent's own doing: void would let it escape a verdict
            progress.outcome, progress.cause, progress.detail = Outcome.FAILED, None, error.message
        except (HarnessError, K3EvalError) as error:
            self._void(error)
        except Exception as error:  # noqa: BLE001 - the trial boundary: one trial's bug must not end the job
            write_text(self._setup.layout.exception, traceback.format_exc())
            self._void(AgentError(f"{type(error).__name__}: {error}"))

    def _work(self, image: BuiltImage, folder: Path) -> tuple[CapturedPath, ...]:
        """Sandbox, agent and capture; the sandbox is gone afterwards."""
        setup, progress = self._setup, self._progress
        seconds = self._agent_seconds()
        sandbox = self._phase(Phase.SANDBOX, lambda: setup.provider.start(self._agent_spec(image, seconds)))
        try:
            wait_healthy(setup.task, sandbox, self._check_stop)
            inject(setup.task, sandbox)
            paths = capture_paths(setup.task, sandbox.workdir)
            result = progress.result = self._phase(Phase.AGENT, lambda: self._run_agent(sandbox, seconds))
            progress.stop_reason = result.stop_reason

            def freeze_and_capture() -> tuple[CapturedPath, ...]:
                run_collect_hooks(setup.task, sandbox, self._log)
                sandbox.freeze()
                captured = capture(sandbox, paths, folder)
                keep_artifacts(setup.task, captured, sandbox.workdir, setup.layout.artifacts_dir)
                return captured

            return self._phase(Phase.CAPTURE, freeze_and_capture)
        finally:
            sandbox.close()

    def _build_image(self) -> BuiltImage:
        return self._setup.images.ensure(self._setup.task, log_file=self._setup.layout.root / "build.log")

    def _run_agent(self, sandbox: Sandbox, seconds: float | None) -> AgentResult:
        setup = self._setup
        context = AgentContext(
            task=setup.task,
            sandbox=sandbox,
            log_dir=setup.layout.agent_dir,
            limits=setup.limits,
            seed=setup.seed,
            cancel=setup.stop,
            deadline=time.monotonic() + seconds if seconds is not None else float("inf"),
            listener=_JournalingListener(setup.listener, self._journal, self._progress.turns),
            new_client=setup.new_client,
            fetch_oracle_files=self._copy_oracle_files if setup.task.extras.oracle_stage else None,
        )
        return setup.agent.run(context)

    def _copy_oracle_files(self, into: Path) -> None:
        setup = self._setup
        log_file = setup.layout.root / "build-oracle.log"
        image = setup.images.ensure(setup.task, setup.task.extras.oracle_stage, log_file)
        setup.images.copy_out(image, setup.task.extras.oracle_files, into)

    def _grade(self, image: BuiltImage, captured: tuple[CapturedPath, ...]) -> Grade:
        setup = self._setup
        lifetime = setup.task.config.verifier.timeout_sec + _MARGIN_SECONDS
        spec = self._spec(image, "grade", lifetime)
        layout = setup.layout
        return grade(
            setup.task,
            setup.provider,
            spec,
            captured,
            layout.verifier_dir,
            layout.changes_patch,
            self._check_stop,
        )

    def _agent_seconds(self) -> float | None:
        limits = (self._setup.task.config.agent.timeout_sec, self._setup.limits.max_seconds)
        return min((limit for limit in limits if limit is not None), default=None)

    def _agent_spec(self, image: BuiltImage, seconds: float | None) -> SandboxSpec:
        return self._spec(image, "agent", (seconds or DEFAULT_AGENT_SECONDS) + _MARGIN_SECONDS)

    def _spec(self, image: BuiltImage, role: str, lifetime_s: float) -> SandboxSpec:
        setup, environment = self._setup, self._setup.task.config.environment
        default = SandboxLimits()
        user = setup.task.config.agent.user
        where = f"{setup.task.path / 'task.toml'}: environment.env"
        return SandboxSpec(
            image=image.ref,
            trial_id=setup.trial_id,
            job_id=setup.job_id,
            role=role,
            user=None if user is None else str(user),
            workdir=environment.workdir,
            env=resolve_env(environment.env, os.environ, where),
            limits=SandboxLimits(
                cpus=min(environment.cpus or default.cpus, setup.max_cpus),
                memory_mb=environment.memory_mb or default.memory_mb,
                lifetime_s=lifetime_s,
            ),
        )

    def _phase(self, phase: Phase, act: Callable[[], T]) -> T:
        self._check_stop()
        self._setup.listener.phase(phase)
        start = time.monotonic()
        try:
            with self._journal.act(phase.value) as entry:
                value = act()
                entry.details = {"seconds": round(time.monotonic() - start, 4)}
        finally:
            self._progress.seconds[phase] = time.monotonic() - start
        return value

    def _check_stop(self) -> None:
        if self._setup.stop.is_set():
            raise self._setup.stopped_by()

    def _void(self, error: HarnessError | K3EvalError) -> None:
        progress = self._progress
        if self._setup.stop.is_set():
            # whatever broke, it broke because the job is being stopped
            error = self._setup.stopped_by()
        if isinstance(error, Cancelled | BudgetError) and progress.result is None:
            progress.stop_reason = "cancelled"
        progress.outcome, progress.cause = Outcome.VOID, error.cause
        progress.detail = " ".join(error.message.split())
        detail = error.detail if isinstance(error, HarnessError) else None
        if detail or not isinstance(error, Cancelled):
            exception = self._setup.layout.exception
            if not exception.exists():
                write_text(exception, f"{type(error).__name__}: {error.message}\n{detail or ''}")

    def _record(self, total_s: float) -> TrialRecord:
        setup, progress, seconds = self._setup, self._progress, self._progress.seconds
        turns = tuple(progress.turns)
        return TrialRecord(
            trial_id=setup.trial_id,
            job_id=setup.job_id,
            task=task_info(setup.task, progress.image),
            attempt=setup.attempt,
            seed=setup.seed,
            agent=AgentInfo(
                name=setup.agent.name, version=setup.agent.version, prompt_sha256=setup.agent.prompt_sha256
            ),
            model=setup.model,
            outcome=progress.outcome,
            cause=progress.cause,
            detail=progress.detail,
            stop_reason=progress.stop_reason,
            rewards=dict(progress.grade.rewards) if progress.grade else {},
            tests=progress.grade.tests if progress.grade else None,
            turns=turns,
            tokens=sum_tokens(turn.tokens for turn in turns),
            costs=sum_costs(turn.costs for turn in turns),
            phases=PhaseTimes(
                image_s=seconds.get(Phase.IMAGE),
                sandbox_start_s=seconds.get(Phase.SANDBOX),
                agent_s=seconds.get(Phase.AGENT),
                capture_s=seconds.get(Phase.CAPTURE),
                grade_s=seconds.get(Phase.GRADE),
                total_s=total_s,
            ),
            started_at=progress.started_at,
            finished_at=setup.now(),
            provenance=setup.provenance,
        )

    def _log(self, text: str) -> None:
        append_line(self._setup.layout.log, f"{self._setup.now().isoformat()} {text}")


def inject(task: Task, sandbox: Sandbox) -> None:
    """Lay the task's ``inject`` folder into the working directory, owned by the agent.

    Raises TaskError when the folder is missing, SandboxError when it cannot be laid in.
    """
    if task.extras.inject is None:
        return
    folder = task.path / task.extras.inject
    if not folder.is_dir():
        raise TaskError(f"{task.path / 'task.toml'}: metadata.k3eval.inject names {folder}, no folder")
    sandbox.upload(folder, sandbox.workdir)
    shell = sandbox.open_shell(user="0", cwd="/")
    try:
        owner, path = shlex.quote(sandbox.user), shlex.quote(sandbox.workdir)
        result = shell.run(f"chown -R {owner} {path}", timeout_s=_INJECT_SECONDS)
    finally:
        shell.close()
    if result.exit_code != 0:
        raise SandboxError(f"the task's files could not be given to {sandbox.user}: {result.text.strip()}")


def task_info(task: Task, image: BuiltImage | None = None) -> TaskInfo:
    """What the record says of a task."""
    parts = task.path.parts
    below = parts[len(parts) - 1 - parts[::-1].index("tasks") :] if "tasks" in parts else (task.path.name,)
    return TaskInfo(
        name=task.name,
        family=task.family,
        path="/".join(below[1:] if len(below) > 1 else below),
        digest=task.digest,
        image=image.ref if image else None,
        image_digest=image.id if image else None,
    )


class _JournalingListener:
    """Writes every turn down before it is shown."""

    def __init__(self, inner: AgentListener, journal: Journal, turns: list[TurnRecord]) -> None:
        self._inner = inner
        self._journal = journal
        self._turns = turns

    def turn_started(self, turn: int, context_tokens: int | None) -> None:
        self._journal.write("intent", "turn", {"turn": turn, "context_tokens": context_tokens})
        self._inner.turn_started(turn, context_tokens)

    def token_tick(self, output_tokens: int, tok_s: float | None) -> None:
        self._inner.token_tick(output_tokens, tok_s)

    def turn_finished(self, turn: TurnRecord, messages: Sequence[Message]) -> None:
        self._turns.append(turn)
        details = {"turn": turn.model_dump(mode="json"), "messages": [item.to_json() for item in messages]}
        self._journal.write("result", "turn", details)
        self._inner.turn_finished(turn, messages)
