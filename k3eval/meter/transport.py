"""The metered httpx transports, sync and async: any client that takes an httpx client is metered through
them.

Only input, output and waiting are here; what a call costs and how its bytes are read is in ``call``. Chat
calls are metered and retried, every attempt is a ledger row; other requests pass through. A refusal of ours
(budget, configuration) reaches a foreign client as an HTTP error that says so, and the typed client as an
exception.
"""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final, Protocol, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from tenacity import AsyncRetrying, Retrying

from k3eval.errors import BudgetExceededError, ConfigError, K3EvalError, QuotaExceededError, TransportError
from k3eval.jsontypes import JsonObject, write_json
from k3eval.meter.call import Call, Try
from k3eval.meter.context import CallContext
from k3eval.meter.gate import HostGate
from k3eval.meter.meter import Meter
from k3eval.meter.retry import RetryRules
from k3eval.options import RetryPolicy
from k3eval.providers.base import Provider

CONTEXT: Final = "k3eval"
"""Request extension under which the typed client passes its ``CallContext``."""
_CHAT: Final = "/chat/completions"
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
_IO_ERRORS: Final = (httpx.RequestError, httpx.StreamError, TransportError, OSError)
_FRAMING: Final = frozenset({"content-encoding", "content-length", "transfer-encoding"})
_LOOK_S: Final = 0.25
"""How often a waiting thread looks whether its client was closed."""


class _Core:
    """What both transports share: which requests are metered, and what their callers get."""

    def __init__(self, provider: Provider, meter: Meter, retry: RetryPolicy) -> None:
        self.provider = provider
        self.meter = meter
        self.retry = retry

    def metered(self, request: httpx.Request) -> bool:
        return request.method == "POST" and request.url.path.endswith(_CHAT)

    def open(self, request: httpx.Request) -> Call:
        context = cast("CallContext | None", request.extensions.get(CONTEXT))
        if context is None:
            # Compression hides a stream from the meter and holds tokens back.
            request.headers["accept-encoding"] = "identity"
        key = request.headers.get("authorization", "").partition(" ")[2] or None
        return Call(self.meter, self.provider, str(request.url), request.content, key, context)

    def outcome(self, call: Call | None, error: K3EvalError) -> httpx.Response:
        """Return or raise what the caller gets after the last attempt."""
        if call is not None:
            error.request = error.request or call.summary
            call.close(error)
            if call.typed:
                raise error
            if isinstance(error.__cause__, httpx.HTTPError):
                raise error.__cause__
            if call.last_reply is not None:
                status, headers, body = call.last_reply
                return httpx.Response(status, headers=_unframed(headers), content=body)
        if isinstance(error, BudgetExceededError | QuotaExceededError | ConfigError):
            status = 400 if isinstance(error, ConfigError) else 402
            payload: JsonObject = {
                "type": f"k3eval_{type(error).__name__}",
                "message": error.message,
                "code": status,
            }
            return httpx.Response(
                status,
                headers={"content-type": "application/json", "x-should-retry": "false"},
                content=write_json({"error": payload}),
            )
        raise error


class MeteredTransport(httpx.BaseTransport):
    """Meters the chat calls of any ``httpx.Client``: ``httpx.Client(transport=MeteredTransport(...))``."""

    def __init__(
        self,
        provider: Provider,
        meter: Meter,
        *,
        inner: httpx.BaseTransport | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._core = _Core(provider, meter, RetryPolicy() if retry is None else retry)
        self._inner = httpx.HTTPTransport() if inner is None else inner
        self._in_flight = _InFlight(self._inner.close)
        self._closed = threading.Event()
        self._sockets: weakref.WeakSet[_NetworkStream] = weakref.WeakSet()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; chat calls are metered, and tried again where that may help."""
        if self._closed.is_set():
            raise TransportError("the client was closed")
        request.extensions = {**request.extensions, "trace": self._trace}
        if not self._core.metered(request):
            return self._inner.handle_request(request)
        request.read()
        call: Call | None = None
        try:
            call = self._core.open(request)
            rules = RetryRules(self._core.retry)
            for attempt in Retrying(
                retry=rules.again, wait=rules.wait, stop=rules.stop, sleep=self._sleep, reraise=True
            ):
                with attempt:
                    return self._try(call, request)
        except K3EvalError as error:
            return self._core.outcome(call, error)
        raise AssertionError("the attempts loop returns or raises")

    def close(self) -> None:
        """Close the connections; calls in flight in other threads end at once with an error."""
        self._closed.set()
        for stream in tuple(self._sockets):
            _shut(stream)
        self._in_flight.close()

    def _try(self, call: Call, request: httpx.Request) -> httpx.Response:
        self._enter(call.gate)
        attempt = call.start()
        response: httpx.Response | None = None
        handed_over = False
        self._in_flight.enter()
        try:
            response = self._inner.handle_request(request)
            attempt.began(response.status_code, response.headers)
            if call.stream and response.status_code < 300:
                stream = _Stream(call, attempt, response, self._in_flight.leave)
                stream.peek()
                handed_over = True
                return httpx.Response(
                    response.status_code,
                    headers=_unframed(response.headers),
                    stream=stream,
                    extensions=response.extensions,
                )
            body = b"".join(attempt.timed(chunk) for chunk in response.iter_bytes())
            attempt.whole(body)
            return httpx.Response(
                response.status_code,
                headers=_unframed(response.headers),
                content=body,
                extensions=response.extensions,
            )
        except _IO_ERRORS as error:
            known = self._lost(attempt, error)
            if known is error:
                raise
            raise known from error
        finally:
            if not handed_over:
                attempt.left()
                if response is not None:
                    response.close()
                self._in_flight.leave()

    def _lost(self, attempt: Try, error: Exception) -> TransportError:
        if self._closed.is_set():
            return attempt.lost(TransportError("the client was closed"))
        return attempt.lost(error, sent=not isinstance(error, _NOT_SENT))

    def _enter(self, gate: HostGate) -> None:
        woken = threading.Event()
        ticket = gate.ask(woken.set)
        last_ns = time.monotonic_ns() + int(self._core.retry.max_total_s * 1e9)
        try:
            while True:
                if self._closed.is_set():
                    raise TransportError("the client was closed")
                woken.clear()
                now = time.monotonic_ns()
                pause = gate.poll(ticket, now)
                if pause is None:
                    return
                if now > last_ns:
                    raise TransportError(
                        "waited too long for a place: other calls to this account do not end"
                    )
                woken.wait(min(pause, _LOOK_S))
        finally:
            gate.withdraw(ticket)

    def _sleep(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _trace(self, name: str, info: Mapping[str, object]) -> None:
        """Note each socket that is opened, so that ``close`` can end a read in another thread."""
        if name in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            stream = info.get("return_value")
            if stream is not None:
                known = cast("_NetworkStream", stream)
                self._sockets.add(known)
                if self._closed.is_set():  # closed while it connected
                    _shut(known)


class _InFlight:
    """Counts calls in flight, and closes the connections when the last one has left.

    A descriptor that is closed while another thread waits on it can be given to a new connection at once;
    the thread then waits on that one, and nothing wakes it.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._calls = 0
        self._closing = False

    def enter(self) -> None:
        """A call begins."""
        with self._lock:
            self._calls += 1

    def leave(self) -> None:
        """A call has ended."""
        with self._lock:
            self._calls -= 1
            last = self._closing and self._calls == 0
        if last:
            self._close()

    def close(self) -> None:
        """Close now, or when the last call leaves."""
        with self._lock:
            self._closing = True
            idle = self._calls == 0
        if idle:
            self._close()


class _Stream(httpx.SyncByteStream):
    """A reply's bytes on their way to the client, watched by the attempt."""

    def __init__(self, call: Call, attempt: Try, response: httpx.Response, left: Callable[[], None]) -> None:
        self._left = left
        self._call = call
        self._attempt = attempt
        self._response = response
        self._held: list[bytes] = []
        encoded = response.headers.get("content-encoding", "identity") != "identity"
        source = response.iter_bytes() if encoded else cast("httpx.SyncByteStream", response.stream)
        self._chunks = iter(source)

    def peek(self) -> None:
        """Read until the first event; a stream that begins with an error can still be tried again."""
        for chunk in self._chunks:
            self._attempt.feed(chunk)
            self._attempt.asked()
            self._held.append(chunk)
            if self._attempt.begun:
                break
        self._attempt.first_error(b"".join(self._held))

    def __iter__(self) -> Iterator[bytes]:
        feed, asked = self._attempt.feed, self._attempt.asked
        try:
            yield from self._held
            self._held.clear()
            asked()
            for chunk in self._chunks:
                feed(chunk)
                yield chunk
                asked()
            self._attempt.ended()
        except _IO_ERRORS as error:
            known = self._call.broken(self._attempt, error)
            if known is error:
                raise
            raise known from error

    def close(self) -> None:
        self._attempt.left()
        self._response.close()
        left, self._left = self._left, lambda: None
        left()


class AsyncMeteredTransport(httpx.AsyncBaseTransport):
    """Meters the chat calls of any ``httpx.AsyncClient``. For asyncio."""

    def __init__(
        self,
        provider: Provider,
        meter: Meter,
        *,
        inner: httpx.AsyncBaseTransport | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._core = _Core(provider, meter, RetryPolicy() if retry is None else retry)
        self._inner = httpx.AsyncHTTPTransport() if inner is None else inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; chat calls are metered, and tried again where that may help."""
        if not self._core.metered(request):
            return await self._inner.handle_async_request(request)
        await request.aread()
        call: Call | None = None
        try:
            call = self._core.open(request)
            rules = RetryRules(self._core.retry)
            async for attempt in AsyncRetrying(
                retry=rules.again, wait=rules.wait, stop=rules.stop, reraise=True
            ):
                with attempt:
                    return await self._try(call, request)
        except K3EvalError as error:
            return self._core.outcome(call, error)
        raise AssertionError("the attempts loop returns or raises")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    async def _try(self, call: Call, request: httpx.Request) -> httpx.Response:
        await self._enter(call.gate)
        attempt = call.start()
        response: httpx.Response | None = None
        handed_over = False
        try:
            response = await self._inner.handle_async_request(request)
            attempt.began(response.status_code, response.headers)
            if call.stream and response.status_code < 300:
                stream = _AsyncStream(call, attempt, response)
                await stream.peek()
                handed_over = True
                return httpx.Response(
                    response.status_code,
                    headers=_unframed(response.headers),
                    stream=stream,
                    extensions=response.extensions,
                )
            body = b"".join([attempt.timed(chunk) async for chunk in response.aiter_bytes()])
            attempt.whole(body)
            return httpx.Response(
                response.status_code,
                headers=_unframed(response.headers),
                content=body,
                extensions=response.extensions,
            )
        except _IO_ERRORS as error:
            known = attempt.lost(error, sent=not isinstance(error, _NOT_SENT))
            if known is error:
                raise
            raise known from error
        finally:
            if not handed_over:
                attempt.left()
                if response is not None:
                    await response.aclose()

    async def _enter(self, gate: HostGate) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        ticket = gate.ask(lambda: _wake(loop, woken))
        last_ns = time.monotonic_ns() + int(self._core.retry.max_total_s * 1e9)
        try:
            while True:
                woken.clear()
                now = time.monotonic_ns()
                pause = gate.poll(ticket, now)
                if pause is None:
                    return
                if now > last_ns:
                    raise TransportError(
                        "waited too long for a place: other calls to this account do not end"
                    )
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), None if math.isinf(pause) else pause)
        finally:
            gate.withdraw(ticket)


class _AsyncStream(httpx.AsyncByteStream):
    """Like ``_Stream``."""

    def __init__(self, call: Call, attempt: Try, response: httpx.Response) -> None:
        self._call = call
        self._attempt = attempt
        self._response = response
        self._held: list[bytes] = []
        encoded = response.headers.get("content-encoding", "identity") != "identity"
        source = response.aiter_bytes() if encoded else cast("httpx.AsyncByteStream", response.stream)
        self._chunks = aiter(source)

    async def peek(self) -> None:
        async for chunk in self._chunks:
            self._attempt.feed(chunk)
            self._attempt.asked()
            self._held.append(chunk)
            if self._attempt.begun:
                break
        self._attempt.first_error(b"".join(self._held))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        feed, asked = self._attempt.feed, self._attempt.asked
        try:
            for chunk in self._held:
                yield chunk
            self._held.clear()
            asked()
            async for chunk in self._chunks:
                feed(chunk)
                yield chunk
                asked()
            self._attempt.ended()
        except _IO_ERRORS as error:
            known = self._call.broken(self._attempt, error)
            if known is error:
                raise
            raise known from error

    async def aclose(self) -> None:
        self._attempt.left()
        await self._response.aclose()


def plain_transport(base_url: str) -> httpx.HTTPTransport:
    """Return the transport under the meter: the environment's proxy, no connection limit, TLS only where
    used.
    """
    return httpx.HTTPTransport(
        verify=not base_url.startswith("http://"),  # loading certificates takes longer than a local call
        proxy=_proxy(base_url),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
    )


def plain_async_transport(base_url: str) -> httpx.AsyncHTTPTransport:
    """Like ``plain_transport``, for asyncio."""
    return httpx.AsyncHTTPTransport(
        verify=not base_url.startswith("http://"),
        proxy=_proxy(base_url),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
    )


def _proxy(base_url: str) -> str | None:
    """Return the proxy that the environment names for an address."""
    parts = urlsplit(base_url)
    if proxy_bypass(parts.hostname or ""):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


class _NetworkStream(Protocol):
    """The part of httpcore's network stream that is used here."""

    def get_extra_info(self, info: str) -> object: ...


def _shut(stream: _NetworkStream) -> None:
    """End whatever another thread reads from a socket or writes to it."""
    found = stream.get_extra_info("socket")
    if isinstance(found, socket.socket):
        with suppress(OSError):  # closed already
            found.shutdown(socket.SHUT_RDWR)


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop has ended, and so has whoever waited in it
        loop.call_soon_threadsafe(event.set)


def _unframed(headers: httpx.Headers) -> list[tuple[str, str]]:
    """Return the headers without those that describe how the body was packed: it is unpacked now."""
    return [(name, value) for name, value in headers.multi_items() if name not in _FRAMING]
