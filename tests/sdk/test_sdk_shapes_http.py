"""Every reply shape, over real HTTP, through the typed client: what the caller gets and what the ledger
keeps."""

# ruff: noqa: E501 - one row a reply keeps the table of errors readable
from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal

import pytest
import shapes
from sdk_server import HttpServer

from k3eval import (
    K3,
    ApiError,
    AuthenticationError,
    BadRequestError,
    ContentFilterError,
    ContextOverflowError,
    K3EvalError,
    Message,
    Meter,
    OverloadedError,
    ProtocolError,
    QuotaExceededError,
    RateLimitError,
    Reasoning,
    RetryPolicy,
    ServerError,
    StreamInterruptedError,
    ToolArgumentsError,
    ToolCall,
    TransportError,
    Usage,
)
from k3eval.testing import Reply

ASK = [Message.user("what is it?")]
ONCE = RetryPolicy(max_attempts=1)
JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream"}
KEY = "sk-invented-0123456789"
Make = Callable[..., K3]


@pytest.fixture
def make(server: HttpServer, meter: Meter) -> Iterator[Make]:
    made: list[K3] = []

    def build(provider: str = "moonshot", model: str = "kimi-k3", retry: RetryPolicy = ONCE) -> K3:
        made.append(K3(provider, model, base_url=server.url, api_key=KEY, meter=meter, retry=retry))
        return made[-1]

    yield build
    for client in made:
        client.close()


def whole(body: str, status: int = 200, **headers: str) -> Reply:
    return Reply((body.encode(),), status, {**JSON, **headers})


def stream(*events: str, cut: bool = False) -> Reply:
    return Reply((shapes.sse(events),), headers=SSE, cut=cut)


def test_moonshot_reply(make: Make, server: HttpServer) -> None:
    server.play(
        whole(
            shapes.MOONSHOT_CACHED, **{"x-msh-trace-id": "trace-1", "Msh-Usage-Cache-Write-Tokens-1h": "256"}
        )
    )
    done = make().chat(ASK)
    assert done.text == "42"
    assert done.message.reasoning == Reasoning("adding")
    assert done.usage == Usage(20, 1024, 256, 9, 31)
    assert done.cost.computed == (20 * 3 + Decimal("307.2") + 256 * 6 + 40 * 15).scaleb(-6)
    assert done.cost.billed is None
    assert done.request_id == "trace-1"
    assert done.host == "api.moonshot.ai"
    assert done.attempts[0].notes == ()


def test_unknown_write_tier_is_noted(make: Make, server: HttpServer) -> None:
    server.play(whole(shapes.MOONSHOT_CACHED))
    assert make().chat(ASK).attempts[0].notes == ("write_tier_unknown",)


def test_moonshot_tool_stream(make: Make, server: HttpServer) -> None:
    server.play(stream(*shapes.MOONSHOT_TOOL_STREAM))
    with make().stream(ASK) as streaming:
        done = streaming.completion()
    assert done.message.tool_calls == (ToolCall("ls_0", "ls", '{"p":"src"}'),)
    assert done.usage == Usage(90, 0, None, 22, None)
    assert done.cost.computed == Decimal("0.0006")
    assert done.timing.first_token_ns is not None
    assert (
        done.timing.sent_ns
        < done.timing.first_token_ns
        <= (done.timing.last_token_ns or 0)
        <= done.timing.end_ns
    )


def test_openrouter_stream(make: Make, server: HttpServer, meter: Meter) -> None:
    server.play(
        Reply((shapes.sse(shapes.OPENROUTER_STREAM, keep_alive=": OPENROUTER PROCESSING\n\n"),), headers=SSE)
    )
    with make("openrouter", "moonshotai/kimi-k3").stream(ASK) as streaming:
        done = streaming.completion()
    assert done.cost.billed == Decimal("0.000966")
    assert done.cost.computed == Decimal("0.000966")
    assert (done.host, done.request_id) == ("Moonshot AI", "gen-1")
    assert meter.total.cost.billed == Decimal("0.000966")
    assert meter.ledger.held()[0] == Decimal("0.000966")


def test_openrouter_repeated_finish(make: Make, server: HttpServer) -> None:
    server.play(stream(*shapes.OPENROUTER_REPEATED_FINISH))
    with make("openrouter", "moonshotai/kimi-k3").stream(ASK) as streaming:
        done = streaming.completion()
    assert len(done.message.tool_calls) == 1
    assert done.cost.billed == Decimal("0.000285")


@pytest.mark.parametrize(
    ("provider", "reply", "kind", "status"),
    [
        ("openrouter", stream(*shapes.ERROR_WITH_CHOICE), ServerError, 502),
        ("openrouter", stream(*shapes.ERROR_WITHOUT_CHOICE), RateLimitError, 429),
        ("openrouter", whole(shapes.ERROR_WITH_PARTIAL_TEXT), ServerError, 502),
        ("moonshot", whole(shapes.RATE_429, 429, **{"retry-after": "1"}), RateLimitError, 429),
        ("moonshot", whole(shapes.QUOTA_429, 429), QuotaExceededError, 429),
        ("moonshot", whole(shapes.OVERLOADED_429, 429), OverloadedError, 429),
        ("openrouter", whole(shapes.WRAPPED_QUOTA_429, 429, **{"Retry-After": "7"}), QuotaExceededError, 429),
        ("openrouter", whole(shapes.FINAL_402, 402), QuotaExceededError, 402),
        ("openrouter", whole(shapes.TEMPORARY_402, 402, **{"Retry-After": "3"}), RateLimitError, 402),
        ("moonshot", whole(shapes.OVERFLOW_MOONSHOT, 400), ContextOverflowError, None),
        ("openrouter", whole(shapes.OVERFLOW_OPENROUTER, 400), ContextOverflowError, None),
        ("compatible", whole(shapes.OVERFLOW_VLLM, 400), ContextOverflowError, None),
        ("moonshot", whole(shapes.FILTERED_400, 400), ContentFilterError, 400),
        ("moonshot", Reply((shapes.HTML_504.encode(),), 504, {"content-type": "text/html"}), ServerError, 504),
        ("moonshot", whole('{"error":{"type":"incorrect_api_key_error","message":"no"}}', 401), AuthenticationError, 401),
        ("moonshot", whole('{"error":{"type":"resource_not_found_error","message":"no"}}', 404), BadRequestError, 404),
        ("moonshot", whole('{"error":{"type":"server_unavailable","message":"no"}}', 503), OverloadedError, 503),
        ("openrouter", whole('{"error":{"code":403,"message":"no","metadata":{"reasons":["x"]}}}', 403), ContentFilterError, 403),
        ("openrouter", whole('{"error":{"code":524,"message":"edge"}}', 524), ServerError, 524),
        ("openrouter", whole('{"error":{"code":529,"message":"busy"}}', 529), OverloadedError, 529),
        ("openrouter", whole('{"error":{"message":"x","http_status":429,"error_type":"rate_limit_exceeded","availability":{"retry_after":2}}}', 429), RateLimitError, 429),
        ("compatible", whole("", 500), ServerError, 500),
        ("compatible", whole("[]", 418), BadRequestError, 418),
        ("compatible", whole('{"error":"as text"}', 400), BadRequestError, 400),
        ("compatible", whole('{"detail":"Not Found"}', 404), BadRequestError, 404),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streaming", [False, True])
def test_errors(
    make: Make, server: HttpServer, meter: Meter, provider: str, reply: Reply, kind: type[K3EvalError],
    status: int | None, streaming: bool,
) -> None:  # fmt: skip
    is_stream = reply.headers["content-type"] == "text/event-stream"
    if reply.status == 200 and is_stream != streaming:
        streaming = is_stream
    server.play(reply)
    client = make(provider)

    def call() -> None:
        if not streaming:
            client.chat(ASK)
            return
        with client.stream(ASK) as open_stream:
            open_stream.completion()

    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert type(error) is kind
    assert error.message
    assert "\n" not in error.message
    assert error.request is not None
    assert "model=kimi-k3" in error.request
    assert ASK[0].text not in error.request
    assert KEY not in repr(error) + str(vars(error))
    if isinstance(error, ApiError):
        assert error.status == status
        assert error.host == provider
    (row,) = meter.ledger.attempts()
    assert row.error
    timed_out = reply.status in (504, 524)
    partial = "half" in reply.body.decode()
    assert row.state == ("unknown" if timed_out or partial else "settled")
    if not timed_out and not partial:
        assert row.held == 0


@pytest.mark.parametrize(
    ("provider", "reply", "seconds"),
    [
        ("moonshot", whole(shapes.RATE_429, 429, **{"retry-after": "4"}), 4.0),
        ("moonshot", whole(shapes.RATE_429, 429, **{"x-retry-after": "3"}), 3.0),
        ("moonshot", whole(shapes.RATE_429, 429), 1.0),
        ("openrouter", whole('{"error":{"code":429,"message":"x","availability":{"retry_after":2.5}}}', 429), 2.5),
        ("openrouter", whole(shapes.TEMPORARY_402, 402, **{"Retry-After": "3"}), 3.0),
        ("compatible", whole('{"error":{"message":"x"}}', 429, **{"retry-after": "nan"}), None),
        ("compatible", whole('{"error":{"message":"x"}}', 429, **{"retry-after": "soon"}), None),
        ("compatible", whole('{"error":{"message":"x"}}', 429, **{"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}), 0.0),
    ],
)  # fmt: skip
def test_where_the_wait_stands(
    make: Make, server: HttpServer, provider: str, reply: Reply, seconds: float | None
) -> None:
    server.play(reply)
    with pytest.raises(RateLimitError) as caught:
        make(provider).chat(ASK)
    assert caught.value.retry_after_s == seconds


def test_quota_error_hides_account_ids(make: Make, server: HttpServer, meter: Meter) -> None:
    server.play(whole(shapes.QUOTA_429, 429))
    with pytest.raises(QuotaExceededError) as caught:
        make().chat(ASK)
    shown = repr(caught.value) + str(vars(caught.value)) + repr(list(meter.ledger.attempts()))
    assert "org-abc123def" not in shown
    assert "ak-f00ba4" not in shown
    assert "insufficient balance" in caught.value.message


def test_cut_at_the_cap(make: Make, server: HttpServer) -> None:
    server.play(whole(shapes.CUT_AT_CAP))
    done = make().chat(ASK)
    assert (done.finish_reason, done.text) == ("length", "")
    assert done.usage == Usage(20, None, None, 3, 45)


def test_cut_in_arguments(make: Make, server: HttpServer, meter: Meter) -> None:
    server.play(whole(shapes.CUT_IN_ARGUMENTS))
    done = make().chat(ASK)
    assert done.finish_reason == "length"
    with pytest.raises(ToolArgumentsError):
        done.message.tool_calls[0].parsed()
    assert done.usage is None
    (row,) = meter.ledger.attempts()
    assert row.state == "unknown"
    assert row.held is not None
    assert row.held > 0


@pytest.mark.parametrize(
    "usage",
    [
        '{"prompt_tokens":1e30,"completion_tokens":2}',
        '{"prompt_tokens":-5,"completion_tokens":-1}',
        '{"prompt_tokens":null}',
        '"many"',
    ],
)
def test_broken_counters_are_not_reported(make: Make, server: HttpServer, meter: Meter, usage: str) -> None:
    server.play(
        whole(f'{{"choices":[{{"finish_reason":"stop","message":{{"content":"x"}}}}],"usage":{usage}}}')
    )
    assert make().chat(ASK, max_output=10**25).usage is None
    (row,) = meter.ledger.attempts()
    assert row.state == "unknown"


def test_a_broken_charge_is_not_counted(make: Make, server: HttpServer) -> None:
    usage = '{"prompt_tokens":10,"completion_tokens":2,"cost":1e25}'
    server.play(
        whole(f'{{"choices":[{{"finish_reason":"stop","message":{{"content":"x"}}}}],"usage":{usage}}}')
    )
    assert make("openrouter").chat(ASK).cost.billed is None


def test_empty_answer(make: Make, server: HttpServer) -> None:
    server.play(whole(shapes.EMPTY))
    done = make().chat(ASK)
    assert (done.text, done.finish_reason, done.message.content) == ("", "stop", None)


def test_filtered_answer(make: Make, server: HttpServer) -> None:
    server.play(whole(shapes.FILTERED))
    assert make().chat(ASK).finish_reason == "content_filter"


@pytest.mark.parametrize(
    "body",
    ["<html>hello</html>", "", "null", "{}", '{"choices":[]}', '{"choices":[{"message":{"role":"x"}}]}'],
)
def test_success_that_is_no_completion(make: Make, server: HttpServer, meter: Meter, body: str) -> None:
    server.play(whole(body))
    with pytest.raises(ProtocolError):
        make().chat(ASK)
    (row,) = meter.ledger.attempts()
    assert row.state == "unknown"


def test_cut_stream_keeps_the_part_and_the_worst_case(make: Make, server: HttpServer, meter: Meter) -> None:
    server.play(stream(*shapes.MOONSHOT_TOOL_STREAM[:4], cut=True))
    with pytest.raises(StreamInterruptedError) as caught, make().stream(ASK) as streaming:
        streaming.completion()
    assert caught.value.partial is not None
    assert caught.value.partial.tool_calls[0].name == "ls"
    (row,) = meter.ledger.attempts()
    assert (row.state, row.usage) == ("unknown", None)
    assert row.held is not None
    assert row.held > Decimal("0.4")


@pytest.mark.parametrize(
    "events", [shapes.MOONSHOT_TOOL_STREAM[:3], (*shapes.MOONSHOT_TOOL_STREAM[:3], "[DONE]")]
)
def test_stream_that_ends_too_early(
    make: Make, server: HttpServer, meter: Meter, events: tuple[str, ...]
) -> None:
    server.play(stream(*events))
    with (
        pytest.raises(StreamInterruptedError, match="without a finish reason"),
        make().stream(ASK) as streaming,
    ):
        streaming.completion()
    (row,) = meter.ledger.attempts()
    assert row.state == "unknown"


def test_completion_after_a_failure_raises_again(make: Make, server: HttpServer) -> None:
    server.play(stream(*shapes.MOONSHOT_TOOL_STREAM[:3]))
    with make().stream(ASK) as streaming:
        with pytest.raises(StreamInterruptedError):
            list(streaming)
        with pytest.raises(StreamInterruptedError):
            streaming.completion()


def test_error_after_some_tokens(make: Make, server: HttpServer, meter: Meter) -> None:
    server.play(stream(*shapes.OPENROUTER_STREAM[:2], *shapes.ERROR_WITHOUT_CHOICE))
    with pytest.raises(RateLimitError), make("openrouter").stream(ASK) as streaming:
        streaming.completion()
    (row,) = meter.ledger.attempts()
    assert row.state == "unknown"
    assert len(server.requests) == 1


def test_stream_closed_early_is_unknown(make: Make, server: HttpServer, meter: Meter) -> None:
    server.play(stream(*shapes.MOONSHOT_TOOL_STREAM[:3]))
    with make().stream(ASK) as streaming:
        next(iter(streaming))
    (row,) = meter.ledger.attempts()
    assert (row.state, row.error) == ("unknown", "closed by the reader")


def test_nobody_listens(meter: Meter) -> None:
    with (
        K3("local", "a", base_url="http://127.0.0.1:9/v1", meter=meter, retry=ONCE) as client,
        pytest.raises(TransportError, match="no reply from local"),
    ):
        client.chat(ASK)
    (row,) = meter.ledger.attempts()
    assert (row.state, row.held) == ("settled", 0)


def test_line_separators_inside_a_stream(make: Make, server: HttpServer) -> None:
    odd = "a\u2028b\u2029c\u0085d\U0001f600"
    server.play(
        stream(
            f'{{"choices":[{{"delta":{{"content":"{odd}"}}}}]}}',
            '{"choices":[{"delta":{},"finish_reason":"stop"}]}',
            "[DONE]",
        )
    )
    with make().stream(ASK) as streaming:
        assert streaming.completion().text == odd
