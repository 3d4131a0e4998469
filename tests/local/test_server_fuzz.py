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

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
NAME = st.sampled_from(["f", "g", "1x", "", "a b", "é", "x" * 200])
SCHEMA = st.recursive(
    st.sampled_from(
        [
            {},
            {"type": "string"},
            {"type": "integer"},
            {"type": "strange"},
            {"enum": []},
            {"enum": ["a", 1, None]},
            {"$ref": "#/$defs/X"},
            {"$ref": 7},
            {"const": {"x": [1]}},
            {"type": ["string", "null"]},
            True,
            False,
            3,
            {"type": "string", "pattern": "["},
            {"type": "string", "maxLength": -3},
            {"type": "string", "minLength": 9},
            {"type": "object", "required": ["zz"]},
            {"allOf": [{}]},
            {"not": {}},
            {"type": None},
            {"type": "string", "pattern": "(?=x)y"},
            {"type": "string", "minLength": 5, "maxLength": 2},
            {"type": "number", "minimum": 5, "maximum": 1},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda p: {"type": "object", "properties": p},
            st.dictionaries(st.text(max_size=4), inner, max_size=3),
        ),
        st.builds(
            lambda p: {"type": "object", "$defs": {"X": p}, "properties": {"k": {"$ref": "#/$defs/X"}}}, inner
        ),
        st.builds(lambda s: {"type": "array", "items": s}, inner),
        st.builds(lambda s: {"anyOf": s}, st.lists(inner, max_size=2)),
    ),
    max_leaves=4,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["function", "builtin_function"]),
            "function": st.fixed_dictionaries(
                {"name": NAME}, optional={"parameters": SCHEMA, "description": st.text(max_size=4)}
            ),
        }
    )
    | JUNK,
    max_size=3,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(["c1", "c2", ""]),
            "function": st.fixed_dictionaries(
                {"name": NAME, "arguments": st.sampled_from(["{}", "{", '{"a": 1e999}', "[1]", ""])}
            ),
        }
    ),
    max_size=2,
)
CONTENT = (
    st.text(max_size=8)
    | st.none()
    | st.lists(st.sampled_from([{"type": "text", "text": "x"}, {"type": "image_url"}]), max_size=2)
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "robot"])},
    optional={
        "content": CONTENT,
        "tool_calls": CALLS,
        "tool_call_id": st.sampled_from(["c1", "c2", "f:0", ""]),
        "reasoning_content": st.text(max_size=4),
        "reasoning_details": st.lists(st.dictionaries(st.just("text"), JUNK), max_size=2),
        "name": st.text(max_size=4),
        "tools": TOOLS,
        "partial": st.booleans(),
    },
)
BODY = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["a", "kimi-k3", "A", "nope"]),
        "messages": st.lists(MESSAGE, max_size=4) | JUNK,
    },
    optional={
        "stream": st.booleans(),
        "tools": TOOLS,
        "n": st.integers(-1, 3) | JUNK,
        "max_tokens": st.integers(-1, 40) | JUNK,
        "temperature": st.floats(-1, 3) | JUNK,
        "top_p": st.floats(-1, 2),
        "seed": st.integers() | JUNK,
        "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=6) | JUNK,
        "tool_choice": st.sampled_from(
            ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]
        )
        | JUNK,
        "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}])
        | st.builds(lambda s: {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}, SCHEMA)
        | JUNK,
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(-1, 25),
        "reasoning_effort": st.text(max_size=4),
        "thinking": JUNK,
        "provider": JUNK,
        "reasoning": JUNK,
        "chat_template_kwargs": JUNK,
        "min_tokens": JUNK,
        "stream_options": st.sampled_from([{"include_usage": True}, {}, None]) | JUNK,
        "ignore_eos": st.booleans(),
        "k3eval_timings": st.booleans(),
        "prompt_cache_options": JUNK,
        "parallel_tool_calls": st.booleans(),
    },
)


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
