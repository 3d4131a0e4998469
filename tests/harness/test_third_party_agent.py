"""An agent of another framework (PydanticAI) runs its own tool loop against our server, a process of its own.

The bundled model repairs generated projects through it, in two dialects, whole replies and streamed; what its
commands print is computed, nothing that it writes is executed. A model with random weights says nothing
sensible, but the server's grammar makes its tool calls and its final answer fit their types.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, AgentStreamEvent, ModelRetry, RunContext, StructuredDict, Tool, ToolOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.messages import ModelMessage, ModelResponse, ThinkingPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles import merge_profile
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.moonshotai import MoonshotAIProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from k3eval_harness.agent.observations import bash_observation, edit_observation, edit_refused
from k3eval_harness.agent.tools import BASH, EDIT, READ, SUBMIT
from k3eval_harness.launcher import LocalServer, local_server
from k3eval_harness.task.mini import make_project
from k3eval_harness.task.mini.opening import opening_messages
from k3eval_harness.task.mini.project import Edit, MiniProject
from k3eval_harness.task.mini.shell import TEST_COMMAND, Printed, locate, locate_command, run_tests

pytestmark = pytest.mark.slow
KEY = "sk-test"
OPTIONS = ("--threads", "1", "--key", KEY)


@pytest.fixture(scope="module", params=["vllm", "moonshot"])
def nano(request: pytest.FixtureRequest) -> Iterator[tuple[str, LocalServer]]:
    with local_server("k3-nano", options=(*OPTIONS, "--dialect", request.param)) as server:
        yield request.param, server


def speaking(dialect: str, server: LocalServer, name: str, http: httpx2.AsyncClient) -> OpenAIChatModel:
    """The framework's model with the provider that it has for this dialect."""
    thinking = OpenAIModelProfile(
        openai_chat_thinking_field="reasoning_content",
        openai_chat_send_back_thinking_parts="field",
        # this model often thinks nothing at all: the vendor wants the empty field back, too
        openai_chat_thinking_requires_field_on_tool_calls=True,
        thinking_enabled_by_default=True,
    )
    if dialect == "moonshot":
        moonshot = MoonshotAIProvider(base_url=server.base_url, api_key=KEY, http_client=http)
        profile = merge_profile(moonshot.model_profile("kimi-k3"), thinking)
        return OpenAIChatModel("kimi-k3", provider=moonshot, profile=profile)
    provider = OpenAIProvider(base_url=server.base_url, api_key=KEY, http_client=http)
    return OpenAIChatModel(name, provider=provider, profile=thinking)


@dataclass
class Repository:
    """A generated project in memory, and the tools that work on it."""

    project: MiniProject
    edit: Edit | None = None
    called: list[str] = field(default_factory=list)

    def bash(self, command: str, timeout_sec: int = 120) -> str:
        self.called.append("bash")
        if command == TEST_COMMAND:
            printed = run_tests(self.project, self._known_edit())
        elif command == locate_command(self.project.broken.name):
            printed = locate(self.project, self.edit)
        else:
            printed = Printed("bash: only tests and the search are here\n", 127)
        return bash_observation(printed.text, printed.exit_code)

    def _known_edit(self) -> Edit | None:
        """The edit, if the project's generator knows it; tests of any other one stay red."""
        return self.edit if self.edit in (self.project.fix, *self.project.near_misses) else None

    def change(self, path: str, old_str: str, new_str: str) -> str:
        self.called.append("edit")
        source = self.project.files(self.edit)[self.project.path]
        if path != f"./{self.project.path}" or source.count(old_str) != 1:
            return edit_refused(path, source.count(old_str))
        line = source.count("\n", 0, source.index(old_str)) + 1
        if self.edit is not None and old_str == self.edit.new:
            old_str = self.edit.old  # the second edit of the same place
        self.edit = Edit(self.project.path, old_str, new_str)
        return edit_observation(path, created=False, line=line)

    def read(self, path: str, start: int = 1, lines: int = 400) -> str:
        self.called.append("read")
        return f"[error: {path}: no such file]"

    @property
    def repaired(self) -> bool:
        return self.edit is not None and self.edit == self.project.fix

    def tools(self) -> list[Tool[None]]:
        made: tuple[tuple[Callable[..., str], Any], ...] = (
            (self.bash, BASH),
            (self.change, EDIT),
            (self.read, READ),
        )
        return [
            Tool.from_schema(function, tool.name, tool.description, dict(tool.parameters))
            for function, tool in made
        ]


class Counter:
    """Counts the events of a run's streams."""

    def __init__(self) -> None:
        self.seen = 0

    async def __call__(self, context: RunContext[None], events: AsyncIterable[AgentStreamEvent]) -> None:
        async for _ in events:
            self.seen += 1


async def repair(model: OpenAIChatModel, index: int, counter: Counter | None) -> Repository:
    """One run on a project of its own, and what every loop must have been."""
    repository = Repository(make_project(7, index))
    system, user = (str(message["content"]) for message in opening_messages(repository.project, None))
    submit = StructuredDict(dict(SUBMIT.parameters), SUBMIT.name, SUBMIT.description)
    agent: Agent[None, Any] = Agent(
        model,
        system_prompt=system,
        tools=repository.tools(),
        output_type=[str, ToolOutput(submit, name=SUBMIT.name, description=SUBMIT.description)],
    )
    result = await agent.run(user, usage_limits=UsageLimits(request_limit=12), event_stream_handler=counter)
    check_loop(result.all_messages())
    assert isinstance(result.output, dict)  # it called submit
    return repository


def check_loop(messages: list[ModelMessage]) -> None:
    """Several turns with calls and their results, thoughts, and prompts that come from the cache."""
    replies = [message for message in messages if isinstance(message, ModelResponse)]
    results = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    assert len(replies) >= 3
    assert len(results) >= 4
    assert {reply.finish_reason for reply in replies} == {"tool_call"}
    assert any(isinstance(part, ThinkingPart) for reply in replies for part in reply.parts)
    later = replies[1:]
    read, prompt = (sum(getattr(r.usage, n) for r in later) for n in ("cache_read_tokens", "input_tokens"))
    assert read > 0.9 * prompt


def run_with(act: Callable[[httpx2.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with httpx2.AsyncClient(timeout=120, trust_env=False) as http:
            await act(http)

    asyncio.run(main())


@pytest.mark.parametrize("streamed", [False, True])
def test_the_bundled_model_repairs_projects(nano: tuple[str, LocalServer], streamed: bool) -> None:
    dialect, server = nano
    counter = Counter() if streamed else None
    repaired: list[bool] = []

    async def act(http: httpx2.AsyncClient) -> None:
        model = speaking(dialect, server, "k3-nano", http)
        for index in range(3):
            try:
                repository = await repair(model, index, counter)
            except UsageLimitExceeded:  # a model this small may go round in circles
                repaired.append(False)
            else:
                assert repository.called[:2] == ["bash", "bash"]
                repaired.append(repository.repaired)

    run_with(act)
    # greedy there; here the vendor's fixed temperature of 1
    assert sum(repaired) >= (2 if dialect == "vllm" else 1)
    if counter is not None:
        assert counter.seen > 50 * sum(repaired)


class Verdict(BaseModel):
    """The final answer."""

    passed: bool
    grade: Literal["low", "high"]


@pytest.fixture(scope="module")
def noise() -> Iterator[LocalServer]:
    with local_server("a", seed=3, options=OPTIONS) as server:
        yield server


@pytest.mark.parametrize("streamed", [False, True])
def test_a_typed_answer_after_tool_calls_whatever_the_model_says(noise: LocalServer, streamed: bool) -> None:
    counter = Counter() if streamed else None

    async def act(http: httpx2.AsyncClient) -> None:
        looked: list[tuple[str, int]] = []
        agent = Agent(
            speaking("vllm", noise, "a", http),
            output_type=Verdict,
            model_settings={
                "max_tokens": 2000,
                "extra_body": {"chat_template_kwargs": {"thinking": False}},
            },
            retries=40,
        )

        @agent.tool_plain
        def look(place: Literal["here", "there"], times: Literal[1, 2, 3]) -> str:
            """Look at a place."""
            looked.append((place, times))
            return f"{place}: nothing, {times} times"

        @agent.output_validator
        def only_after_looking(verdict: Verdict) -> Verdict:
            if len(looked) < 3:
                raise ModelRetry("Look three times first.")
            return verdict

        result = await agent.run(
            "Is it done?", usage_limits=UsageLimits(request_limit=60), event_stream_handler=counter
        )
        assert isinstance(result.output, Verdict)
        assert len(looked) >= 3
        replies = [message for message in result.all_messages() if isinstance(message, ModelResponse)]
        assert len(replies) >= 2
        assert {reply.finish_reason for reply in replies} == {"tool_call"}

    run_with(act)
    if counter is not None:
        assert counter.seen > 10
