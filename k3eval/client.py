"""The typed clients: ``K3`` and ``AsyncK3``. Chat, stream, tool loop, and what there is to ask of a host.

One client may be shared by all threads. Both stand on the metered transport; what is not input or output is
in ``BaseClient``, so the two differ in nothing but waiting.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack, cast

from k3eval.base_client import BaseClient, CallOptions, ClientOptions, LoopOptions, Tools
from k3eval.errors import BadRequestError, K3EvalError, ProtocolError, TransportError
from k3eval.events import StreamEvent
from k3eval.jsontypes import JsonValue
from k3eval.messages import Message
from k3eval.providers.base import Balance, ModelInfo, Provider
from k3eval.results import Completion
from k3eval.stream import StreamDecoder
from k3eval.tokens import TokenCount, count_locally
from k3eval.tools import AnyTool, run_call, run_call_async, specs_of

if TYPE_CHECKING:
    import httpx

    from k3eval.meter.context import CallContext
    from k3eval.options import ChatRequest


@dataclass(frozen=True, slots=True)
class ToolRun:
    """What a tool loop gave: the last answer, the whole conversation, and every call on the way."""

    completion: Completion
    messages: tuple[Message, ...]
    completions: tuple[Completion, ...]
    stopped: bool
    """Whether the turn limit ended the loop before the model did."""


class K3(BaseClient):
    """A client for threads. Use as a context manager, or call ``close``."""

    def __init__(
        self,
        provider: str | Provider = "local",
        model: str = "kimi-k3",
        *,
        transport: httpx.BaseTransport | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(provider, model, **options)
        from k3eval.meter.transport import MeteredTransport, plain_transport

        self._transport = MeteredTransport(
            self.provider,
            self.meter,
            inner=plain_transport(self.base_url) if transport is None else transport,
            retry=self.retry,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. From another thread this aborts the calls in flight."""
        self._transport.close()

    def chat(self, messages: Sequence[Message], **options: Unpack[CallOptions]) -> Completion:
        """Send a conversation and return the answer.

        Raises ``BudgetExceededError`` before sending, ``ApiError`` and its kin for what the host refuses,
        ``TransportError`` where no reply came.
        """
        request = self.request(messages, False, **options)
        try:
            return self._chat(request)
        except BadRequestError as error:
            changed = self.auto_instead(request, error)
            if changed is None:
                raise
            return self._chat(changed)

    def stream(self, messages: Sequence[Message], **options: Unpack[CallOptions]) -> Stream:
        """Send a conversation and return the answer's events as they arrive. Use as a context manager."""
        request = self.request(messages, True, **options)
        try:
            return self._stream(request)
        except BadRequestError as error:
            changed = self.auto_instead(request, error)
            if changed is None:
                raise
            return self._stream(changed)

    def run_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[AnyTool],
        *,
        max_turns: int = 20,
        on_turn: Callable[[Completion], None] | None = None,
        **options: Unpack[LoopOptions],
    ) -> ToolRun:
        """Let the model call functions until it answers without a call, or for ``max_turns`` turns.

        A call that does not parse and a tool that fails are told to the model, not raised.
        """
        table = {item.spec.name: item for item in tools}
        history, done = list(messages), []
        for _ in range(max_turns):
            completion = self.chat(history, tools=tools, **options)
            done.append(completion)
            history.append(completion.message)
            if on_turn is not None:
                on_turn(completion)
            if not completion.message.tool_calls:
                return ToolRun(completion, tuple(history), tuple(done), False)
            history += [
                Message.tool(call.id, run_call(table, call), name=call.name)
                for call in completion.message.tool_calls
            ]
        return ToolRun(done[-1], tuple(history), tuple(done), True)

    def count_tokens(self, messages: Sequence[Message], *, tools: Tools = ()) -> TokenCount:
        """Count a prompt: by the host where it has an endpoint for that (free), else locally."""
        if self.provider.estimate_path is None:
            return count_locally(messages, specs_of(tools))
        request = self.plain("POST", self.provider.estimate_path, self.estimate_body(messages, tools))
        try:
            return self.read_estimate(self._ask(request))
        except BadRequestError as error:
            if error.status != 404:
                raise
            return count_locally(messages, specs_of(tools))  # an older server without that endpoint

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the models that the host offers."""
        return self.provider.read_models(self._ask(self.plain("GET", self.provider.models_path)))

    def balance(self) -> Balance:
        """Return the money left in the account; ``ConfigError`` where the host has no such endpoint."""
        return self.provider.read_balance(self._ask(self.plain("GET", self.balance_path())))

    def charged(self, request_id: str, *, wait_s: float = 15.0) -> Decimal | None:
        """Return what the host charged for one call, also for a stream that broke off (OpenRouter only).

        The host needs a moment to know: asked again for ``wait_s`` seconds at most, ``None`` after that.
        """
        last = time.monotonic() + wait_s
        while True:
            try:
                return self.provider.read_receipt(self._ask(self.receipt(request_id)))
            except BadRequestError as error:
                if error.status != 404:
                    raise
            if time.monotonic() >= last:
                return None
            time.sleep(min(1.0, wait_s / 10))

    def _chat(self, request: ChatRequest) -> Completion:
        prepared, context = self.prepare(request)
        self._transport.handle_request(prepared)
        return self.completion_of(context)

    def _stream(self, request: ChatRequest) -> Stream:
        prepared, context = self.prepare(request)
        return Stream(self, self._transport.handle_request(prepared), context)

    def _ask(self, request: httpx.Request) -> dict[str, JsonValue]:
        import httpx

        try:
            response = self._transport.handle_request(request)
            response.request = request
            try:
                return self.read_plain(response, response.read())
            finally:
                response.close()
        except httpx.HTTPError as error:
            raise TransportError(f"no reply from {request.url.host}: {error}") from error


class AsyncK3(BaseClient):
    """A client for asyncio. Use as an async context manager, or await ``close``."""

    def __init__(
        self,
        provider: str | Provider = "local",
        model: str = "kimi-k3",
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(provider, model, **options)
        from k3eval.meter.transport import AsyncMeteredTransport, plain_async_transport

        self._transport = AsyncMeteredTransport(
            self.provider,
            self.meter,
            inner=plain_async_transport(self.base_url) if transport is None else transport,
            retry=self.retry,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def chat(self, messages: Sequence[Message], **options: Unpack[CallOptions]) -> Completion:
        """Like ``K3.chat``. Cancelling the task ends the call; the ledger then keeps its worst case."""
        request = self.request(messages, False, **options)
        try:
            return await self._chat(request)
        except BadRequestError as error:
            changed = self.auto_instead(request, error)
            if changed is None:
                raise
            return await self._chat(changed)

    async def stream(self, messages: Sequence[Message], **options: Unpack[CallOptions]) -> AsyncStream:
        """Like ``K3.stream``: ``async with await client.stream(...) as stream``."""
        request = self.request(messages, True, **options)
        try:
            return await self._stream(request)
        except BadRequestError as error:
            changed = self.auto_instead(request, error)
            if changed is None:
                raise
            return await self._stream(changed)

    async def run_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[AnyTool],
        *,
        max_turns: int = 20,
        on_turn: Callable[[Completion], None] | None = None,
        **options: Unpack[LoopOptions],
    ) -> ToolRun:
        """Like ``K3.run_tools``; tools may be coroutines."""
        table = {item.spec.name: item for item in tools}
        history, done = list(messages), []
        for _ in range(max_turns):
            completion = await self.chat(history, tools=tools, **options)
            done.append(completion)
            history.append(completion.message)
            if on_turn is not None:
                on_turn(completion)
            if not completion.message.tool_calls:
                return ToolRun(completion, tuple(history), tuple(done), False)
            for call in completion.message.tool_calls:
                text = await run_call_async(table, call)
                history.append(Message.tool(call.id, text, name=call.name))
        return ToolRun(done[-1], tuple(history), tuple(done), True)

    async def count_tokens(self, messages: Sequence[Message], *, tools: Tools = ()) -> TokenCount:
        """Like ``K3.count_tokens``."""
        if self.provider.estimate_path is None:
            return count_locally(messages, specs_of(tools))
        request = self.plain("POST", self.provider.estimate_path, self.estimate_body(messages, tools))
        try:
            return self.read_estimate(await self._ask(request))
        except BadRequestError as error:
            if error.status != 404:
                raise
            return count_locally(messages, specs_of(tools))

    async def models(self) -> tuple[ModelInfo, ...]:
        """Like ``K3.models``."""
        return self.provider.read_models(await self._ask(self.plain("GET", self.provider.models_path)))

    async def balance(self) -> Balance:
        """Like ``K3.balance``."""
        return self.provider.read_balance(await self._ask(self.plain("GET", self.balance_path())))

    async def charged(self, request_id: str, *, wait_s: float = 15.0) -> Decimal | None:
        """Like ``K3.charged``."""
        import asyncio

        last = time.monotonic() + wait_s
        while True:
            try:
                return self.provider.read_receipt(await self._ask(self.receipt(request_id)))
            except BadRequestError as error:
                if error.status != 404:
                    raise
            if time.monotonic() >= last:
                return None
            await asyncio.sleep(min(1.0, wait_s / 10))

    async def _chat(self, request: ChatRequest) -> Completion:
        prepared, context = self.prepare(request)
        await self._transport.handle_async_request(prepared)
        return self.completion_of(context)

    async def _stream(self, request: ChatRequest) -> AsyncStream:
        prepared, context = self.prepare(request)
        return AsyncStream(self, await self._transport.handle_async_request(prepared), context)

    async def _ask(self, request: httpx.Request) -> dict[str, JsonValue]:
        import httpx

        try:
            response = await self._transport.handle_async_request(request)
            response.request = request
            try:
                return self.read_plain(response, await response.aread())
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise TransportError(f"no reply from {request.url.host}: {error}") from error


class Stream:
    """A reply that is being streamed. Iterate over it for events; ``completion()`` gives the whole."""

    def __init__(self, client: BaseClient, response: httpx.Response, context: CallContext) -> None:
        self._client = client
        self._response = response
        self._context = context
        self._error: K3EvalError | None = None
        self._events = self._run()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[StreamEvent]:
        return self._events

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def completion(self) -> Completion:
        """Read what is left and return the whole reply."""
        for _ in self._events:
            pass
        if self._error is not None:
            raise self._error
        return self._client.completion_of(self._context)

    def close(self) -> None:
        """End the stream. Closing it early leaves its cost unknown: the ledger keeps the worst case."""
        self._response.close()

    def _run(self) -> Iterator[StreamEvent]:
        decoder = self._context.observer
        if not isinstance(decoder, StreamDecoder):
            raise ProtocolError("the transport replaced the stream's decoder")
        take = decoder.take
        try:
            for _ in cast("httpx.SyncByteStream", self._response.stream):
                yield from take()
            yield from take()
        except K3EvalError as error:
            self._error = error
            raise


class AsyncStream:
    """Like ``Stream``, for ``async for``."""

    def __init__(self, client: BaseClient, response: httpx.Response, context: CallContext) -> None:
        self._client = client
        self._response = response
        self._context = context
        self._error: K3EvalError | None = None
        self._events = self._run()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self._events

    async def __anext__(self) -> StreamEvent:
        return await anext(self._events)

    async def completion(self) -> Completion:
        """Read what is left and return the whole reply."""
        async for _ in self._events:
            pass
        if self._error is not None:
            raise self._error
        return self._client.completion_of(self._context)

    async def close(self) -> None:
        """End the stream."""
        await self._response.aclose()

    async def _run(self) -> AsyncIterator[StreamEvent]:
        decoder = self._context.observer
        if not isinstance(decoder, StreamDecoder):
            raise ProtocolError("the transport replaced the stream's decoder")
        try:
            async for _ in cast("httpx.AsyncByteStream", self._response.stream):
                for event in decoder.take():
                    yield event
            for event in decoder.take():
                yield event
        except K3EvalError as error:
            self._error = error
            raise
