"""Attempts, limits and stops: what is tried again, how often, and what ends a run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
import shapes
from sdk_server import Handler, HttpServer

from k3eval import (
    K3,
    AsyncK3,
    BadRequestError,
    Message,
    Meter,
    OverloadedError,
    QuotaExceededError,
    RateLimitError,
    RetryPolicy,
    ServerError,
    StreamInterruptedError,
    Timeouts,
    TransportError,
)
from k3eval.meter.gate import HostGate
from k3eval.notices import Notice
from k3eval.testing import Answer, Reply, ScriptedTransport, SeenRequest, answer, events, failure, streamed

ASK = [Message.user("hi")]
KEY = "sk-invented-0123456789"
QUICK = RetryPolicy(first_wait_s=0.001)
RATE = {"type": "rate_limit_reached_error", "message": "request reached max organization concurrency: 1"}
BUSY = failure(429, {"type": "engine_overloaded_error", "message": "capacity"})
BROKEN = failure(500, {"type": "server_error", "message": "oops"})


def client(
    meter: Meter, *script: Answer, retry: RetryPolicy = QUICK, repeat: bool = False
) -> tuple[K3, ScriptedTransport]:
    fake = ScriptedTransport(*script, repeat=repeat)
    return K3("moonshot", "kimi-k3", api_key=KEY, meter=meter, transport=fake, retry=retry), fake


@pytest.mark.parametrize(
    "trouble",
    [
        BROKEN,
        BUSY,
        failure(503, {"type": "server_unavailable", "message": "x"}),
        failure(429, {"message": "slow"}, retry_after="0"),
        failure(504, "<html>time-out</html>"),
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        events([{"choices": [], "error": {"code": 502, "message": "x"}}]),
    ],
)
def test_one_trouble_is_survived(meter: Meter, trouble: Answer) -> None:
    k3, fake = client(meter, trouble, streamed())
    with k3.stream(ASK) as stream:
        done = stream.completion()
    assert done.text == "ok"
    assert len(fake.requests) == len(done.attempts) == 2
    assert [a.number for a in done.attempts] == [1, 2]
    assert [a.call_id for a in done.attempts] == [done.attempts[0].call_id] * 2
    assert list(meter.ledger.attempts()) == list(done.attempts)
    assert (meter.total.calls, meter.total.attempts) == (1, 2)
    assert done.timing.sent_ns > 0


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (failure(400, {"message": "bad"}), BadRequestError),
        (failure(401, {"message": "key"}), Exception),
        (Reply((shapes.QUOTA_429.encode(),), 429), QuotaExceededError),
        (Reply((shapes.FILTERED_400.encode(),), 400), Exception),
        (failure(429, {"message": "later"}, retry_after="3600"), RateLimitError),
    ],
)
def test_what_a_retry_cannot_cure_is_sent_once(meter: Meter, reply: Reply, kind: type[Exception]) -> None:
    k3, fake = client(meter, reply, repeat=True)
    with pytest.raises(kind):
        k3.chat(ASK)
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("trouble", "kind", "tries"),
    [
        (BROKEN, ServerError, 5),
        (BUSY, OverloadedError, 5),
        (failure(504, "x"), ServerError, 2),
        (httpx.ReadTimeout("idle"), TransportError, 2),
    ],
)
def test_tries_are_bounded(meter: Meter, trouble: Answer, kind: type[Exception], tries: int) -> None:
    k3, fake = client(meter, trouble, repeat=True)
    with pytest.raises(kind):
        k3.chat(ASK)
    assert len(fake.requests) == tries
    assert len(list(meter.ledger.attempts())) == tries


def test_a_broken_stream_is_not_tried_again(meter: Meter) -> None:
    whole = streamed(["a"] * 5)
    k3, fake = client(meter, replace(whole, packets=whole.packets[:3], cut=True), repeat=True)
    with pytest.raises(StreamInterruptedError), k3.stream(ASK) as stream:
        stream.completion()
    assert len(fake.requests) == 1


def test_lost_attempts_hold_their_worst_case(meter: Meter) -> None:
    k3, _ = client(meter, httpx.ReadError("reset"), answer())
    done = k3.chat(ASK, max_output=10_000)
    lost, answered = done.attempts
    assert lost.state == "unknown"
    assert lost.held is not None
    assert lost.held > 10_000 * 15 / 10**6
    assert answered.state == "settled"
    assert meter.total.unknown == 1


def test_the_host_is_asked_to_wait_is_waited_for(meter: Meter) -> None:
    k3, fake = client(meter, failure(429, {"message": "x"}, retry_after="0.2"), answer())
    before = time.monotonic()
    k3.chat(ASK)
    assert time.monotonic() - before >= 0.2
    assert len(fake.requests) == 2


# -- a host that allows one request at a time ------------------------------------------------------


def one_at_a_time(server: HttpServer, error: dict[str, str], **headers: str) -> tuple[Handler, Counter[str]]:
    """Refuse a request while another one runs; count the requests of each task."""
    busy, seen, lock = threading.Semaphore(1), Counter[str](), threading.Lock()

    def handle(request: SeenRequest) -> Reply:
        messages = request.body["messages"]
        with lock:
            seen[str(messages[0]["content"])] += 1  # type: ignore[index, call-overload]
        if not busy.acquire(blocking=False):
            return failure(429, dict(error), **headers)
        try:
            time.sleep(0.02)
            return streamed() if request.body.get("stream") else answer()
        finally:
            busy.release()

    server.handler = handle
    return handle, seen


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (RATE, {"retry_after": "0.1"}),
        (RATE, {}),
        (
            {
                "type": "rate_limit_reached_error",
                "message": "max organization concurrency: 1, try again after 1 seconds",
            },
            {},
        ),
        ({"message": "too many requests"}, {}),
        ({"type": "engine_overloaded_error", "message": "capacity"}, {}),
    ],
)
def test_eight_workers_all_finish(
    server: HttpServer, meter: Meter, error: dict[str, str], headers: dict[str, str], notices: list[Notice]
) -> None:
    _, seen = one_at_a_time(server, error, **headers)
    with K3("moonshot", "kimi-k3", base_url=server.url, api_key=KEY, meter=meter) as k3:

        def work(number: int) -> str:
            return k3.chat([Message.user(f"task {number}")]).text

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == ["ok"] * 8
    assert len(seen) == 8
    assert max(seen.values()) <= 3
    if "concurrency: 1" in error["message"]:
        assert [n.code for n in notices].count("one_at_a_time") == 1


def test_eight_workers_with_many_streamed_tasks(server: HttpServer, meter: Meter) -> None:
    _, seen = one_at_a_time(server, RATE)
    with K3("moonshot", "kimi-k3", base_url=server.url, api_key=KEY, meter=meter) as k3:

        def work(number: int) -> str:
            with k3.stream([Message.user(f"task {number}")]) as stream:
                return stream.completion().text

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(24))) == ["ok"] * 24
    assert max(seen.values()) <= 3
    assert seen.total() <= 24 + 8 + 8


def test_eight_tasks_of_one_loop(server: HttpServer, meter: Meter) -> None:
    _, seen = one_at_a_time(server, RATE)

    async def run() -> list[str]:
        async with AsyncK3("moonshot", "kimi-k3", base_url=server.url, api_key=KEY, meter=meter) as k3:

            async def work(number: int) -> str:
                return (await k3.chat([Message.user(f"task {number}")])).text

            return await asyncio.gather(*(work(n) for n in range(8)))

    assert asyncio.run(run()) == ["ok"] * 8
    assert max(seen.values()) <= 3


def test_threads_and_tasks_share_one_gate(server: HttpServer, meter: Meter) -> None:
    _, seen = one_at_a_time(server, RATE)

    async def tasks() -> None:
        async with AsyncK3("moonshot", "kimi-k3", base_url=server.url, api_key=KEY, meter=meter) as k3:
            await asyncio.gather(*(k3.chat([Message.user(f"async {n}")]) for n in range(4)))

    with (
        K3("moonshot", "kimi-k3", base_url=server.url, api_key=KEY, meter=meter) as k3,
        ThreadPoolExecutor(5) as pool,
    ):
        done = [pool.submit(asyncio.run, tasks())]
        waits = [pool.submit(k3.chat, [Message.user(f"sync {n}")]) for n in range(4)]
        for future in done:
            future.result()
        assert [future.result().text for future in waits] == ["ok"] * 4
    assert len(seen) == 8
    assert max(seen.values()) <= 3


def test_a_used_up_quota_stops_everything(server: HttpServer, meter: Meter) -> None:
    count = 0
    lock = threading.Lock()

    def handle(_: SeenRequest) -> Reply:
        nonlocal count
        with lock:
            count += 1
            mine = count
        time.sleep(0.02)
        if mine <= 2:
            return failure(429, dict(RATE))
        return Reply((shapes.QUOTA_429.encode(),), 429, {"content-type": "application/json"})

    server.handler = handle
    with K3("moonshot", "kimi-k3", base_url=server.url, api_key=KEY, meter=meter) as k3:

        def work(number: int) -> type[BaseException] | None:
            try:
                k3.chat([Message.user(str(number))])
            except QuotaExceededError as error:
                return type(error)
            return None

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(work, range(40))) == {QuotaExceededError}
    assert count <= 9  # the eight that were under way, and at most one more
    sent = count
    with K3("moonshot", "kimi-k3", base_url=server.url, api_key=KEY, meter=meter) as again:
        with pytest.raises(QuotaExceededError):
            again.chat(ASK)
        assert count == sent
        server.play(answer())
        again.meter.gate("api.moonshot.ai", _account(again)).reopen()
        assert again.chat(ASK).text == "ok"


def _account(client: K3) -> str:
    from k3eval.redact import fingerprint

    return fingerprint(client.key)


def test_wrapped_quota_stops_too(meter: Meter) -> None:
    fake = ScriptedTransport(Reply((shapes.WRAPPED_QUOTA_429.encode(),), 429), repeat=True)
    k3 = K3("openrouter", "moonshotai/kimi-k3", api_key=KEY, meter=meter, transport=fake)
    for _ in range(3):
        with pytest.raises(QuotaExceededError):
            k3.chat(ASK)
    assert len(fake.requests) == 1


# -- the gate itself -------------------------------------------------------------------------------

S = 1_000_000_000


def rate_error(retry_after_s: float | None = None) -> RateLimitError:
    return RateLimitError("x", status=429, host="h", retry_after_s=retry_after_s)


def test_gate_keeps_the_order() -> None:
    gate, woken = HostGate(limit=1), list[str]()
    tickets = [gate.ask(lambda name=name: woken.append(name)) for name in "abc"]  # type: ignore[misc]
    assert gate.poll(tickets[0], 0) is None
    assert gate.poll(tickets[2], 0) == gate.poll(tickets[1], 0) == float("inf")
    gate.leave(0)
    assert woken[-1] == "b"
    assert gate.poll(tickets[2], 0) == float("inf")
    assert gate.poll(tickets[1], 0) is None
    gate.withdraw(tickets[1])
    gate.leave(0)
    assert gate.poll(tickets[2], 0) is None


def test_gate_believes_a_stated_limit_and_does_not_probe() -> None:
    gate = HostGate()
    for ticket in [gate.ask(lambda: None) for _ in range(4)]:
        assert gate.poll(ticket, 0) is None
    gate.refused(rate_error(), 2, None, 0)
    assert gate.limit == 2
    for _ in range(4):
        gate.leave(0)
    for _ in range(100):
        gate.accepted(1000 * S)
    assert gate.limit == 2


def test_gate_grows_again_after_a_vague_refusal() -> None:
    gate = HostGate(limit=4)
    for ticket in [gate.ask(lambda: None) for _ in range(4)]:
        gate.poll(ticket, 0)
    gate.refused(rate_error(), None, None, 0)
    assert gate.limit == 1
    for _ in range(30):
        gate.accepted(10 * S)
    assert gate.limit == 1  # too soon
    for _ in range(200):
        gate.accepted(60 * S)
    assert gate.limit == 4


def test_gate_paces_by_requests_a_minute() -> None:
    gate = HostGate()
    first, second = gate.ask(lambda: None), gate.ask(lambda: None)
    assert gate.poll(first, 0) is None
    gate.refused(rate_error(), None, 3, 0)
    gate.leave(0)
    assert gate.poll(second, 0) is None
    third = gate.ask(lambda: None)
    assert gate.poll(third, 1 * S) == pytest.approx(19.0)
    assert gate.poll(third, 20 * S) is None


def test_gate_waits_as_asked() -> None:
    gate = HostGate()
    gate.poll(gate.ask(lambda: None), 0)
    gate.refused(rate_error(5.0), None, None, 0)
    gate.leave(0)
    assert gate.poll(gate.ask(lambda: None), 2 * S) == pytest.approx(3.0)


# -- time limits and closing -----------------------------------------------------------------------


def slow(server: HttpServer, seconds: float) -> threading.Event:
    release = threading.Event()

    def handle(_: SeenRequest) -> Reply:
        release.wait(seconds)
        return answer()

    server.handler = handle
    return release


def test_silence_is_limited(server: HttpServer, meter: Meter) -> None:
    release = slow(server, 30)
    limits = Timeouts(first_token=0.2, idle=0.2, total=5)
    once = RetryPolicy(max_attempts=1)
    with (
        K3("local", "a", base_url=server.url, meter=meter, timeouts=limits, retry=once) as k3,
        pytest.raises(TransportError, match="ReadTimeout"),
    ):
        k3.chat(ASK)
    release.set()
    (row,) = meter.ledger.attempts()
    assert row.state == "unknown"


class Clock:
    """Keep-alives for ever: the idle limit never strikes, the others must."""

    def __init__(self, packet: bytes) -> None:
        self.packet = packet

    def __call__(self, _: SeenRequest) -> Reply:
        return Reply(_Endless(self.packet), headers={"content-type": "text/event-stream"})  # type: ignore[arg-type]


class _Endless:
    def __init__(self, packet: bytes) -> None:
        self.packet = packet

    def __iter__(self):  # type: ignore[no-untyped-def]
        while True:
            time.sleep(0.02)
            yield self.packet


@pytest.mark.parametrize(
    ("packet", "limits", "said"),
    [
        (b": keep-alive\n\n", Timeouts(first_token=0.2, total=20), "no token within 0.2 s"),
        (
            b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n',
            Timeouts(first_token=0.2, total=20),
            "no token",
        ),
        (
            b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n',
            Timeouts(first_token=5, total=0.3),
            "within 0.3 s",
        ),
    ],
)
def test_keep_alives_do_not_keep_a_call_alive(
    server: HttpServer, meter: Meter, packet: bytes, limits: Timeouts, said: str
) -> None:
    server.handler = Clock(packet)
    once = RetryPolicy(max_attempts=1)
    with (
        K3("local", "a", base_url=server.url, meter=meter, timeouts=limits, retry=once) as k3,
        pytest.raises(TransportError, match=said),
        k3.stream(ASK) as stream,
    ):
        stream.completion()


@pytest.mark.parametrize("streaming", [False, True])
def test_close_from_another_thread_ends_the_call(server: HttpServer, meter: Meter, streaming: bool) -> None:
    release = slow(server, 30)
    k3 = K3("local", "a", base_url=server.url, meter=meter)

    def call() -> object:
        if not streaming:
            return k3.chat(ASK)
        with k3.stream(ASK) as stream:
            return stream.completion()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        while not server.requests:
            time.sleep(0.01)
        before = time.monotonic()
        k3.close()
        with pytest.raises(TransportError, match="closed"):
            future.result(10)
    assert time.monotonic() - before < 10
    release.set()
    with pytest.raises(TransportError, match="closed"):
        k3.chat(ASK)
    assert [row.state for row in meter.ledger.attempts()] == ["unknown"]


def test_close_ends_a_wait_for_the_next_try(server: HttpServer, meter: Meter) -> None:
    server.play(failure(500, {"message": "x"}))
    k3 = K3("local", "a", base_url=server.url, meter=meter, retry=RetryPolicy(first_wait_s=30))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(k3.chat, ASK)
        while not list(meter.ledger.attempts()) or meter.total.attempts == 0:
            time.sleep(0.01)
        k3.close()
        with pytest.raises(TransportError, match="closed"):
            future.result(10)


def test_cancelled_task_settles_its_attempt(server: HttpServer, meter: Meter) -> None:
    release = slow(server, 30)

    async def run() -> None:
        async with AsyncK3("moonshot", "kimi-k3", base_url=server.url, api_key=KEY, meter=meter) as k3:
            task = asyncio.create_task(k3.chat(ASK))
            while not server.requests:  # noqa: ASYNC110 - the server runs in a thread and knows no events of the loop
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    release.set()
    (row,) = meter.ledger.attempts()
    assert row.state == "unknown"
    assert row.held is not None
    assert row.held > 0
