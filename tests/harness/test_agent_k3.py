"""The k3 agent's loop against a scripted model, with real tools in a local folder."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from harness_tasks import write_task

from k3eval import K3, K3EvalError, Message, ModelRef
from k3eval_harness.agent.k3 import K3Agent
from k3eval_harness.agent.protocol import AgentContext, AgentLimits, AgentResult
from k3eval_harness.errors import Cancelled, UsageError
from k3eval_harness.results.schema import TurnRecord
from k3eval_harness.task import load_task
from k3eval_harness.testing import Call, LocalSandbox, Reply, ScriptedServer

SUBMIT = Reply(calls=(Call("submit", {"summary": "done"}),))


@dataclass
class Bench:
    """One agent run and what it left."""

    tmp_path: Path
    limits: AgentLimits = field(default_factory=AgentLimits)
    cancel: threading.Event = field(default_factory=threading.Event)
    seconds: float = 60.0
    turns: list[TurnRecord] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work = self.tmp_path / "work"
        self.work.mkdir()
        (self.tmp_path / "trial" / "agent").mkdir(parents=True)

    def run(self, server: ScriptedServer) -> AgentResult:
        sandbox = LocalSandbox(self.work)
        context = AgentContext(
            task=load_task(write_task(self.tmp_path / "tasks")),
            sandbox=sandbox,
            log_dir=self.tmp_path / "trial" / "agent",
            limits=self.limits,
            seed=3,
            cancel=self.cancel,
            deadline=time.monotonic() + self.seconds,
            listener=self,
            new_client=lambda: K3.from_ref(ModelRef.parse(server.model)),
        )
        try:
            return K3Agent(error_wait_s=0.0).run(context)
        finally:
            sandbox.close()

    def play(self, *replies: Reply) -> tuple[AgentResult, ScriptedServer]:
        with ScriptedServer(replies) as server:
            return self.run(server), server

    def observations(self, server: ScriptedServer) -> list[str]:
        messages = server.requests[-1]["messages"]
        assert isinstance(messages, list)
        return [item["content"] for item in messages if item["role"] == "tool"]

    def turn_started(self, turn: int, context_tokens: int | None) -> None: ...

    def token_tick(self, output_tokens: int, tok_s: float | None) -> None:
        self.ticks.append(output_tokens)

    def turn_finished(self, turn: TurnRecord, messages: Sequence[Message]) -> None:
        self.turns.append(turn)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_it_works_with_real_tools_until_it_submits(bench: Bench) -> None:
    create = Call("edit", {"path": "a.py", "old_str": "", "new_str": "x = 1\ny = 2\n"})
    look = (Call("read", {"path": "a.py"}), Call("bash", {"command": "cat a.py; false"}))
    change = Call("edit", {"path": "a.py", "old_str": "y = 2", "new_str": "y = 3"})
    result, server = bench.play(
        Reply(reasoning="First a file.", calls=(create,)),
        Reply(content="Now look.", calls=look),
        Reply(calls=(change,)),
        SUBMIT,
    )
    assert (result.stop_reason, len(result.turns)) == ("submitted", 4)
    assert (bench.work / "a.py").read_text() == "x = 1\ny = 3\n"
    assert bench.observations(server) == [
        "[created a.py]",
        "1\tx = 1\n2\ty = 2\n[lines 1-2 of 2]",
        "x = 1\ny = 2\n[exit code 1]",
        "[edited a.py at line 2]",
    ]
    assert bench.turns == list(result.turns)
    assert bench.turns[0].tokens.output_reasoning == len("First a file.") // 4
    assert bench.ticks


def test_the_prompt_only_grows_and_reasoning_goes_back_whole(bench: Bench) -> None:
    _, server = bench.play(
        Reply(
            reasoning="think é\n", content="a", calls=(Call("bash", {"command": "echo 1"}, id="weird:id.1"),)
        ),
        Reply(content="no tool here"),
        Reply(reasoning="only thought"),
        Reply(calls=(Call("bash", "{broken"),)),
        SUBMIT,
    )
    requests = server.requests
    assert len(requests) == 5
    for before, after in pairwise(requests):
        old, new = before["messages"], after["messages"]
        assert isinstance(old, list)
        assert isinstance(new, list)
        assert new[: len(old)] == old
    for body, later in pairwise(server.bodies):
        # byte for byte: everything up to the end of the older message list is found in the newer body
        start = body.index(b'"messages"')
        end = body.index(b"}]", body.rindex(b'"role"')) + 1
        assert body[start:end] in later
    messages = requests[-1]["messages"]
    assert isinstance(messages, list)
    assert messages[2]["reasoning_content"] == "think é\n"
    assert messages[2]["tool_calls"][0]["id"] == messages[3]["tool_call_id"] == "weird:id.1"
    assert messages[6]["reasoning_content"] == "only thought"
    assert messages[8]["tool_calls"][0]["function"]["arguments"] == "{broken"


def test_malformed_calls_are_told_and_counted(bench: Bench) -> None:
    result, server = bench.play(
        Reply(calls=(Call("bash", "{nope"), Call("frobnicate", {}), Call("read", {"path": "missing"}))),
        SUBMIT,
    )
    assert [turn.tool_errors for turn in result.turns] == [2, 0]
    told = bench.observations(server)
    assert "the arguments of bash are wrong: Invalid JSON" in told[0]
    assert "there is no tool named 'frobnicate'" in told[1]
    assert told[2].endswith("missing: no such file]")


def test_calls_after_submit_are_not_run(bench: Bench) -> None:
    result, _ = bench.play(Reply(calls=(Call("submit"), Call("bash", {"command": "touch late"}))))
    assert result.stop_reason == "submitted"
    assert not (bench.work / "late").exists()
    assert [message.role for message in result.messages][-2:] == ["tool", "tool"]


def test_edits_are_refused_when_ambiguous_and_keep_odd_bytes(bench: Bench) -> None:
    (bench.work / "f").write_bytes(b"aa\r\n\xff\nbb\n")
    _, server = bench.play(
        Reply(
            calls=(
                Call("edit", {"path": "f", "old_str": "a", "new_str": "c"}),
                Call("edit", {"path": "f", "old_str": "zz", "new_str": "c"}),
                Call("edit", {"path": "f", "old_str": "", "new_str": "c"}),
                Call("edit", {"path": "f", "old_str": "bb", "new_str": "'q' \"$HOME\" `x`"}),
                Call("edit", {"path": "new/deep/g", "old_str": "", "new_str": "é"}),
                Call("read", {"path": "f", "start": 2, "lines": 1}),
                Call("read", {"path": "."}),
            )
        ),
        SUBMIT,
    )
    assert (bench.work / "f").read_bytes() == b"aa\r\n\xff\n'q' \"$HOME\" `x`\n"
    assert (bench.work / "new/deep/g").read_text() == "é"
    told = bench.observations(server)
    assert told[0] == "[error: old_str occurs 2 times in f; add context so that it occurs once]"
    assert told[1] == "[error: old_str does not occur in f; nothing was changed]"
    assert told[2] == "[error: f exists; give the text to replace as old_str]"
    assert told[5] == "2\t\ufffd\n[lines 2-2 of 3]"
    assert "not a regular file" in told[6]


def test_file_tools_follow_the_shells_directory(bench: Bench) -> None:
    move = Call("bash", {"command": "mkdir -p d; cd d; echo x > f; set -e"})
    _, server = bench.play(Reply(calls=(move, Call("read", {"path": "f"}))), SUBMIT)
    assert bench.observations(server)[1] == "1\tx\n[lines 1-1 of 1]"


def test_replies_without_a_tool_end_it(bench: Bench) -> None:
    result, server = bench.play(Reply(content="one"), Reply(content="two"), Reply(content="three"), SUBMIT)
    assert (result.stop_reason, len(server.requests)) == ("no_tool_call", 3)


def test_empty_replies_are_not_sent_back(bench: Bench) -> None:
    result, server = bench.play(Reply(), Reply(), SUBMIT)
    assert result.stop_reason == "submitted"
    assert server.requests[0]["messages"] == server.requests[2]["messages"]
    assert len(result.turns) == 3


@pytest.mark.parametrize(
    ("limits", "reason", "calls"),
    [
        (AgentLimits(max_turns=2), "turn_limit", 2),
        (AgentLimits(max_total_tokens=700), "token_limit", 2),
        (AgentLimits(max_context_tokens=10), "context_limit", 1),
    ],
)
def test_budgets_end_it_in_order(tmp_path: Path, limits: AgentLimits, reason: str, calls: int) -> None:
    bench = Bench(tmp_path, limits=limits)
    again = Reply(calls=(Call("bash", {"command": "true"}),))
    result, server = bench.play(*[again] * 9)
    assert (result.stop_reason, len(server.requests)) == (reason, calls)


def test_a_limit_on_money_needs_a_price(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits=AgentLimits(max_cost=Decimal(1)))
    with pytest.raises(UsageError, match="known price"):
        bench.play(Reply(calls=(Call("bash", {"command": "true"}),)), SUBMIT)


def test_time_runs_out_during_a_model_call(tmp_path: Path) -> None:
    bench = Bench(tmp_path, seconds=1.0)
    never = threading.Event()
    with ScriptedServer([Reply(wait=never)]) as server:
        result = bench.run(server)
        never.set()
    assert result.stop_reason == "time_limit"


def test_time_runs_out_during_a_command(tmp_path: Path) -> None:
    bench = Bench(tmp_path, seconds=1.5)
    result, _ = bench.play(Reply(calls=(Call("bash", {"command": "sleep 100"}),)), SUBMIT)
    assert result.stop_reason == "time_limit"
    assert "killed after" in result.messages[-1].text


def test_cancelling_cuts_a_call_in_flight(bench: Bench) -> None:
    never = threading.Event()
    with ScriptedServer([Reply(wait=never)]) as server:
        threading.Timer(0.5, bench.cancel.set).start()
        with pytest.raises(Cancelled):
            bench.run(server)
        never.set()


def test_a_broken_stream_is_tried_again(bench: Bench) -> None:
    result, server = bench.play(Reply(content="half of a", break_off=True), SUBMIT)
    assert result.stop_reason == "submitted"
    assert server.requests[0]["messages"] == server.requests[1]["messages"]


def test_repeated_provider_errors_void_the_trial(bench: Bench) -> None:
    broken = Reply(content="half of a", break_off=True)
    with pytest.raises(K3EvalError) as caught:
        bench.play(*[broken] * 30)
    assert caught.value.cause == "provider"
    assert (bench.tmp_path / "trial" / "agent" / "trajectory.json").is_file()


def test_a_refused_key_ends_it_at_once(bench: Bench) -> None:
    with pytest.raises(K3EvalError) as caught:
        bench.play(Reply(status=401, error="no such key"), SUBMIT)
    assert caught.value.cause == "user"


def test_the_trajectory_is_written_with_timing(bench: Bench) -> None:
    bench.play(Reply(content="x" * 200, calls=(Call("bash", {"command": "true"}),)), SUBMIT)
    data = json.loads((bench.tmp_path / "trial" / "agent" / "trajectory.json").read_text())
    assert data["schema_version"] == "ATIF-v1.8"
    assert [step["source"] for step in data["steps"]] == ["system", "user", "agent", "agent"]
    assert data["steps"][2]["metrics"]["extra"]["context_tokens"] > 0
    assert data["steps"][2]["observation"]["results"][0]["content"] == "[exit code 0]"
