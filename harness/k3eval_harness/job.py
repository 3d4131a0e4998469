"""A job: plan trials, run them with limits, write everything down, stop cleanly.

``run_job`` never raises for one trial's trouble and always leaves ``job.json``; Ctrl-C, a full budget or a
time limit stop it early with every finished trial kept and no container left.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k3eval_harness.agent.protocol import Agent
from k3eval_harness.agent.registry import make_agent
from k3eval_harness.clients import ClientFactory
from k3eval_harness.engine.events import (
    JobEvent,
    JobFinished,
    JobObserver,
    JobStarted,
    SilentObserver,
    TokenTick,
    TrialFinished,
    TrialPhase,
    TrialStarted,
    TurnFinished,
    TurnStarted,
)
from k3eval_harness.engine.executor import Executor, ThreadExecutor
from k3eval_harness.errors import BudgetError, Cancelled, HarnessError, ModelServerError, UsageError
from k3eval_harness.journal import Journal, utc_now
from k3eval_harness.launcher import local_server
from k3eval_harness.plan import JobConfig, JobPlan, TrialPlan, plan_job
from k3eval_harness.provenance import collect_provenance
from k3eval_harness.results import harbor
from k3eval_harness.results.layout import JobLayout, append_line, remember_secrets, write_json
from k3eval_harness.results.schema import (
    JobSummary,
    ModelInfo,
    Outcome,
    Provenance,
    TrialRecord,
    TurnRecord,
    main_reward,
)
from k3eval_harness.results.summary import summarise
from k3eval_harness.sandbox.container import DockerProvider
from k3eval_harness.sandbox.engine import EngineInfo, check_disk, connect, engine_info
from k3eval_harness.sandbox.images import ImageBuilder
from k3eval_harness.sandbox.lease import reap
from k3eval_harness.task import Task, lint_task
from k3eval_harness.trial import Phase, Trial, TrialSetup

if TYPE_CHECKING:
    from docker import DockerClient

    from k3eval import Message, ModelRef

__all__ = [
    "JobConfig",
    "JobPlan",
    "TrialPlan",
    "ValidationResult",
    "plan_job",
    "run_job",
    "validate_task",
]

LOCAL_OUTPUT_TOKENS: Final = 1024
"""Output tokens of one call to a local model, unless the limits say otherwise."""


def run_job(config: JobConfig, observer: JobObserver, cancel: threading.Event) -> JobSummary:
    """Run the job to its end and return what ``job.json`` says.

    Raises UsageError, TaskError, ConfigError or EngineUnavailable before anything is started or written.
    """
    plan = plan_job(config)
    agent = make_agent(config.agent)
    client = connect()
    try:
        engine = engine_info(client)
        check_disk(client, info=engine)
        with _served(config, cancel) as served, _clients(config, served.ref) as clients:
            _check_price(config, clients)
            return _JobRun(config, plan, agent, client, engine, observer, cancel, clients, served).run()
    finally:
        client.close()


def _clients(config: JobConfig, model: ModelRef | None) -> ClientFactory:
    return ClientFactory(
        model,
        max_cost=config.max_cost,
        effort=config.effort,
        max_output=_max_output(config),
    )


def _check_price(config: JobConfig, clients: ClientFactory) -> None:
    """Refuse a limit on money that could not be kept."""
    model = config.model
    limited = config.max_cost is not None or config.limits.max_cost is not None
    if model is not None and model.provider != "local" and limited and clients.price_row is None:
        raise UsageError(
            f"the price of {model.model} is unknown, so a limit on cost cannot be kept: drop --max-cost "
            "or name a model that `k3eval models` shows a price for"
        )


def _max_output(config: JobConfig) -> int | None:
    """Output tokens of one call; a local model without a limit would fill its context with every reply."""
    chosen = config.limits.max_output_tokens_per_turn
    local = config.model is not None and config.model.provider == "local"
    return LOCAL_OUTPUT_TOKENS if chosen is None and local else chosen


@dataclass(frozen=True, slots=True)
class _Served:
    """The job's model as it can be called; empty where no agent calls one."""

    ref: ModelRef | None = None
    info: ModelInfo | None = None
    ended: Callable[[], str | None] = lambda: None
    """Why the server that the job itself started is gone; None while it runs or where there is none."""


@contextmanager
def _served(config: JobConfig, cancel: threading.Event) -> Iterator[_Served]:
    """The model; a local one without a URL is served for the length of the job."""
    ref = config.model
    if ref is None or not make_agent(config.agent).needs_model:
        yield _Served()
    elif ref.provider == "local" and ref.base_url is None:
        with local_server(ref.model, config.seed, cancel=cancel) as server:
            name = str(ref)
            yield _Served(
                replace(ref, base_url=server.base_url, model=server.model),
                ModelInfo(name=name, provider=ref.provider, model=server.model, weights=server.weights),
                server.ended,
            )
    else:
        base_url = re.sub(r"//[^/@]*@", "//", ref.base_url) if ref.base_url else None
        name = re.sub(r"//[^/@]*@", "//", str(ref))
        yield _Served(ref, ModelInfo(name=name, provider=ref.provider, model=ref.model, base_url=base_url))


class _JobRun:
    """One run of a planned job."""

    def __init__(
        self,
        config: JobConfig,
        plan: JobPlan,
        agent: Agent,
        client: DockerClient,
        engine: EngineInfo,
        observer: JobObserver,
        cancel: threading.Event,
        clients: ClientFactory,
        served: _Served,
    ) -> None:
        self._config, self._plan, self._agent = config, plan, agent
        self._client, self._clients = client, clients
        self._model, self._server_ended = served.info, served.ended
        self._cancel = cancel
        self._layout = JobLayout(config.out / plan.job_id)
        self._observer = observer
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._stop_error: HarnessError = Cancelled("stopped by the user")
        self._records: list[TrialRecord] = []
        self._running = 0
        self._provider = DockerProvider(client)
        self._images = ImageBuilder(client, self._log, self._stop)
        self._started_at = utc_now()
        self._start = time.monotonic()
        self._engine = engine
        self._provenance: Provenance = collect_provenance(self._engine.version, _date_of(clients.price_row))

    def run(self) -> JobSummary:
        """Run all trials; see ``run_job``."""
        config, plan = self._config, self._plan
        remember_secrets(os.environ)
        self._layout.root.mkdir(parents=True)
        self._clients.open_ledger(self._layout.ledger, plan.job_id, self._log)
        self._write_harbor_inputs()
        journal = Journal(self._layout.journal)
        self._log(
            f"job {plan.job_id}: {len(plan.trials)} trials, agent {config.agent}, model {self._model_name}"
        )
        for name in reap(self._client):
            self._log(f"removed the left-over container {name}")
        self._emit(
            JobStarted(plan.job_id, len(plan.trials), config.agent, self._model_name, self._layout.root)
        )
        executor: Executor = ThreadExecutor(config.concurrency)
        # what may take longest first, or the others would wait for it at the end
        order = sorted(
            plan.trials, key=lambda trial: (trial.attempt, -trial.task.config.verifier.timeout_sec)
        )
        try:
            with journal.act("job", trials=[trial.trial_id for trial in plan.trials]) as act:
                executor.run(
                    [partial(self._run_trial, trial) for trial in order],
                    self._stop,
                    self._poll,
                    lambda: self._stop_with(Cancelled("stopped by the user")),
                )
                act.details = {"finished": len(self._records)}
        except KeyboardInterrupt:
            self._stop_with(Cancelled("stopped by the user"))
        finally:
            try:
                self._provider.close()
            except KeyboardInterrupt:  # a second Ctrl-C shall end the wait for trials, not this
                self._provider.close()
            summary = self._summarise()
            write_json(self._layout.job_json, summary)
            self._write_harbor_result()
        self._log(f"passed {summary.passed}, failed {summary.failed}, void {summary.void}")
        self._emit(JobFinished(summary))
        return summary

    @property
    def _model_name(self) -> str | None:
        return self._model.name if self._model else None

    def _run_trial(self, plan: TrialPlan) -> None:
        with self._lock:
            self._running += 1
        self._emit(TrialStarted(plan.trial_id, plan.task.name, plan.attempt))
        layout = self._layout.trial(plan.trial_id)
        setup = TrialSetup(
            trial_id=plan.trial_id,
            job_id=self._plan.job_id,
            task=plan.task,
            attempt=plan.attempt,
            seed=plan.seed,
            agent=self._agent if self._config.agent in ("oracle", "nop") else make_agent(self._config.agent),
            limits=self._config.limits,
            layout=layout,
            images=self._images,
            provider=self._provider,
            stop=self._stop,
            stopped_by=lambda: self._stop_error,
            listener=_EventListener(plan.trial_id, self._emit),
            provenance=self._provenance,
            max_cpus=float(self._engine.cpus),
            model=self._model,
            new_client=self._clients.new_client if self._model else None,
        )
        trial_config = harbor.trial_config(
            plan.trial_id,
            self._plan.job_id,
            self._layout.root,
            *self._harbor_task(plan.task),
            *self._harbor_agent,
        )
        try:
            trial = Trial(setup)
            write_json(layout.config_json, trial_config)
            write_json(layout.lock_json, self._trial_lock(plan))
            record = trial.run()
            result = harbor.trial_result(record, layout.root, plan.task.path, trial_config)
            write_json(layout.result_json, result)
        except OSError as error:
            self._stop_with(HarnessError(f"results cannot be written: {error}"))
            return
        finally:
            with self._lock:
                self._running -= 1
        with self._lock:
            self._records.append(record)
            self._write_harbor_result()
        if record.outcome is Outcome.VOID and record.cause == "budget" and not self._stop.is_set():
            self._stop_with(BudgetError(record.detail or "the job's budget is reached"))
        self._emit(TrialFinished(plan.trial_id, record))

    def _poll(self) -> None:
        limit = self._config.timeout_s
        if self._cancel.is_set():
            self._stop_with(Cancelled("stopped by the user"))
        elif limit is not None and time.monotonic() - self._start > limit:
            self._stop_with(BudgetError(f"the job ran longer than its limit of {limit:g} s"))
        elif reason := self._server_ended():
            self._stop_with(ModelServerError(f"the local model server ended during the run: {reason}"))

    def _stop_with(self, error: HarnessError) -> None:
        """Stop early: no new trial, calls in flight cut, containers removed; running trials end as void."""
        with self._lock:
            if self._stop.is_set():
                return
            self._stop_error = error
            self._stop.set()
        self._log(f"stopping: {error.message}")
        self._clients.close_all()
        self._provider.close()

    def _summarise(self) -> JobSummary:
        config, stopped = self._config, self._stop.is_set()
        return summarise(
            self._records,
            job_id=self._plan.job_id,
            agent=config.agent,
            model=self._model_name,
            tasks=len(config.tasks),
            attempts=config.attempts,
            planned=len(self._plan.trials),
            wall_s=time.monotonic() - self._start,
            started_at=self._started_at,
            finished_at=utc_now(),
            results_dir=str(self._layout.root),
            stopped_by=self._stop_error.cause if stopped else None,
            stop_detail=self._stop_error.message if stopped else None,
        )

    def _write_harbor_inputs(self) -> None:
        config = self._config
        tasks = [harbor.task_config(*self._harbor_task(task)) for task in config.tasks]
        write_json(
            self._layout.config_json,
            harbor.job_config(
                self._plan.job_id, config.out, config.attempts, config.concurrency, *self._harbor_agent, tasks
            ),
        )
        locks = [self._trial_lock(trial) for trial in self._plan.trials]
        write_json(self._layout.lock_json, harbor.job_lock(self._started_at, config.concurrency, locks))

    def _write_harbor_result(self) -> None:
        with self._lock:
            data = harbor.job_result(
                self._plan.job_id,
                self._records,
                len(self._plan.trials),
                self._running,
                self._started_at,
                utc_now(),
            )
            write_json(self._layout.result_json, data)

    def _trial_lock(self, plan: TrialPlan) -> harbor.Json:
        path, family = self._harbor_task(plan.task)
        return harbor.trial_lock(plan.task.name, plan.task.digest, path, family, *self._harbor_agent)

    def _harbor_task(self, task: Task) -> tuple[Path, str | None]:
        return task.path, task.family

    @property
    def _harbor_agent(self) -> tuple[str, str | None]:
        return self._config.agent, self._model_name

    def _emit(self, event: JobEvent) -> None:
        with self._lock:
            try:
                self._observer.on_event(event)
            except Exception as error:  # noqa: BLE001 - a broken display must not end a paid run; it is logged
                self._log(f"the observer failed: {type(error).__name__}: {error}")

    def _log(self, text: str) -> None:
        with suppress(OSError):  # a disk that is full or gone ends the job where a result is written
            if self._layout.root.is_dir():
                append_line(self._layout.log, f"{utc_now().isoformat()} {text}")


class _EventListener:
    """Turns what a trial says into events of the job."""

    def __init__(self, trial_id: str, emit: Callable[[JobEvent], None]) -> None:
        self._trial_id = trial_id
        self._emit = emit

    def phase(self, phase: Phase) -> None:
        self._emit(TrialPhase(self._trial_id, phase.value))

    def turn_started(self, turn: int, context_tokens: int | None) -> None:
        self._emit(TurnStarted(self._trial_id, turn, context_tokens))

    def token_tick(self, output_tokens: int, tok_s: float | None) -> None:
        self._emit(TokenTick(self._trial_id, output_tokens, tok_s))

    def turn_finished(self, turn: TurnRecord, messages: Sequence[Message]) -> None:
        self._emit(TurnFinished(self._trial_id, turn))


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
    """The oracle must pass and nop must fail, ``repeat`` times each.

    Results are kept below ``out``; without it they are thrown away.
    """
    import tempfile

    start = time.monotonic()
    problems = [f"{item.where}: {item.message}" for item in lint_task(task) if item.level == "error"]
    rewards: dict[str, tuple[float | None, ...]] = {}
    with tempfile.TemporaryDirectory(prefix="k3eval-validate-") as scratch:
        for agent, wanted in (("oracle", Outcome.PASSED), ("nop", Outcome.FAILED)):
            seen = _Recorder(observer or SilentObserver())
            config = JobConfig((task,), agent, None, attempts=repeat, out=out or Path(scratch))
            run_job(config, seen, cancel or threading.Event())
            rewards[agent] = tuple(_reward(record) for record in seen.records)
            problems += [
                f"{agent} attempt {record.attempt}: {record.outcome.value} instead of {wanted.value}"
                + (f": {record.detail}" if record.detail else "")
                for record in seen.records
                if record.outcome is not wanted
            ]
            missing = repeat - len(seen.records)
            if missing:
                problems.append(f"{agent}: {missing} of {repeat} runs did not take place")
    return ValidationResult(
        task=task.name,
        valid=not problems,
        oracle_rewards=rewards["oracle"],
        nop_rewards=rewards["nop"],
        problems=tuple(problems),
        wall_s=time.monotonic() - start,
    )


class _Recorder:
    """Keeps the records of finished trials and passes every event on."""

    def __init__(self, inner: JobObserver) -> None:
        self._inner = inner
        self.records: list[TrialRecord] = []

    def on_event(self, event: JobEvent) -> None:
        if isinstance(event, TrialFinished):
            self.records.append(event.record)
        self._inner.on_event(event)


def _reward(record: TrialRecord) -> float | None:
    return None if record.outcome is Outcome.VOID or not record.rewards else main_reward(record.rewards)


def _date_of(price_row: str | None) -> str | None:
    """The check date in ``host/model@YYYY-MM-DD``."""
    return price_row.rpartition("@")[2] if price_row else None
