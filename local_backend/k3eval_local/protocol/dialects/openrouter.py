"""OpenRouter in front of moonshotai/kimi-k3 (provider-facts section 3): routing, cost, keep-alive comments.

Every delta repeats the role; reasoning comes twice (``reasoning`` and ``reasoning_details``); the usage chunk
is always last and has two real forms; errors carry a numeric code and ``metadata.error_type``.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

from k3eval_local.protocol.dialects.base import (
    Dialect,
    ErrorReply,
    Frames,
    read_effort,
    refuse_unless,
    usage_json,
    with_timings,
)
from k3eval_local.protocol.errors import ErrorKind, ProtocolError
from k3eval_local.protocol.messages import Conversation, JsonObject
from k3eval_local.protocol.options import EFFORTS
from k3eval_local.protocol.prices import OPENROUTER_HOSTS, OPENROUTER_TIERS, HostRow, PriceRow
from k3eval_local.protocol.reply import (
    Counts,
    FinishReason,
    ModelCard,
    ReplyChoice,
    ReplyHead,
    ReplyTail,
    Timings,
    TokenLogprob,
)
from k3eval_local.protocol.request import ChatRequest
from k3eval_local.protocol.wire import ChatBody, WireModel

CANONICAL_DATE = "-20260715"
"""Suffix of the dated slug that the terminal chunk may carry."""

_EFFORT: Mapping[str, str] = {"minimal": "low", "medium": "high", "xhigh": "max"}
"""The router's finer effort words, mapped to the nearest one that K3 has."""

_ERRORS: Mapping[ErrorKind, tuple[int, str]] = {
    ErrorKind.KEY_MISSING: (401, "authentication"),
    ErrorKind.KEY_WRONG: (401, "authentication"),
    ErrorKind.UNKNOWN_PATH: (404, "not_found"),
    ErrorKind.NO_ENDPOINT: (404, "not_found"),
    ErrorKind.NOT_FOUND: (404, "not_found"),
    ErrorKind.WRONG_METHOD: (405, "invalid_request"),
    ErrorKind.TOO_LARGE: (413, "payload_too_large"),
    ErrorKind.CONTEXT: (400, "context_length_exceeded"),
    ErrorKind.RATE: (429, "rate_limit_exceeded"),
    ErrorKind.CONCURRENCY: (429, "rate_limit_exceeded"),
    ErrorKind.QUOTA: (402, "payment_required"),
    ErrorKind.BUDGET_IN_USE: (402, "payment_required"),
    ErrorKind.WRAPPED_QUOTA: (429, "rate_limit_exceeded"),
    ErrorKind.OVERLOADED: (529, "provider_overloaded"),
    ErrorKind.SERVER: (500, "server"),
    ErrorKind.BAD_GATEWAY: (502, "provider_unavailable"),
    ErrorKind.UNAVAILABLE: (503, "provider_unavailable"),
    ErrorKind.TIMEOUT: (504, "timeout"),
}
_BAD_REQUEST = (400, "invalid_request")


class ProviderBody(WireModel):
    """``provider``: which endpoints may serve."""

    order: list[str] | None = None
    only: list[str] | None = None
    ignore: list[str] | None = None
    allow_fallbacks: bool | None = None
    quantizations: list[str] | None = None


class ReasoningBody(WireModel):
    """``reasoning``."""

    effort: str | None = None
    max_tokens: int | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class OpenRouterBody(ChatBody):
    """OpenRouter's additions to the request."""

    provider: ProviderBody | None = None
    reasoning: ReasoningBody | None = None
    include_reasoning: bool | None = None
    repetition_penalty: float | None = None


class OpenRouterDialect(Dialect[OpenRouterBody]):
    """``--dialect openrouter``."""

    name = "openrouter"
    aliases = ("moonshotai/kimi-k3", f"moonshotai/kimi-k3{CANONICAL_DATE}")
    tiers = OPENROUTER_TIERS
    keep_alive = b": OPENROUTER PROCESSING\n\n"
    most_stops = 4
    body = OpenRouterBody

    def check(self, body: OpenRouterBody) -> None:
        """Refuse sampling that the engine does not have."""
        refuse_unless(body.presence_penalty, 0, "presence_penalty")
        refuse_unless(body.frequency_penalty, 0, "frequency_penalty")
        refuse_unless(body.repetition_penalty, 1, "repetition_penalty")

    def thinking(self, body: OpenRouterBody) -> tuple[bool, str | None]:
        """``reasoning`` or ``reasoning_effort``; the effort ``none`` and ``enabled: false`` switch it off."""
        reasoning = body.reasoning or ReasoningBody()
        effort = reasoning.effort or body.reasoning_effort
        if effort == "none" or reasoning.enabled is False:
            return False, None
        return True, read_effort(_EFFORT.get(effort, effort) if effort is not None else None)

    def request(self, body: OpenRouterBody, conversation: Conversation) -> ChatRequest:
        """Chooses the endpoint; usage always comes."""
        request = super().request(body, conversation)
        host = choose_host(body.provider or ProviderBody(), request.max_tokens)
        excluded = bool(body.reasoning and body.reasoning.exclude) or body.include_reasoning is False
        return replace(request, include_usage=True, host=host.tag, show_reasoning=not excluded)

    def new_id(self) -> str:
        """``gen-``, Unix seconds and 20 letters and digits."""
        alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
        return f"gen-{int(time.time())}-{''.join(secrets.choice(alphabet) for _ in range(20))}"

    def call_id(self, name: str, index: int, earlier: int) -> str:
        """``NAME:N``, the host's own form."""
        return f"{name}:{earlier + index}"

    def price(self, request: ChatRequest) -> PriceRow | None:
        """The served endpoint's row."""
        return host_of(request).price if self.options.prices else None

    def completion(self, head: ReplyHead, choices: Sequence[ReplyChoice], tail: ReplyTail) -> JsonObject:
        """Adds ``provider``."""
        return super().completion(head, choices, tail) | {"provider": host_of(head.request).provider}

    def choice(self, head: ReplyHead, choice: ReplyChoice) -> JsonObject:
        """Adds the host's own finish reason."""
        return {"logprobs": None} | super().choice(head, choice) | {"native_finish_reason": choice.finish}

    def message(self, head: ReplyHead, choice: ReplyChoice) -> JsonObject:
        """Reasoning as text and as details."""
        shown = choice.reasoning if head.request.show_reasoning and choice.reasoning else None
        message: JsonObject = {
            "role": "assistant",
            "content": choice.content or (None if choice.calls else ""),
            "refusal": None,
            "reasoning": shown,
        }
        if shown is not None:
            message["reasoning_details"] = [_detail(shown)]
        if choice.calls:
            calls: list[JsonObject] = [
                {
                    "index": index,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(choice.calls)
            ]
            message["tool_calls"] = [*calls]
        return message

    def usage(self, tail: ReplyTail) -> JsonObject:
        """With the cost: zero unless published prices are applied."""
        cost = float(tail.cost if tail.cost is not None else Decimal(0))
        return usage_json(tail.counts) | {
            "cost": cost,
            "is_byok": False,
            "cost_details": {"upstream_inference_cost": cost},
        }

    def frames(self, head: ReplyHead) -> Frames:
        """Chunks that repeat the role."""
        return _OpenRouterFrames(self, head)

    def error_frames(self, head: ReplyHead, error: ProtocolError) -> list[JsonObject]:
        """The status stays 200: a chunk with a top-level error and the finish reason ``error``."""
        body = self.error(error).body
        return [
            _frame(
                head, [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": "error"}]
            )
            | body
        ]

    def error(self, error: ProtocolError) -> ErrorReply:
        """``{"error": {code, message, metadata}}``."""
        status, kind = _ERRORS.get(error.kind, _BAD_REQUEST)
        message, metadata = error.message, dict[str, object](error_type=kind)
        if error.kind is ErrorKind.CONTEXT and error.limit is not None:
            message = (
                f"This endpoint's maximum context length is {error.limit} tokens. "
                f"However, you requested about {error.requested} tokens."
            )
        elif error.kind is ErrorKind.UNKNOWN_MODEL:
            message = f"{error.message}: not a valid model ID"
        elif error.kind is ErrorKind.BUDGET_IN_USE:
            metadata["limit_source"] = "openrouter_in_flight_budget"
        elif error.kind is ErrorKind.WRAPPED_QUOTA:
            inner = {"error": {"type": "exceeded_current_quota_error", "message": error.message}}
            message = "Provider returned error"
            metadata |= {"provider_name": OPENROUTER_HOSTS[0].provider, "raw": json.dumps(inner)}
        headers = {}
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
            if error.kind is ErrorKind.RATE and error.limit is not None:
                headers |= {"X-RateLimit-Limit": str(error.limit), "X-RateLimit-Remaining": "0"}
        body: JsonObject = {"error": {"code": status, "message": message, "metadata": _json(metadata)}}
        return ErrorReply(status, body, headers)

    def models(self, cards: Sequence[ModelCard]) -> JsonObject:
        """The list with pricing strings and the efforts."""
        head = OPENROUTER_HOSTS[0]
        data: list[JsonObject] = [
            {
                "id": card.id,
                "canonical_slug": f"{card.id.removesuffix(CANONICAL_DATE)}{CANONICAL_DATE}",
                "name": f"k3eval local: {card.id}",
                "created": card.created,
                "description": f"Local K3 model, weights: {card.weights}",
                "context_length": card.context_length,
                "architecture": {
                    "modality": "text->text",
                    "input_modalities": ["text"],
                    "output_modalities": ["text"],
                    "tokenizer": "Other",
                },
                "pricing": self._pricing(head),
                "top_provider": {
                    "context_length": card.context_length,
                    "max_completion_tokens": card.max_output,
                    "is_moderated": False,
                },
                "supported_parameters": [*SUPPORTED],
                "reasoning": {
                    "supported_efforts": [*reversed(EFFORTS)],
                    "default_effort": "max",
                    "mandatory": False,
                },
            }
            for card in cards
        ]
        return {"data": [*data]}

    def endpoints(self, card: ModelCard) -> JsonObject:
        """``GET /models/{author}/{slug}/endpoints``."""
        endpoints: list[JsonObject] = [
            {
                "name": f"{host.provider} | {card.id}",
                "tag": host.tag,
                "provider_name": host.provider,
                "context_length": min(host.context_length, card.context_length),
                "max_completion_tokens": host.max_output,
                "max_prompt_tokens": None,
                "quantization": host.quantization,
                "pricing": self._pricing(host),
                "supported_parameters": [*SUPPORTED],
                "status": 0,
            }
            for host in OPENROUTER_HOSTS
        ]
        return {"data": {"id": card.id, "name": card.id, "created": card.created, "endpoints": [*endpoints]}}

    def generation(
        self, head: ReplyHead, tail: ReplyTail, timings: Timings, finish: FinishReason
    ) -> JsonObject:
        """``GET /generation``: what a reply used and cost. Times in milliseconds."""
        counts = tail.counts
        cost = float(tail.cost if tail.cost is not None else Decimal(0))
        first = timings.token_ns[0] if timings.token_ns else 0
        last = timings.token_ns[-1] if timings.token_ns else 0
        return {
            "id": head.id,
            "model": head.request.model,
            "provider_name": host_of(head.request).provider,
            "created_at": datetime.fromtimestamp(head.created, UTC).isoformat(),
            "streamed": head.request.stream,
            "finish_reason": finish,
            "native_finish_reason": finish,
            "total_cost": cost,
            "usage": cost,
            "upstream_inference_cost": cost,
            "cache_discount": None,
            "is_byok": False,
            "tokens_prompt": counts.prompt,
            "tokens_completion": counts.completion,
            "native_tokens_prompt": counts.prompt,
            "native_tokens_completion": counts.completion,
            "native_tokens_reasoning": counts.reasoning,
            "native_tokens_cached": counts.cached,
            "latency": first // 1_000_000,
            "generation_time": (last - first) // 1_000_000,
        }

    def _pricing(self, host: HostRow) -> JsonObject:
        rates = {
            "prompt": host.price.miss,
            "completion": host.price.output,
            "input_cache_read": host.price.hit,
        }
        applied = self.options.prices
        return {name: _per_token(rate if applied else Decimal(0)) for name, rate in rates.items()}


SUPPORTED = (
    "include_reasoning",
    "logprobs",
    "max_tokens",
    "reasoning",
    "response_format",
    "seed",
    "stop",
    "structured_outputs",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
)
"""Request members that the endpoints advertise."""


class _OpenRouterFrames(Frames):
    def __init__(self, dialect: OpenRouterDialect, head: ReplyHead) -> None:
        super().__init__(dialect, head)
        self._dialect = dialect
        self._last: tuple[int, FinishReason] = (0, "stop")

    def frame(self, choices: list[JsonObject]) -> JsonObject:
        return _frame(self.head, choices)

    def first(self, choice: int, delta: JsonObject) -> JsonObject:
        return {"role": "assistant"} | delta

    def reasoning_delta(self, text: str) -> JsonObject:
        return {"content": "", "reasoning": text, "reasoning_details": [_detail(text)]}

    def call_start_delta(self, index: int, call_id: str, name: str) -> JsonObject:
        return {"content": None} | super().call_start_delta(index, call_id, name)

    def arguments_delta(self, index: int, text: str) -> JsonObject:
        return {"content": None} | super().arguments_delta(index, text)

    def choice(
        self,
        index: int,
        delta: JsonObject,
        finish: FinishReason | None,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> JsonObject:
        return super().choice(index, delta, finish, logprobs) | {"native_finish_reason": finish}

    def finish(
        self, choice: int, reason: FinishReason, stopped_by: str | None, counts: Counts
    ) -> list[JsonObject]:
        self._last = (choice, reason)
        delta: JsonObject = {"role": "assistant", "content": "", "reasoning": None}
        return [self.frame([self.choice(choice, delta, reason)])]

    def end(self, tail: ReplyTail) -> list[JsonObject]:
        choices: list[JsonObject] = []
        if self._dialect.options.repeat_finish:
            index, reason = self._last
            choices = [self.choice(index, {"role": "assistant", "content": ""}, reason)]
        frame = self.frame(choices) | {"usage": self._dialect.usage(tail)}
        model = self.head.request.model
        if model == OpenRouterDialect.aliases[0]:
            frame["model"] = f"{model}{CANONICAL_DATE}"
        return with_timings([frame], tail)


def choose_host(provider: ProviderBody, max_tokens: int | None) -> HostRow:
    """The endpoint that serves: the first one in ``order``, else the first that the filters leave.

    Raises:
        ProtocolError: no endpoint is left, or ``order`` without fallbacks names none.
    """

    def matches(host: HostRow, tags: Sequence[str]) -> bool:
        return any(tag in (host.tag, host.tag.partition("/")[0], host.provider) for tag in tags)

    left = [
        host
        for host in OPENROUTER_HOSTS
        if (provider.only is None or matches(host, provider.only))
        and not matches(host, provider.ignore or ())
        and (provider.quantizations is None or host.quantization in provider.quantizations)
        and (max_tokens is None or host.max_output is None or max_tokens <= host.max_output)
    ]
    ordered = [host for tag in provider.order or () for host in left if matches(host, [tag])]
    if provider.order and provider.allow_fallbacks is False:
        left = []
    if not ordered and not left:
        raise ProtocolError(
            ErrorKind.NO_ENDPOINT,
            "No endpoints found that can serve this request; relax 'provider'",
            "provider",
        )
    return (ordered or left)[0]


def host_of(request: ChatRequest) -> HostRow:
    """The endpoint that a request was routed to."""
    return next((host for host in OPENROUTER_HOSTS if host.tag == request.host), OPENROUTER_HOSTS[0])


def _frame(head: ReplyHead, choices: list[JsonObject]) -> JsonObject:
    return {
        "id": head.id,
        "provider": host_of(head.request).provider,
        "model": head.request.model,
        "object": "chat.completion.chunk",
        "created": head.created,
        "choices": [*choices],
    }


def _detail(text: str) -> JsonObject:
    return {"type": "reasoning.text", "text": text, "format": "unknown", "index": 0}


def _per_token(rate: Decimal) -> str:
    return format((rate / Decimal(1_000_000)).normalize(), "f")


def _json(values: Mapping[str, object]) -> JsonObject:
    return {key: str(value) for key, value in values.items()}
