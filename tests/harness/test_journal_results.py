"""The journal, atomic writing, secrets, sums, the summary, Harbor's files, trajectories, tables."""

from __future__ import annotations

import json
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from surface_samples import START, trial, turn

from k3eval import Message, ToolCall
from k3eval_harness.errors import UsageError
from k3eval_harness.journal import Journal, read_journal, unfinished
from k3eval_harness.results import harbor, load_job
from k3eval_harness.results.atif import AtifAgent, Exchange, build_trajectory
from k3eval_harness.results.frames import trials_frame, turns_frame
from k3eval_harness.results.layout import JobLayout, append_line, remember_secrets, write_json, write_text
from k3eval_harness.results.schema import Costs, Outcome, TokenCounts
from k3eval_harness.results.summary import summarise
from k3eval_harness.results.sums import sum_costs, sum_tokens


def test_an_intent_is_on_disk_before_the_act(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, now=lambda: START)
    with journal.act("build", image="x") as act:
        (entry,) = read_journal(path)
        assert (entry.kind, entry.act, entry.details) == ("intent", "build", {"image": "x"})
        act.details = {"seconds": 1}
    assert [item.kind for item in read_journal(path)] == ["intent", "result"]
    assert unfinished(read_journal(path)) == ()


def test_an_error_is_written_and_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    with pytest.raises(ValueError, match="boom"), journal.act("grade"):
        raise ValueError("boom")
    assert read_journal(tmp_path / "j")[-1].details == {"error": "ValueError", "message": "boom"}


def test_a_torn_line_is_ignored_and_the_open_act_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.write("intent", "turn", {"turn": 1})
    journal.write("result", "turn", {"turn": 1})
    journal.write("intent", "turn", {"turn": 2})
    path.write_text(path.read_text() + '{"at": "2026", "kind": "res')
    assert [entry.details for entry in unfinished(read_journal(path))] == [{"turn": 2}]
    assert read_journal(tmp_path / "none") == ()


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["x.json"]


def test_secrets_never_reach_a_file(tmp_path: Path) -> None:
    remember_secrets(
        {"MOONSHOT_API_KEY": "canary-4711-moon", "GH_TOKEN": "canary-4712-gh", "HOME": "/home/x"}
    )
    text = "key canary-4711-moon and canary-4712-gh in /home/x, sk-canary-4713"
    write_text(tmp_path / "a.txt", text)
    write_json(tmp_path / "b.json", {"deep": [text]})
    append_line(tmp_path / "c.log", text)
    Journal(tmp_path / "d.jsonl").write("result", "turn", {"messages": [text]})
    for path in tmp_path.iterdir():
        assert "canary" not in path.read_text(), path.name
        assert "/home/x" in path.read_text()


def test_unknown_counters_stay_unknown_and_partial_costs_are_no_sums() -> None:
    total = sum_tokens([TokenCounts(miss=1, cache_read=2), TokenCounts(miss=3, output_text=4)])
    assert total == TokenCounts(miss=4, cache_read=2, cache_write=None, output_text=4)
    known = Costs(billed=Decimal("0.1"), computed=Decimal("0.2"), price_row="a")
    assert sum_costs([known, known]).billed == Decimal("0.2")
    assert sum_costs([known, Costs(computed=Decimal(1))]).billed is None
    assert sum_costs([]) == Costs()
    with pytest.raises(ValueError, match="different currencies"):
        sum_costs([known, Costs(currency="CNY")])


def test_a_void_trial_is_in_no_score() -> None:
    records = [
        trial("a", outcome=Outcome.PASSED, turns=(turn(),)),
        trial("b", outcome=Outcome.FAILED),
        trial("c", outcome=Outcome.VOID, cause="sandbox"),
    ]
    summary = summarise(
        records,
        job_id="j",
        agent="k3",
        model=None,
        tasks=4,
        attempts=1,
        planned=4,
        wall_s=1.0,
        started_at=START,
        finished_at=START + timedelta(seconds=1),
        results_dir="x",
    )
    assert (summary.passed, summary.failed, summary.void) == (1, 1, 1)
    assert (summary.score, summary.coverage, summary.worst_case_score) == (0.5, 0.5, 0.25)
    assert summary.void_causes == {"sandbox": 1}
    assert summary.costs.billed == Decimal("0.02")
    assert summary.decode_samples == 1


def test_harbor_result_of_a_valid_and_a_void_trial(tmp_path: Path) -> None:
    passed = trial("a", outcome=Outcome.PASSED, turns=(turn(),))
    data = harbor.trial_result(passed, tmp_path, Path("/t/a"), {})
    assert data["verifier_result"] == {"rewards": passed.rewards}
    assert data["exception_info"] is None
    agent_result = data["agent_result"]
    assert isinstance(agent_result, dict)
    assert (agent_result["n_input_tokens"], agent_result["n_cache_tokens"]) == (2000, 500)
    void = harbor.trial_result(
        trial("b", outcome=Outcome.VOID, cause="provider", detail="no"), tmp_path, Path("b"), {}
    )
    exception = void["exception_info"]
    assert isinstance(exception, dict)
    assert (exception["exception_type"], exception["exception_message"]) == ("ApiError", "no")
    json.dumps([data, void])


def test_harbor_job_result_counts_void_as_errored() -> None:
    records = [trial("a"), trial("b", outcome=Outcome.VOID, cause="user")]
    data = harbor.job_result("j", records, planned=3, running=1, started_at=START, now=START)
    stats = data["stats"]
    assert isinstance(stats, dict)
    counts = {key: stats[key] for key in stats if key.startswith("n_") and key.endswith("_trials")}
    assert counts == {
        "n_completed_trials": 2,
        "n_errored_trials": 1,
        "n_running_trials": 1,
        "n_pending_trials": 0,
        "n_cancelled_trials": 1,
    }
    assert data["finished_at"] is None


def test_a_trajectory_follows_atif() -> None:
    calls = (ToolCall("c1", "bash", '{"command": "ls"}'), ToolCall("c2", "bash", "{broken"))
    exchanges = [
        Exchange(
            turn(1),
            Message.assistant("hm", tool_calls=calls, reasoning="because"),
            (Message.tool("c1", "out"), Message.tool("c2", "[error]")),
        ),
        Exchange(turn(2), Message.assistant("text"), (Message.user("go on"),)),
    ]
    opening = (Message.system("s"), Message.user("u"))
    trajectory = build_trajectory("id", AtifAgent(name="k3", version="1"), opening, exchanges)
    steps = trajectory.steps
    assert [(step.step_id, step.source) for step in steps] == [
        (1, "system"),
        (2, "user"),
        (3, "agent"),
        (4, "agent"),
        (5, "user"),
    ]
    assert steps[2].reasoning_content == "because"
    assert steps[2].tool_calls is not None
    assert [call.arguments for call in steps[2].tool_calls] == [{"command": "ls"}, {"malformed": "{broken"}]
    assert steps[2].observation is not None
    assert [item.source_call_id for item in steps[2].observation.results] == ["c1", "c2"]
    assert trajectory.final_metrics.total_prompt_tokens == 4000
    assert trajectory.final_metrics.total_cost_usd == pytest.approx(0.04)


def test_a_job_reads_back_with_and_without_its_summary(tmp_path: Path) -> None:
    layout = JobLayout(tmp_path)
    with pytest.raises(UsageError, match=r"no job\.json and no trial"):
        load_job(tmp_path)
    layout.lock_json.write_text('{"trials": [{}, {}]}')
    with pytest.raises(UsageError, match="before any of its 2 trials did"):
        load_job(tmp_path)
    layout.lock_json.unlink()
    write_json(layout.trial("t1").trial_json, trial("a"))
    loaded = load_job(tmp_path)
    assert loaded.summary is None
    assert [record.task.name for record in loaded.trials] == ["a"]
    assert loaded.planned == 1
    layout.lock_json.write_text('{"trials": [{}, {}, {}]}')
    assert load_job(tmp_path).planned == 3
    layout.trial("t1").trial_json.write_text("{}")
    with pytest.raises(UsageError, match="not readable as TrialRecord"):
        load_job(tmp_path)


def test_tables_have_a_row_a_trial_and_a_row_a_turn() -> None:
    trials = [trial("a", turns=(turn(1), turn(2))), trial("b")]
    assert list(trials_frame(trials)["task"]) == ["a", "b"]
    turns = turns_frame(trials)
    assert list(turns["turn"]) == [1, 2]
    assert turns["cost_billed"].sum() == pytest.approx(0.04)
