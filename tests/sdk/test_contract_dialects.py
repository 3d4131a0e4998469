"""The typed client against the local backend's dialects over real HTTP: one test per row of the conformance
matrix.

The backend runs as it does for a user, ``python -m k3eval_local.server``, with random weights: what it says
means nothing, how it says it is what each host does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal

import openai
import pytest

from k3eval import (
    K3,
    AuthenticationError,
    BadRequestError,
    Budget,
    BudgetExceededError,
    CachePolicy,
    Completion,
    ContextOverflowError,
    K3EvalError,
    Message,
    Meter,
    Reasoning,
    RetryPolicy,
    ToolSpec,
    openai_client,
)
from k3eval.jsontypes import JsonValue
from k3eval.options import Effort

pytestmark = pytest.mark.slow

KEY = "sk-contract-0123456789"
SPEC = ToolSpec(
    "add",
    "Adds two numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)
LONG = Message.user("The cache keeps what it has read once. " * 120)


@dataclass(frozen=True)
class Dialect:
    """How one host names things."""

    name: str
    provider: str
    model: str
    reasoning: str
    max_output: str


DIALECTS = (
    Dialect("moonshot", "moonshot", "kimi-k3", "reasoning_content", "max_completion_tokens"),
    Dialect("openrouter", "openrouter", "moonshotai/kimi-k3", "reasoning", "max_tokens"),
    Dialect("vllm", "local", "a", "reasoning_content", "max_tokens"),
)


class Backend:
    """The server process of one dialect."""

    def __init__(self, dialect: Dialect, *options: str) -> None:
        self.dialect = dialect
        command = [
            sys.executable, "-m", "k3eval_local.server", "--model", "a", "--port", "0", "--threads", "1",
            "--dialect", dialect.name, "--key", KEY, "--parent-pid", str(os.getpid()), *options,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise AssertionError(f"the backend did not start: {' '.join(command)}")
        self.url = str(json.loads(line)["base_url"])

    def client(
        self,
        meter: Meter,
        *,
        effort: Effort | None = None,
        key: str = KEY,
        tries: int = 1,
        max_output: int = 40,
    ) -> K3:
        return K3(
            self.dialect.provider, self.dialect.model, base_url=self.url, api_key=key, meter=meter,
            effort=effort, max_output=max_output, retry=RetryPolicy(max_attempts=tries, first_wait_s=0.01),
        )  # fmt: skip

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=20)


@pytest.fixture(scope="module", params=DIALECTS, ids=[d.name for d in DIALECTS])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    running = Backend(request.param, "--prices", "--context", "8192")
    yield running
    running.close()


@pytest.fixture
def k3(backend: Backend, meter: Meter) -> Iterator[K3]:
    with backend.client(meter) as client:
        yield client


def ask(text: str) -> list[Message]:
    return [Message.user(text)]


def streamed(client: K3, messages: list[Message], **options: JsonValue) -> Completion:
    with client.stream(messages, extra=options) as stream:
        return stream.completion()


def test_text_and_reasoning_as_on_the_wire(backend: Backend, k3: K3) -> None:
    done = k3.chat(ask("wire form"))
    sent = done.raw["choices"][0]["message"]  # type: ignore[index, call-overload]
    assert done.message.reasoning is not None
    assert done.message.reasoning.member == backend.dialect.reasoning
    assert (done.message.reasoning.text, done.text) == (
        sent[backend.dialect.reasoning],
        sent["content"] or "",
    )
    if backend.dialect.name == "openrouter":
        assert [dict(item) for item in done.message.reasoning.details] == sent["reasoning_details"]


def test_stream_and_whole_reply_agree(k3: K3) -> None:
    whole, stream = k3.chat(ask("both ways")), streamed(k3, ask("both ways"))
    assert whole.finish_reason == stream.finish_reason
    assert whole.usage is not None
    assert stream.usage is not None
    assert whole.usage.prompt == stream.usage.prompt
    assert whole.usage.output == stream.usage.output == 40


def test_usage_is_split(k3: K3) -> None:
    usage = k3.chat([LONG]).usage
    assert usage is not None
    assert usage.prompt > 1000
    assert usage.cache_read is not None
    assert usage.output_reasoning is not None
    assert usage.output == usage.output_text + usage.output_reasoning


def test_replay_keeps_the_prefix_cached(backend: Backend, k3: K3) -> None:
    history = [Message.system("You are terse."), LONG, Message.user(f"for {backend.dialect.name}")]
    first = k3.chat(history, tools=[SPEC])
    second = streamed(k3, [*history, first.message, Message.user("go on")])
    del second
    third = k3.chat([*history, first.message, Message.user("go on")], tools=[SPEC])
    assert third.usage is not None
    assert first.usage is not None
    assert third.usage.cache_read is not None
    assert third.usage.cache_read > first.usage.prompt * 0.8
    assert third.cache_miss_reason is None


def test_a_changed_tool_list_is_named_as_the_reason(backend: Backend, k3: K3) -> None:
    history = [Message.system("Reasons."), LONG, Message.user(f"tools of {backend.dialect.name}")]
    first = k3.chat(history)
    assert first.usage is not None
    second = k3.chat([*history, first.message, Message.user("go on")], tools=[SPEC])
    if second.usage is not None and (second.usage.cache_read or 0) < first.usage.prompt * 0.5:
        assert second.cache_miss_reason == "prefix changed at tools"


def test_forced_tool_call(backend: Backend, k3: K3) -> None:
    done = k3.chat(ask("add 1 and 2"), tools=[SPEC], tool_choice="required", max_output=1500)
    if done.finish_reason == "tool_calls":
        (call, *_) = done.message.tool_calls
        assert call.name == "add"
        assert call.id
        again = k3.chat([*ask("add 1 and 2"), done.message, Message.tool(call.id, "3")], tools=[SPEC])
        assert again.usage is not None
    else:
        assert done.finish_reason == "length"  # random weights may think until the cap


def test_cost_is_what_the_host_says(backend: Backend, k3: K3) -> None:
    done = streamed(k3, [LONG, Message.user("cost")])
    if backend.dialect.name == "vllm":
        assert (done.cost.billed, done.cost.computed) == (None, None)
        return
    assert done.cost.computed is not None
    assert done.cost.computed > 0
    if backend.dialect.name == "openrouter":
        assert done.cost.billed == done.cost.computed
        assert done.attempts[0].notes == ()
    else:
        before = k3.balance().amount
        paid = k3.chat([LONG, Message.user("cost again")])
        assert paid.cost.computed is not None
        spent = before - k3.balance().amount
        assert abs(spent - paid.cost.computed) <= Decimal("0.01")


def test_served_by_and_request_id(backend: Backend, k3: K3) -> None:
    done = streamed(k3, ask("who serves"))
    assert done.request_id
    if backend.dialect.name == "openrouter":
        assert done.host == "Moonshot AI"
        assert done.request_id.startswith("gen-")
        assert done.model.startswith("moonshotai/kimi-k3")
    elif backend.dialect.name == "moonshot":
        assert done.host == "api.moonshot.ai"
        assert done.request_id == done.attempts[0].request_id


def test_raw_finish_reason(k3: K3) -> None:
    done = streamed(k3, ask("finish"))
    assert (done.finish_reason, done.raw_finish_reason) == ("length", "length")


@pytest.mark.parametrize("effort", ["low", "high", "max"])
def test_effort_is_accepted(backend: Backend, meter: Meter, effort: Effort) -> None:
    with backend.client(meter, effort=effort) as client:
        assert client.chat(ask("effort")).usage is not None


def test_output_cap_is_kept(k3: K3) -> None:
    usage = k3.chat(ask("cap"), max_output=7).usage
    assert usage is not None
    assert usage.output == 7


def test_a_wrong_key(backend: Backend, meter: Meter) -> None:
    with (
        backend.client(meter, key="sk-wrong-0123456789") as client,
        pytest.raises(AuthenticationError) as caught,
    ):
        client.chat(ask("key"))
    assert caught.value.status == 401
    assert "sk-wrong" not in str(caught.value)
    (row,) = meter.ledger.attempts()
    assert row.held == 0


def test_an_unknown_model(backend: Backend, meter: Meter) -> None:
    with (
        K3(
            backend.dialect.provider, "no-such-model", base_url=backend.url, api_key=KEY, meter=meter
        ) as client,
        pytest.raises(BadRequestError),
    ):
        client.chat(ask("model"))


def test_a_bad_parameter_is_the_users_fault(k3: K3) -> None:
    with pytest.raises(BadRequestError) as caught:
        k3.chat(ask("x"), extra={"tool_choice": "sometimes"}, tools=[SPEC])
    assert caught.value.status == 400
    assert caught.value.cause == "user"


def test_the_context_is_limited(k3: K3) -> None:
    with pytest.raises(ContextOverflowError):
        k3.chat([Message.user("many words in a row " * 3000)])


def test_models_and_counting(backend: Backend, k3: K3) -> None:
    assert backend.dialect.model in {model.id for model in k3.models()}
    counted = k3.count_tokens([LONG])
    usage = k3.chat([LONG]).usage
    assert usage is not None
    if counted.method == "host":
        assert abs(counted.tokens - usage.prompt) <= 3
    else:
        assert backend.dialect.name == "openrouter"


def test_timing_of_a_stream(k3: K3) -> None:
    timing = streamed(k3, ask("time it")).timing
    assert timing.first_token_ns is not None
    assert timing.last_token_ns is not None
    assert timing.sent_ns < timing.first_token_ns < timing.last_token_ns <= timing.end_ns
    assert timing.token_events > 1
    assert 0 < timing.first_event_chars < timing.total_chars


def test_missing_reasoning_is_filled_in(backend: Backend, k3: K3) -> None:
    """A turn of another model has none; Moonshot refuses to go on without."""
    foreign = Message.assistant("I looked.", reasoning=Reasoning("because"))
    bare = Message.assistant("I looked.")
    for turn in (foreign, bare):
        assert k3.chat([*ask("history"), turn, *ask("and now")]).usage is not None


def test_openai_on_the_meter(backend: Backend, meter: Meter) -> None:
    with openai_client(backend.dialect.provider, base_url=backend.url, api_key=KEY, meter=meter) as client:
        texts = [
            choice.delta.content or ""
            for chunk in client.chat.completions.create(
                model=backend.dialect.model, messages=[{"role": "user", "content": "hi"}], max_tokens=30,
                stream=True, stream_options={"include_usage": True},
            )
            for choice in chunk.choices
        ]  # fmt: skip
        assert texts
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(
                model="no-such-model", messages=[{"role": "user", "content": "hi"}]
            )
    good, bad = meter.ledger.attempts()
    assert good.usage is not None
    assert good.usage.output == 30
    assert bad.status in (400, 404)


def test_cache_life_is_accepted(backend: Backend, meter: Meter) -> None:
    """Sent to Moonshot through the raw body, and to no other host."""
    dialect = backend.dialect
    with K3(
        dialect.provider, dialect.model, base_url=backend.url, api_key=KEY, meter=meter, max_output=8,
        cache=CachePolicy(ttl="1h"),
    ) as client:  # fmt: skip
        done = client.chat([LONG, Message.user("one hour")])
    assert done.usage is not None
    if dialect.name == "moonshot" and done.usage.cache_write:
        assert "write_tier_unknown" not in done.attempts[0].notes


def test_budget_against_a_host_that_charges(backend: Backend) -> None:
    meter = Meter(budget=Budget(max_cost=Decimal("0.004")), notify=lambda _: None)
    with backend.client(meter, max_output=100) as client:
        if backend.dialect.name == "vllm":
            assert client.chat(ask("free")).usage is not None
            return
        calls = (client.chat(ask(f"call {number}")) for number in range(10))
        with pytest.raises(BudgetExceededError):
            list(calls)
    assert meter.ledger.held()[0] <= Decimal("0.004")


# -- limits and faults -----------------------------------------------------------------------------


def test_eight_workers_on_the_smallest_tier(meter: Meter) -> None:
    """Tier $1: one request at a time. The pace of three a minute is tested in the gate, not here."""
    running = Backend(DIALECTS[0], "--chaos", "1:concurrency@0.2")
    try:
        with running.client(meter, tries=8, max_output=8) as client, ThreadPoolExecutor(8) as pool:
            done = list(pool.map(lambda n: client.chat(ask(f"task {n}")), range(16)))
        assert all(item.usage is not None for item in done)
    finally:
        running.close()


@pytest.mark.parametrize("dialect", DIALECTS[:2], ids=[d.name for d in DIALECTS[:2]])
def test_every_fault_ends_in_an_answer_or_a_named_error(meter: Meter, dialect: Dialect) -> None:
    faults = (
        "rate_limit,overloaded,http_500,http_502,http_503,html_504,error_in_200,broken_tool_json,missing_tool_id,"
        "null_usage,cut_reply,cut_stream,early_end,no_done,one_byte,crlf,duplicate_finish,missing_tool_index,"
        "zero_usage,nulls,whole_arguments"
    )
    running = Backend(dialect, "--chaos", f"7:{faults}@0.7")
    answers, errors = 0, list[K3EvalError]()
    try:
        with running.client(meter, tries=2, max_output=12) as client:
            for number in range(40):
                begin = time.monotonic()
                try:
                    if number % 2:
                        done = streamed(client, ask(f"fault {number}"))
                    else:
                        done = client.chat(ask(f"fault {number}"), tools=[SPEC])
                except K3EvalError as error:
                    errors.append(error)
                else:
                    answers += 1
                    assert done.finish_reason in ("stop", "length", "tool_calls")
                assert time.monotonic() - begin < 60
    finally:
        running.close()
    assert answers > 10
    rows = list(meter.ledger.attempts())
    assert all(row.state in ("settled", "unknown") for row in rows)
    assert meter.total.calls == 40
    assert len(errors) < 30
    assert not any(isinstance(error, AuthenticationError | BadRequestError) for error in errors)
