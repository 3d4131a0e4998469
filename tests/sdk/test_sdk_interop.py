"""Other clients on the meter: the real ``openai`` package and one agent framework, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import httpx
import httpx2
import openai
import pytest
import shapes
from sdk_server import HttpServer

from k3eval import (
    Budget,
    Ledger,
    Meter,
    RetryPolicy,
    ToolCall,
    Usage,
    async_openai_client,
    metered_async_http_client,
    metered_async_httpx2_client,
    metered_http_client,
    metered_httpx2_client,
    openai_client,
)
from k3eval.meter.transport import MeteredTransport
from k3eval.notices import Notice
from k3eval.providers import provider_named
from k3eval.testing import Reply, ScriptedTransport, SeenRequest, answer, failure, streamed

KEY = "sk-invented-0123456789"
SSE = {"content-type": "text/event-stream"}
TOOL_STREAM = Reply((shapes.sse(shapes.MOONSHOT_TOOL_STREAM),), headers=SSE)
CACHED = Reply((shapes.MOONSHOT_CACHED.encode(),), headers={"content-type": "application/json"})
QUICK = RetryPolicy(first_wait_s=0.001)
ASK: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server: HttpServer, meter: Meter) -> Iterator[openai.OpenAI]:
    with openai_client("moonshot", base_url=server.url, api_key=KEY, meter=meter, retry=QUICK) as made:
        yield made


def test_it_is_an_ordinary_client(client: openai.OpenAI) -> None:
    assert type(client) is openai.OpenAI
    assert client.max_retries == 0


def test_answer(client: openai.OpenAI, server: HttpServer, meter: Meter) -> None:
    server.play(CACHED)
    done = client.chat.completions.create(model="kimi-k3", messages=ASK)
    assert done.choices[0].message.content == "42"
    assert done.choices[0].message.reasoning_content == "adding"  # type: ignore[attr-defined]
    (row,) = meter.ledger.attempts()
    assert row.usage == Usage(20, 1024, 256, 9, 31)
    assert row.cost.computed is not None
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("packed", ["one packet", "many packets"])
def test_stream_with_tools(client: openai.OpenAI, server: HttpServer, meter: Meter, packed: str) -> None:
    body = shapes.sse(shapes.MOONSHOT_TOOL_STREAM)
    parts = (body,) if packed == "one packet" else tuple(body[i : i + 7] for i in range(0, len(body), 7))
    server.play(Reply(parts, headers=SSE))
    arguments, name = "", ""
    with client.chat.completions.create(model="kimi-k3", messages=ASK, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or ():
                    assert call.function is not None
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
    assert (name, json.loads(arguments)) == ("ls", {"p": "src"})
    (row,) = meter.ledger.attempts()
    assert row.state == "settled"
    assert row.usage == Usage(90, 0, None, 22, None)
    assert row.cost.computed == Decimal("0.0006")
    assert row.finish_reason == "tool_calls"
    assert row.ttft_seconds is not None


def test_accumulating_stream_helper(client: openai.OpenAI, server: HttpServer) -> None:
    server.play(streamed(["a", "b", "c"]))
    with client.chat.completions.stream(model="kimi-k3", messages=ASK) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == "abc"


def test_stream_left_early(client: openai.OpenAI, server: HttpServer, meter: Meter) -> None:
    server.play(Reply((shapes.sse(shapes.MOONSHOT_TOOL_STREAM[:3]),), headers=SSE))
    stream = client.chat.completions.create(model="kimi-k3", messages=ASK, stream=True)
    next(iter(stream))
    stream.close()
    (row,) = meter.ledger.attempts()
    assert row.state == "unknown"


def test_cut_stream(client: openai.OpenAI, server: HttpServer, meter: Meter) -> None:
    server.play(Reply((shapes.sse(shapes.MOONSHOT_TOOL_STREAM[:3]),), headers=SSE, cut=True))
    with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
        list(client.chat.completions.create(model="kimi-k3", messages=ASK, stream=True))
    (row,) = meter.ledger.attempts()
    assert row.state == "unknown"
    assert row.held is not None
    assert row.held > 0


def test_retries_are_ours_and_seen(client: openai.OpenAI, server: HttpServer, meter: Meter) -> None:
    server.play(failure(500, {"message": "x"}), failure(503, {"message": "x"}), CACHED)
    assert client.chat.completions.create(model="kimi-k3", messages=ASK).choices[0].message.content == "42"
    assert [row.status for row in meter.ledger.attempts()] == [500, 503, 200]


def test_a_stream_that_begins_with_an_error_is_tried_again(client: openai.OpenAI, server: HttpServer) -> None:
    server.play(Reply((shapes.sse(shapes.ERROR_WITHOUT_CHOICE),), headers=SSE), streamed())
    chunks = list(client.chat.completions.create(model="kimi-k3", messages=ASK, stream=True))
    assert len(server.requests) == 2
    assert len(chunks) > 2


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (
            Reply((shapes.QUOTA_429.encode(),), 429, {"content-type": "application/json"}),
            openai.RateLimitError,
        ),
        (failure(401, {"type": "incorrect_api_key_error", "message": "no"}), openai.AuthenticationError),
        (failure(400, {"type": "invalid_request_error", "message": "no"}), openai.BadRequestError),
        (failure(500, {"message": "no"}), openai.InternalServerError),
        (Reply((shapes.HTML_504.encode(),), 504, {"content-type": "text/html"}), openai.InternalServerError),
    ],
)
def test_errors_stay_the_clients_own(
    client: openai.OpenAI, server: HttpServer, reply: Reply, kind: type[openai.APIStatusError]
) -> None:
    server.play(reply)
    with pytest.raises(kind) as caught:
        client.chat.completions.create(model="kimi-k3", messages=ASK)
    assert caught.value.status_code == reply.status


def test_nobody_listens(meter: Meter) -> None:
    with (
        openai_client("local", base_url="http://127.0.0.1:9/v1", meter=meter, retry=QUICK) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.chat.completions.create(model="a", messages=ASK)
    assert [row.state for row in meter.ledger.attempts()] == ["settled", "settled"]


def test_a_budget_reaches_the_user_as_402(server: HttpServer, notices: list[Notice]) -> None:
    meter = Meter(budget=Budget(max_cost=Decimal("0.05")), notify=notices.append)
    server.play(answer(usage={"prompt_tokens": 100, "completion_tokens": 1313, "cached_tokens": 50}))
    with openai_client("moonshot", base_url=server.url, api_key=KEY, meter=meter) as client:
        for _ in range(2):
            client.chat.completions.create(model="kimi-k3", messages=ASK, max_completion_tokens=1250)
        with pytest.raises(openai.APIStatusError, match="Raise the budget") as caught:
            client.chat.completions.create(model="kimi-k3", messages=ASK, max_completion_tokens=1250)
    assert caught.value.status_code == 402
    assert len(server.requests) == 2


def test_quota_stops_the_next_call_too(client: openai.OpenAI, server: HttpServer) -> None:
    server.play(Reply((shapes.QUOTA_429.encode(),), 429, {"content-type": "application/json"}))
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="kimi-k3", messages=ASK)
    with pytest.raises(openai.APIStatusError, match="Top up"):
        client.chat.completions.create(model="kimi-k3", messages=ASK)
    assert len(server.requests) == 1


@pytest.mark.parametrize("body", [b"<html>", b'{"choices":[]}', b"{}"])
def test_a_strange_success_is_passed_on(meter: Meter, body: bytes) -> None:
    script = ScriptedTransport(Reply((body,), headers={"content-type": "application/json"}))
    inner = MeteredTransport(provider_named("local"), meter, inner=script)
    with httpx.Client(transport=inner) as client:
        reply = client.post("http://h/v1/chat/completions", json={"model": "m", "messages": []})
    assert reply.content == body
    assert [row.state for row in meter.ledger.attempts()] == ["unknown"]


def test_a_broken_stream_is_passed_on(meter: Meter) -> None:
    body = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\ndata: {"usage":{nonsense\n\ndata: [DONE]\n\n'
    script = ScriptedTransport(Reply((body[:20], body[20:]), headers=SSE))
    inner = MeteredTransport(provider_named("local"), meter, inner=script)
    with httpx.Client(transport=inner) as client:
        reply = client.post(
            "http://h/v1/chat/completions", json={"model": "m", "messages": [], "stream": True}
        )
    assert reply.content == body
    assert [row.state for row in meter.ledger.attempts()] == ["unknown"]


def test_a_request_that_is_no_chat_call_passes(meter: Meter) -> None:
    script = ScriptedTransport(Reply((b"{}",)), Reply((b"{}",)))
    with httpx.Client(transport=MeteredTransport(provider_named("local"), meter, inner=script)) as client:
        client.get("http://h/v1/models")
        client.post("http://h/v1/embeddings", json={})
    assert list(meter.ledger.attempts()) == []


def test_a_body_that_is_no_json_is_refused(meter: Meter) -> None:
    inner = MeteredTransport(provider_named("local"), meter, inner=ScriptedTransport())
    with httpx.Client(transport=inner) as client:
        reply = client.post("http://h/v1/chat/completions", content=b"hello")
    assert reply.status_code == 400
    assert "no JSON" in reply.text


def test_compression_is_not_asked_for_and_survived(meter: Meter) -> None:
    import gzip

    def packed(request: SeenRequest) -> Reply:
        assert request.headers["accept-encoding"] == "identity"
        body = shapes.sse(shapes.MOONSHOT_TOOL_STREAM) if request.body.get("stream") else CACHED.body
        kind = "text/event-stream" if request.body.get("stream") else "application/json"
        return Reply((gzip.compress(body),), headers={"content-type": kind, "content-encoding": "gzip"})

    inner = MeteredTransport(provider_named("moonshot"), meter, inner=ScriptedTransport(packed, repeat=True))
    with httpx.Client(transport=inner) as client:
        for stream in (False, True):
            body = {"model": "kimi-k3", "messages": [], "stream": stream}
            assert b"choices" in client.post("http://h/v1/chat/completions", json=body).content
    assert [row.state for row in meter.ledger.attempts()] == ["settled", "settled"]


def test_async_client(server: HttpServer, meter: Meter) -> None:
    async def run() -> tuple[str | None, str]:
        async with async_openai_client("moonshot", base_url=server.url, api_key=KEY, meter=meter) as client:
            server.play(CACHED)
            whole = await client.chat.completions.create(model="kimi-k3", messages=ASK)
            server.play(streamed(["x", "y"]))
            text = ""
            stream = await client.chat.completions.create(model="kimi-k3", messages=ASK, stream=True)
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            return whole.choices[0].message.content, text

    assert asyncio.run(run()) == ("42", "xy")
    assert [row.state for row in meter.ledger.attempts()] == ["settled", "settled"]


def test_bare_http_client(server: HttpServer, meter: Meter) -> None:
    server.play(CACHED)
    with metered_http_client("moonshot", base_url=server.url, api_key=KEY, meter=meter) as http:
        reply = http.post("/chat/completions", json={"model": "kimi-k3", "messages": ASK})
    assert reply.json()["usage"]["prompt_tokens"] == 1300
    assert meter.total.calls == 1


def test_clients_of_both_kinds_share_a_ledger(server: HttpServer, tmp_path: object) -> None:
    ledger = Ledger()
    server.play(CACHED)
    for _ in range(2):
        meter = Meter(ledger, notify=lambda _: None)
        with openai_client("moonshot", base_url=server.url, api_key=KEY, meter=meter) as client:
            client.chat.completions.create(model="kimi-k3", messages=ASK)
    assert ledger.totals().calls == 2


def test_httpx2_client(server: HttpServer, meter: Meter) -> None:
    server.play(CACHED)
    with (
        metered_httpx2_client("moonshot", base_url=server.url, api_key=KEY, meter=meter) as http,
        openai.OpenAI(base_url=server.url, api_key=KEY, http_client=http, max_retries=0) as client,
    ):
        assert (
            client.chat.completions.create(model="kimi-k3", messages=ASK).choices[0].message.content == "42"
        )
        server.play(Reply((shapes.sse(shapes.MOONSHOT_TOOL_STREAM[:3]),), headers=SSE, cut=True))
        with pytest.raises((openai.APIConnectionError, httpx2.RemoteProtocolError)):
            list(client.chat.completions.create(model="kimi-k3", messages=ASK, stream=True))
    assert [row.state for row in meter.ledger.attempts()] == ["settled", "unknown"]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            metered_async_http_client,
            # PydanticAI 2 takes httpx clients until its version 3 and says so
            marks=pytest.mark.filterwarnings("ignore:.*httpx.AsyncClient.* support"),
            id="httpx",
        ),
        pytest.param(metered_async_httpx2_client, id="httpx2"),
    ],
)
def test_an_agent_framework_on_the_meter(server: HttpServer, meter: Meter, kind: Callable[..., Any]) -> None:
    """PydanticAI is handed our client; its whole tool loop is metered."""
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    server.play(
        answer(None, tool_calls=[ToolCall("add_0", "add", '{"a": 2, "b": 3}')]),
        answer("it is 5", usage={"prompt_tokens": 80, "completion_tokens": 6, "cached_tokens": 64}),
    )

    async def run() -> str:
        async with kind("moonshot", base_url=server.url, api_key=KEY, meter=meter) as http:
            provider = OpenAIProvider(base_url=server.url, api_key=KEY, http_client=http)
            agent = pydantic_ai.Agent(OpenAIChatModel("kimi-k3", provider=provider))

            @agent.tool_plain
            def add(a: int, b: int) -> int:
                """Add two numbers."""
                return a + b

            return str((await agent.run("What is 2 + 3?")).output)

    assert asyncio.run(run()) == "it is 5"
    sent = server.requests[1].body["messages"]
    assert any(m["role"] == "tool" and m["content"] == "5" for m in sent)  # type: ignore[union-attr, call-overload, index]
    rows = list(meter.ledger.attempts())
    assert [row.state for row in rows] == ["settled", "settled"]
    assert rows[1].usage == Usage(16, 64, None, 6, None)
    assert rows[1].cost.computed is not None
