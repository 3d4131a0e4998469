"""The HTTP application: routes, keys, size limits, error envelopes, the two forms of a chat reply.

Everything here runs on the event loop; rendering and grammars go to a thread, the model has its own.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from itertools import count

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from k3eval_local.protocol.chaos import GATEWAY_PAGE, Drawn, rewrite_reply
from k3eval_local.protocol.dialects import OpenRouterDialect
from k3eval_local.protocol.dialects.base import Frames
from k3eval_local.protocol.errors import ErrorKind, ProtocolError
from k3eval_local.protocol.messages import Conversation, JsonObject
from k3eval_local.protocol.reply import ModelCard, ReplyHead, ReplyTail
from k3eval_local.protocol.request import ChatRequest, check_unique, read_messages, read_tools
from k3eval_local.protocol.wire import CountBody, parse_body
from k3eval_local.server.account import Account
from k3eval_local.server.generate import ChoiceEnd, Generator, Item, Job, Piece
from k3eval_local.server.metrics import Metrics
from k3eval_local.server.openapi import describe
from k3eval_local.server.settings import ServerSettings
from k3eval_local.server.streaming import CutReply, EventStream, Frame, TextFrames, watch

_log = logging.getLogger(__name__)

_LARGE_BODY = 256 * 1024
"""Bytes from which on reading a body would hold up other streams and goes to a thread."""
FAULT_HEADER = "x-k3eval-fault"
"""Names the fault in a reply that has one, so that a test knows what it is looking at."""


class ChatServer:
    """The handlers of one server."""

    def __init__(self, settings: ServerSettings, generator: Generator) -> None:
        self.settings = settings
        self.dialect = settings.dialect
        self.generator = generator
        self.account = Account(settings)
        self.metrics = Metrics(generator.engine)
        self._numbers = count()
        self._jobs: set[Job] = set()
        self._created = int(time.time())

    def cancel_all(self) -> None:
        """Stop every generation: the server is going down."""
        for job in list(self._jobs):
            job.cancel()

    # Chat completions

    async def chat(self, request: Request) -> ASGIApp:
        """``POST /v1/chat/completions``."""
        body = await self._body(request)
        if len(body) > _LARGE_BODY:
            chat = await asyncio.to_thread(self.dialect.read_bytes, body)
        else:
            chat = self.dialect.read_bytes(body)
        self._check_model(chat.model)
        drawn = self._draw(stream=chat.stream)
        if drawn is not None and (refusal := self._refusal(drawn)) is not None:
            return refusal
        plan = await asyncio.to_thread(self.generator.prepare, chat, clamp=self.dialect.clamp_output)
        self.account.admit(plan.prompt.prompt_tokens + plan.max_tokens)
        head = ReplyHead(self.dialect.new_id(), int(time.time()), chat)
        try:
            job = self.generator.start(plan, head.id)
        except ProtocolError:
            self.account.release()
            raise
        self._jobs.add(job)
        self.metrics.in_flight.inc()
        if chat.stream:
            return self._stream(head, job, drawn)
        return await self._whole(request, head, job, drawn)

    def _draw(self, *, stream: bool) -> Drawn | None:
        if self.settings.chaos is None:
            return None
        drawn = self.settings.chaos.draw(next(self._numbers), stream=stream)
        if drawn is not None:
            self.metrics.faults.labels(drawn.name).inc()
            _log.info("fault %s", drawn.name)
        return drawn

    def _refusal(self, drawn: Drawn) -> Response | None:
        if drawn.name == "html_504":
            return Response(GATEWAY_PAGE, 504, {FAULT_HEADER: drawn.name}, media_type="text/html")
        error = drawn.refusal()
        return None if error is None else self.error(error, {FAULT_HEADER: drawn.name})

    def _stream(self, head: ReplyHead, job: Job, drawn: Drawn | None) -> EventStream:
        fault = {FAULT_HEADER: drawn.name} if drawn is not None else {}

        def gone() -> None:
            if job in self._jobs:
                self.metrics.disconnects.inc()
            job.cancel()

        return EventStream(
            self._frames(head, job, drawn),
            headers=self.dialect.headers() | fault,
            on_gone=gone,
            on_end=lambda: self._end(job),
            keep_alive=self.dialect.keep_alive,
            keep_alive_s=self.settings.keep_alive_s,
            drawn=drawn,
            silence_s=self.settings.silence_s,
        )

    async def _frames(
        self, head: ReplyHead, job: Job, drawn: Drawn | None
    ) -> AsyncGenerator[Sequence[Frame]]:
        frames = self.dialect.frames(head)
        plain = drawn is None and not head.request.continuous_usage
        text = TextFrames(frames) if plain else None
        yield frames.begin()
        made = 0
        try:
            async with aclosing(job.items()) as batches:
                async for items in batches:
                    shaped: list[Frame] = []
                    for item in items:
                        if text is not None and isinstance(item, Piece):
                            shaped += text.frames(item.choice, item.event, item.logprobs)
                            continue
                        fresh = self._shaped(frames, job, item)
                        if _dropped_here(drawn, made, len(fresh), item):
                            yield shaped
                            raise ProtocolError(
                                ErrorKind.BAD_GATEWAY, "injected fault: the upstream dropped the stream"
                            )
                        made += len(fresh)
                        shaped += fresh
                    yield shaped
        except ProtocolError as error:
            yield self.dialect.error_frames(head, error)
            return
        yield frames.end(self._tail(head, job))

    def _shaped(self, frames: Frames, job: Job, item: Item) -> list[JsonObject]:
        if isinstance(item, ChoiceEnd):
            choice = item.choice
            return frames.finish(choice.index, choice.finish, choice.stopped_by, item.counts)
        shaped = frames.event(item.choice, item.event, item.logprobs)
        if job.plan.request.continuous_usage:
            prompt = job.plan.prompt.prompt_tokens
            for frame in shaped:
                frame["usage"] = {
                    "prompt_tokens": prompt,
                    "completion_tokens": item.tokens,
                    "total_tokens": prompt + item.tokens,
                }
        return shaped

    async def _whole(self, request: Request, head: ReplyHead, job: Job, drawn: Drawn | None) -> ASGIApp:
        watcher = asyncio.create_task(watch(request.receive, job.cancel))
        try:
            async for _ in job.items():
                pass
            tail = self._tail(head, job)
        except ProtocolError:
            if watcher.done():
                self.metrics.disconnects.inc()
            raise
        finally:
            watcher.cancel()
            self._end(job)
        for choice in job.choices:
            choice.name_calls(self.dialect.call_id, head.request.earlier_calls)
        reply = self.dialect.completion(head, job.choices, tail)
        headers = self.dialect.headers(head.request, tail)
        if drawn is None:
            return JSONResponse(reply, headers=headers)
        return await self._faulty_reply(drawn, reply, headers | {FAULT_HEADER: drawn.name})

    async def _faulty_reply(self, drawn: Drawn, reply: JsonObject, headers: dict[str, str]) -> ASGIApp:
        error = self.dialect.error(ProtocolError(ErrorKind.BAD_GATEWAY, "injected fault: upstream error"))
        if drawn.name == "silence":
            await asyncio.sleep(self.settings.silence_s)
        faulty = rewrite_reply(drawn, reply, error.body)
        if drawn.name == "cut_reply":
            return CutReply(json.dumps(faulty).encode(), drawn.fraction)
        return JSONResponse(faulty, headers=headers)

    def _tail(self, head: ReplyHead, job: Job) -> ReplyTail:
        counts = job.counts
        row = self.dialect.price(head.request)
        cost = row.cost(counts, write_1h=head.request.write_1h) if row is not None else None
        self.account.charge(cost)
        self.metrics.observe(counts, job.results)
        tail = ReplyTail(counts, cost, job.timings if head.request.timings else None)
        if isinstance(self.dialect, OpenRouterDialect):
            timings = job.timings
            record = self.dialect.generation(head, tail, timings, job.choices[0].finish)
            self.account.remember(head.id, record)
        return tail

    def _end(self, job: Job) -> None:
        if job in self._jobs:
            job.cancel()
            self._jobs.discard(job)
            self.metrics.in_flight.dec()
            self.account.release()

    # Other endpoints

    async def count_tokens(self, request: Request) -> Response:
        """``POST /v1/tokenizers/estimate-token-count``: what ``usage.prompt_tokens`` would say."""
        body = parse_body(CountBody, await self._body(request))
        self._check_model(body.model)
        tools = read_tools(body.tools or ())
        conversation = Conversation(messages=read_messages(body.messages), tools=tools)
        check_unique(conversation.every_tool)
        chat = ChatRequest(body.model, conversation)
        prompt = await asyncio.to_thread(self.generator.render, chat)
        return JSONResponse(_wrapped({"total_tokens": prompt.prompt_tokens}), headers=self.dialect.headers())

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return JSONResponse(self.dialect.models([self._card(name) for name in self.settings.served_names]))

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``."""
        name = request.path_params["model"]
        self._check_model(name)
        listed = self.dialect.models([self._card(name)])["data"]
        return JSONResponse(listed[0] if isinstance(listed, list) else listed)

    async def balance(self, request: Request) -> Response:
        """``GET /v1/users/me/balance``."""
        left = float(self.account.left)
        data: JsonObject = {"available_balance": left, "voucher_balance": 0.0, "cash_balance": left}
        return JSONResponse(_wrapped(data), headers=self.dialect.headers())

    async def endpoints(self, request: Request) -> Response:
        """OpenRouter: ``GET /models/{author}/{slug}/endpoints``."""
        name = f"{request.path_params['author']}/{request.path_params['slug']}"
        self._check_model(name)
        if not isinstance(self.dialect, OpenRouterDialect):
            raise TypeError("only the openrouter dialect has this route")
        return JSONResponse(self.dialect.endpoints(self._card(name)))

    async def generation(self, request: Request) -> Response:
        """OpenRouter: ``GET /generation?id=``."""
        return JSONResponse({"data": self.account.recall(request.query_params.get("id", ""))})

    async def key(self, request: Request) -> Response:
        """OpenRouter: ``GET /key``."""
        spent = float(self.account.spent)
        data: JsonObject = {
            "label": "k3eval local",
            "limit": float(self.account.credit),
            "limit_remaining": float(self.account.left),
            "usage": spent,
            "usage_daily": spent,
            "usage_weekly": spent,
            "usage_monthly": spent,
            "byok_usage": 0.0,
            "is_free_tier": False,
        }
        return JSONResponse({"data": data})

    async def credits(self, request: Request) -> Response:
        """OpenRouter: ``GET /credits``."""
        data = {"total_credits": float(self.account.credit), "total_usage": float(self.account.spent)}
        return JSONResponse({"data": data})

    async def health(self, request: Request) -> Response:
        """``GET /health``."""
        return JSONResponse({"status": "ok", "model": self.settings.model, "weights": self.settings.weights})

    async def show_metrics(self, request: Request) -> Response:
        """``GET /metrics``."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    # Shared

    def error(self, error: ProtocolError, headers: dict[str, str] | None = None) -> Response:
        """A refusal in the dialect's envelope."""
        reply = self.dialect.error(error)
        every = self.dialect.headers() | dict(reply.headers) | (headers or {})
        return JSONResponse(reply.body, reply.status, every)

    def check_key(self, request: Request) -> None:
        """Raise ProtocolError unless the request carries the server's key, if there is one."""
        expected = self.settings.key
        if expected is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise ProtocolError(ErrorKind.KEY_MISSING, "a key is needed: send 'Authorization: Bearer KEY'")
        if not hmac.compare_digest(given.strip().encode(), expected.encode()):
            raise ProtocolError(
                ErrorKind.KEY_WRONG, "the key is not the one that this server was started with"
            )

    def _check_model(self, name: str) -> None:
        plain = name.lower().partition(":")[0]
        if plain not in {served.lower() for served in self.settings.served_names}:
            known = ", ".join(self.settings.served_names)
            raise ProtocolError(
                ErrorKind.UNKNOWN_MODEL, f"no model is called {name!r} here; there is {known}", "model"
            )

    def _card(self, name: str) -> ModelCard:
        settings = self.settings
        return ModelCard(
            name, self._created, settings.context_length, settings.context_length, settings.weights
        )

    async def _body(self, request: Request) -> bytes:
        most = self.settings.max_body_bytes
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= most:
                parts.append(part)
            elif size > 8 * most:  # read on for a while, so that a client that sends first sees the refusal
                break
        if size > most:
            raise ProtocolError(
                ErrorKind.TOO_LARGE,
                f"the request body is above {most} bytes; total message size exceeds limit",
            )
        return b"".join(parts)


Handler = Callable[[Request], Awaitable[ASGIApp]]


def build_app(server: ChatServer) -> Starlette:
    """The application, with every route of the dialect under ``/v1`` and, for openrouter, ``/api/v1``."""
    shared: dict[str, tuple[str, Handler, str]] = {
        "/chat/completions": ("POST", server.chat, "Create a chat completion"),
        "/models": ("GET", server.models, "List the served models"),
        "/tokenizers/estimate-token-count": ("POST", server.count_tokens, "Count a prompt's tokens"),
        "/users/me/balance": ("GET", server.balance, "The account's balance"),
    }
    if isinstance(server.dialect, OpenRouterDialect):
        shared |= {
            "/models/{author}/{slug}/endpoints": ("GET", server.endpoints, "The endpoints behind a model"),
            "/generation": ("GET", server.generation, "What a generation cost"),
            "/key": ("GET", server.key, "The key's limits"),
            "/credits": ("GET", server.credits, "The account's credits"),
        }
    shared["/models/{model:path}"] = ("GET", server.model, "One served model")
    prefixes = ("/v1", "/api/v1") if isinstance(server.dialect, OpenRouterDialect) else ("/v1",)
    guarded = {f"{prefix}{path}": entry for prefix in prefixes for path, entry in shared.items()}
    public: dict[str, tuple[str, Handler, str]] = {
        "/health": ("GET", server.health, "Whether the server answers"),
        "/metrics": ("GET", server.show_metrics, "Prometheus metrics"),
    }
    document = describe(
        server.dialect,
        {
            path.replace(":path", ""): (entry[0].lower(), entry[2])
            for path, entry in (guarded | public).items()
        },
    )

    async def openapi(request: Request) -> Response:
        return JSONResponse(document)

    routes = [
        Route(path, _Endpoint(server, entry[1], key=True), methods=[entry[0]])
        for path, entry in guarded.items()
    ]
    routes += [
        Route(path, _Endpoint(server, entry[1], key=False), methods=[entry[0]])
        for path, entry in public.items()
    ]
    routes.append(Route("/openapi.json", openapi, methods=["GET"]))

    async def refused(request: Request, error: Exception) -> Response:
        wrong_method = isinstance(error, HTTPException) and error.status_code == 405
        kind = ErrorKind.WRONG_METHOD if wrong_method else ErrorKind.UNKNOWN_PATH
        return server.error(ProtocolError(kind, f"{request.method} {request.url.path} is not served here"))

    async def failed(request: Request, error: Exception) -> Response:
        return server.error(ProtocolError(ErrorKind.SERVER, f"internal error: {type(error).__name__}"))

    app = Starlette(routes=routes, exception_handlers={404: refused, 405: refused, Exception: failed})
    app.add_middleware(_Counted, server=server)
    return app


class _Endpoint:
    """A handler as an ASGI app: key check, error envelopes."""

    def __init__(self, server: ChatServer, handler: Handler, *, key: bool) -> None:
        self._server = server
        self._handler = handler
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if self._key:
                self._server.check_key(request)
            response = await self._handler(request)
        except ProtocolError as error:
            response = self._server.error(error)
        except ClientDisconnect:
            self._server.metrics.disconnects.inc()
            return
        except asyncio.CancelledError:  # the server stops, and this one has waited too long
            response = self._server.error(ProtocolError(ErrorKind.UNAVAILABLE, "the server is stopping"))
        with suppress(asyncio.CancelledError):
            await response(scope, receive, send)


class _Counted:
    """Counts requests by route and status."""

    def __init__(self, app: ASGIApp, server: ChatServer) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = route.path if isinstance(route, Route) else "other"
                self._server.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting_send)


def _dropped_here(drawn: Drawn | None, made: int, fresh: int, item: Item) -> bool:
    """Whether the fault strikes among the ``fresh`` frames of ``item``, after ``made`` earlier ones."""
    if drawn is None or drawn.name != "error_in_200" or not fresh:
        return False
    return made < drawn.position <= made + fresh or isinstance(item, ChoiceEnd)


def _wrapped(data: JsonObject) -> JsonObject:
    return {"code": 0, "data": data, "scode": "0x0", "status": True}
