"""The public fakes, used as a user would use them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from sdk_server import HttpServer

from k3eval import K3, AsyncK3, K3EvalError, Message, Meter, RetryPolicy, ToolCall
from k3eval.testing import (
    ChaosProfile,
    ChaosTransport,
    RecordingTransport,
    ReplayTransport,
    Reply,
    ScriptedTransport,
    SeenRequest,
    answer,
    failure,
    streamed,
)

ASK = [Message.user("hi")]
CALL = ToolCall("f_0", "f", '{"a": "b c"}')
QUICK = RetryPolicy(first_wait_s=0.0)


def test_script_plays_in_order_and_remembers(meter: Meter) -> None:
    fake = ScriptedTransport(answer("one"), lambda seen: answer(str(seen.body["model"])))
    with K3("local", "a", meter=meter, transport=fake) as k3:
        assert k3.chat(ASK).text == "one"
        assert k3.chat(ASK).text == "a"
        with pytest.raises(AssertionError, match="request 3 came"):
            k3.chat(ASK)
    assert [r.method for r in fake.requests] == ["POST"] * 3
    assert isinstance(fake.requests[0], SeenRequest)


def test_script_of_a_stream(meter: Meter) -> None:
    fake = ScriptedTransport(streamed(["a", "b"], reasoning=["hm"], tool_calls=[CALL]), repeat=True)
    with K3("local", "a", meter=meter, transport=fake) as k3, k3.stream(ASK) as stream:
        done = stream.completion()
    assert (done.text, done.message.tool_calls, done.finish_reason) == ("ab", (CALL,), "tool_calls")

    async def run() -> str:
        async with (
            AsyncK3("local", "a", meter=meter, transport=fake) as client,
            await client.stream(ASK) as again,
        ):
            return (await again.completion()).text

    assert asyncio.run(run()) == "ab"


@pytest.mark.parametrize("seed", range(12))
def test_chaos_ends_in_an_answer_or_in_one_of_our_errors(meter: Meter, seed: int) -> None:
    profile = ChaosProfile(0.2, 0.2, 0.1, 0.1, 0.2)
    inner = ScriptedTransport(
        streamed(["über", "\u2028", "漢字"], reasoning=["hm"], tool_calls=[CALL]), repeat=True
    )
    chaos = ChaosTransport(inner, seed, profile)
    with K3(
        "moonshot", "kimi-k3", api_key="sk-invented-key", meter=meter, transport=chaos, retry=QUICK
    ) as k3:
        failed = 0
        for _ in range(10):
            try:
                with k3.stream(ASK) as stream:
                    done = stream.completion()
            except K3EvalError:
                failed += 1
            else:
                assert done.text == "über\u2028漢字"
                assert done.message.tool_calls == (CALL,)
    rows = list(meter.ledger.attempts())
    assert all(row.state in ("settled", "unknown") for row in rows)
    assert len(rows) >= 10
    assert sum(row.error is None for row in rows) == 10 - failed


def test_the_same_seed_gives_the_same_trouble() -> None:
    def troubles(seed: int) -> list[str]:
        chaos = ChaosTransport(
            ScriptedTransport(streamed(), repeat=True), seed, ChaosProfile(0.2, 0.2, 0.1, 0.1, 0.2)
        )
        with httpx.Client(transport=chaos) as client:
            for _ in range(30):
                try:
                    client.post("http://h/v1/chat/completions", json={})
                except httpx.HTTPError:
                    continue
        return chaos.disturbances

    assert troubles(1) == troubles(1) != troubles(2)
    assert set(troubles(1)) >= {"rate_limited", "server_error"}


def test_record_and_replay(server: HttpServer, meter: Meter, tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    server.play(answer("a", id="org-abc123456"), failure(500, {"message": "x"}), streamed(["b", "\u2028"]))
    with K3(
        "moonshot", "kimi-k3", base_url=server.url, api_key="sk-very-secret-key", meter=meter, retry=QUICK,
        transport=RecordingTransport(httpx.HTTPTransport(), path),
    ) as k3:  # fmt: skip
        first = k3.chat(ASK)
        with k3.stream(ASK) as stream:
            second = stream.completion()
    text = path.read_text("utf-8")
    assert "very-secret" not in text
    assert "org-abc" not in text
    assert len(text.splitlines()) == 3
    fake = ReplayTransport(path, strict=True)
    with K3(
        "moonshot", "kimi-k3", base_url="http://elsewhere/v1", api_key="sk-other-key", meter=meter,
        retry=QUICK, transport=fake,
    ) as k3:  # fmt: skip
        assert k3.chat(ASK).message == first.message
        with k3.stream(ASK) as stream:
            assert stream.completion().message == second.message
        with pytest.raises(AssertionError, match="no further reply"):
            k3.chat(ASK)


def test_strict_replay_refuses_another_request(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record = {
        "request": {"method": "POST", "url": "http://h/v1/chat/completions", "body": {"a": 1}},
        "reply": {"status": 200, "headers": {}, "packets": ["{}"]},
    }
    path.write_text(json.dumps(record), "utf-8")
    with (
        httpx.Client(transport=ReplayTransport(path, strict=True)) as client,
        pytest.raises(AssertionError, match="not the recorded one"),
    ):
        client.post("http://h/v1/chat/completions", json={"a": 2})


def test_a_reply_is_a_plain_value() -> None:
    assert Reply((b"a", b"b")).body == b"ab"
    assert failure(429, {"message": "x"}, retry_after="1").headers["retry-after"] == "1"
