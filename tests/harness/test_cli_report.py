"""``k3eval report`` and ``k3eval tasks`` on folders: complete, interrupted, killed, broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from surface_samples import summary, trial, turn
from typer.testing import CliRunner

from k3eval_harness.cli.app import app
from k3eval_harness.report.build import JobReport
from k3eval_harness.results.schema import JobSummary, Outcome, TrialRecord

CHECKOUT = Path(__file__).parents[2]


def write_job(folder: Path, trials: list[TrialRecord], job: JobSummary | None) -> Path:
    for record in trials:
        (folder / record.trial_id).mkdir(parents=True)
        (folder / record.trial_id / "trial.json").write_text(record.model_dump_json())
    if job is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(job.model_dump_json())
    return folder


def call(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return done.exit_code, done.stdout, done.stderr


TRIALS = [trial("one", turns=(turn(),)), trial("two", outcome=Outcome.FAILED, turns=(turn(2, 9000, 0.02),))]


def test_json_is_one_object_of_the_published_shape(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job", TRIALS, summary(planned=2))
    code, stdout, stderr = call("report", folder, "--json")
    assert (code, stderr) == (0, "")
    report = JobReport.model_validate(json.loads(stdout))
    assert (report.passed, report.failed, report.state) == (1, 1, "complete")
    assert stdout == call("report", folder, "--format", "json")[1]


def test_markdown_goes_to_stdout_or_a_file(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job", TRIALS, summary(planned=2))
    code, stdout, _ = call("report", folder)
    assert code == 0
    assert stdout.startswith("# Report on job-1\n")
    out = tmp_path / "report.md"
    assert call("report", folder, "--out", out) == (0, "", "")
    assert out.read_text() == stdout
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("job", "state"),
    [
        (summary(planned=5, interrupted=True), "interrupted: 3 of 5 trials have no result"),
        (None, "not finished: the job wrote no summary"),
    ],
)
def test_an_interrupted_and_a_killed_job_are_reported(
    tmp_path: Path, job: JobSummary | None, state: str
) -> None:
    code, stdout, _ = call("report", write_job(tmp_path / "job", TRIALS, job), "--json")
    assert code == 0
    assert json.loads(stdout)["state"] == state


def test_a_later_folder_is_compared_with_the_first(tmp_path: Path) -> None:
    first = write_job(tmp_path / "old", TRIALS, summary(planned=2))
    better = [trial("one"), trial("two")]
    second = write_job(tmp_path / "new", better, summary(planned=2))
    code, stdout, _ = call("report", first, second)
    assert code == 0
    assert stdout.startswith("# new against old\n")
    assert "+50.0 points" in stdout
    data = json.loads(call("report", first, second, "--json")[1])
    assert len(data["reports"]) == 2
    assert data["comparisons"][0]["only_second"] == ["two"]


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_a_job_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    code, stdout, stderr = call("report", tmp_path / name)
    assert (code, stdout) == (2, "")
    assert name in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": "k3eval-trial-9"}', "[]"])
def test_a_broken_record_is_named(tmp_path: Path, text: str) -> None:
    folder = write_job(tmp_path / "job", TRIALS, None)
    (folder / "one__1" / "trial.json").write_text(text)
    code, stdout, stderr = call("report", folder)
    assert (code, stdout) == (2, "")
    assert "one__1/trial.json" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("member", "value", "said"),
    [
        ("rewards", {"reward": 0.0}, "outcome passed with reward 0"),
        ("rewards", {"a": 1.0, "b": -1.0}, "outcome passed with reward -1"),
        ("rewards", {}, "outcome passed without a reward"),
        ("rewards", {"reward": float("nan")}, "rewards.reward"),
        ("rewards", {"reward": float("inf")}, "rewards.reward"),
        ("cause", "sandbox", "outcome passed with cause sandbox"),
        ("outcome", "void", "outcome void with cause null"),
        ("attempt", 0, "attempt"),
        ("job_id", "job-2", "job_id is 'job-2', not 'job-1' as in"),
        ("started_at", "2026-03-04T05:06:07", "started_at"),
        ("tokens", {"miss": -1}, "tokens.miss"),
        ("tokens", {"cache_read": 10**30}, "tokens.cache_read"),
        ("costs", {"billed": "1e999999"}, "costs.billed"),
        ("costs", {"billed": "-0.01"}, "costs.billed"),
        ("costs", {"computed": "NaN"}, "costs.computed"),
        ("phases", {"total_s": -1.0}, "phases.total_s"),
        ("phases", {"agent_s": float("nan")}, "phases.agent_s"),
        ("phases", {"agent_s": float("inf")}, "phases.agent_s"),
        ("tests", {"failed": -1}, "tests.failed"),
    ],
)
def test_an_impossible_trial_is_named(tmp_path: Path, member: str, value: object, said: str) -> None:
    folder = write_job(tmp_path / "job", TRIALS, summary(planned=2))
    path = folder / "one__1" / "trial.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {member: value}))
    refused(folder, "one__1/trial.json: not readable as TrialRecord: " + said)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("planned", -1),
        ("planned", 1),
        ("score", 1.01),
        ("score", float("nan")),
        ("coverage", -0.1),
        ("worst_case_score", 2),
        ("void_causes", {"sandbox": -1}),
        ("wall_s", float("inf")),
        ("score_interval", {"low": float("nan"), "high": 1.0, "method": "m"}),
    ],
)
def test_an_impossible_summary_is_named(tmp_path: Path, member: str, value: object) -> None:
    folder = write_job(tmp_path / "job", TRIALS, summary(planned=2))
    path = folder / "job.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {member: value}))
    refused(folder, "job.json: not readable as JobSummary: ")


@pytest.mark.parametrize("name", ["job.json", "one__1/trial.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
def test_only_regular_files_are_read(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    folder = write_job(tmp_path / "job", TRIALS, summary(planned=2))
    (folder / name).unlink()
    make(folder / name)
    refused(folder, f"{name}: not readable as ")


def test_a_pipe_for_a_lock_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job", TRIALS, None)
    os.mkfifo(folder / "lock.json")
    assert json.loads(call("report", folder, "--json")[1])["planned"] == 2


def refused(folder: Path, said: str) -> None:
    code, stdout, stderr = call("report", folder)
    assert (code, stdout) == (2, "")
    assert said in stderr
    assert stderr.count("\n") == 1


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job", TRIALS, None)
    code, _, stderr = call("report", folder, "--out", tmp_path / "nowhere" / "report.md")
    assert code == 2
    assert "cannot write" in stderr
    assert stderr.count("\n") == 1
    assert call("report", folder, "--out", folder)[0] == 2


def test_tasks_list_and_show_the_bundled_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)
    rows = json.loads(call("tasks", "list", "repo-fix", "--json")[1])
    assert len(rows) >= 5
    assert all(row["oracle"] and row["digest"] for row in rows)
    assert rows[0]["name"] in call("tasks", "list")[1]
    shown = json.loads(call("tasks", "show", rows[0]["path"], "--json")[1])
    assert shown["name"] == rows[0]["name"]
    assert len(shown["instruction"]) > 100
    assert shown["instruction"].strip() in call("tasks", "show", rows[0]["path"])[1]


def test_tasks_check_fails_on_an_error_and_with_strict_on_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "task"
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 60\ntimout_sec = 5\n',
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM python:3.11-slim-bookworm\nWORKDIR /app\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/sh\ntrue\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    code, stdout, _ = call("tasks", "check", folder)
    assert code == 0
    assert "timout_sec" in stdout
    code, stdout, stderr = call("tasks", "check", folder, "--strict", "--json")
    assert code == 1
    assert json.loads(stdout)[0]["ok"] is False
    assert stderr == "k3eval: 1 of 1 tasks have errors\n"
    (folder / "tests" / "test.sh").unlink()
    code, stdout, _ = call("tasks", "check", folder)
    assert code == 1
    assert "tests/test.sh" in stdout


def test_a_shape_is_part_of_the_tasks_names(tmp_path: Path) -> None:
    out = tmp_path / "rare"
    assert call("tasks", "generate", "--n", 2, "--seed", 5, "--shape", "rare", "--out", out)[0] == 0
    assert sorted(path.name for path in out.iterdir()) == ["mini-rare-5-00000", "mini-rare-5-00001"]
    assert "shape rare" in (out / "mini-rare-5-00000" / "task.toml").read_text()


def test_generated_tasks_are_equal_for_equal_arguments(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert call("tasks", "generate", "--n", 3, "--seed", 5, "--out", tmp_path / name)[0] == 0
    data = json.loads(call("tasks", "generate", "--n", 3, "--seed", 5, "--out", tmp_path / "a", "--json")[1])
    assert (data["n"], data["seed"], len(data["tasks"])) == (3, 5, 3)
    first, second = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in sorted((tmp_path / name).rglob("*.*"))
        }
        for name in ("a", "b")
    )
    assert first == second
    assert call("tasks", "check", tmp_path / "a")[0] == 0


def test_episodes_are_json_lines_in_parts_or_at_once(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert call("tasks", "episodes", "--n", 4, "--seed", 1, "--out", whole)[0] == 0
    code, stdout, _ = call("tasks", "episodes", "--n", 2, "--seed", 1, "--start", 2, "--out", part, "--json")
    assert code == 0
    assert json.loads(stdout) == {"written": 2, "seed": 1, "start": 2, "out": str(part)}
    assert whole.read_text().splitlines()[2:] == part.read_text().splitlines()
    assert "messages" in json.loads(part.read_text().splitlines()[0])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("tasks", "generate", "repo-fix", "--out", "OUT"), "only the family repo-fix-mini is generated"),
        (("tasks", "generate", "--n", "0", "--out", "OUT"), "cannot generate 0 tasks"),
        (("tasks", "generate", "--seed=-1", "--out", "OUT"), "--seed must be 0 or more"),
        (("tasks", "generate", "--shape", "round", "--out", "OUT"), "no shape is called 'round'"),
        (("tasks", "episodes", "--n", "0", "--out", "OUT"), "cannot generate 0 conversations"),
        (("tasks", "episodes", "--start=-1", "--out", "OUT"), "must be 0 or more"),
        (("tasks", "episodes", "--n", "1", "--out", "OUT/deep/file"), "cannot write"),
        (("run", "--task", "repo-fix-mini", "--n", "2", "--model", "x", "--out", "OUT"), "unknown model 'x'"),
        (("run", "--task", "repo-fix", "--n", "2", "--out", "OUT"), "--n makes tasks of repo-fix-mini only"),
        (("run", "--task", "tasks/*", "--n", "2", "--out", "OUT"), "drop it to run 'tasks/*'"),
        (("run", "--task", "./tasks/repo-fix-mini", "--n", "2", "--out", "OUT"), "or name that family"),
    ],
)
def test_what_cannot_be_generated_is_one_line_and_leaves_nothing(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    code, stdout, stderr = call(*(part.replace("OUT", str(tmp_path / "out")) for part in arguments))
    assert (code, stdout) == (2, "")
    assert expected in stderr
    assert stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_generated_tasks_is_planned_without_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("run", "--task", "repo-fix-mini", "--n", 3, "--seed", 4, "--out", out, "--dry-run", "--json")
    code, stdout, _ = call(*map(str, arguments))
    assert code == 0
    assert [t["task"] for t in json.loads(stdout)["trials"]] == [f"k3eval/mini-4-0000{i}" for i in range(3)]
    assert list(tmp_path.iterdir()) == []
