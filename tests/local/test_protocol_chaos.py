"""Fault plans are deterministic, and the rewriting faults do what their names say. Limits and windows too."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from k3eval_local.protocol.chaos import (
    FAULTS,
    PROFILES,
    Chaos,
    ChaosError,
    Drawn,
    FrameFault,
    encode_frame,
    help_lines,
    packets,
    rewrite_reply,
)
from k3eval_local.protocol.errors import ErrorKind, ProtocolError
from k3eval_local.protocol.limits import RateLimiter
from k3eval_local.protocol.prices import MOONSHOT_TIERS, Limits


def drawn(name: str) -> Drawn:
    return Drawn(FAULTS[name], position=2, fraction=0.5)


def plan(text: str, *, stream: bool = True, count: int = 400) -> list[str | None]:
    chaos = Chaos.parse(text)
    draws = (chaos.draw(number, stream=stream) for number in range(count))
    return [None if each is None else each.name for each in draws]


def test_a_plan_depends_on_the_seed_alone() -> None:
    assert plan("7") == plan("7")
    assert plan("7") != plan("8")


@pytest.mark.parametrize("profile", list(PROFILES))
def test_profiles_have_their_rate_and_only_their_faults(profile: str) -> None:
    rate, names = PROFILES[profile]
    names_drawn = plan(f"1:{profile}", count=2000)
    hit = sum(name is not None for name in names_drawn) / 2000
    assert abs(hit - rate) < 0.05
    assert {name for name in names_drawn if name} <= set(names)


@pytest.mark.parametrize("stream", [True, False])
def test_every_fault_that_applies_is_drawn_some_time(stream: bool) -> None:
    seen = Counter(plan("3:every", stream=stream, count=3000))
    assert set(seen) == {name for name, fault in FAULTS.items() if fault.applies(stream=stream)}


def test_named_faults_befall_every_request_unless_a_rate_is_given() -> None:
    assert set(plan("1:cut_stream")) == {"cut_stream"}
    assert set(plan("1:cut_stream,nulls")) == {"cut_stream", "nulls"}
    assert 100 < sum(name is not None for name in plan("1:nulls@0.5")) < 300
    assert set(plan("1:cut_stream", stream=False)) == {None}


@pytest.mark.parametrize("text", ["", "x", "1:nonsense", "1:nulls,nonsense", "1@2", "1@x", "1:all@-1"])
def test_bad_plans_are_refused(text: str) -> None:
    with pytest.raises(ChaosError, match="--chaos"):
        Chaos.parse(text)


def test_the_help_names_every_fault_and_profile() -> None:
    text = "\n".join(help_lines())
    assert all(name in text for name in (*FAULTS, *PROFILES))


def test_every_fault_of_the_refusing_kind_has_an_error_or_a_page() -> None:
    refusing = [fault for fault in FAULTS.values() if fault.where == "refusal"]
    without = [fault.name for fault in refusing if drawn(fault.name).refusal() is None]
    assert without == ["html_504"]
    assert all(drawn(name).refusal() is None for name, fault in FAULTS.items() if fault.where != "refusal")


def call_frame(arguments: str, **function: object) -> dict:
    call = {"index": 0, "id": "c", "function": {"arguments": arguments} | function}
    return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}


def finish_frame() -> dict:
    usage = {"prompt_tokens": 5}
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": usage}], "usage": usage}


def call_in(frame: dict) -> dict:
    return frame["choices"][0]["delta"]["tool_calls"][0]


def sent(name: str, *frames: dict) -> list[dict]:
    fault = FrameFault(drawn(name))
    return [out for frame in frames for out in fault.frames(frame)]


def test_frame_faults() -> None:
    assert "id" not in call_in(sent("missing_tool_id", call_frame("{}"))[0])
    assert "index" not in call_in(sent("missing_tool_index", call_frame("{}"))[0])
    assert sent("null_usage", finish_frame())[0]["usage"] is None
    assert sent("null_usage", finish_frame())[0]["choices"][0]["usage"] is None
    assert sent("zero_usage", call_frame("{}"))[0]["usage"]["prompt_tokens"] == 0
    assert sent("zero_usage", finish_frame())[0]["usage"]["prompt_tokens"] == 5
    assert sent("nulls", call_frame("{}"))[0]["choices"][0]["delta"]["content"] is None
    assert len(sent("duplicate_finish", call_frame("{}"), finish_frame())) == 3
    assert sent("cut_stream", finish_frame()) == [finish_frame()]


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a": [1, 2]}', "{}"])
def test_broken_tool_json_is_never_json(arguments: str) -> None:
    pieces = [call_frame(char) for char in arguments]
    text = "".join(call_in(frame)["function"]["arguments"] for frame in sent("broken_tool_json", *pieces))
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(text)


def test_whole_arguments_come_in_one_late_piece() -> None:
    out = sent(
        "whole_arguments", call_frame("", name="f"), call_frame('{"a"'), call_frame(": 1}"), finish_frame()
    )
    assert [len(frame["choices"][0]["delta"]) for frame in out] == [1, 1, 0]
    assert call_in(out[1])["function"]["arguments"] == '{"a": 1}'


def test_byte_faults() -> None:
    assert list(packets(b"abc", drawn("one_byte"))) == [b"a", b"b", b"c"]
    assert list(packets(b"abc", None)) == [b"abc"]
    assert encode_frame({"a": 1}, drawn("crlf")) == b': still here\r\ndata:{"a":1}\r\n\r\n'
    assert encode_frame({"a": "é\u2028"}, None) == 'data: {"a":"é\u2028"}\n\n'.encode()


def test_whole_reply_faults() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
    reply = {"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}], "usage": {}}
    error = {"error": {"code": 502}}

    def rewritten(name: str) -> dict:
        return rewrite_reply(drawn(name), reply, error)

    assert rewritten("error_in_200")["choices"][0]["error"] == {"code": 502}
    assert rewritten("null_usage")["usage"] is None
    changed = rewritten("broken_tool_json")["choices"][0]["message"]["tool_calls"][0]
    assert changed["function"]["arguments"] == '{"a": 1'
    assert "id" not in rewritten("missing_tool_id")["choices"][0]["message"]["tool_calls"][0]
    assert reply["choices"][0]["message"]["tool_calls"] == [call]
    assert rewritten("silence") == reply


class Clock:
    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now


def refusal(limiter: RateLimiter, tokens: int = 1) -> ProtocolError | None:
    try:
        limiter.admit(tokens)
    except ProtocolError as error:
        return error
    return None


def test_windows_slide() -> None:
    clock = Clock()
    limiter = RateLimiter(Limits(per_minute=2), clock)
    assert refusal(limiter) is None
    clock.now += 20 * 10**9
    assert refusal(limiter) is None
    error = refusal(limiter)
    assert error is not None
    assert (error.kind, error.retry_after_s, error.limit) == (ErrorKind.RATE, 40, 2)
    clock.now += 40 * 10**9
    assert refusal(limiter) is None
    assert refusal(limiter) is not None


def test_concurrency_counts_what_runs() -> None:
    limiter = RateLimiter(MOONSHOT_TIERS["1"], Clock())
    assert refusal(limiter) is None
    error = refusal(limiter)
    assert error is not None
    assert error.kind is ErrorKind.CONCURRENCY
    limiter.release()
    assert refusal(limiter) is None


def test_tokens_a_minute_and_a_day() -> None:
    clock = Clock()
    limiter = RateLimiter(Limits(tokens_per_minute=100, tokens_per_day=150), clock)
    assert refusal(limiter, 90) is None
    assert "TPM" in str(refusal(limiter, 20))
    clock.now += 61 * 10**9
    assert "TPD" in str(refusal(limiter, 70))
    assert refusal(limiter, 60) is None
    clock.now += 24 * 3600 * 10**9
    assert refusal(limiter, 100) is None


def test_one_request_above_the_limit_is_always_refused() -> None:
    error = refusal(RateLimiter(Limits(tokens_per_minute=500_000), Clock()), 1_000_000)
    assert error is not None
    assert error.retry_after_s == 60
