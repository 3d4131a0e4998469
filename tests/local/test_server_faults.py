"""Every fault over real HTTP, as a client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from server_helpers import HTTP, ScriptedEngine, Served, serve, spoken

from k3eval_local.protocol.chaos import FAULTS, Chaos

SAID = spoken("so it is", reasoning="why", calls=[("add", [("a", "number", "1"), ("b", "string", "two")])])
TOOL = {"type": "function", "function": {"name": "add"}}
BODY = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
HINTED = {
    "vllm": {"rate_limit", "concurrency", "wrapped_quota", "budget_in_use"},
    "moonshot": {"rate_limit", "concurrency", "budget_in_use"},  # a quota never has a hint there
    "openrouter": {"rate_limit", "concurrency", "wrapped_quota", "budget_in_use"},
}
REFUSALS = [name for name, fault in FAULTS.items() if fault.where == "refusal"]


@pytest.fixture(scope="module", params=["vllm", "moonshot", "openrouter"])
def named(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    with serve(ScriptedEngine(SAID), request.param, silence_s=0.15) as served:
        yield request.param, served


def ask(served: Served, fault: str | None, *, stream: bool) -> httpx.Response:
    # the plan is part of the immutable settings: give the running server other ones
    settings = served.chat.settings
    plan = None if fault is None else Chaos.parse(f"3:{fault}")
    served.chat.settings = type(settings)(**{**_fields(settings), "chaos": plan})
    body = BODY | {"stream": stream, "stream_options": {"include_usage": True}}
    return HTTP.post(f"{served.url}/chat/completions", json=body)


def _fields(settings: object) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def events(text: str) -> list[dict]:
    blocks = [block for block in text.replace("\r\n", "\n").split("\n\n") if block]
    lines = [line for block in blocks for line in block.split("\n") if line.startswith("data:")]
    return [json.loads(line[5:]) for line in lines if line[5:].strip() != "[DONE]"]


def finishes(chunks: list[dict]) -> list[str]:
    reasons = (choice.get("finish_reason") for chunk in chunks for choice in chunk.get("choices", ()))
    return [reason for reason in reasons if reason]


@pytest.mark.parametrize("fault", REFUSALS)
@pytest.mark.parametrize("stream", [True, False])
def test_refusals(named: tuple[str, Served], fault: str, stream: bool) -> None:
    name, served = named
    response = ask(served, fault, stream=stream)
    assert response.headers["x-k3eval-fault"] == fault
    if fault == "html_504":
        assert response.status_code == 504
        assert "<html>" in response.text
        return
    assert response.status_code in (402, 429, 500, 502, 503, 529)
    assert "error" in response.json()
    assert ("retry-after" in response.headers) == (fault in HINTED[name])


def test_without_a_fault_nothing_is_changed(named: tuple[str, Served]) -> None:
    _, served = named
    response = ask(served, None, stream=True)
    assert "x-k3eval-fault" not in response.headers
    assert finishes(events(response.text))[0] == "tool_calls"


@pytest.mark.parametrize("fault", ["cut_stream", "cut_reply"])
def test_cut_connections(named: tuple[str, Served], fault: str) -> None:
    _, served = named
    with pytest.raises(httpx.RemoteProtocolError):
        ask(served, fault, stream=fault == "cut_stream")


def test_an_early_end_has_no_finish(named: tuple[str, Served]) -> None:
    _, served = named
    response = ask(served, "early_end", stream=True)
    assert "[DONE]" not in response.text
    assert finishes(events(response.text)) == []


def test_no_done(named: tuple[str, Served]) -> None:
    _, served = named
    response = ask(served, "no_done", stream=True)
    assert "[DONE]" not in response.text
    assert finishes(events(response.text))


@pytest.mark.parametrize("fault", ["one_byte", "crlf", "nulls", "zero_usage", "whole_arguments"])
def test_odd_but_complete_streams_say_the_same(named: tuple[str, Served], fault: str) -> None:
    _, served = named

    def said(response: httpx.Response) -> tuple[str, str, str]:
        content = arguments = ""
        chunks = events(response.text)
        for chunk in chunks:
            for choice in chunk["choices"]:
                content += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or ():
                    arguments += call["function"].get("arguments") or ""
        return content, arguments, str(chunks[-1]["usage"])

    assert said(ask(served, fault, stream=True)) == said(ask(served, None, stream=True))


def test_one_byte_packets_are_one_byte(named: tuple[str, Served]) -> None:
    _, served = named
    ask(served, "one_byte", stream=True)
    body = BODY | {"stream": True}
    with HTTP.stream("POST", f"{served.url}/chat/completions", json=body) as response:
        raw = b"".join(response.iter_raw())
    assert raw.endswith(b"data: [DONE]\n\n")


def test_a_duplicated_finish(named: tuple[str, Served]) -> None:
    _, served = named
    assert len(finishes(events(ask(served, "duplicate_finish", stream=True).text))) == 2


def test_null_usage(named: tuple[str, Served]) -> None:
    _, served = named
    assert ask(served, "null_usage", stream=False).json()["usage"] is None
    assert '"usage":{' not in ask(served, "null_usage", stream=True).text


@pytest.mark.parametrize("stream", [True, False])
def test_broken_tool_arguments_and_missing_ids(named: tuple[str, Served], stream: bool) -> None:
    _, served = named

    def calls(fault: str) -> list[dict]:
        response = ask(served, fault, stream=stream)
        if not stream:
            return response.json()["choices"][0]["message"]["tool_calls"]
        deltas = [choice["delta"] for chunk in events(response.text) for choice in chunk["choices"]]
        return [call for delta in deltas for call in delta.get("tool_calls") or ()]

    text = "".join(call["function"].get("arguments", "") for call in calls("broken_tool_json"))
    with pytest.raises(ValueError, match=r"delimiter|Unterminated"):
        json.loads(text)
    assert all("id" not in call for call in calls("missing_tool_id"))
    if stream:
        assert all("index" not in call for call in calls("missing_tool_index"))


def test_an_error_inside_a_200(named: tuple[str, Served]) -> None:
    _, served = named
    whole = ask(served, "error_in_200", stream=False)
    assert whole.status_code == 200
    assert whole.json()["choices"][0]["finish_reason"] == "error"
    assert "error" in whole.json()["choices"][0]
    stream = ask(served, "error_in_200", stream=True)
    assert stream.status_code == 200
    assert "error" in events(stream.text)[-1]


@pytest.mark.parametrize("stream", [True, False])
def test_silence_takes_its_time_and_then_goes_on(named: tuple[str, Served], stream: bool) -> None:
    _, served = named
    response = ask(served, "silence", stream=stream)
    assert response.elapsed.total_seconds() >= 0.15
    assert response.status_code == 200


def test_every_fault_was_tried_here() -> None:
    tried = {
        *REFUSALS,
        "cut_stream",
        "cut_reply",
        "early_end",
        "no_done",
        "one_byte",
        "crlf",
        "nulls",
        "zero_usage",
    }
    tried |= {"whole_arguments", "duplicate_finish", "null_usage", "broken_tool_json", "missing_tool_id"}
    tried |= {"missing_tool_index", "error_in_200", "silence"}
    assert tried == set(FAULTS)
