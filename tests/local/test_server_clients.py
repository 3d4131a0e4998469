"""The official openai client against the reference model: sync, async, streams, tools, structured output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel
from server_helpers import Served, serve

from k3eval_local.checkpoint import open_model
from k3eval_local.engine import Engine

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say something."}]
BRIEF = {"reasoning_effort": "low", "max_tokens": 60}
ADD: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two digits.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [4, 5, 6]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    model, _ = open_model("a", 0)
    with (
        Engine(model, memory_budget_bytes=256 * 2**20, seed=1) as engine,
        serve(engine, key="sk-test", context_length=50_000) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="sk-test", max_retries=0, timeout=60) as made:
        yield made


def test_a_plain_reply(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="a", messages=USER, **BRIEF)
    choice = reply.choices[0]
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.model_extra is not None
    assert isinstance(choice.message.model_extra["reasoning_content"], str)
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 60
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.completion_tokens_details is not None


def test_greedy_is_repeatable_and_the_second_time_mostly_cached(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "twice " * 30}]
    first, second = (
        client.chat.completions.create(model="local/A", messages=messages, temperature=0, **BRIEF)
        for _ in range(2)
    )
    assert first.choices[0].message == second.choices[0].message
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached > 0.9 * second.usage.prompt_tokens - 40


def test_a_seed_repeats_a_sample(client: openai.OpenAI) -> None:
    texts = [
        client.chat.completions.create(model="a", messages=USER, seed=seed, **BRIEF)
        .choices[0]
        .message.to_json()
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_stream_is_the_reply_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="a", messages=USER, seed=9, **BRIEF)
    stream = client.chat.completions.create(
        model="a", messages=USER, seed=9, stream=True, stream_options={"include_usage": True}, **BRIEF
    )
    text = reasoning = ""
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
    message = whole.choices[0].message
    assert text == (message.content or "")
    assert reasoning == ((message.model_extra or {}).get("reasoning_content") or "")
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_many_async_streams_at_once(served: Served) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        text = ""
        stream = await client.chat.completions.create(
            model="a", messages=USER, seed=seed, stream=True, **BRIEF
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += (
                    (choice.delta.model_extra or {}).get("reasoning_content") or choice.delta.content or ""
                )
        return text

    async def every() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="sk-test", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in (1, 2, 3, 1, 2, 3)))

    texts = asyncio.run(every())
    assert texts[:3] == texts[3:]
    assert len(set(texts)) == 3


def test_a_tool_loop(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Add two digits."}]
    cached = []
    for turn in range(3):
        reply = client.chat.completions.create(
            model="a",
            messages=messages,
            tools=[ADD],
            tool_choice="required",
            seed=turn,
            parallel_tool_calls=False,
            extra_body={"chat_template_kwargs": {"thinking": False}},
            max_tokens=1500,
        )
        message = reply.choices[0].message
        assert reply.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls
        call = message.tool_calls[0]
        arguments = json.loads(call.function.arguments)
        assert arguments["a"] in (1, 2, 3)
        assert arguments["b"] in (4, 5, 6)
        messages.append(message.to_dict())
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached.append((reply.usage.prompt_tokens_details.cached_tokens or 0) / reply.usage.prompt_tokens)
    assert cached[1] > 0.3
    assert cached[2] > 0.3


def test_a_session_of_twenty_turns_reads_most_of_its_prompts_from_the_cache(client: openai.OpenAI) -> None:
    task = "Repair the failing test, then submit. " * 200  # a system prompt with tools and files, in bytes
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": task}]
    prompt = cached = 0
    for turn in range(20):
        messages.append({"role": "user", "content": f"observation {turn}"})
        reply = client.chat.completions.create(model="a", messages=messages, seed=turn, max_tokens=40)
        message = reply.choices[0].message
        messages.append(message.to_dict())
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        if turn:  # the first turn has nothing to read
            prompt += reply.usage.prompt_tokens
            cached += reply.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= 0.95 * prompt


def test_streamed_tool_calls_are_assembled_by_the_client(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    with client.chat.completions.stream(
        model="a",
        messages=USER,
        tools=[ADD],
        tool_choice=choice,
        seed=1,
        max_tokens=2500,
        extra_body={"chat_template_kwargs": {"thinking": False}},
    ) as stream:
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert call.function.name == "add"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}


class Verdict(BaseModel):
    """A structured answer with few words."""

    passed: bool
    grade: Literal["low", "high"]


def test_structured_output_is_parsed_into_the_users_type(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="a", messages=USER, response_format=Verdict, seed=3, reasoning_effort="none", max_tokens=200
    )
    assert isinstance(reply.choices[0].message.parsed, Verdict)


def test_logprobs_are_typed_and_at_most_zero(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="a",
        messages=USER,
        logprobs=True,
        top_logprobs=3,
        reasoning_effort="none",
        max_tokens=10,
        seed=1,
    )
    assert reply.choices[0].logprobs is not None
    for item in reply.choices[0].logprobs.content or ():
        assert item.logprob <= 0
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].logprob >= item.top_logprobs[-1].logprob


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert "a" in {model.id for model in client.models.list()}
    assert client.models.retrieve("a").id == "a"


def test_timings_of_the_server_are_opt_in(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="a", messages=USER, max_tokens=8, extra_body={"k3eval_timings": True, "ignore_eos": True}
    )
    timings = (reply.model_extra or {})["k3eval_timings"]
    assert len(timings["token_ns"]) == 8
    assert timings["token_ns"] == sorted(timings["token_ns"])
    assert timings["queue_ns"] + timings["prefill_ns"] <= timings["token_ns"][0]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
        ({"messages": [{"role": "tool", "content": "x"}]}, openai.BadRequestError),
        ({"temperature": 5}, openai.BadRequestError),
    ],
)
def test_refusals_are_the_clients_own_errors(
    client: openai.OpenAI, changes: dict[str, object], error: type[openai.APIStatusError]
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**({"model": "a", "messages": USER} | changes))
    assert caught.value.message
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(served: Served) -> None:
    with (
        openai.OpenAI(base_url=served.url, api_key="sk-other", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
