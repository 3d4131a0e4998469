"""Conversations for training are byte for byte those of the agent loop, and so are their tokens."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path

import pytest

from k3eval import K3, ModelRef
from k3eval_harness.agent.k3 import K3Agent
from k3eval_harness.agent.protocol import AgentContext, AgentLimits
from k3eval_harness.task import load_task
from k3eval_harness.task.mini import EpisodeShape, NoiseShape, Shape, generate, make_project
from k3eval_harness.task.mini.episodes import episode
from k3eval_harness.task.mini.folder import write_files
from k3eval_harness.testing import Call, LocalSandbox, Reply, ScriptedServer
from k3eval_local.protocol.dialects.base import DialectOptions
from k3eval_local.protocol.dialects.vllm import VllmDialect
from k3eval_local.protocol.xtml import encode
from k3eval_local.tokenizer import Tokenizer
from k3eval_local.train.render import render

SHAPE = Shape(modules=(2, 2), noise=NoiseShape(share=1.0, lines=(2, 4)))


def _replies(messages: list[dict[str, object]]) -> list[Reply]:
    replies = []
    for message in messages:
        if message["role"] == "assistant":
            calls = message["tool_calls"]
            assert isinstance(calls, list)
            replies.append(
                Reply(
                    reasoning=str(message.get("reasoning_content", "")),
                    calls=tuple(
                        Call(item["function"]["name"], item["function"]["arguments"], item["id"])
                        for item in calls
                    ),
                )
            )
    return replies


@pytest.mark.slow
@pytest.mark.parametrize(("index", "second_try"), [(0, 0.0), (1, 1.0), (4, 1.0)])
def test_the_agent_loop_sends_what_the_generator_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, second_try: float
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    project = make_project(97, index, SHAPE)
    written = episode(project, random.Random(5), EpisodeShape(SHAPE, second_try=second_try))
    messages = written["messages"]
    assert isinstance(messages, list)
    folder = generate(index + 1, 97, tmp_path / "tasks", shape=SHAPE)[index]
    work = tmp_path / "work"
    write_files(work, project.files())
    sandbox = LocalSandbox(work)
    # without its last two messages the last request is the whole conversation
    with ScriptedServer(_replies(messages)) as server:
        context = AgentContext(
            task=load_task(folder),
            sandbox=sandbox,
            log_dir=tmp_path / "trial" / "agent",
            limits=AgentLimits(),
            seed=0,
            cancel=threading.Event(),
            deadline=time.monotonic() + 120,
            new_client=lambda: K3.from_ref(ModelRef.parse(server.model)),
        )
        (tmp_path / "trial" / "agent").mkdir(parents=True)
        try:
            result = K3Agent(error_wait_s=0.0).run(context)
        finally:
            sandbox.close()
        request = server.requests[-1]
    assert result.stop_reason == "submitted"
    assert request["tools"] == written["tools"]
    sent = request["messages"]
    assert isinstance(sent, list)
    assert [_facts(message, str(work)) for message in sent] == [
        _facts(message, "/app") for message in messages[:-2]
    ]
    _same_tokens(request, written, str(work))


def _facts(message: dict[str, object], workdir: str) -> tuple[object, ...]:
    """What a message says; the two runs differ only in where the project lies."""
    content = str(message.get("content") or "")
    if message["role"] == "system":
        content = content.replace(workdir, "/app")
    calls = message.get("tool_calls") or []
    assert isinstance(calls, list)
    return (
        message["role"],
        content,
        str(message.get("reasoning_content") or message.get("reasoning") or ""),
        message.get("tool_call_id"),
        tuple((item["id"], item["function"]["name"], item["function"]["arguments"]) for item in calls),
    )


def _same_tokens(request: dict[str, object], written: dict[str, object], workdir: str) -> None:
    """The server's prompt for the last request is what training reads before the last turn."""
    tokenizer = Tokenizer.for_vocab(1024)
    body = json.dumps(request).replace(workdir, "/app").encode()
    prompt = encode(tokenizer, VllmDialect(DialectOptions()).read_bytes(body).conversation)
    example = render(written, tokenizer)
    assert prompt.ids == example.ids[: example.turns[-1].start]
