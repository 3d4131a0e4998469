"""What each dialect reads, refuses and sends, without a server."""

from __future__ import annotations

import json
import re
from decimal import Decimal

import pytest
from server_helpers import settings

from k3eval_local.protocol.dialects import AnyDialect, DialectOptions, OpenRouterDialect
from k3eval_local.protocol.dialects.moonshot import flavour_error
from k3eval_local.protocol.dialects.openrouter import ProviderBody, choose_host
from k3eval_local.protocol.errors import ErrorKind, ProtocolError
from k3eval_local.protocol.messages import JsonObject
from k3eval_local.protocol.parser import CallArguments, CallEnd, CallStart, Reasoning, Text
from k3eval_local.protocol.prices import MOONSHOT, OPENROUTER_HOSTS
from k3eval_local.protocol.reply import Counts, ReplyCall, ReplyChoice, ReplyHead, ReplyTail, Timings
from k3eval_local.protocol.request import ChatRequest

USER: JsonObject = {"role": "user", "content": "hi"}
SCHEMA: JsonObject = {"type": "object"}
CALL: JsonObject = {"id": "a", "function": {"name": "f"}}
EMPTY_PART: JsonObject = {"type": "text", "text": ""}
TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
COUNTS = Counts(prompt=2000, completion=10, cached=1920, written=0, reasoning=6)
ALL = ("vllm", "moonshot", "openrouter")


def dialect(name: str, **options: object) -> AnyDialect:
    return settings(name, options=DialectOptions(**options)).dialect


def read(name: str, **members: object) -> ChatRequest:
    body = {"model": "kimi-k3", "messages": [USER]} | members
    return dialect(name).read_bytes(json.dumps(body).encode())


def refused(name: str, **members: object) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        read(name, **members)
    assert "\n" not in caught.value.message
    return caught.value


# What all refuse


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "x", "tools": [TOOL]}]}, "only a system message"),
        ({"messages": [USER, {"role": "system", "content": "x", "tools": [TOOL]}]}, "without content"),
        ({"tools": [TOOL, TOOL]}, "declared twice"),
        ({"tools": [TOOL], "messages": [{"role": "system", "tools": [TOOL]}, USER]}, "declared twice"),
        ({"tools": [{"type": "function", "function": {"name": "1st"}}]}, "must start with"),
        ({"tools": [{"type": "web", "function": {"name": "x"}}]}, "not available"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": "required", "tools": []}, "needs tools"),
        ({"tool_choice": "maybe"}, "not one of"),
        ({"response_format": {"type": "xml"}}, "not one of"),
        ({"response_format": {"type": "json_schema"}}, "name and schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "name and schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "name and schema"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n: "),
        ({"stop": ""}, "empty"),
        ({"stop": ["x"] * 99}, "at most"),
        ({"reasoning_effort": "enormous"}, "not one of"),
        ({"model": 7}, "model"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_every_dialect_refuses(name: str, members: dict[str, object], message: str) -> None:
    assert message in refused(name, **members).message


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'{"model": NaN}', b'"\\ud800"', b"[" * 100_000, b"\xff"]
)
def test_every_dialect_refuses_what_is_no_json_object(name: str, body: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        dialect(name).read_bytes(body)
    assert caught.value.kind in (ErrorKind.BAD_JSON, ErrorKind.BAD_REQUEST)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("name", ALL)
def test_unknown_members_and_nulls_are_ignored(name: str) -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "n", "stop", "tools", "stream", "max_tokens", "response_format")
    )
    assert read(name, surprising={"deep": [1]}, **nulls) == read(name)


@pytest.mark.parametrize("name", ALL)
def test_both_names_of_the_output_limit_work_and_the_newer_wins(name: str) -> None:
    assert read(name, max_tokens=5).max_tokens == 5
    assert read(name, max_tokens=5, max_completion_tokens=7).max_tokens == 7


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("member", ["reasoning_content", "reasoning"])
def test_every_name_of_reasoning_is_read_back(name: str, member: str) -> None:
    said = {"role": "assistant", "content": "x", "reasoning_content": "kept"}
    if name != "moonshot":
        said = {"role": "assistant", "content": "x", member: "kept"}
    assert read(name, messages=[USER, said]).conversation.messages[1].reasoning == "kept"


def test_reasoning_details_are_read_back_in_order() -> None:
    details = [{"type": "reasoning.text", "text": "one "}, {"type": "reasoning.summary", "summary": "two"}]
    said = {"role": "assistant", "content": "x", "reasoning_details": details}
    assert read("openrouter", messages=[USER, said]).conversation.messages[1].reasoning == "one two"


@pytest.mark.parametrize("name", ALL)
def test_content_parts_are_joined(name: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(name, messages=[{"role": "user", "content": parts}]).conversation.messages[0].text == "ab"


# Moonshot


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"temperature": 0.5}, "invalid temperature: only 1 is allowed for this model"),
        ({"top_p": 1}, "invalid top_p: only 0.95 is allowed for this model"),
        ({"n": 2}, "invalid n: only 1 is allowed for this model"),
        ({"presence_penalty": 1}, "invalid presence_penalty"),
        ({"frequency_penalty": 1}, "invalid frequency_penalty"),
        ({"stop": ["x"] * 6}, "at most 5"),
        ({"stop": "x" * 33}, "32 bytes"),
        ({"prompt_cache_breakpoint": {}}, "automatic"),
        ({"prompt_cache_options": {"ttl": "30m"}}, "5m or 1h"),
        ({"thinking": {"type": "maybe"}}, "not enabled or disabled"),
        ({"reasoning_effort": "medium"}, "low, high, max"),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            "message at position 1 with role 'assistant'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
            "text content is empty",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
                ]
            },
            "reasoning_content is missing in assistant tool call message at index 1",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "x", "partial": True}]}, "partial"),
        ({"tools": [TOOL] * 129}, "at most 128"),
    ],
)
def test_moonshot_refuses(members: dict[str, object], message: str) -> None:
    assert message in refused("moonshot", **members).message


def test_moonshot_accepts_the_fixed_values_and_samples_with_them() -> None:
    request = read(
        "moonshot", temperature=1, top_p=0.95, n=1, presence_penalty=0, frequency_penalty=0, seed=5
    )
    assert (request.temperature, request.top_p, request.n, request.seed) == (1.0, 0.95, 1, None)


def test_moonshot_ignores_a_named_tool_choice() -> None:
    choice = {"type": "function", "function": {"name": "nonesuch"}}
    assert read("moonshot", tools=[TOOL], tool_choice=choice).conversation.tool_choice.mode == "auto"


@pytest.mark.parametrize(
    ("members", "thinking", "effort"),
    [
        ({}, True, "max"),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"thinking": {"type": "enabled", "effort": "high"}}, True, "high"),
        ({"thinking": {"effort": "high"}, "reasoning_effort": "low"}, True, "low"),
        ({"thinking": {"type": "disabled"}}, False, None),
    ],
)
def test_moonshot_thinking(members: dict[str, object], thinking: bool, effort: str | None) -> None:
    conversation = read("moonshot", **members).conversation
    assert (conversation.thinking, conversation.effort) == (thinking, effort)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array"}, "root"),
        ({}, "root"),
        ({"type": "object", "properties": {"a": {}}}, "properties.a': type is not defined"),
        ({"type": "object", "properties": {"a": {"type": "string", "anyOf": []}}}, "beside anyOf"),
        ({"type": "object", "properties": {"a": {"$ref": "#/definitions/x"}}}, "#/$defs/"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "no property"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": [{}]}}}, "tuple"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {}}}}, "a.items': type"),
        ({"type": "object", "$defs": {"x": {}}, "properties": {}}, "$defs.x': type"),
    ],
)
def test_moonshot_schema_flavour_refuses(schema: JsonObject, reason: str) -> None:
    assert reason in (flavour_error(schema) or "")
    tool = {"type": "function", "function": {"name": "f", "parameters": schema or {"type": "null"}}}
    message = refused("moonshot", tools=[tool]).message
    assert message.startswith(
        "tools.function.parameters is not a valid moonshot flavored json schema, details: <"
    )
    assert read("vllm", tools=[tool]).conversation.tools  # its own rule, not the others'


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "string"}}},
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": "string"}}},
            "required": ["a"],
        },
    ],
)
def test_moonshot_schema_flavour_accepts(schema: JsonObject) -> None:
    assert flavour_error(schema) is None


# OpenRouter and vLLM


@pytest.mark.parametrize(
    ("members", "thinking", "effort"),
    [
        ({}, True, "max"),
        ({"reasoning": {"effort": "low"}}, True, "low"),
        ({"reasoning": {"effort": "medium"}}, True, "high"),
        ({"reasoning": {"enabled": False}}, False, None),
        ({"reasoning": {"effort": "none"}}, False, None),
        ({"reasoning_effort": "xhigh"}, True, "max"),
    ],
)
def test_openrouter_thinking(members: dict[str, object], thinking: bool, effort: str | None) -> None:
    conversation = read("openrouter", **members).conversation
    assert (conversation.thinking, conversation.effort) == (thinking, effort)


@pytest.mark.parametrize(
    ("members", "thinking", "effort"),
    [
        ({}, True, "max"),
        ({"chat_template_kwargs": {"thinking": False}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"chat_template_kwargs": {"thinking_effort": "high"}}, True, "high"),
        ({"reasoning_effort": "none"}, False, None),
    ],
)
def test_vllm_thinking(members: dict[str, object], thinking: bool, effort: str | None) -> None:
    conversation = read("vllm", **members).conversation
    assert (conversation.thinking, conversation.effort) == (thinking, effort)


def test_vllm_forced_length_members() -> None:
    request = read("vllm", min_tokens=8, max_tokens=8, ignore_eos=True, k3eval_timings=True)
    assert (request.min_tokens, request.max_tokens, request.ignore_eos, request.timings) == (8, 8, True, True)


@pytest.mark.parametrize(
    "members", [{"top_k": 5}, {"repetition_penalty": 1.2}, {"min_p": 0.1}, {"min_tokens": 9, "max_tokens": 8}]
)
def test_vllm_refuses_sampling_it_does_not_have(members: dict[str, object]) -> None:
    assert refused("vllm", **members).param in members


@pytest.mark.parametrize(
    ("provider", "limit", "tag"),
    [
        ({}, None, "moonshotai/mxfp4"),
        ({"only": ["deepinfra"]}, None, "deepinfra/bf16"),
        ({"only": ["deepinfra/bf16"]}, 16_384, "deepinfra/bf16"),
        ({"order": ["baseten", "morph"]}, None, "baseten/fp8"),
        ({"order": ["baseten"]}, 262_145, "moonshotai/mxfp4"),
        ({"ignore": ["moonshotai"]}, None, "sail-research/fp4"),
        ({"quantizations": ["bf16"]}, None, "deepinfra/bf16"),
        ({"order": ["Fireworks"], "allow_fallbacks": False}, None, "fireworks"),
    ],
)
def test_openrouter_routes(provider: dict[str, object], limit: int | None, tag: str) -> None:
    assert choose_host(ProviderBody.model_validate(provider), limit).tag == tag


@pytest.mark.parametrize(
    ("provider", "limit"),
    [
        ({"only": ["nobody"]}, None),
        ({"only": ["deepinfra"]}, 16_385),
        ({"order": ["x"], "allow_fallbacks": False}, 1),
    ],
)
def test_openrouter_finds_no_endpoint(provider: dict[str, object], limit: int | None) -> None:
    error = refused("openrouter", provider=provider, max_tokens=limit)
    assert error.kind is ErrorKind.NO_ENDPOINT
    assert dialect("openrouter").error(error).status == 404


# Replies


def head(name: str, **members: object) -> ReplyHead:
    return ReplyHead("id-1", 1_800_000_000, read(name, **members))


def stream(
    name: str,
    *,
    counts: Counts = COUNTS,
    cost: Decimal | None = None,
    options: dict[str, object] | None = None,
    **members: object,
) -> list[JsonObject]:
    """All frames of a reply with reasoning, an answer and a call."""
    made = dialect(name, **(options or {}))
    frames = made.frames(head(name, tools=[TOOL], **members))
    out = frames.begin()
    for event in (
        Reasoning("why"),
        Text("so"),
        CallStart(0, "add"),
        CallArguments(0, '{"a": 1}'),
        CallEnd(0),
    ):
        out += frames.event(0, event, None)
    out += frames.finish(0, "tool_calls", None, counts)
    return out + frames.end(
        ReplyTail(counts, cost, Timings(1, 2, (3, 4)) if members.get("k3eval_timings") else None)
    )


def deltas(frames: list[JsonObject]) -> list[JsonObject]:
    return [choice["delta"] for frame in frames for choice in frame["choices"]]


def nulls(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(nulls, value.values()))
    if isinstance(value, list):
        return any(map(nulls, value))
    return value is None


def test_moonshot_stream_shape() -> None:
    frames = stream("moonshot", stream_options={"include_usage": True})
    call = {"index": 0, "id": "add_0", "type": "function", "function": {"name": "add", "arguments": ""}}
    assert deltas(frames) == [
        {"role": "assistant", "reasoning_content": "why"},
        {"content": "so"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
        {},
    ]
    assert not any(map(nulls, frames))
    *_, finish, last = frames
    assert finish["choices"][0]["finish_reason"] == "tool_calls"
    assert finish["choices"][0]["usage"] == last["usage"]
    assert last["choices"] == []
    assert last["usage"]["cached_tokens"] == 1920


def test_moonshot_without_include_usage_has_it_on_the_end_frame_only() -> None:
    frames = stream("moonshot")
    assert "usage" in frames[-1]["choices"][0]
    assert all("usage" not in frame for frame in frames)


def test_vllm_stream_shape() -> None:
    frames = stream("vllm")
    assert deltas(frames)[0] == {"role": "assistant", "content": ""}
    assert deltas(frames)[1] == {"reasoning_content": "why"}
    assert all("usage" not in frame for frame in frames)
    assert all(set(frame["choices"][0]) >= {"logprobs", "finish_reason"} for frame in frames)
    assert stream("vllm", stream_options={"include_usage": True})[-1]["choices"] == []


def test_vllm_reasoning_member_can_have_the_newer_name() -> None:
    assert {"reasoning": "why"} in deltas(stream("vllm", options={"reasoning_field": "reasoning"}))


def test_openrouter_stream_shape() -> None:
    frames = stream("openrouter", cost=Decimal("0.000966"))
    assert all(delta["role"] == "assistant" for delta in deltas(frames))
    first = deltas(frames)[0]
    assert first["content"] == ""
    assert first["reasoning"] == first["reasoning_details"][0]["text"] == "why"
    assert deltas(frames)[2]["content"] is None
    *_, finish, last = frames
    assert finish["choices"][0]["native_finish_reason"] == "tool_calls"
    assert last["choices"] == []
    assert last["usage"]["cost"] == 0.000966
    assert all(frame["provider"] == "Moonshot AI" for frame in frames)


def test_openrouter_other_end_form_repeats_the_finish_with_the_usage() -> None:
    *_, finish, last = stream("openrouter", options={"repeat_finish": True})
    reasons = [frame["choices"][0]["finish_reason"] for frame in (finish, last)]
    assert reasons == ["tool_calls", "tool_calls"]
    assert "usage" not in finish
    assert "usage" in last


def test_openrouter_terminal_chunk_may_carry_the_dated_slug() -> None:
    frames = stream("openrouter", model="moonshotai/kimi-k3")
    assert {frame["model"] for frame in frames[:-1]} == {"moonshotai/kimi-k3"}
    assert frames[-1]["model"] == "moonshotai/kimi-k3-20260715"


def test_hidden_reasoning_is_not_sent() -> None:
    for name, members in (
        ("openrouter", {"reasoning": {"exclude": True}}),
        ("vllm", {"include_reasoning": False}),
    ):
        assert "why" not in json.dumps(stream(name, **members))


@pytest.mark.parametrize("name", ALL)
def test_timings_are_on_the_last_frame_only(name: str) -> None:
    frames = stream(name, k3eval_timings=True)
    assert frames[-1]["k3eval_timings"] == {"queue_ns": 1, "prefill_ns": 2, "token_ns": [3, 4]}
    assert all("k3eval_timings" not in frame for frame in frames[:-1])


@pytest.mark.parametrize(
    ("name", "id_form"),
    [
        ("vllm", r"chatcmpl-[0-9a-f]{32}"),
        ("moonshot", r"chatcmpl-[0-9a-f]{24}"),
        ("openrouter", r"gen-\d+-\w{20}"),
    ],
)
def test_reply_ids(name: str, id_form: str) -> None:
    made = dialect(name)
    assert re.fullmatch(id_form, made.new_id())
    assert made.new_id() != made.new_id()


@pytest.mark.parametrize(("name", "expected"), [("moonshot", "add_5"), ("openrouter", "add:5")])
def test_call_ids_count_through_the_conversation(name: str, expected: str) -> None:
    assert dialect(name).call_id("add", 2, 3) == expected


@pytest.mark.parametrize("name", ALL)
def test_whole_replies(name: str) -> None:
    choice = ReplyChoice(0, "why", "so", [ReplyCall("id", "add", "{}")], None, "tool_calls")
    reply = dialect(name).completion(head(name), [choice], ReplyTail(COUNTS))
    message = reply["choices"][0]["message"]
    member = "reasoning" if name == "openrouter" else "reasoning_content"
    assert message[member] == "why"
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 1920
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


STATUS = {
    ErrorKind.BAD_JSON: (400, 400, 400),
    ErrorKind.BAD_REQUEST: (400, 400, 400),
    ErrorKind.KEY_MISSING: (401, 401, 401),
    ErrorKind.KEY_WRONG: (401, 401, 401),
    ErrorKind.UNKNOWN_MODEL: (404, 404, 400),
    ErrorKind.UNKNOWN_PATH: (404, 404, 404),
    ErrorKind.WRONG_METHOD: (405, 405, 405),
    ErrorKind.NO_ENDPOINT: (404, 404, 404),
    ErrorKind.NOT_FOUND: (404, 404, 404),
    ErrorKind.TOO_LARGE: (413, 413, 413),
    ErrorKind.CONTEXT: (400, 400, 400),
    ErrorKind.RATE: (429, 429, 429),
    ErrorKind.CONCURRENCY: (429, 429, 429),
    ErrorKind.QUOTA: (429, 429, 402),
    ErrorKind.BUDGET_IN_USE: (429, 429, 402),
    ErrorKind.WRAPPED_QUOTA: (429, 429, 429),
    ErrorKind.OVERLOADED: (503, 429, 529),
    ErrorKind.SERVER: (500, 500, 500),
    ErrorKind.BAD_GATEWAY: (502, 502, 502),
    ErrorKind.UNAVAILABLE: (503, 503, 503),
    ErrorKind.TIMEOUT: (504, 504, 504),
}


@pytest.mark.parametrize("kind", list(ErrorKind), ids=lambda kind: kind.name)
def test_every_error_has_its_status_and_envelope(kind: ErrorKind) -> None:
    error = ProtocolError(kind, "what is wrong", "param", retry_after_s=7, limit=10, requested=20)
    replies = [dialect(name).error(error) for name in ALL]
    assert tuple(reply.status for reply in replies) == STATUS[kind]
    vllm, moonshot, openrouter = (reply.body["error"] for reply in replies)
    assert set(vllm) == {"message", "type", "param", "code"}
    assert set(moonshot) == {"type", "message"}
    assert set(openrouter) == {"code", "message", "metadata"}
    assert openrouter["code"] == replies[2].status
    assert "error_type" in openrouter["metadata"]


def test_the_three_moonshot_429s_are_told_apart_by_type() -> None:
    made = dialect("moonshot")
    rate, quota, busy = (
        made.error(ProtocolError(kind, "m", retry_after_s=1))
        for kind in (ErrorKind.RATE, ErrorKind.QUOTA, ErrorKind.OVERLOADED)
    )
    types = [reply.body["error"]["type"] for reply in (rate, quota, busy)]
    assert types == ["rate_limit_reached_error", "exceeded_current_quota_error", "engine_overloaded_error"]
    assert rate.headers == {"retry-after": "1", "x-retry-after": "1"}
    assert quota.headers == {}
    assert "please try again after 1 seconds" in json.dumps(rate.body)


def test_overflow_texts_carry_the_numbers() -> None:
    error = ProtocolError(ErrorKind.CONTEXT, "m", limit=262144, requested=291351)
    texts = [json.dumps(dialect(name).error(error).body) for name in ALL]
    assert all("262144" in text for text in texts)
    assert "exceeded model token limit: 262144 (requested: 291351)" in texts[1]
    assert "context_length_exceeded" in texts[2]


def test_a_wrapped_quota_hides_in_the_raw_text() -> None:
    body = dialect("openrouter").error(ProtocolError(ErrorKind.WRAPPED_QUOTA, "m", retry_after_s=1)).body
    raw = json.loads(body["error"]["metadata"]["raw"])
    assert raw["error"]["type"] == "exceeded_current_quota_error"


# Prices


@pytest.mark.parametrize(
    ("counts", "cost"),
    [
        (COUNTS, "0.000966"),
        (Counts(100_000, 8_000, 90_000, 0, 0), "0.177"),
        (Counts(100_000, 8_000, 0, 0, 0), "0.42"),
        (Counts(0, 0, 0, 0, 0), "0"),
    ],
)
def test_published_price_of_kimi_k3(counts: Counts, cost: str) -> None:
    assert MOONSHOT["kimi-k3"].cost(counts) == OPENROUTER_HOSTS[0].price.cost(counts) == Decimal(cost)


def test_one_hour_writes_cost_twice() -> None:
    counts = Counts(prompt=1000, completion=0, cached=0, written=1000, reasoning=0)
    row = MOONSHOT["kimi-k3"]
    assert row.cost(counts, write_1h=True) == 2 * row.cost(counts)
    assert read("moonshot", prompt_cache_options={"mode": "implicit", "ttl": "1h"}).write_1h


def test_prices_apply_only_on_request() -> None:
    for name in ("moonshot", "openrouter"):
        assert dialect(name).price(read(name)) is None
        assert dialect(name, prices=True).price(read(name)) is not None
    assert dialect("vllm", prices=True).price(read("vllm")) is None


def test_openrouter_price_is_that_of_the_served_host() -> None:
    request = read("openrouter", provider={"only": ["deepinfra"]})
    row = dialect("openrouter", prices=True).price(request)
    assert row is not None
    assert (row.miss, row.output) == (Decimal("2.85"), Decimal("14.25"))


def test_openrouter_price_strings_are_usd_per_token() -> None:
    made = dialect("openrouter", prices=True)
    assert isinstance(made, OpenRouterDialect)
    text = json.dumps(made._pricing(OPENROUTER_HOSTS[0]))
    assert text == '{"prompt": "0.000003", "completion": "0.000015", "input_cache_read": "0.0000003"}'
