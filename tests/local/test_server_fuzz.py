"""Whatever a request body holds, the answer is a completion or a refusal in the envelope: never a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_helpers import NoiseEngine, chat_server

from k3eval_local.server.app import build_app

ALL = ("vllm", "moonshot", "openrouter")


def object_schema(properties: dict[str, object]) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(properties)[:1]}


def tool(name: str, schema: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
LEAVES: list[object] = [
    {}, {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "strange"}, {"enum": []},
    {"enum": ["a", 1, None]}, {"$ref": "#/$defs/X"}, {"$ref": 7}, {"const": {"x": [1]}}, {"allOf": [{}]},
    {"type": ["string", "null"]}, {"type": "string", "pattern": "["}, {"type": "string", "pattern": "(?=x)y"},
    {"type": "string", "maxLength": -3}, {"type": "string", "minLength": 5, "maxLength": 2}, {"not": {}},
    {"type": "object", "required": ["zz"]}, {"type": "number", "minimum": 5, "maximum": 1}, {"type": None},
    {"type": "string", "pattern": "^a/b$"}, {"type": "array", "items": [{}]}, True, False, 3,
]  # fmt: skip
SCHEMA = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(object_schema),
        inner.map(
            lambda s: {"type": "object", "$defs": {"X": s}, "properties": {"k": {"$ref": "#/$defs/X"}}}
        ),
        inner.map(lambda s: {"type": "array", "items": s}),
        st.lists(inner, max_size=2).map(lambda s: {"anyOf": s}),
    ),
    max_leaves=4,
)
OBJECT = st.dictionaries(st.text(max_size=4), SCHEMA, max_size=3).map(object_schema) | SCHEMA
WORDS = st.text(max_size=8) | st.sampled_from(
    ["<|end_of_msg|>", "<|open|>think<|sep|>", "\x00", "\u2028", "🎉"]
)


ARGUMENTS = st.sampled_from(["{}", "{", '{"a": 1e999}', "[1]", "", '{"k": "v", "k": {"x": [null]}}'])
TURNS: st.SearchStrategy[list[dict[str, object]]] = st.one_of(
    WORDS.map(lambda text: [{"role": "user", "content": text}]),
    WORDS.map(
        lambda text: [{"role": "developer", "content": [{"type": "text", "text": text + "."}], "name": text}]
    ),
    st.tuples(WORDS, WORDS).map(
        lambda t: [{"role": "assistant", "content": t[0] + ".", "reasoning_content": t[1]}]
    ),
    st.tuples(ARGUMENTS, st.permutations(["c1", "c2"])).map(
        lambda t: [
            {
                "role": "assistant",
                "reasoning_content": "r",
                "tool_calls": [
                    {"id": each, "function": {"name": "f", "arguments": t[0]}} for each in ("c1", "c2")
                ],
            },
            *({"role": "tool", "tool_call_id": each, "content": each} for each in t[1]),
        ]
    ),
    SCHEMA.map(lambda s: [{"role": "system", "tools": [tool("dynamic", s)]}]),
)
MEMBERS = {
    "stream": st.booleans(),
    "tools": st.lists(OBJECT, max_size=2).map(lambda each: [tool(f"t{n}", s) for n, s in enumerate(each)]),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 40),
    "seed": st.integers(-(2**63), 2**63),
    "stop": WORDS.map(lambda text: text[:4] or "x") | st.lists(st.sampled_from(["a", "ab", "é"]), max_size=4),
    "tool_choice": st.sampled_from(
        ["auto", "none", "required", {"type": "function", "function": {"name": "t0"}}]
    ),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}])
    | SCHEMA.map(lambda s: {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "reasoning_effort": st.sampled_from(["low", "high", "max"]),
    "stream_options": st.sampled_from([{"include_usage": True}, {}, None]),
    "ignore_eos": st.booleans(),
    "k3eval_timings": st.booleans(),
    "parallel_tool_calls": st.booleans(),
}
ODD = (
    "temperature",
    "top_p",
    "thinking",
    "provider",
    "reasoning",
    "chat_template_kwargs",
    "min_tokens",
    "model",
)
ONE_BAD = st.dictionaries(st.sampled_from([*MEMBERS, *ODD, "messages"]), JUNK, min_size=1, max_size=1)
VALID = st.fixed_dictionaries(
    {
        "model": st.just("a"),
        "messages": st.lists(TURNS, min_size=1, max_size=3).map(
            lambda turns: [m for turn in turns for m in turn]
        ),
    },
    optional=MEMBERS,
)
BODY = VALID | st.tuples(VALID, ONE_BAD).map(lambda pair: pair[0] | pair[1])


@pytest.fixture(scope="module", params=ALL)
def application(request: pytest.FixtureRequest) -> Iterator[tuple[httpx.ASGITransport, asyncio.Runner]]:
    server = chat_server(NoiseEngine(eager=60), request.param, default_max_tokens=40)
    with asyncio.Runner() as runner:
        yield httpx.ASGITransport(build_app(server)), runner


def send(
    application: tuple[httpx.ASGITransport, asyncio.Runner], path: str, content: bytes
) -> httpx.Response:
    transport, runner = application

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=content)

    return runner.run(post())


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert "\n" not in error["message"]
        assert error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text.rsplit("data: {", 1)[1]
    else:
        assert "error" not in response.json()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODY)
def test_no_body_makes_a_500(
    application: tuple[httpx.ASGITransport, asyncio.Runner], body: dict[str, object]
) -> None:
    check(send(application, "/v1/chat/completions", json.dumps(body).encode()))


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=60) | JUNK.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_make_a_500(application: tuple[httpx.ASGITransport, asyncio.Runner], content: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/tokenizers/estimate-token-count"):
        check(send(application, path, content))
