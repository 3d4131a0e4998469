"""Whole trials in real containers: the verdict is right, and nothing that an agent leaves can change it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from harness_tasks import TEST, TOML, write_task

from k3eval import ModelRef
from k3eval.notices import K3EvalWarning
from k3eval_harness.agent.protocol import AgentLimits
from k3eval_harness.engine.events import JobEvent, TrialFinished, TurnStarted
from k3eval_harness.errors import TaskError, UsageError
from k3eval_harness.job import JobConfig, plan_job, run_job, validate_task
from k3eval_harness.journal import read_journal, unfinished
from k3eval_harness.launcher import LocalServer
from k3eval_harness.results import JobLayout, load_job
from k3eval_harness.results.schema import JobSummary, Outcome, TrialRecord
from k3eval_harness.sandbox.base_image import BASE_REF, ensure_base_image
from k3eval_harness.sandbox.engine import connect
from k3eval_harness.task import load_task
from k3eval_harness.testing import Call, Reply, ScriptedServer

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = pytest.mark.docker

SUBMIT = Call("submit")
HELLO = Call("bash", {"command": "echo hello > hello.txt"})
CANARY = "canary-key-4711-never-on-disk"


@pytest.fixture(scope="module")
def client() -> Iterator[DockerClient]:
    client = connect()
    ensure_base_image(client, BASE_REF)
    yield client
    client.close()


class Watcher:
    """Keeps events, and can act on the first one of a kind."""

    def __init__(self) -> None:
        self.events: list[JobEvent] = []
        self.turn = threading.Event()
        self.finished = threading.Event()

    def on_event(self, event: JobEvent) -> None:
        self.events.append(event)
        if isinstance(event, TurnStarted):
            self.turn.set()
        if isinstance(event, TrialFinished):
            self.finished.set()


class Runner:
    """Runs small jobs below one folder."""

    def __init__(self, tmp_path: Path, client: DockerClient) -> None:
        self.tmp_path = tmp_path
        self.client = client
        self.watcher = Watcher()
        self.cancel = threading.Event()

    def config(self, agent: str, *paths: Path, model: str | None = None, **options: object) -> JobConfig:
        return JobConfig(
            tasks=tuple(load_task(path) for path in paths),
            agent=agent,
            model=None if model is None else ModelRef.parse(model),
            out=self.tmp_path / "out",
            **options,  # type: ignore[arg-type]  # a test's own keywords
        )

    def run(self, config: JobConfig) -> tuple[JobSummary, tuple[TrialRecord, ...]]:
        summary = run_job(config, self.watcher, self.cancel)
        assert self.containers(summary.job_id) == []
        return summary, load_job(Path(summary.results_dir)).trials

    def play(self, path: Path, *replies: Reply, **options: object) -> TrialRecord:
        with ScriptedServer(replies) as server:
            _, (trial,) = self.run(self.config("k3", path, model=server.model, **options))
        return trial

    def containers(self, job_id: str) -> list[str]:
        found = self.client.api.containers(all=True, filters={"label": f"k3eval.job={job_id}"})
        return [str(item["Names"]) for item in found]

    def folder(self, trial: TrialRecord) -> Path:
        return self.tmp_path / "out" / trial.job_id / trial.trial_id


@pytest.fixture
def runner(tmp_path: Path, client: DockerClient) -> Runner:
    return Runner(tmp_path, client)


class TestVerdicts:
    def test_the_oracle_passes_and_nop_fails(self, runner: Runner, tmp_path: Path) -> None:
        result = validate_task(load_task(write_task(tmp_path)))
        assert (result.valid, result.oracle_rewards, result.nop_rewards) == (True, (1.0,), (0.0,))

    def test_a_task_that_judges_the_wrong_way_is_not_valid(self, runner: Runner, tmp_path: Path) -> None:
        upside_down = TEST.replace("reward=1; else reward=0", "reward=0; else reward=1")
        result = validate_task(load_task(write_task(tmp_path, test=upside_down)))
        assert not result.valid
        assert [problem.partition(" attempt")[0] for problem in result.problems] == ["oracle", "nop"]

    def test_the_k3_agent_solves_it_through_real_tools(
        self, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("K3EVAL_TEST_API_KEY", CANARY)
        replies = (
            Reply(reasoning="look", calls=(Call("bash", {"command": "pwd; id -un; env"}),)),
            Reply(calls=(Call("edit", {"path": "hello.txt", "old_str": "", "new_str": "hullo\n"}),)),
            Reply(calls=(Call("edit", {"path": "/app/hello.txt", "old_str": "u", "new_str": "e"}),)),
            Reply(content=f"the key is {CANARY}", calls=(Call("read", {"path": "hello.txt"}), SUBMIT)),
        )
        trial = runner.play(write_task(tmp_path, test=TEST + "echo the end\n"), *replies)
        assert (trial.outcome, trial.stop_reason, len(trial.turns)) == (Outcome.PASSED, "submitted", 4)
        assert trial.tests is not None
        assert (trial.tests.passed, trial.tests.failed) == (2, 0)
        assert trial.tokens.output > 0
        assert trial.rewards == {"reward": 1.0}
        folder = runner.folder(trial)
        layout = JobLayout(folder.parent)
        for path in (
            layout.config_json, layout.lock_json, layout.result_json, layout.job_json, layout.log,
            *(folder / name for name in ("config.json", "lock.json", "result.json", "trial.json")),
            folder / "trial.log", folder / "artifacts" / "manifest.json",
            folder / "agent" / "trajectory.json", folder / "verifier" / "reward.txt",
            folder / "verifier" / "junit.xml",
        ):  # fmt: skip
            assert path.is_file(), path
        assert "the end" in (folder / "verifier" / "test-stdout.txt").read_text()
        assert "+hello" in (folder / "agent" / "changes.patch").read_text()
        for path in folder.parent.rglob("*"):
            if path.is_file():
                assert CANARY.encode() not in path.read_bytes(), path
        journal = read_journal(folder / "journal.jsonl")
        assert unfinished(journal) == ()
        assert [entry.act for entry in journal if entry.kind == "intent"] == [
            "trial", "image", "sandbox", "agent", "turn", "turn", "turn", "turn", "capture", "grade",
        ]  # fmt: skip

    def test_attempts_run_side_by_side_and_are_summed(self, runner: Runner, tmp_path: Path) -> None:
        path = write_task(tmp_path)
        summary, trials = runner.run(runner.config("oracle", path, attempts=2, concurrency=3))
        assert (summary.planned, summary.passed, summary.score, summary.coverage) == (2, 2, 1.0, 1.0)
        assert sorted(trial.attempt for trial in trials) == [1, 2]
        assert len({trial.trial_id for trial in trials}) == 2

    def test_a_failing_solution_is_failed_not_void(self, runner: Runner, tmp_path: Path) -> None:
        _, (trial,) = runner.run(
            runner.config("oracle", write_task(tmp_path, solve="#!/bin/sh\necho no; exit 3\n"))
        )
        assert (trial.outcome, trial.cause) == (Outcome.FAILED, None)
        assert (runner.folder(trial) / "agent" / "exit-code.txt").read_text() == "3\n"
        assert (runner.folder(trial) / "agent" / "oracle.txt").read_text() == "no\n"

    def test_reward_json_and_the_threshold(self, runner: Runner, tmp_path: Path) -> None:
        test = '#!/bin/sh\necho \'{"reward": 0.5, "style": 0.1}\' > /logs/verifier/reward.json\n'
        toml = TOML + "[metadata.k3eval]\npass_threshold = 0.5\n"
        _, (trial,) = runner.run(runner.config("nop", write_task(tmp_path, test=test, toml=toml)))
        assert (trial.outcome, trial.rewards) == (Outcome.PASSED, {"reward": 0.5, "style": 0.1})

    def test_tests_run_as_the_user_and_with_the_variables_they_ask_for(
        self, runner: Runner, tmp_path: Path
    ) -> None:
        test = '#!/bin/sh\n[ "$(id -u)" = 1000 ] && [ "$WANT" = yes ] && echo 1 > /logs/verifier/reward.txt\n'
        toml = TOML.replace("[verifier]", '[verifier]\nuser = 1000\nenv = {WANT = "yes"}')
        summary, _ = runner.run(runner.config("nop", write_task(tmp_path, test=test, toml=toml)))
        assert summary.passed == 1


class TestAttacks:
    def test_a_planted_reward_does_not_count(self, runner: Runner, tmp_path: Path) -> None:
        plant = "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
        silent = write_task(tmp_path, test="#!/bin/sh\ntrue\n")
        trial = runner.play(silent, Reply(calls=(Call("bash", {"command": plant}), SUBMIT)))
        assert (trial.outcome, trial.cause) == (Outcome.VOID, "verifier")
        assert trial.rewards == {}
        assert "left no /logs/verifier/reward.txt" in (trial.detail or "")

    def test_a_process_left_behind_does_not_reach_grading(self, runner: Runner, tmp_path: Path) -> None:
        forever = "while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done"
        late = "sleep 4; while :; do echo hello > /app/hello.txt; sleep 0.01; done"
        start = "".join(f"nohup setsid sh -c '{loop}' > /dev/null 2>&1 & " for loop in (forever, late))
        test = TEST.replace("#!/bin/sh", "#!/bin/sh\nsleep 5")
        path = write_task(tmp_path, test=test)
        trial = runner.play(path, Reply(calls=(Call("bash", {"command": start}), SUBMIT)))
        assert (trial.outcome, trial.stop_reason) == (Outcome.FAILED, "submitted")

    def test_only_the_work_tree_crosses_over(self, runner: Runner, tmp_path: Path) -> None:
        outside = (
            "mkdir -p ~/bin; echo x > /tmp/left; echo x > ~/.profile; echo kept > /app/kept; rm -f /app/gone"
        )
        test = (
            "#!/bin/sh\nls /tmp/left /home/agent/.profile && bad=1\n"
            '[ "$(cat kept)" = kept ] && [ -z "$bad" ] && echo 1 > /logs/verifier/reward.txt\n'
        )
        trial = runner.play(
            write_task(tmp_path, test=test), Reply(calls=(Call("bash", {"command": outside}), SUBMIT))
        )
        assert trial.outcome is Outcome.PASSED

    def test_what_the_agent_deletes_stays_deleted(self, runner: Runner, tmp_path: Path) -> None:
        toml = TOML.replace(f'docker_image = "{BASE_REF}"\n', "")
        dockerfile = f"FROM {BASE_REF}\nRUN mkdir /app && echo 1 > /app/old\nWORKDIR /app\n"
        test = "#!/bin/sh\n[ -e old ] && reward=0 || reward=1\necho $reward > /logs/verifier/reward.txt\n"
        path = write_task(tmp_path, toml=toml, dockerfile=dockerfile, test=test)
        trial = runner.play(path, Reply(calls=(Call("bash", {"command": "rm old"}), SUBMIT)))
        assert trial.outcome is Outcome.PASSED
        assert "/dev/null" in (runner.folder(trial) / "agent" / "changes.patch").read_text()

    def test_hidden_tests_and_solution_are_out_of_sight(self, runner: Runner, tmp_path: Path) -> None:
        look = "ls -d /tests /solution; find / -name solve.sh 2>/dev/null; echo end"
        trial = runner.play(write_task(tmp_path), Reply(calls=(Call("bash", {"command": look}), SUBMIT)))
        trajectory = json.loads((runner.folder(trial) / "agent" / "trajectory.json").read_text())
        seen = trajectory["steps"][2]["observation"]["results"][0]["content"]
        assert "solve.sh" not in seen
        assert seen.count("No such file") == 2


class TestBudgets:
    def test_an_agent_out_of_time_is_graded(self, runner: Runner, tmp_path: Path) -> None:
        never = threading.Event()
        replies = (Reply(calls=(HELLO,)), Reply(wait=never))
        with ScriptedServer(replies) as server:
            limits = AgentLimits(max_seconds=3.0)
            _, (trial,) = runner.run(
                runner.config("k3", write_task(tmp_path), model=server.model, limits=limits)
            )
            never.set()
        assert (trial.outcome, trial.stop_reason) == (Outcome.PASSED, "time_limit")

    def test_a_job_out_of_time_voids_what_runs_and_starts_nothing_more(
        self, runner: Runner, tmp_path: Path
    ) -> None:
        never = threading.Event()
        paths = [write_task(tmp_path, name) for name in ("one", "two")]
        with ScriptedServer([Reply(wait=never)] * 9) as server:
            summary, trials = runner.run(runner.config("k3", *paths, model=server.model, timeout_s=2.0))
            never.set()
        assert (summary.void, summary.planned, summary.stopped_by) == (1, 2, "budget")
        assert not summary.interrupted
        assert [trial.cause for trial in trials] == ["budget"]

    def test_tests_out_of_time_are_void(self, runner: Runner, tmp_path: Path) -> None:
        toml = TOML.replace("[verifier]\ntimeout_sec = 60.0", "[verifier]\ntimeout_sec = 1.0")
        _, (trial,) = runner.run(
            runner.config("nop", write_task(tmp_path, toml=toml, test="#!/bin/sh\nsleep 99\n"))
        )
        assert (trial.outcome, trial.cause) == (Outcome.VOID, "verifier")
        assert "ran longer than 1 s" in (trial.detail or "")

    def test_a_limit_on_money_stops_the_job_before_the_call(
        self, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPENROUTER_API_KEY", CANARY)
        paths = [write_task(tmp_path, name) for name in ("one", "two")]
        with ScriptedServer([]) as server, warnings.catch_warnings():
            warnings.simplefilter("ignore", K3EvalWarning)
            model = f"openrouter/moonshotai/kimi-k3@{server.base_url}"
            summary, _ = runner.run(runner.config("k3", *paths, model=model, max_cost=Decimal("0.0001")))
        assert (summary.void, summary.void_causes, summary.stopped_by) == (1, {"budget": 1}, "budget")
        assert server.requests == []

    def test_a_limit_on_money_without_a_price_is_refused(self, runner: Runner, tmp_path: Path) -> None:
        config = runner.config(
            "k3", write_task(tmp_path), model="compatible/x@http://h/v1", max_cost=Decimal(1)
        )
        with pytest.raises(UsageError, match="price of x is unknown"):
            runner.run(config)

    def test_a_provider_that_refuses_voids_the_trial(self, runner: Runner, tmp_path: Path) -> None:
        trial = runner.play(write_task(tmp_path), Reply(status=401, error="no such key"))
        assert (trial.outcome, trial.cause, trial.stop_reason) == (Outcome.VOID, "user", "error")


class TestStopping:
    def test_cancelling_keeps_finished_trials_and_leaves_no_container(
        self, runner: Runner, tmp_path: Path
    ) -> None:
        never = threading.Event()
        replies = [Reply(calls=(HELLO, SUBMIT)), *[Reply(wait=never)] * 9]
        paths = [write_task(tmp_path, name) for name in ("one", "two", "three")]

        def cancel_in_the_second_trial() -> None:
            runner.watcher.finished.wait(60)
            runner.watcher.turn.clear()
            runner.watcher.turn.wait(60)
            runner.cancel.set()

        threading.Thread(target=cancel_in_the_second_trial, daemon=True).start()
        with ScriptedServer(replies) as server:
            summary, trials = runner.run(runner.config("k3", *paths, model=server.model))
            never.set()
        assert summary.interrupted
        assert (summary.passed, summary.void, summary.planned) == (1, 1, 3)
        assert [(trial.outcome, trial.cause) for trial in trials] == [
            (Outcome.PASSED, None),
            (Outcome.VOID, "user"),
        ]
        assert trials[1].stop_reason == "cancelled"

    def test_ctrl_c_on_the_command_line(self, runner: Runner, tmp_path: Path) -> None:
        never = threading.Event()
        path = write_task(tmp_path)
        with ScriptedServer([Reply(wait=never)] * 9) as server:
            command = [sys.executable, "-c", "from k3eval_harness.cli import main; main()", "run"]
            command += ["--task", str(path), "--agent", "k3", "--json"]
            command += ["--model", server.model, "--out", str(tmp_path / "out")]
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                deadline = time.monotonic() + 60
                while not server.requests and process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                os.kill(process.pid, signal.SIGINT)
                out, err = process.communicate(timeout=90)
            finally:
                process.kill()
                never.set()
        assert process.returncode == 130, err
        summary = json.loads(out)
        assert summary["interrupted"]
        assert runner.containers(summary["job_id"]) == []
        assert (Path(summary["results_dir"]) / "job.json").is_file()

    def test_a_container_that_is_killed_voids_its_trial_alone(self, runner: Runner, tmp_path: Path) -> None:
        def kill() -> None:
            runner.watcher.turn.wait(60)
            (container,) = runner.client.containers.list(filters={"label": "k3eval.role=agent"}, limit=1)
            container.kill()
            killed.set()

        killed = threading.Event()
        paths = [write_task(tmp_path, name) for name in ("a", "b")]
        threading.Thread(target=kill, daemon=True).start()
        with ScriptedServer([Reply(calls=(SUBMIT,), wait=killed), Reply(calls=(HELLO, SUBMIT))]) as server:
            _, (first, second) = runner.run(runner.config("k3", *paths, model=server.model))
        assert (first.outcome, first.cause) == (Outcome.VOID, "sandbox")
        assert "stopped from outside" in (first.detail or "")
        assert second.outcome is Outcome.PASSED

    def test_the_end_of_the_runs_own_model_server_ends_the_run(
        self, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @contextmanager
        def dead_server(*args: object, **options: object) -> Iterator[LocalServer]:
            def ended() -> str | None:
                return "it was killed by SIGKILL" if runner.watcher.turn.is_set() else None

            yield LocalServer("http://127.0.0.1:9/v1", "a", "random, seed 0", ended)

        monkeypatch.setattr("k3eval_harness.job.local_server", dead_server)
        paths = [write_task(tmp_path, name) for name in ("a", "b")]
        summary, (trial,) = runner.run(runner.config("k3", *paths, model="local/a"))
        assert (trial.outcome, trial.cause) == (Outcome.VOID, "provider")
        assert (summary.planned, summary.void, summary.failed, summary.stopped_by) == (2, 1, 0, "provider")
        assert summary.stop_detail == "the local model server ended during the run: it was killed by SIGKILL"

    def test_a_log_that_cannot_be_written_ends_no_trial(
        self, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(path: Path, text: str) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("k3eval_harness.job.append_line", full)
        summary, _ = runner.run(runner.config("oracle", write_task(tmp_path)))
        assert summary.passed == 1


class TestBadInput:
    def test_a_failing_build_is_one_line_with_the_log_kept(self, runner: Runner, tmp_path: Path) -> None:
        toml = TOML.replace(f'docker_image = "{BASE_REF}"\n', "")
        dockerfile = f"FROM {BASE_REF}\nRUN echo the reason is here >&2; exit 7\n"
        before = len(runner.client.api.containers(all=True))
        _, (trial,) = runner.run(runner.config("nop", write_task(tmp_path, toml=toml, dockerfile=dockerfile)))
        assert (trial.outcome, trial.cause) == (Outcome.VOID, "sandbox")
        assert "the build failed" in (trial.detail or "")
        assert "the reason is here" in (trial.detail or "")
        assert "\n" not in (trial.detail or "")
        assert "the reason is here" in (runner.folder(trial) / "exception.txt").read_text()
        assert len(runner.client.api.containers(all=True)) <= before

    def test_a_build_out_of_time_is_stopped(self, runner: Runner, tmp_path: Path) -> None:
        toml = TOML.replace(f'docker_image = "{BASE_REF}"\n', "build_timeout_sec = 2\n")
        dockerfile = f"FROM {BASE_REF}\nLABEL k3eval.test=slow\nRUN sleep 600\n"
        _, (trial,) = runner.run(
            runner.config("nop", write_task(tmp_path, "slow", toml=toml, dockerfile=dockerfile))
        )
        assert (trial.outcome, trial.cause) == (Outcome.VOID, "sandbox")
        assert "ran longer than 2 s" in (trial.detail or "")
        deadline = time.monotonic() + 30
        while (
            runner.client.api.containers(filters={"label": "k3eval.test=slow"})
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        assert runner.client.api.containers(filters={"label": "k3eval.test=slow"}) == []

    def test_the_oracle_stage_never_reaches_the_agent(self, runner: Runner, tmp_path: Path) -> None:
        toml = TOML.replace(f'docker_image = "{BASE_REF}"\n', "")
        toml += '[metadata.k3eval]\noracle_stage = "oracle"\noracle_files = ["/solution/word"]\n'
        dockerfile = (
            f"FROM {BASE_REF} AS oracle\nRUN mkdir /solution && echo hello > /solution/word\n"
            f"FROM {BASE_REF}\nWORKDIR /app\n"
        )
        path = write_task(
            tmp_path, toml=toml, dockerfile=dockerfile, solve="#!/bin/sh\ncp /solution/word hello.txt\n"
        )
        summary, _ = runner.run(runner.config("oracle", path))
        assert summary.passed == 1
        trial = runner.play(
            path, Reply(calls=(Call("bash", {"command": "cp /solution/word hello.txt"}), SUBMIT))
        )
        assert trial.outcome is Outcome.FAILED

    def test_what_cannot_run_is_refused_before_anything_starts(self, runner: Runner, tmp_path: Path) -> None:
        no_dockerfile = write_task(tmp_path, "a", toml=TOML.replace("docker_image", "skills_dir"))
        with pytest.raises(TaskError, match="environment/Dockerfile: missing"):
            runner.run(runner.config("nop", no_dockerfile))
        with pytest.raises(UsageError, match="no agent named"):
            runner.run(runner.config("nope", write_task(tmp_path, "b")))
        with pytest.raises(UsageError, match="needs a model"):
            runner.run(runner.config("k3", write_task(tmp_path, "c")))
        assert not (tmp_path / "out").exists()

    def test_a_plan_shows_trials_images_and_money(self, runner: Runner, tmp_path: Path) -> None:
        path = write_task(tmp_path)
        config = runner.config("k3", path, attempts=3, model="moonshot/kimi-k3", max_cost=Decimal("2.5"))
        plan = plan_job(config)
        assert [(trial.attempt, trial.seed) for trial in plan.trials] == [(1, 0), (2, 1), (3, 2)]
        assert plan.images == (BASE_REF,)
        assert plan.worst_case_cost == Decimal("2.5")
        assert plan_job(runner.config("nop", path)).worst_case_cost == 0
        limits = AgentLimits(max_cost=Decimal("0.1"))
        capped = runner.config("k3", path, attempts=3, model="moonshot/kimi-k3", limits=limits)
        assert plan_job(capped).worst_case_cost == Decimal("0.3")
        assert plan_job(runner.config("k3", path, model="moonshot/kimi-k3")).worst_case_cost is None
