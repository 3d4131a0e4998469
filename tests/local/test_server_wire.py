"""The server over real HTTP, with an engine that says what it is told: bytes, statuses, counts, leaving."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from decimal import Decimal

import httpx
import pytest
from server_helpers import (
    HTTP,
    TOKENIZER,
    Limits,
    NoiseEngine,
    ScriptedEngine,
    Served,
    serve,
    spoken,
    until,
)

from k3eval_local.protocol.dialects import DialectOptions

ALL = ("vllm", "moonshot", "openrouter")
USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
SAID = spoken("so it is", reasoning="why not", calls=[("add", [("a", "number", "1")])])


@pytest.fixture(scope="module", params=ALL)
def named(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served, ScriptedEngine]]:
    engine = ScriptedEngine(SAID)
    with serve(engine, request.param) as served:
        yield request.param, served, engine


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[Served, ScriptedEngine]]:
    engine = ScriptedEngine(SAID)
    with serve(engine) as served:
        yield served, engine


def post(served: Served, path: str = "/chat/completions", **members: object) -> httpx.Response:
    body = {"model": "a", "messages": [USER]} | members
    return HTTP.post(f"{served.url}{path}", json=body)


def frames(response: httpx.Response) -> list[dict]:
    """The JSON frames of a stream; checks its framing."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    data = [event for event in events[:-2] if not event.startswith(":")]
    assert all(event.startswith("data: ") for event in data)
    return [json.loads(event.removeprefix("data: ")) for event in data]


def joined(chunks: list[dict], member: str) -> str:
    pieces = (choice["delta"].get(member) for chunk in chunks for choice in chunk["choices"])
    return "".join(piece for piece in pieces if piece)


def test_a_whole_reply(named: tuple[str, Served, ScriptedEngine]) -> None:
    name, served, engine = named
    engine.cached = 7
    reply = post(served, tools=[TOOL]).json()
    message = reply["choices"][0]["message"]
    assert message["content"] == "so it is"
    assert message["reasoning" if name == "openrouter" else "reasoning_content"] == "why not"
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    usage = reply["usage"]
    assert usage["prompt_tokens"] == len(engine.requests[-1].prompt_ids) - 3
    assert usage["completion_tokens"] == len(SAID)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 7
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("why not") + len("think") + 2


def test_a_stream_says_the_same_as_the_whole_reply(named: tuple[str, Served, ScriptedEngine]) -> None:
    name, served, _ = named
    whole = post(served, tools=[TOOL]).json()
    response = post(served, tools=[TOOL], stream=True, stream_options={"include_usage": True})
    chunks = frames(response)
    message = whole["choices"][0]["message"]
    reasoning = "reasoning" if name == "openrouter" else "reasoning_content"
    assert joined(chunks, "content") == message["content"]
    assert joined(chunks, reasoning) == message[reasoning]
    pieces = [
        call["function"].get("arguments", "")
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls") or ()
    ]
    assert "".join(pieces) == message["tool_calls"][0]["function"]["arguments"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["usage"] == whole["usage"]
    assert [c["finish_reason"] for f in chunks for c in f["choices"] if c.get("finish_reason")] == [
        "tool_calls"
    ]


def test_openrouter_comments_come_first_and_in_silence() -> None:
    engine = ScriptedEngine(SAID)
    engine.delay_s = 0.02
    with serve(engine, "openrouter", keep_alive_s=0.01) as served:
        text = post(served, stream=True).text
    assert text.startswith(": OPENROUTER PROCESSING\n\n")
    assert text.count(": OPENROUTER PROCESSING") > 3


def test_curl_sees_unbroken_events_as_they_are_made(plain: tuple[Served, ScriptedEngine]) -> None:
    served, _ = plain
    body = json.dumps({"model": "a", "messages": [USER], "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        wire.sendall(head.encode() + b"connection: close\r\n\r\n" + body)
        data = b"".join(iter(lambda: wire.recv(65536), b""))
    headers, _, rest = data.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding: chunked" in headers.lower()
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b"\ndata: {" in rest
    events = rest.count(b"data: {")
    assert events > len("why notso it is")  # one a token and more, although what was there went out at once
    assert rest.count(b"}\n\n\r\n") < 5


@pytest.mark.parametrize(
    ("members", "finish", "content"),
    [
        ({}, "stop", "so it is"),
        ({"stop": "it"}, "stop", "so "),
        ({"stop": ["zz", " is"]}, "stop", "so it"),
        ({"stop": "s"}, "stop", ""),
        ({"stop": "why"}, "stop", "so it is"),  # only the answer is searched
        ({"max_tokens": 30}, "length", "so it "),
        ({"max_tokens": 4}, "length", ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ways_to_end(
    plain: tuple[Served, ScriptedEngine], members: dict[str, object], finish: str, content: str, stream: bool
) -> None:
    served, _ = plain
    response = post(served, stream=stream, **members)
    if stream:
        chunks = frames(response)
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        got = (next(reason for reason in reversed(reasons) if reason), joined(chunks, "content"))
    else:
        choice = response.json()["choices"][0]
        got = (choice["finish_reason"], choice["message"]["content"])
    assert got == (finish, content)


def test_a_stop_text_across_tokens_is_held_back_and_named(plain: tuple[Served, ScriptedEngine]) -> None:
    served, engine = plain
    choice = post(served, stop=" it i").json()["choices"][0]
    assert choice["message"]["content"] == "so"
    assert choice["stop_reason"] == " it i"
    assert engine.generations[-1].cancel_requested


def test_a_call_that_is_cut_is_a_length_finish(plain: tuple[Served, ScriptedEngine]) -> None:
    served, _ = plain
    cut = len(SAID) - 33
    choice = post(served, tools=[TOOL], max_tokens=cut).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1'


def test_calls_are_not_shown_without_tools(plain: tuple[Served, ScriptedEngine]) -> None:
    served, _ = plain
    choice = post(served).json()["choices"][0]
    assert choice["message"]["tool_calls"] == []
    assert choice["finish_reason"] == "stop"
    assert "<|" not in choice["message"]["content"]


def test_logprobs_cover_the_answer(plain: tuple[Served, ScriptedEngine]) -> None:
    served, _ = plain
    content = post(served, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == "so it is"
    assert all(item["bytes"] == list(item["token"].encode()) for item in content)
    assert all(len(item["top_logprobs"]) == 2 for item in content)
    chunks = frames(post(served, logprobs=True, stream=True))
    streamed = [
        item
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for item in choice["logprobs"]["content"]
    ]
    assert [item["token"] for item in streamed] == [item["token"] for item in content]


def test_n_choices_count_the_prompt_once() -> None:
    engine = NoiseEngine(eager=40)
    with serve(engine) as served:
        reply = post(served, n=3, seed=5).json()
        again = post(served, n=3, seed=5).json()
        chunks = frames(post(served, n=3, seed=5, stream=True, stream_options={"include_usage": True}))
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_ids) - 3
    assert reply["usage"]["completion_tokens"] == sum(len(g.result().ids) for g in engine.generations[:3])
    assert [choice["message"] for choice in reply["choices"]] == [c["message"] for c in again["choices"]]
    contents = [
        "".join(c["delta"].get("content") or "" for f in chunks for c in f["choices"] if c["index"] == index)
        for index in range(3)
    ]
    assert contents == [choice["message"]["content"] for choice in reply["choices"]]
    assert len(set(contents)) > 1


def test_timings_are_served_when_asked_for(
    plain: tuple[Served, ScriptedEngine],
) -> None:
    served, _ = plain
    timings = post(served, k3eval_timings=True).json()["k3eval_timings"]
    assert len(timings["token_ns"]) == len(SAID)
    assert (timings["queue_ns"], timings["prefill_ns"]) == (1, 2)
    assert frames(post(served, k3eval_timings=True, stream=True))[-1]["k3eval_timings"]["queue_ns"] == 1


def test_continuous_usage_grows_chunk_by_chunk(plain: tuple[Served, ScriptedEngine]) -> None:
    served, _ = plain
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = frames(post(served, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == len(SAID)
    assert len(counts) > 10


def test_forced_length_runs_to_the_limit_with_ordinary_tokens_only() -> None:
    engine = NoiseEngine()
    with serve(engine) as served:
        reply = post(served, ignore_eos=True, min_tokens=50, max_tokens=50).json()
    assert reply["usage"]["completion_tokens"] == 50
    assert reply["choices"][0]["finish_reason"] == "length"
    assert not any(TOKENIZER.is_control(token) for token in engine.generations[0].result().ids)


def test_an_engine_failure_is_an_error_not_a_short_answer(named: tuple[str, Served, ScriptedEngine]) -> None:
    name, served, engine = named
    engine.fail_after = 20
    try:
        whole = post(served)
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in post(served, stream=True).text.split("\n\n")
            if line.startswith("data: {")
        ]
    finally:
        engine.fail_after = None
    assert whole.status_code == 500
    assert "broken on purpose" in json.dumps(whole.json()["error"])
    assert "error" in chunks[-1]
    if name == "openrouter":
        assert chunks[-1]["choices"][0]["finish_reason"] == "error"
    assert all("usage" not in chunk for chunk in chunks)


# Bad input, each with status and envelope


def error_of(response: httpx.Response, name: str) -> dict:
    error = response.json()["error"]
    expected = {"vllm": {"message", "type", "param", "code"}, "moonshot": {"type", "message"}}
    assert set(error) == expected.get(name, {"code", "message", "metadata"})
    return error


def test_bad_bodies(named: tuple[str, Served, ScriptedEngine]) -> None:
    name, served, engine = named
    before = len(engine.requests)
    url = f"{served.url}/chat/completions"
    for content in (b"{", b"", b"[]", b"\xff\xfe", b'{"model": "a"}'):
        response = HTTP.post(url, content=content)
        assert response.status_code == 400
        error_of(response, name)
    long_prompt = post(served, messages=[{"role": "user", "content": "x" * 5000}])
    assert long_prompt.status_code == 400
    assert "4096" in error_of(long_prompt, name)["message"]
    big = HTTP.post(url, content=b" " * (256 * 1024 + 1))
    assert big.status_code == 413
    error_of(big, name)
    unknown = post(served, model="gpt-9")
    assert unknown.status_code == (400 if name == "openrouter" else 404)
    assert "gpt-9" in error_of(unknown, name)["message"]
    bad_schema = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "strng"}}}},
    }
    refused = post(served, response_format=bad_schema)
    assert refused.status_code == 400
    assert "strng" in error_of(refused, name)["message"]
    orphan = post(served, messages=[USER, {"role": "tool", "tool_call_id": "x", "content": "y"}])
    assert orphan.status_code == 400
    assert "answers no call" in error_of(orphan, name)["message"]
    assert len(engine.requests) == before


def test_output_limits_above_the_context(named: tuple[str, Served, ScriptedEngine]) -> None:
    name, served, engine = named
    response = post(served, max_tokens=4096)
    if name == "moonshot":  # bounded by context - prompt
        assert response.status_code == 200
        assert engine.requests[-1].max_tokens == 4096 - len(engine.requests[-1].prompt_ids)
    else:
        assert response.status_code == 400
        assert "4096" in error_of(response, name)["message"]


def test_unknown_paths_and_methods(named: tuple[str, Served, ScriptedEngine]) -> None:
    name, served, _ = named
    for response, status in (
        (HTTP.get(f"{served.url}/nowhere"), 404),
        (HTTP.get(f"{served.url}/chat/completions"), 405),
        (HTTP.post(f"{served.url}/models"), 405),
    ):
        assert response.status_code == status
        error_of(response, name)


@pytest.mark.parametrize("name", ALL)
def test_a_key_is_asked_for_when_one_is_set(name: str) -> None:
    with serve(ScriptedEngine(SAID), name, key="right") as served:
        url = f"{served.url}/models"
        for headers, status in (
            ({}, 401),
            ({"authorization": "Basic right"}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Bearer rïght".encode("latin-1")}, 401),
            ({"authorization": "Bearer right"}, 200),
        ):
            response = HTTP.get(url, headers=headers)
            assert response.status_code == status
            if status == 401:
                assert "right'" not in json.dumps(error_of(response, name))
        assert HTTP.get(f"{served.root}/health").status_code == 200


# Other endpoints


def test_models_name_context_and_efforts(named: tuple[str, Served, ScriptedEngine]) -> None:
    name, served, _ = named
    data = HTTP.get(f"{served.url}/models").json()["data"]
    first = data[0]
    assert first["id"] == "a"
    assert first["context_length"] == 4096
    efforts = (
        first["reasoning"]["supported_efforts"]
        if name == "openrouter"
        else first["supported_reasoning_efforts"]
    )
    assert set(efforts) == {"low", "high", "max"}
    assert "random, seed 0" in json.dumps(first)
    one = HTTP.get(f"{served.url}/models/{data[-1]['id']}")
    assert one.json()["id"] == data[-1]["id"]
    assert HTTP.get(f"{served.url}/models/none/such").status_code in (400, 404)


def test_token_count_is_what_usage_says(named: tuple[str, Served, ScriptedEngine]) -> None:
    _, served, _ = named
    counted = post(served, "/tokenizers/estimate-token-count", tools=[TOOL]).json()
    assert counted["data"]["total_tokens"] == post(served, tools=[TOOL]).json()["usage"]["prompt_tokens"]


def test_health_metrics_and_openapi(plain: tuple[Served, ScriptedEngine]) -> None:
    served, _ = plain
    assert HTTP.get(f"{served.root}/health").json()["status"] == "ok"
    post(served)
    text = HTTP.get(f"{served.root}/metrics").text
    assert 'k3eval_requests_total{path="/v1/chat/completions",status="200"}' in text
    assert "k3eval_engine_free_pages" in text
    assert "k3eval_token_gap_seconds_bucket" in text
    document = HTTP.get(f"{served.root}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert "/v1/chat/completions" in document["paths"]


def test_prices_are_charged_and_the_balance_runs_out() -> None:
    engine = ScriptedEngine(SAID)
    options = DialectOptions(prices=True)
    with serve(engine, "moonshot", options=options, credit=Decimal("0.003")) as served:
        balances = []
        for _ in range(2):
            balances.append(HTTP.get(f"{served.url}/users/me/balance").json()["data"]["available_balance"])
            last = post(served)
        prompt = len(engine.requests[0].prompt_ids) - 3
        assert balances[0] == 0.003
        assert balances[1] == pytest.approx(0.003 - (prompt * 3 + len(SAID) * 15) / 1e6)
        assert last.status_code == 200
        refused = post(served)
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "exceeded_current_quota_error"
    assert "retry-after" not in refused.headers


def test_openrouter_endpoints_cost_and_generation() -> None:
    with serve(ScriptedEngine(SAID), "openrouter", options=DialectOptions(prices=True)) as served:
        api = f"{served.root}/api/v1"
        reply = HTTP.post(
            f"{api}/chat/completions", json={"model": "moonshotai/kimi-k3", "messages": [USER]}
        ).json()
        usage = reply["usage"]
        expected = (usage["prompt_tokens"] * 3 + usage["completion_tokens"] * 15) / 1e6
        assert usage["cost"] == usage["cost_details"]["upstream_inference_cost"] == pytest.approx(expected)
        found = until(lambda: HTTP.get(f"{api}/generation", params={"id": reply["id"]}).status_code == 200)
        assert found
        record = HTTP.get(f"{api}/generation", params={"id": reply["id"]}).json()["data"]
        assert record["total_cost"] == usage["cost"]
        assert record["native_tokens_prompt"] == usage["prompt_tokens"]
        assert HTTP.get(f"{api}/generation?id=gen-none").status_code == 404
        assert HTTP.get(f"{api}/credits").json()["data"]["total_usage"] == usage["cost"]
        assert HTTP.get(f"{api}/key").json()["data"]["limit_remaining"] == pytest.approx(100 - usage["cost"])
        endpoints = HTTP.get(f"{api}/models/moonshotai/kimi-k3/endpoints").json()["data"]["endpoints"]
        assert endpoints[0]["pricing"]["prompt"] == "0.000003"
        assert {"tag", "provider_name", "max_completion_tokens", "quantization"} <= set(endpoints[0])
        missing = HTTP.post(
            f"{api}/chat/completions",
            json={"model": "moonshotai/kimi-k3", "messages": [USER], "provider": {"only": ["nobody"]}},
        )
        assert missing.status_code == 404


def test_limits_refuse_and_say_when_to_come_back() -> None:
    with serve(ScriptedEngine(SAID), "moonshot", limits=Limits(per_minute=2)) as served:
        statuses = [post(served).status_code for _ in range(2)]
        refused = post(served)
    assert statuses == [200, 200]
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_reached_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert f"{refused.headers['retry-after']} seconds" in refused.json()["error"]["message"]


def test_concurrency_is_given_back() -> None:
    engine = NoiseEngine(eager=0)
    engine.delay_s = 0.01
    with serve(engine, "moonshot", default_max_tokens=3000, limits=Limits(concurrency=1)) as served:
        with HTTP.stream(
            "POST", f"{served.url}/chat/completions", json={"model": "a", "messages": [USER], "stream": True}
        ) as held:
            pieces = held.iter_bytes()  # dropping the iterator would close the response
            next(pieces)
            assert "concurrency: 1" in post(served).json()["error"]["message"]
        assert until(lambda: post(served, max_tokens=1).status_code == 200)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_generation(stream: bool) -> None:
    engine = NoiseEngine(eager=0)
    engine.delay_s = 0.005
    with serve(engine, default_max_tokens=3000) as served:
        body = json.dumps({"model": "a", "messages": [USER], "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            wire.sendall(head.encode() + body)
            if stream:
                assert wire.recv(100).startswith(b"HTTP/1.1 200")
            assert until(lambda: bool(engine.generations))
        assert until(lambda: engine.generations[0].cancel_requested)
        assert until(lambda: engine.generations[0].done)
        assert until(lambda: "k3eval_disconnects_total 1.0" in HTTP.get(f"{served.root}/metrics").text)
        assert until(lambda: "k3eval_chat_in_flight 0.0" in HTTP.get(f"{served.root}/metrics").text)
        assert HTTP.get(f"{served.root}/health").status_code == 200


def test_a_client_that_sends_half_a_body_and_leaves_is_no_error() -> None:
    with serve(ScriptedEngine(SAID)) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
            wire.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert until(lambda: "k3eval_disconnects_total 1.0" in HTTP.get(f"{served.root}/metrics").text)


def test_many_streams_are_never_mixed() -> None:
    engine = NoiseEngine(eager=10)
    engine.delay_s = 0.0005

    async def one(client: httpx.AsyncClient, url: str, seed: int) -> tuple[str, str]:
        body = {"model": "a", "messages": [USER], "stream": True, "seed": seed}
        response = await client.post(url, json=body)
        return response.text.split('"id":"')[1][:20], joined(frames(response), "content")

    async def every(url: str) -> list[tuple[str, str]]:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=32)) as client:
            return await asyncio.gather(*(one(client, url, seed % 8) for seed in range(32)))

    with serve(engine) as served:
        results = asyncio.run(every(f"{served.url}/chat/completions"))
    assert len({reply_id for reply_id, _ in results}) == 32
    by_seed = [{text for _, text in results[seed::8]} for seed in range(8)]
    assert all(len(texts) == 1 for texts in by_seed)
