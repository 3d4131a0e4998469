"""The rest of the typed client: other endpoints, estimates, the context guard, the async twin, spans,
secrets."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from decimal import Decimal

import pytest
from sdk_server import HttpServer

from k3eval import (
    K3,
    AsyncK3,
    Budget,
    BudgetExceededError,
    ConfigError,
    ContextOverflowError,
    End,
    Message,
    Meter,
    ModelRef,
    PriceRow,
    PriceTable,
    ProtocolError,
    ReasoningDelta,
    TextDelta,
    Timeouts,
    Usage,
    UsageUpdate,
)
from k3eval.jsontypes import JsonObject
from k3eval.notices import K3EvalWarning, Notice
from k3eval.redact import redact, remember_secret
from k3eval.testing import Reply, ScriptedTransport, answer, failure, streamed

KEY = "sk-invented-0123456789"
ASK = [Message.user("hi")]


def plain(data: str, status: int = 200) -> Reply:
    return Reply((data.encode(),), status, {"content-type": "application/json"})


def client(
    provider: str, meter: Meter, *script: Reply, model: str = "kimi-k3"
) -> tuple[K3, ScriptedTransport]:
    fake = ScriptedTransport(*script)
    return K3(provider, model, api_key=KEY, meter=meter, transport=fake), fake


def test_models(meter: Meter) -> None:
    k3, fake = client(
        "moonshot",
        meter,
        plain('{"data":[{"id":"kimi-k3","context_length":1048576},{"id":"x","owned_by":"y"},5]}'),
    )
    assert [(m.id, m.context, m.owner) for m in k3.models()] == [
        ("kimi-k3", 1_048_576, None),
        ("x", None, "y"),
    ]
    assert fake.requests[0].url == "https://api.moonshot.ai/v1/models"


@pytest.mark.parametrize(
    ("provider", "reply", "amount", "currency", "path"),
    [
        (
            "moonshot",
            '{"data":{"available_balance":49.58,"cash_balance":3}}',
            "49.58",
            "USD",
            "/v1/users/me/balance",
        ),
        ("moonshot-cn", '{"data":{"available_balance":10}}', "10", "CNY", "/v1/users/me/balance"),
        (
            "openrouter",
            '{"data":{"total_credits":20.5,"total_usage":0.25}}',
            "20.25",
            "USD",
            "/api/v1/credits",
        ),
    ],
)
def test_balance(meter: Meter, provider: str, reply: str, amount: str, currency: str, path: str) -> None:
    k3, fake = client(provider, meter, plain(reply))
    found = k3.balance()
    assert (found.amount, found.currency) == (Decimal(amount), currency)
    assert fake.requests[0].url.endswith(path)


def test_what_has_no_balance(meter: Meter) -> None:
    with pytest.raises(ConfigError, match="no balance"):
        client("local", meter)[0].balance()
    for provider in ("moonshot", "openrouter"):
        with pytest.raises(ConfigError, match="gave no"):
            client(provider, meter, plain("{}"))[0].balance()
    with pytest.raises(ProtocolError, match="no JSON"):
        client("moonshot", meter, plain("<html>"))[0].balance()


def test_what_a_single_call_was_charged(meter: Meter) -> None:
    not_yet = failure(404, {"code": 404, "message": "not ready"})
    receipt = plain('{"data":{"id":"gen-1","total_cost":0.00492,"provider_name":"X"}}')
    k3, fake = client("openrouter", meter, not_yet, receipt, not_yet)
    assert k3.charged("gen-1/?&", wait_s=3) == Decimal("0.00492")
    assert fake.requests[0].url == "https://openrouter.ai/api/v1/generation?id=gen-1%2F%3F%26"
    assert k3.charged("gen-2", wait_s=0) is None
    with pytest.raises(ConfigError, match="single call"):
        client("moonshot", meter)[0].charged("x")


def test_other_endpoints_raise_the_hosts_errors(meter: Meter) -> None:
    k3, _ = client("moonshot", meter, failure(401, {"type": "incorrect_api_key_error", "message": "no"}))
    with pytest.raises(Exception, match="try provider moonshot-cn"):
        k3.models()


def test_tokens_by_the_host(meter: Meter) -> None:
    k3, fake = client("moonshot", meter, plain('{"data":{"total_tokens":123}}'))
    found = k3.count_tokens(ASK)
    assert (found.tokens, found.method, found.error) == (123, "host", 0.0)
    assert fake.requests[0].body == {"model": "kimi-k3", "messages": [{"role": "user", "content": "hi"}]}
    older, _ = client("local", meter, failure(404, {"message": "Not Found"}))
    assert older.count_tokens(ASK).method != "host"
    assert client("openrouter", meter)[0].count_tokens(ASK).method != "host"


def test_estimate_before_a_call(meter: Meter) -> None:
    k3, _ = client("moonshot", meter)
    found = k3.estimate_cost([Message.user("word " * 1000)], max_output=1000)
    assert found.computed is not None
    assert found.ideal_cache is not None
    assert Decimal("0.015") < found.ideal_cache < found.computed < Decimal("0.03")
    assert found.price_row == "api.moonshot.ai/kimi-k3@2026-10-15"
    assert client("local", meter)[0].estimate_cost(ASK).computed is None
    routed = client("openrouter", meter, model="moonshotai/kimi-k3")[0].estimate_cost(ASK, max_output=1000)
    assert routed.computed is not None
    assert routed.computed > Decimal("0.0225")  # the dearest host that may serve it


def test_capabilities(meter: Meter) -> None:
    known = client("moonshot", meter)[0].capabilities()
    assert (known.context, known.max_output, known.fixed_sampling) == (1_048_576, 1_048_576, True)
    assert known.efforts == ("off", "low", "high", "max")
    unknown = client("local", meter, model="a")[0].capabilities()
    assert (unknown.context, unknown.tools, unknown.efforts, unknown.price_row) == (None, None, (), None)


def test_context_guard(meter: Meter) -> None:
    fake = ScriptedTransport(answer(), answer())
    with K3("local", "a", meter=meter, transport=fake, context=1000) as k3:
        k3.chat([Message.user("short")])
        with pytest.raises(ContextOverflowError, match="a takes 1000"):
            k3.chat([Message.user("many different words here " * 2000)])
    assert len(fake.requests) == 1
    assert meter.total.calls == 1


def test_from_a_reference(meter: Meter) -> None:
    ref = ModelRef.parse("compatible/m@http://10.0.0.1:8000/v1/")
    with K3.from_ref(ref, meter=meter) as k3:
        assert (k3.model, k3.base_url) == ("m", "http://10.0.0.1:8000/v1")
    with K3.from_ref(ModelRef.parse("local/a"), base_url="http://127.0.0.1:5/v1", effort="low") as k3:
        assert k3.base_url == "http://127.0.0.1:5/v1"


def test_events_and_their_stamps(meter: Meter) -> None:
    k3, _ = client("local", meter, streamed(["a", "b"], reasoning=["hm"]), model="a")
    with k3.stream(ASK) as stream:
        events = list(stream)
        done = stream.completion()
    assert [type(e) for e in events] == [ReasoningDelta, TextDelta, TextDelta, UsageUpdate, End]
    stamps = [event.at_ns for event in events]
    assert stamps == sorted(stamps)
    assert done.timing.sent_ns <= stamps[0]
    assert (done.timing.first_token_ns, done.timing.last_token_ns) == (stamps[0], stamps[2])
    assert (done.timing.token_events, done.timing.first_event_chars, done.timing.total_chars) == (3, 2, 4)


def test_async_twin(server: HttpServer, meter: Meter) -> None:
    async def run() -> list[object]:
        async with AsyncK3("moonshot", "kimi-k3", base_url=server.url, api_key=KEY, meter=meter) as k3:
            server.play(
                answer("one", usage={"prompt_tokens": 3099, "completion_tokens": 168, "cached_tokens": 2560})
            )
            whole = await k3.chat(ASK)
            server.play(streamed(["t", "wo"]))
            async with await k3.stream(ASK) as stream:
                kinds = [type(event) async for event in stream]
                done = await stream.completion()
            server.play(plain('{"data":{"total_tokens":7,"available_balance":3}}'))
            tokens, balance = await k3.count_tokens(ASK), await k3.balance()
            server.play(plain('{"data":[{"id":"m"}]}'))
            models = await k3.models()
            return [
                whole.text,
                whole.cost.computed,
                done.text,
                kinds[0],
                tokens.tokens,
                balance.amount,
                models[0].id,
            ]

    assert asyncio.run(run()) == ["one", Decimal("0.004905"), "two", TextDelta, 7, Decimal(3), "m"]


def test_async_budget_holds_over_tasks(server: HttpServer, notices: list[Notice]) -> None:
    meter = Meter(budget=Budget(max_cost=Decimal("0.05")), notify=notices.append)
    server.play(answer(usage={"prompt_tokens": 100, "completion_tokens": 1313, "cached_tokens": 50}))

    async def run() -> int:
        options = {"base_url": server.url, "api_key": KEY, "meter": meter, "max_output": 1250}
        async with AsyncK3("moonshot", "kimi-k3", **options) as k3:  # type: ignore[arg-type]
            done = await asyncio.gather(*(k3.chat(ASK) for _ in range(8)), return_exceptions=True)
        assert all(isinstance(item, BudgetExceededError) for item in done if isinstance(item, Exception))
        return sum(not isinstance(item, Exception) for item in done)

    assert asyncio.run(run()) == 2


def test_one_client_for_many_threads(server: HttpServer, meter: Meter) -> None:
    server.handler = lambda seen: streamed([str(seen.body["messages"][0]["content"])] * 20)  # type: ignore[index, call-overload]
    with K3("local", "a", base_url=server.url, meter=meter) as k3:

        def work(number: int) -> bool:
            with k3.stream([Message.user(f"<{number}>")]) as stream:
                return stream.completion().text == f"<{number}>" * 20

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(40)))
    assert meter.total.calls == 40
    assert threading.active_count() < 40


def test_billed_and_computed_apart_is_a_finding(meter: Meter, notices: list[Notice]) -> None:
    usage: JsonObject = {"prompt_tokens": 1000, "completion_tokens": 100, "cost": 0.009}
    k3, _ = client(
        "openrouter", meter, answer(usage=usage, provider="Moonshot AI"), model="moonshotai/kimi-k3"
    )
    done = k3.chat(ASK)
    assert (done.cost.billed, done.cost.computed) == (Decimal("0.009"), Decimal("0.0045"))
    assert done.cost.best == Decimal("0.009")
    assert "billed_differs" in done.attempts[0].notes
    assert "billed_differs" in [n.code for n in notices]


def test_a_cached_reply_is_noted(meter: Meter) -> None:
    reply = answer(provider="Moonshot AI")
    hit = replace(reply, headers={**reply.headers, "x-openrouter-cache-status": "HIT"})
    k3, _ = client("openrouter", meter, hit, model="moonshotai/kimi-k3")
    assert "reply_cached" in k3.chat(ASK).attempts[0].notes


def test_own_prices(notices: list[Notice]) -> None:
    row = PriceRow("10.0.0.1", "m", "EUR", date(2026, 11, 30), "own", Decimal(1), Decimal(2))
    meter = Meter(prices=PriceTable((row,)), notify=notices.append)
    fake = ScriptedTransport(answer(usage={"prompt_tokens": 1000, "completion_tokens": 500}))
    with K3("compatible", "m", base_url="http://10.0.0.1/v1", meter=meter, transport=fake) as k3:
        done = k3.chat(ASK)
    assert done.cost.computed == Decimal("0.002")
    assert done.cost.currency == "EUR"


def test_a_free_host_has_unknown_cost_not_zero(meter: Meter) -> None:
    k3, _ = client("local", meter, answer(), model="a")
    done = k3.chat(ASK)
    assert (done.cost.billed, done.cost.computed) == (None, None)
    assert done.attempts[0].held == 0
    assert meter.total.usage == Usage(10, None, None, 5, None)


def test_warnings_are_python_warnings_unless_told_otherwise() -> None:
    with (
        K3("moonshot", "kimi-k3", api_key=KEY, transport=ScriptedTransport(answer())) as k3,
        pytest.warns(K3EvalWarning, match="Singapore"),
    ):
        k3.chat(ASK)


def test_spans(meter: Meter) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    usage: JsonObject = {"prompt_tokens": 3099, "completion_tokens": 168, "cached_tokens": 2560}
    k3, _ = client(
        "moonshot", meter, answer(usage=usage), streamed(usage=usage), failure(400, {"message": "bad"})
    )
    k3.chat([Message.user("a secret question")])
    with k3.stream(ASK) as stream:
        stream.completion()
    with pytest.raises(Exception, match="bad"):
        k3.chat(ASK)
    whole, streaming, failed = exporter.get_finished_spans()
    for span in (whole, streaming):
        assert span.name == "chat kimi-k3"
        assert span.attributes is not None
        assert span.attributes["gen_ai.usage.input_tokens"] == 3099
        assert span.attributes["gen_ai.usage.output_tokens"] == 168
        assert span.attributes["gen_ai.provider.name"] == "moonshot"
        assert span.attributes["k3eval.cost"] == "0.004905 USD"
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "BadRequestError"
    assert "secret question" not in str([dict(s.attributes or {}) for s in (whole, streaming, failed)])


@pytest.mark.parametrize(
    "text",
    [
        "key sk-or-v1-0123456789abcdef failed", "Authorization: Bearer abcdefghijk",
        "account org-0123abcd suspended", "<ak-f00ba4abc>", "ak-f00ba4abc", "sk-proj_A-b.c123",
    ],
)  # fmt: skip
def test_known_secrets_are_masked(text: str) -> None:
    masked = redact(text)
    assert "[redacted]" in masked
    assert not any(part in masked for part in ("0123", "f00ba4", "abcdefghijk", "A-b.c"))


def test_the_clients_own_key_is_masked_whatever_its_shape() -> None:
    remember_secret("plain-looking-key")
    remember_secret("short")
    assert redact("x plain-looking-key y short") == "x [redacted] y short"


def test_nothing_secret_in_logs(server: HttpServer, meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="k3eval")
    server.play(failure(401, {"message": f"bad key {KEY}"}))
    with (
        K3("moonshot", "kimi-k3", base_url=server.url, api_key=KEY, meter=meter) as k3,
        pytest.raises(Exception, match="redacted") as caught,
    ):
        k3.chat(ASK)
    assert KEY not in caplog.text + repr(caught.value) + str(caught.value) + repr(k3)


@pytest.mark.parametrize("name", ["connect", "first_token", "idle", "total"])
def test_time_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Timeouts(**{name: 0})
