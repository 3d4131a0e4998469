"""``k3eval run``: tasks, an agent and a model in; a folder of results, a table or one JSON object out.

Without ``--model`` the run serves the local backend itself: nothing costs money unless the user named a
paid model.
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from k3eval_harness.cli.common import Exit, fail, note, one_line_errors, out_option, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from k3eval import ModelRef
    from k3eval_harness.agent.protocol import AgentLimits
    from k3eval_harness.job import JobConfig, JobPlan
    from k3eval_harness.results.schema import JobSummary
    from k3eval_harness.task import Task

DEFAULT_MODEL = "local/a"
DEFAULT_OUT = Path("results/runs")
MAX_SEED = 2**63
CLEAN_UP_SECONDS = 5.0
MIN_FREE_BYTES = 16 * 1024**2
"""Less free space than this would end the job half-way."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(run)


def run(
    task: Annotated[
        list[str], typer.Option("--task", "-t", help="Task name, family, path or glob. Repeatable.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help=f"local/NAME, moonshot/kimi-k3, openrouter/moonshotai/kimi-k3 or compatible/ID@URL. "
            f"Default: {DEFAULT_MODEL}, served by the run itself and free of cost."
        ),
    ] = None,
    agent: Annotated[str, typer.Option(help="k3, oracle, nop or module:Class.")] = "k3",
    attempts: Annotated[int, typer.Option(help="Attempts at each task.")] = 1,
    concurrency: Annotated[int, typer.Option(help="Trials at the same time.")] = 1,
    max_cost: Annotated[
        str | None, typer.Option(help="Money cap of the whole job, in the model's currency.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole job.")] = None,
    out: Annotated[Path, out_option("Folder that receives the job's folder.")] = DEFAULT_OUT,
    seed: Annotated[int, typer.Option(help="Seed of the trials, and of a generated family.")] = 0,
    n: Annotated[
        int | None,
        typer.Option("--n", help="Generate this many tasks of the family instead of the bundled ones."),
    ] = None,
    effort: Annotated[str | None, typer.Option(help="Reasoning effort, where the model has it.")] = None,
    max_turns: Annotated[int | None, typer.Option(help="Model calls per trial.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Exit 1 when the score is lower (0 to 1).")] = None,
    min_coverage: Annotated[
        float, typer.Option(help="Exit 3 when fewer of the planned trials are valid (0 to 1).")
    ] = 0.9,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and start nothing.")] = False,
) -> None:
    """Run tasks in sandboxes with an agent; report pass rate, tokens, cost and decode speed."""
    with one_line_errors(), ExitStack() as scratch:
        from k3eval_harness.job import JobConfig, plan_job

        _check_numbers(attempts, concurrency, timeout, threshold, min_coverage, n, max_turns, seed)
        home = scratch.enter_context(_generated_home(out, seed, keep=not dry_run)) if n else None
        config = JobConfig(
            agent=agent,
            model=_model(model, agent),
            attempts=attempts,
            concurrency=concurrency,
            max_cost=money_cap(max_cost),
            timeout_s=timeout,
            out=out,
            seed=seed,
            effort=_effort(effort),
            limits=_limits(max_turns),
            tasks=_tasks(task, n, seed, home),  # last: it may write, the checks above must come first
        )
        plan = plan_job(config)
        if dry_run:
            return _show_plan(plan, config, as_json=json)
        for warning in plan.warnings:
            note(warning)
        summary = _execute(config)
        _show_summary(summary, as_json=json)
        raise _exit(summary, threshold, min_coverage)


def _check_numbers(
    attempts: int,
    concurrency: int,
    timeout: float | None,
    threshold: float | None,
    min_coverage: float,
    n: int | None,
    max_turns: int | None,
    seed: int,
) -> None:
    from k3eval_harness.errors import UsageError

    counts = {"attempts": attempts, "concurrency": concurrency, "n": n, "max-turns": max_turns}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"--{name} must be 1 or more, not {count}")
    if timeout is not None and not 0 < timeout < float("inf"):
        raise UsageError(f"--timeout must be a positive number of seconds, not {timeout:g}")
    if not 0 <= seed < MAX_SEED:
        raise UsageError(f"--seed must be 0 or more and below 2^63, not {seed}")
    for name, share in {"threshold": threshold, "min-coverage": min_coverage}.items():
        if share is not None and not 0 <= share <= 1:
            raise UsageError(f"--{name} must lie between 0 and 1, not {share:g}")


def _tasks(selectors: Sequence[str], n: int | None, seed: int, home: Path | None) -> tuple[Task, ...]:
    """The tasks of all selectors, each once; with ``n`` and ``home``, new ones of a generated family."""
    from k3eval_harness.cli.tasks import GENERATED, generated_folders
    from k3eval_harness.errors import UsageError
    from k3eval_harness.task import find_tasks, load_task

    if n is not None and home is not None:
        for selector in selectors:
            if selector != GENERATED:
                raise UsageError(
                    f"--n makes tasks of {GENERATED} only: drop it to run {selector!r}, or name that family"
                )
        return tuple(load_task(folder) for folder in generated_folders(n, seed, home))
    found = {task.path: task for selector in selectors for task in find_tasks(selector)}
    return tuple(found.values())


@contextmanager
def _generated_home(out: Path, seed: int, *, keep: bool) -> Iterator[Path]:
    """Where generated tasks lie: beside the results that name them, or in a place that is thrown away."""
    import tempfile

    from k3eval_harness.cli.generated import generated_home

    if keep:
        _check_writable(out)
        with generated_home(out, seed) as home:
            yield home
        return
    with tempfile.TemporaryDirectory(prefix="k3eval-generated-") as folder:
        yield Path(folder)


def _model(text: str | None, agent: str) -> ModelRef | None:
    """The model named, else the local default; ``None`` for agents that call no model."""
    from k3eval import ModelRef
    from k3eval_harness.agent.registry import make_agent
    from k3eval_harness.cli.models import check_local_model

    reference = ModelRef.parse(text or DEFAULT_MODEL)
    if reference.provider == "local" and reference.base_url is None:
        check_local_model(reference.model)
    return reference if make_agent(agent).needs_model else None


def money_cap(text: str | None) -> Decimal | None:
    """Read ``--max-cost``."""
    from k3eval_harness.errors import UsageError

    if text is None:
        return None
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or amount <= 0:
        raise UsageError(f"--max-cost must be a positive amount such as 2.50, not {text!r}")
    return amount


def _effort(text: str | None) -> str | None:
    from k3eval.options import EFFORTS
    from k3eval_harness.errors import UsageError

    if text is not None and text not in EFFORTS:
        raise UsageError(f"--effort must be one of {', '.join(EFFORTS)}, not {text!r}")
    return text


def _limits(max_turns: int | None) -> AgentLimits:
    from k3eval_harness.agent.protocol import AgentLimits

    return AgentLimits() if max_turns is None else AgentLimits(max_turns=max_turns)


def _execute(config: JobConfig) -> JobSummary:
    from k3eval_harness.cli.render import console, watched
    from k3eval_harness.errors import HarnessError
    from k3eval_harness.job import run_job
    from k3eval_harness.progress import progress

    _check_writable(config.out)
    screen = console(stderr=True)
    with progress(screen, live=watched()) as observer, cancelled_by_signals(screen) as cancel:
        try:
            return run_job(config, observer, cancel)
        except HarnessError:
            if cancel.is_set():  # what was being started was cut off: that is the user's stop, not an error
                raise KeyboardInterrupt from None
            raise
        except OSError as error:
            reason = error.strerror or error
            raise HarnessError(
                f"results cannot be written to {config.out}: {reason}; free some disk or choose another --out"
            ) from error


def _check_writable(out: Path) -> None:
    """Refuse a results folder that cannot be made or written, and leave nothing behind in the attempt."""
    import shutil
    import tempfile

    from k3eval_harness.errors import UsageError

    try:
        existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        raise UsageError(
            f"cannot write results to {str(out)[:200]}: {error.strerror}; choose another --out"
        ) from None
    if free < MIN_FREE_BYTES:
        raise UsageError(
            f"only {free // 1024} KiB free for results in {out}: free some disk or choose another --out"
        )


@contextmanager
def cancelled_by_signals(screen: Console) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C, SIGTERM or end of the terminal sets; the second one interrupts at once.

    More of them are ignored for CLEAN_UP_SECONDS: who keeps pressing must not cut off the removal of
    containers that the second one has started.
    """
    cancel = threading.Event()
    interrupted_at = -math.inf

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted_at
        if not cancel.is_set():
            cancel.set()
            with suppress(OSError):  # the terminal may be gone
                screen.print(
                    "k3eval: stopping; finished trials are kept. Press Ctrl-C again to stop at once."
                )
        elif time.monotonic() - interrupted_at > CLEAN_UP_SECONDS:
            interrupted_at = time.monotonic()
            raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else nohup wants the run to go on
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield cancel
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_plan(plan: JobPlan, config: JobConfig, *, as_json: bool) -> None:
    from k3eval_harness.cli.render import print_table, say

    if as_json:
        return print_json(
            {
                "job_id": plan.job_id,
                "agent": config.agent,
                "model": _model_name(config),
                "trials": [
                    {"trial_id": t.trial_id, "task": t.task.name, "attempt": t.attempt, "seed": t.seed}
                    for t in plan.trials
                ],
                "images": list(plan.images),
                "worst_case_cost": None if plan.worst_case_cost is None else str(plan.worst_case_cost),
                "notes": [*plan.notes, *plan.warnings],
            }
        )
    rows = [(t.task.name, str(t.attempt), str(t.seed), t.trial_id) for t in plan.trials]
    print_table(("task", "attempt", "seed", "trial"), rows, right=("attempt", "seed"))
    worst = "no limit (set --max-cost)" if plan.worst_case_cost is None else str(plan.worst_case_cost)
    model = f"model {_model_name(config)}" if config.model else "no model"
    say(
        f"\n{len(plan.trials)} trials, agent {config.agent}, {model}, {len(plan.images)} images; "
        f"cost at worst: {worst}. Nothing was started."
    )
    for text in (*plan.notes, *plan.warnings):
        say(f"note: {text}")
    return None


def _model_name(config: JobConfig) -> str | None:
    """The model as it may be shown: without what a URL may hold before its host."""
    return re.sub(r"//[^/@]*@", "//", str(config.model)) if config.model else None


def _show_summary(summary: JobSummary, *, as_json: bool) -> None:
    from k3eval_harness.cli.render import console
    from k3eval_harness.report.build import build_report
    from k3eval_harness.report.table import print_report
    from k3eval_harness.results import load_job

    if as_json:
        return print_json(summary.model_dump(mode="json"))
    loaded = load_job(Path(summary.results_dir))
    print_report(console(), build_report(loaded.trials, summary, summary.job_id))
    return console().print(f"Results: {summary.results_dir}", markup=False)


def _exit(summary: JobSummary, threshold: float | None, min_coverage: float) -> typer.Exit:
    """The exit of a job: interrupted, over budget, too many void, below the threshold, or fine."""
    if summary.interrupted:
        return fail(f"interrupted; the finished trials are in {summary.results_dir}", Exit.INTERRUPTED)
    if summary.stopped_by == "budget":
        return fail(f"{summary.stop_detail}; the finished trials are in {summary.results_dir}", Exit.BUDGET)
    if summary.coverage is None or summary.coverage < min_coverage:
        causes = ", ".join(f"{cause} {n}" for cause, n in summary.void_causes.items()) or "not run"
        valid = f"{summary.passed + summary.failed} of {summary.planned}"
        first = f": {summary.stop_detail}" if summary.stop_detail else _first_void(Path(summary.results_dir))
        return fail(
            f"only {valid} trials are valid (void: {causes}){first}; see {summary.results_dir}", Exit.VOID
        )
    if threshold is not None and (summary.score is None or summary.score < threshold):
        return fail(f"score {summary.score} is below the threshold {threshold:g}", Exit.THRESHOLD)
    return typer.Exit(int(Exit.OK))


def _first_void(folder: Path) -> str:
    """Why the first void trial is void, as the tail of a sentence; empty where nothing is written."""
    from k3eval_harness.errors import UsageError
    from k3eval_harness.results import load_job

    try:
        trials = load_job(folder).trials
    except UsageError:
        return ""
    details = (" ".join(t.detail.split()) for t in trials if t.outcome == "void" and t.detail)
    return next((f": {detail}" for detail in details), "")
