"""What the sync and the async client share: options, building of requests, reading of results. No input or
output.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, TypeAlias, TypedDict, Unpack

from k3eval.errors import (
    BadRequestError,
    ConfigError,
    ContextOverflowError,
    ProtocolError,
)
from k3eval.jsontypes import JsonObject, JsonValue, as_int, as_object, read_object, write_json
from k3eval.messages import Message
from k3eval.meter.meter import Meter
from k3eval.meter.pricing import PriceRow
from k3eval.options import (
    EFFORTS,
    CachePolicy,
    ChatRequest,
    Effort,
    RetryPolicy,
    Routing,
    Timeouts,
    ToolChoice,
)
from k3eval.providers import provider_named
from k3eval.providers.base import Capabilities, Provider, is_k3_family
from k3eval.redact import redact, remember_secret
from k3eval.refs import ModelRef
from k3eval.results import Completion, Cost
from k3eval.tokens import LONGEST_TOKENS, TokenCount, count_locally
from k3eval.tools import AnyTool, ToolSpec, specs_of

if TYPE_CHECKING:
    import httpx

    from k3eval.meter.cache import PrefixCheck
    from k3eval.meter.context import CallContext

Tools: TypeAlias = Sequence[ToolSpec | AnyTool]


class ClientOptions(TypedDict, total=False):
    """Keyword options of a client."""

    base_url: str | None
    api_key: str | None
    """The host's key; taken from the provider's environment variable when not given."""
    meter: Meter | None
    """Shared by all clients of a job; an own one in memory when not given."""
    effort: Effort | None
    max_output: int | None
    """Cap on reasoning plus answer, for calls that give none."""
    timeouts: Timeouts | None
    headers: Mapping[str, str] | None
    retry: RetryPolicy | None
    cache: CachePolicy | None
    routing: Routing | None
    context: int | None
    """Context length of the model, where the price table does not know it."""


class LoopOptions(TypedDict, total=False):
    """Keyword options of each call of a tool loop."""

    tool_choice: ToolChoice | None
    """``auto``, ``none``, ``required``, or a tool's name."""
    max_output: int | None
    temperature: float | None
    """Not sent to K3 models, which fix it."""
    seed: int | None
    stop: Sequence[str]
    response_format: Mapping[str, JsonValue] | None
    extra: Mapping[str, JsonValue] | None
    """Members of the request body that have no option here."""


class CallOptions(LoopOptions, total=False):
    """Keyword options of one call."""

    tools: Tools


class BaseClient:
    """Options, request building and reading of results, for both clients."""

    def __init__(
        self,
        provider: str | Provider = "local",
        model: str = "kimi-k3",
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        meter: Meter | None = None,
        effort: Effort | None = None,
        max_output: int | None = None,
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        retry: RetryPolicy | None = None,
        cache: CachePolicy | None = None,
        routing: Routing | None = None,
        context: int | None = None,
    ) -> None:
        found = provider_named(provider, base_url) if isinstance(provider, str) else provider
        url = base_url or found.base_url
        if url is None or not url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must start with http:// or https://, not {url!r}")
        if effort is not None and effort not in EFFORTS:
            raise ConfigError(f"unknown effort {effort!r}; known: {', '.join(EFFORTS)}")
        key = api_key or next((os.environ[name] for name in found.key_env if os.environ.get(name)), None)
        if key is None and found.key_required:
            raise ConfigError(f"no key for {found.name}: set {found.key_env[0]} or pass api_key")
        if key is not None and (not key.isascii() or any(c.isspace() for c in key)):
            raise ConfigError(f"the key for {found.name} holds characters that no key has; copy it again")
        remember_secret(key)
        self.provider: Provider = found
        self.model = model
        self.base_url = url.rstrip("/")
        self.meter = Meter() if meter is None else meter
        self.timeouts = Timeouts() if timeouts is None else timeouts
        self.retry = RetryPolicy() if retry is None else retry
        self._effort = effort
        self._max_output = max_output
        self._cache = CachePolicy() if cache is None else cache
        self._routing = Routing() if routing is None else routing
        self._context = context
        self.key = key
        self.headers: dict[str, str] = {"user-agent": "k3eval", **(headers or {})}
        if key is not None:
            self.headers["authorization"] = f"Bearer {key}"

    @classmethod
    def from_ref(cls, ref: ModelRef, **options: Unpack[ClientOptions]) -> Self:
        """Return a client for a model named as on the command line; ``base_url`` wins over its own."""
        options.setdefault("base_url", ref.base_url)
        if options["base_url"] is None:
            options["base_url"] = ref.base_url
        return cls(ref.provider, ref.model, **options)

    def __repr__(self) -> str:
        return redact(f"{type(self).__name__}({self.provider.name}/{self.model} at {self.base_url})")

    def capabilities(self) -> Capabilities:
        """Return what is known of the model at this host, from the price table; nothing is sent."""
        row = self._row()
        k3 = is_k3_family(self.model)
        return Capabilities(
            context=self._context or (None if row is None else row.context),
            max_output=None if row is None else row.max_output,
            efforts=EFFORTS if k3 else (),
            tools=True if k3 else None,
            images=True if k3 else None,
            fixed_sampling=k3,
            price_row=None if row is None or not row.priced else row.label,
        )

    def estimate_cost(
        self, messages: Sequence[Message], *, tools: Tools = (), max_output: int | None = None
    ) -> Cost:
        """Return what a call could cost at most, before it is made: nothing cached, the whole output used.

        ``computed`` is that figure, ``ideal_cache`` the same with the whole prompt read from the cache; both
        ``None`` where no price is known.
        """
        row = self._row()
        cap = max_output or self._max_output or self.provider.default_max_output
        cap = cap or (None if row is None else row.max_output)
        if row is None or not row.priced or cap is None:
            return Cost(currency=self.provider.currency if row is None else row.currency)
        prompt = count_locally(messages, specs_of(tools)).upper_bound
        from k3eval.meter.usage import Usage
        from k3eval.meter.usage_wire import UsageReport

        cached = UsageReport(Usage(0, prompt, None, cap, None))
        return Cost(
            computed=row.worst_case(prompt, cap),
            ideal_cache=row.price(cached),
            currency=row.currency,
            price_row=row.label,
        )

    def _row(self) -> PriceRow | None:
        from urllib.parse import urlsplit

        host = self.provider.price_host or urlsplit(self.base_url).hostname or ""
        found = self.meter.prices.find(host, self.model, pinned=self._routing.only)
        if found is not None:
            return found
        rows = self.meter.prices.worst(host, self.model, pinned=self._routing.only)
        return max(rows, key=lambda row: (row.output or 0, row.input or 0), default=None)

    def request(
        self,
        messages: Sequence[Message],
        stream: bool,
        *,
        tools: Tools = (),
        tool_choice: ToolChoice | None = None,
        max_output: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        response_format: Mapping[str, JsonValue] | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> ChatRequest:
        """Gather one call's options, the client's own where the call gives none."""
        if isinstance(stop, str):
            raise ConfigError("stop must be a list of strings")
        for message in messages:
            if not isinstance(message, Message):
                raise ConfigError(f"messages must hold Message objects, not {type(message).__name__}")
        return ChatRequest(
            model=self.model,
            messages=messages,
            tools=specs_of(tools),
            tool_choice=tool_choice,
            max_output=self._max_output if max_output is None else max_output,
            temperature=temperature,
            seed=seed,
            stop=stop,
            response_format=response_format,
            extra={} if extra is None else extra,
            effort=self._effort,
            cache=self._cache,
            routing=self._routing,
            stream=stream,
        )

    def prepare(self, request: ChatRequest) -> tuple[httpx.Request, CallContext]:
        """Write a call down for the transport; refuses what cannot be sent or cannot fit."""
        import httpx

        from k3eval.meter.cache import write_body
        from k3eval.meter.context import CallContext
        from k3eval.meter.transport import CONTEXT

        body = self.provider.body(request, self.meter.notices)
        try:
            data, prefix = write_body(body)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the request cannot be written as JSON: {error}") from error
        check = self.meter.prefixes.check(prefix)
        self._guard(request, len(data), check)
        limits = self.timeouts
        context = CallContext(body=body, check=check, timeouts=limits)
        silence = limits.idle if request.stream else max(limits.idle, limits.first_token)
        return (
            httpx.Request(
                "POST",
                f"{self.base_url}/chat/completions",
                headers={
                    **self.headers,
                    **self.provider.headers(request),
                    "content-type": "application/json",
                    "accept": "text/event-stream" if request.stream else "application/json",
                    "accept-encoding": "identity",
                },
                content=data,
                extensions={"timeout": self._timeout(min(silence, limits.total)), CONTEXT: context},
            ),
            context,
        )

    def _timeout(self, read: float) -> dict[str, float | None]:
        connect = self.timeouts.connect
        return {"connect": connect, "read": read, "write": self.timeouts.idle, "pool": None}

    def _guard(self, request: ChatRequest, size: int, check: PrefixCheck) -> None:
        """Refuse a prompt that cannot fit the context, before it is paid for."""
        row = self._row()
        context = self._context or (None if row is None else row.context)
        if context is None or size < context:  # a token has at least one byte
            return
        known, rest = check.known_prompt
        if known:
            tokens = known + int(rest / LONGEST_TOKENS)
        else:
            tokens = count_locally(request.messages, request.tools).lower_bound
        if tokens > context:
            raise ContextOverflowError(
                f"the prompt has at least {tokens} tokens, {self.model} takes {context};"
                " shorten the conversation"
            )

    def completion_of(self, context: CallContext) -> Completion:
        """Return what the transport left in a call's context."""
        reply, timing = context.reply, context.timing
        if reply is None or timing is None or not context.attempts:
            raise ProtocolError("the transport gave no reply; it was not built for this client")
        last = context.attempts[-1]
        return Completion(
            message=reply.message,
            finish_reason=reply.finish_reason or "other",
            usage=last.usage,
            cost=last.cost,
            timing=timing,
            model=reply.model or self.model,
            host=reply.served_by or last.host,
            request_id=last.request_id,
            attempts=tuple(context.attempts),
            cache_miss_reason=last.cache_miss_reason,
            raw_finish_reason=reply.raw_finish_reason,
            raw=reply.raw,
        )

    def auto_instead(self, request: ChatRequest, error: BadRequestError) -> ChatRequest | None:
        """Return the request with a free tool choice, where a thinking model refuses a forced one."""
        from dataclasses import replace

        if request.tool_choice in (None, "auto", "none") or "thinking" not in error.message.lower():
            return None
        self.meter.notices.once(
            "tool_choice",
            self.model,
            f"{self.model} refuses a forced tool choice while thinking; auto was sent",
        )
        return replace(request, tool_choice="auto")

    def plain(self, method: str, path: str, body: JsonObject | None = None) -> httpx.Request:
        """Return a request to another endpoint than chat."""
        import httpx

        return httpx.Request(
            method,
            f"{self.base_url}{path}",
            headers={**self.headers, "content-type": "application/json"},
            content=None if body is None else write_json(body),
            extensions={"timeout": self._timeout(60.0)},
        )

    def read_plain(self, response: httpx.Response, body: bytes) -> JsonObject:
        """Read its reply; raises the host's error."""
        if response.status_code >= 300:
            raise self.provider.error(
                response.status_code,
                response.headers,
                body,
                request=f"{response.request.method} {path_of(response)}",
            )
        try:
            return read_object(body)
        except ValueError as error:
            raise ProtocolError(
                f"{self.provider.name} gave no JSON for {path_of(response)}: {error}"
            ) from error

    def estimate_body(self, messages: Sequence[Message], tools: Tools) -> JsonObject:
        """Return the body with which the host's token counter is asked."""
        body = self.provider.body(
            ChatRequest(model=self.model, messages=messages, tools=specs_of(tools)), self.meter.notices
        )
        return {key: body[key] for key in ("model", "messages", "tools") if key in body}

    def read_estimate(self, data: JsonObject) -> TokenCount:
        """Read its answer."""
        total = as_int((as_object(data.get("data")) or {}).get("total_tokens"))
        if total is None:
            raise ProtocolError(f"{self.provider.name} gave no token estimate")
        return TokenCount(total, "host", 0.0)

    def receipt(self, request_id: str) -> httpx.Request:
        """Return the request for the charge of one call; ``ConfigError`` where the host cannot say."""
        from urllib.parse import quote

        if self.provider.receipt_path is None:
            raise ConfigError(f"{self.provider.name} does not say what a single call was charged")
        return self.plain("GET", f"{self.provider.receipt_path}?id={quote(request_id, safe='')}")

    def balance_path(self) -> str:
        """Return where the account's balance stands; ``ConfigError`` where the host has none."""
        if self.provider.balance_path is None:
            raise ConfigError(f"{self.provider.name} has no balance to ask for")
        return self.provider.balance_path


def path_of(response: httpx.Response) -> str:
    """Return host and path of the request that a response answers."""
    return f"{response.request.url.host}{response.request.url.path}"
