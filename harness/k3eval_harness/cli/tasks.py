"""``k3eval tasks``: find tasks, show one, check them without running, prove them with the oracle and nop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from k3eval_harness.cli.common import (
    Exit,
    fail,
    help_without_command,
    one_line_errors,
    out_option,
    print_json,
)

if TYPE_CHECKING:
    from k3eval_harness.job import ValidationResult
    from k3eval_harness.task import Finding, Task

GENERATED = "repo-fix-mini"
"""The family whose tasks can be generated."""

commands = typer.Typer(
    help="List, show, check, validate and generate tasks.",
    callback=help_without_command,
    invoke_without_command=True,
)

Selectors = Annotated[list[str] | None, typer.Argument(help="Task names, families, paths or globs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(commands, name="tasks")


@commands.command("list")
def list_tasks(selectors: Selectors = None, json: AsJson = False) -> None:
    """List tasks; all of the tasks folder by default."""
    with one_line_errors():
        from k3eval_harness.cli.render import print_table

        tasks = _find(selectors or ["*"])
        if json:
            return print_json([_facts(task) for task in tasks])
        rows = [
            (task.name, task.family or "-", task.extras.kind or "-", _limit(task), _first_line(task))
            for task in tasks
        ]
        return print_table(
            ("task", "family", "kind", "agent limit", "instruction"), rows, right=("agent limit",)
        )


@commands.command("show")
def show(task: Annotated[str, typer.Argument(help="One task.")], json: AsJson = False) -> None:
    """Show one task: its limits, its image, its instruction."""
    with one_line_errors():
        from k3eval_harness.cli.render import say
        from k3eval_harness.errors import UsageError

        found = _find([task])
        if len(found) > 1:
            names = ", ".join(t.name for t in found[:5])
            raise UsageError(f"{task!r} names {len(found)} tasks ({names}, ...); give one")
        facts = _facts(found[0])
        if json:
            return print_json(facts | {"instruction": found[0].instruction})
        lines = [f"{key}: {'-' if value is None else value}" for key, value in facts.items()]
        return say("\n".join([*lines, "", found[0].instruction.strip()]))


@commands.command("check")
def check(
    selectors: Selectors = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail the check too.")] = False,
    json: AsJson = False,
) -> None:
    """Look for mistakes in tasks without running anything. Exit 1 when a task has an error."""
    with one_line_errors():
        from k3eval_harness.cli.render import say
        from k3eval_harness.task import lint_task

        failing = {"error", "warning"} if strict else {"error"}
        remarks = [(task, lint_task(task)) for task in _find(selectors or ["*"])]
        oks = [not any(finding.level in failing for finding in found) for _, found in remarks]
        if json:
            print_json([_remarks(task, found, ok=ok) for (task, found), ok in zip(remarks, oks, strict=True)])
        else:
            for (task, found), ok in zip(remarks, oks, strict=True):
                say("\n".join([f"{task.name}: {'ok' if ok else 'fails'}", *map(_remark, found)]))
        if not all(oks):
            raise fail(f"{oks.count(False)} of {len(oks)} tasks have errors", Exit.THRESHOLD)


@commands.command("validate")
def validate(
    selectors: Selectors = None,
    repeat: Annotated[int, typer.Option(help="Runs of the oracle and of nop; more find flaky tests.")] = 1,
    json: AsJson = False,
) -> None:
    """Prove tasks: the oracle must pass and nop must fail. Exit 1 when a task is not valid."""
    with one_line_errors():
        from k3eval_harness.errors import UsageError

        if repeat < 1:
            raise UsageError(f"--repeat must be 1 or more, not {repeat}")
        results = _validate(_find(selectors or ["*"]), repeat, quiet=json)
        if json:
            print_json([_verdict(result) for result in results])
        void = [r for r in results if None in (*r.oracle_rewards, *r.nop_rewards)]
        bad = [r for r in results if not r.valid]
        if void:
            raise fail(f"{len(void)} of {len(results)} tasks could not be measured", Exit.VOID)
        if bad:
            raise fail(f"{len(bad)} of {len(results)} tasks are not valid", Exit.THRESHOLD)


@commands.command("generate")
def generate(
    out: Annotated[Path, out_option("Folder that receives one folder per task.")],
    n: Annotated[int, typer.Option("--n", help="How many tasks.")] = 10,
    seed: Annotated[int, typer.Option(help="Series of tasks; equal arguments write equal files.")] = 0,
    family: Annotated[str, typer.Argument(help="A family that is generated.")] = GENERATED,
    shape: Annotated[
        str, typer.Option(help="plain, or a distribution to measure on: rare, noise-500, ...")
    ] = "plain",
    json: AsJson = False,
) -> None:
    """Generate tasks: small repositories with one seeded bug each."""
    with one_line_errors():
        from k3eval_harness.cli.render import say
        from k3eval_harness.errors import UsageError

        if family != GENERATED:
            raise UsageError(f"only the family {GENERATED} is generated, not {family!r}")
        folders = generated_folders(n, seed, out, shape)
        if json:
            tasks = [str(folder) for folder in folders]
            return print_json({"family": family, "seed": seed, "n": n, "out": str(out), "tasks": tasks})
        return say(f"{len(folders)} tasks of {family}, series {seed}, are in {out}")


@commands.command("episodes")
def episodes(
    out: Annotated[Path, out_option("File that receives one conversation per line (JSON lines).")],
    n: Annotated[int, typer.Option("--n", help="How many conversations.")] = 1000,
    seed: Annotated[int, typer.Option(help="Series; equal arguments write equal files.")] = 0,
    start: Annotated[int, typer.Option(help="Number of the first one, to write a series in parts.")] = 0,
    shape: Annotated[str, typer.Option(help="training, or a distribution to measure on.")] = "training",
    json: AsJson = False,
) -> None:
    """Write conversations that repair generated tasks, to train a model on."""
    with one_line_errors():
        from k3eval_harness.cli.render import say
        from k3eval_harness.errors import UsageError
        from k3eval_harness.task.mini.episodes import SHAPES, write_episodes

        if shape not in SHAPES:
            raise UsageError(f"no shape is called {shape!r}; there are {', '.join(SHAPES)}")
        if start < 0 or seed < 0:
            raise UsageError("--start and --seed must be 0 or more")
        with _whole_file(out) as file:
            written = write_episodes(n, seed, file, start=start, shape=SHAPES[shape])
        if json:
            return print_json({"written": written, "seed": seed, "start": start, "out": str(out)})
        return say(f"{written} conversations of series {seed} are in {out}")


def generated_folders(n: int, seed: int, out: Path, shape: str = "plain") -> tuple[Path, ...]:
    """Generate tasks below ``out``; UsageError where that cannot be written or ``shape`` is not known."""
    from k3eval_harness.errors import UsageError
    from k3eval_harness.task.mini.episodes import SHAPES, EpisodeShape
    from k3eval_harness.task.mini.folder import generate as generate_tasks

    if seed < 0:
        raise UsageError(f"--seed must be 0 or more, not {seed}")
    single = {name: each.project for name, each in SHAPES.items() if isinstance(each, EpisodeShape)}
    if shape not in single:
        raise UsageError(f"no shape is called {shape!r}; there are {', '.join(single)}")
    try:
        return generate_tasks(n, seed, out, shape=single[shape], label="" if shape == "plain" else shape)
    except OSError as error:
        raise UsageError(f"cannot write tasks to {out}: {error.strerror}; choose another folder") from None


@contextmanager
def _whole_file(out: Path) -> Iterator[TextIO]:
    """A text file that appears under its name only when it is complete."""
    from k3eval_harness.errors import UsageError

    partial = out.with_name(f".{out.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        partial.replace(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; choose another --out") from None
    finally:
        partial.unlink(missing_ok=True)


def _find(selectors: list[str]) -> list[Task]:
    from k3eval_harness.task import find_tasks

    return list({task.path: task for selector in selectors for task in find_tasks(selector)}.values())


def _facts(task: Task) -> dict[str, object]:
    environment = task.config.environment
    return {
        "name": task.name,
        "family": task.family,
        "kind": task.extras.kind,
        "path": _shown_path(task.path),
        "digest": task.digest,
        "image": environment.docker_image or "built from environment/Dockerfile",
        "agent_timeout_s": task.config.agent.timeout_sec,
        "verifier_timeout_s": task.config.verifier.timeout_sec,
        "cpus": environment.cpus,
        "memory_mb": environment.memory_mb,
        "oracle": (task.solution_dir / "solve.sh").is_file(),
    }


def _shown_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _limit(task: Task) -> str:
    seconds = task.config.agent.timeout_sec
    return "none" if seconds is None else f"{seconds:g} s"


def _first_line(task: Task) -> str:
    line = next((line.strip("# ").strip() for line in task.instruction.splitlines() if line.strip("# ")), "")
    return line if len(line) <= 70 else line[:69] + "…"


def _remark(finding: Finding) -> str:
    return f"  {finding.level}: {finding.where}: {finding.message}"


def _remarks(task: Task, found: tuple[Finding, ...], *, ok: bool) -> dict[str, object]:
    findings = [{"level": f.level, "where": f.where, "message": f.message} for f in found]
    return {"task": task.name, "ok": ok, "findings": findings}


def _validate(tasks: list[Task], repeat: int, *, quiet: bool) -> list[ValidationResult]:
    """Validate one task after the other; each verdict is shown as soon as it is known."""
    from k3eval_harness.cli.render import console, say
    from k3eval_harness.cli.run import cancelled_by_signals
    from k3eval_harness.job import validate_task

    results = []
    with cancelled_by_signals(console(stderr=True)) as cancel:
        for task in tasks:
            result = validate_task(task, repeat, cancel=cancel)
            if cancel.is_set():  # what was cut off is no verdict on the task
                raise KeyboardInterrupt
            results.append(result)
            if not quiet:
                say(_verdict_line(result))
    return results


def _verdict_line(result: ValidationResult) -> str:
    rewards = f"oracle {_rewards(result.oracle_rewards)}, nop {_rewards(result.nop_rewards)}"
    head = f"{result.task}: {'valid' if result.valid else 'NOT VALID'} ({rewards}, {result.wall_s:.1f} s)"
    return "\n".join([head, *(f"  {problem}" for problem in result.problems)])


def _rewards(rewards: tuple[float | None, ...]) -> str:
    return " ".join("void" if reward is None else f"{reward:g}" for reward in rewards)


def _verdict(result: ValidationResult) -> dict[str, object]:
    return {
        "task": result.task,
        "valid": result.valid,
        "oracle_rewards": list(result.oracle_rewards),
        "nop_rewards": list(result.nop_rewards),
        "problems": list(result.problems),
        "wall_s": result.wall_s,
    }
