"""``k3eval run`` from the command line: plans, exit codes, one JSON object, errors, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from rich.console import Console
from surface_samples import summary
from typer.testing import CliRunner

from k3eval_harness.cli.app import app
from k3eval_harness.cli.run import _exit, cancelled_by_signals
from k3eval_harness.results.schema import JobSummary

BASE = "python:3.11-slim-bookworm"
CHECKOUT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(CHECKOUT / part) for part in ("", "harness", "local_backend"))
}
COMMAND = [sys.executable, "-c", "from k3eval_harness.cli import main; main()"]


def write_task(root: Path, name: str, *, solve: str = "touch solved", test: str | None = None) -> Path:
    """A task whose test passes when /app/solved is there."""
    folder = root / name
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text(
        f'schema_version = "1.4"\n[environment]\nworkdir = "/app"\n'
        f'[metadata.k3eval]\nfamily = "{root.name}"\n'
        "[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60\n"
    )
    (folder / "instruction.md").write_text("Create the file /app/solved.\n")
    (folder / "environment" / "Dockerfile").write_text(
        f"FROM {BASE}\nRUN useradd -m -u 1000 agent && mkdir /app && chown agent /app\nWORKDIR /app\n"
    )
    grade = "if [ -e /app/solved ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
    (folder / "tests" / "test.sh").write_text(f"#!/bin/sh\n{grade if test is None else test}\n")
    (folder / "solution" / "solve.sh").write_text(f"#!/bin/sh\n{solve}\n")
    return folder


def run(*arguments: str | int | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["run", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("changes", "threshold", "code", "said"),
    [
        ({}, None, 0, ""),
        ({}, 0.5, 0, ""),
        ({}, 0.6, 1, "score 0.5 is below the threshold 0.6"),
        ({"coverage": 0.5, "void": 2, "planned": 4, "void_causes": {"sandbox": 2}}, 0.9, 3, "sandbox 2"),
        ({"coverage": 0.0, "score": None}, None, 3, "trials are valid"),
        ({"coverage": 0.2, "stopped_by": "budget", "stop_detail": "the budget is spent"}, 0.9, 4, "spent"),
        ({"coverage": 0.2, "stopped_by": "user", "interrupted": True}, 0.9, 130, "interrupted"),
        ({"score": None, "coverage": 1.0}, 0.1, 1, "below the threshold"),
        (
            {"coverage": 0.2, "stopped_by": "provider", "stop_detail": "no server"},
            None,
            3,
            ": no server; see",
        ),
    ],
)
def test_exit_codes(
    changes: dict[str, object],
    threshold: float | None,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = _exit(summary(**({"planned": 2} | changes)), threshold, 0.9)
    assert isinstance(stop, typer.Exit)
    assert stop.exit_code == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == (code != 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_cancels_the_second_interrupts_and_mashing_does_nothing_more(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with cancelled_by_signals(Console(stderr=True)) as cancel:
        signal.raise_signal(number)
        assert cancel.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        for _ in range(5):
            signal.raise_signal(number)
    assert capsys.readouterr().err.count("finished trials are kept") == 1
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cancelled_by_signals(Console(stderr=True)) as cancel:
            signal.raise_signal(signal.SIGHUP)
            assert not cancel.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_dry_run_shows_the_plan_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")
    for name in ("one", "two"):
        write_task(tmp_path / "family", name)
    out = tmp_path / "out"
    arguments = ("--task", tmp_path / "family", "--attempts", 2, "--out", out, "--dry-run")
    code, stdout, _ = run(*map(str, arguments), "--json")
    assert code == 0
    plan = json.loads(stdout)
    assert plan["agent"] == "k3"
    assert plan["model"] == "local/a"
    assert sorted((t["task"], t["attempt"]) for t in plan["trials"]) == [
        ("one", 1), ("one", 2), ("two", 1), ("two", 2),
    ]  # fmt: skip
    assert plan["worst_case_cost"] == "0"
    code, stdout, _ = run(*map(str, arguments))
    assert "4 trials, agent k3, model local/a, 2 images" in stdout
    assert not out.exists()


@pytest.mark.filterwarnings(
    # the docker package leaves a socket open when its constructor fails
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_remark_that_holds_for_several_tasks_is_said_once_by_plans_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")
    for name in ("one", "two", "three"):
        toml = write_task(tmp_path / "family", name) / "task.toml"
        toml.write_text(toml.read_text().replace("[environment]", "[environment]\nskills_dir = '/skills'"))
    arguments = ("--task", tmp_path / "family", "--agent", "nop", "--out", tmp_path / "out")
    expected = "note: one and 2 more: task.toml: environment.skills_dir: not used: agents get no skills here"
    _, stdout, _ = run(*arguments, "--dry-run")
    assert stdout.count("skills_dir") == 1
    assert expected in stdout
    _, _, stderr = run(*arguments)
    first, second = stderr.splitlines()
    assert first == f"k3eval: {expected}"
    assert "no Docker engine answers" in second


def test_a_password_in_a_models_url_is_not_shown(tmp_path: Path) -> None:
    arguments = (
        "--task",
        write_task(tmp_path, "one"),
        "--model",
        "compatible/x@http://me:secret@h/v1",
        "--dry-run",
    )
    for form in ((), ("--json",)):
        code, stdout, stderr = run(*arguments, *form)
        assert code == 0
        assert "compatible/x@http://h/v1" in stdout
        assert "secret" not in stdout + stderr


def test_the_same_task_twice_is_run_once(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "family", "one")
    code, stdout, _ = run(
        "--task", folder, "--task", tmp_path / "family", "--agent", "nop", "--dry-run", "--json"
    )
    assert code == 0
    assert len(json.loads(stdout)["trials"]) == 1


@pytest.mark.filterwarnings(
    # the docker package leaves a socket open when its constructor fails
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_no_engine_is_one_line_and_leaves_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")
    out = tmp_path / "out"
    code, stdout, stderr = run(
        "--task", write_task(tmp_path, "one"), "--agent", "oracle", "--out", out, "--json"
    )
    assert (code, stdout) == (3, "")
    assert stderr.startswith("k3eval: no Docker engine answers at unix:///no/such/socket")
    assert stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.filterwarnings(
    # the docker package leaves a socket open when its constructor fails
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_generated_tasks_go_again_when_no_job_came_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")
    out = tmp_path / "out"
    code, _, stderr = run("--task", "repo-fix-mini", "--n", 2, "--agent", "nop", "--out", out)
    assert code == 3
    assert "no Docker engine answers" in stderr
    assert list(tmp_path.iterdir()) == []


def test_an_out_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")
    blocked = tmp_path / "file"
    blocked.touch()
    code, _, stderr = run("--task", write_task(tmp_path, "one"), "--agent", "nop", "--out", blocked / "runs")
    assert code == 2
    assert stderr.startswith(f"k3eval: cannot write results to {blocked}/runs: Not a directory")
    assert stderr.count("\n") == 1


def test_a_missing_dockerfile_is_named(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "one")
    (folder / "environment" / "Dockerfile").unlink()
    code, _, stderr = run("--task", folder, "--agent", "nop", "--dry-run")
    assert code == 2
    assert "environment/Dockerfile" in stderr


@pytest.mark.docker
@pytest.mark.slow
def test_json_is_one_object_that_agrees_with_the_folder_and_the_report(tmp_path: Path) -> None:
    family = tmp_path / "family"
    write_task(family, "good")
    write_task(family, "wrong", solve="true")
    out = tmp_path / "out"
    code, stdout, stderr = run(
        "--task", family, "--agent", "oracle", "--out", out, "--json", "--concurrency", "2"
    )
    assert code == 0
    job = JobSummary.model_validate(json.loads(stdout))
    assert (job.passed, job.failed, job.void, job.score, job.coverage) == (1, 1, 0, 0.5, 1.0)
    assert job.score_interval is not None
    folder = Path(job.results_dir)
    assert JobSummary.model_validate_json((folder / "job.json").read_text()) == job
    assert len(list(folder.glob("*/trial.json"))) == 2
    lines = stderr.strip().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("trial finished trial=") for line in lines)

    report = json.loads(CliRunner().invoke(app, ["report", str(folder), "--json"]).stdout)
    assert (report["passed"], report["failed"], report["state"]) == (1, 1, "complete")
    written = tmp_path / "report.md"
    assert CliRunner().invoke(app, ["report", str(folder), "--out", str(written)]).exit_code == 0
    assert "50.0 %" in written.read_text()

    code, stdout, stderr = run("--task", family, "--agent", "nop", "--out", out, "--threshold", "0.5")
    assert code == 1
    assert "below the threshold" in stderr
    assert "0 passed, 2 failed, 0 void" in stdout
    other = next(path for path in out.iterdir() if path != folder)
    compared = CliRunner().invoke(app, ["report", str(other), str(folder)])
    assert "+50.0 points" in compared.stdout


@pytest.mark.docker
@pytest.mark.slow
def test_tests_without_a_verdict_make_a_void_trial_and_exit_3(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "mute", test="true")
    code, stdout, stderr = run("--task", folder, "--agent", "oracle", "--out", tmp_path / "out")
    assert code == 3
    assert "No valid trial of 1" in stdout
    assert "only 0 of 1 trials are valid (void: verifier 1): " in stderr


@pytest.mark.docker
@pytest.mark.slow
def test_validate_proves_a_good_task_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    write_task(tmp_path / "family", "good")
    write_task(tmp_path / "family", "wrong", solve="true")
    done = CliRunner().invoke(app, ["tasks", "validate", str(tmp_path / "family"), "--json"])
    assert done.exit_code == 1
    verdicts = {row["task"]: row for row in json.loads(done.stdout)}
    assert verdicts["good"]["valid"]
    assert verdicts["good"]["oracle_rewards"] == [1.0]
    assert verdicts["good"]["nop_rewards"] == [0.0]
    assert not verdicts["wrong"]["valid"]
    assert "oracle" in verdicts["wrong"]["problems"][0]


def start_and_interrupt(arguments: list[str], ready: Path, pattern: str) -> subprocess.CompletedProcess[str]:
    """Start k3eval, send Ctrl-C once a file below ``ready`` matches, and wait for the end."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        deadline = time.monotonic() + 120
        while not list(ready.glob(pattern)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


@pytest.mark.docker
@pytest.mark.slow
def test_ctrl_c_keeps_finished_trials_and_leaves_no_container(tmp_path: Path) -> None:
    import docker

    family = tmp_path / "family"
    write_task(family, "a-quick")
    write_task(family, "b-slow", solve="sleep 300")
    out = tmp_path / "out"
    arguments = ["run", "--task", str(family), "--agent", "oracle", "--out", str(out), "--json"]
    done = start_and_interrupt(arguments, out, "*/a-quick*/trial.json")
    assert done.returncode == 130, done.stderr
    job = JobSummary.model_validate(json.loads(done.stdout))
    assert job.interrupted
    assert (job.passed, job.planned) == (1, 2)
    assert f"interrupted; the finished trials are in {job.results_dir}" in done.stderr
    client = docker.from_env()
    left = [c for c in client.containers.list(all=True) if job.job_id in str(c.labels)]
    client.close()
    assert left == []
    shown = CliRunner().invoke(app, ["report", job.results_dir]).stdout
    assert "interrupted" in shown


@pytest.mark.docker
@pytest.mark.slow
def test_the_time_limit_of_the_job_is_a_budget(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "slow", solve="sleep 300")
    code, _, stderr = run(
        "--task", folder, "--agent", "oracle", "--out", tmp_path / "out", "--timeout", "8", "--json"
    )
    assert code == 4
    assert "limit of 8 s" in stderr
