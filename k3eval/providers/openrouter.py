"""OpenRouter: one id, many hosts. Pin the host in an evaluation; ``usage.cost`` is what is charged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from k3eval.errors import ApiError, ConfigError, OverloadedError, QuotaExceededError, RateLimitError
from k3eval.jsontypes import JsonObject, JsonValue, as_object, as_str, read_object
from k3eval.messages import Message
from k3eval.meter.pricing import normal_host, plain
from k3eval.meter.usage_wire import money
from k3eval.notices import Notices
from k3eval.options import ChatRequest
from k3eval.providers.base import Balance, Provider, is_k3_family

MAX_STOPS: Final = 4
_IN_FLIGHT: Final = "openrouter_in_flight_budget"


@dataclass(frozen=True, kw_only=True)
class OpenRouter(Provider):
    """``openrouter.ai``."""

    moonshot_schemas: ClassVar[bool] = True
    balance_path: ClassVar[str | None] = "/credits"
    receipt_path: ClassVar[str | None] = "/generation"

    def message(self, message: Message, request: ChatRequest, number: int) -> JsonObject:
        """Replay ``reasoning_details`` unchanged where they exist, else the text as ``reasoning``."""
        data = super().message(message, request, number)
        if message.role != "assistant":
            return data
        for member in ("reasoning_content", "reasoning"):
            data.pop(member, None)
        if message.reasoning is not None and not message.reasoning.details and message.reasoning.text:
            data["reasoning"] = message.reasoning.text
        if not message.text and not message.tool_calls and is_k3_family(request.model):
            data["content"] = " "  # K3's own host refuses an empty assistant turn
        return data

    def stream_options(self, data: JsonObject) -> None:
        """Usage always comes; there is nothing to ask for."""

    def extend(self, data: JsonObject, request: ChatRequest, notices: Notices) -> None:
        """Effort, routing and sticky sessions. Moonshot's cache life must never be sent here."""
        if request.effort is not None:
            off = request.effort == "off"
            data["reasoning"] = {"enabled": False} if off else {"effort": request.effort}
        routing: JsonObject = {}
        wanted = request.routing
        for name in ("only", "order", "ignore", "quantizations"):
            values = getattr(wanted, name)
            if values:
                routing[name] = list(values)
        for name in ("allow_fallbacks", "require_parameters", "data_collection", "zdr"):
            value = getattr(wanted, name)
            if value is not None:
                routing[name] = value
        limits: JsonObject = {}
        for name, price in (("prompt", wanted.max_price_input), ("completion", wanted.max_price_output)):
            if price is not None:
                limits[name] = plain(price)
        if limits:
            routing["max_price"] = limits
        if routing:
            data["provider"] = routing
        if request.cache.session is not None:
            data["session_id"] = request.cache.session
            if wanted.order:
                notices.once(
                    "session_off", "order", "routing.order switches OpenRouter's sticky session off; use only"
                )
        if request.cache.key is not None:
            data["prompt_cache_key"] = request.cache.key
        if request.cache.ttl is not None:
            notices.once(
                "no_ttl", self.name, "OpenRouter has no cache life to choose; cache.ttl was not sent"
            )
        if len(request.stop) > MAX_STOPS:
            raise ConfigError(f"OpenRouter accepts {MAX_STOPS} stop strings")

    def headers(self, request: ChatRequest) -> Mapping[str, str]:
        """Switch whole-reply caching off: a cached reply measures nothing."""
        return {"x-openrouter-title": "k3eval", "x-openrouter-cache": "false"}

    def pinned(self, body: Mapping[str, JsonValue]) -> tuple[str, ...]:
        """Return ``provider.only``."""
        only = (as_object(body.get("provider")) or {}).get("only")
        return tuple(item for item in only if isinstance(item, str)) if isinstance(only, list) else ()

    def request_id(self, headers: Mapping[str, str], reply_id: str | None) -> str | None:
        """Return the generation id."""
        return reply_id or headers.get("x-generation-id") or headers.get("x-request-id")

    def error_type(self, error: Mapping[str, JsonValue]) -> str | None:
        """Return ``metadata.error_type``, or the upstream's own word from ``metadata.raw``."""
        metadata = as_object(error.get("metadata")) or {}
        upstream = _upstream(metadata)
        return (
            (as_str(upstream.get("type")) if upstream else None)
            or as_str(metadata.get("error_type"))
            or as_str(error.get("error_type"))
        )

    def error_class(self, status: int, kind: str | None, error: Mapping[str, JsonValue]) -> type[ApiError]:
        """Look inside wrapped errors; a 402 of the in-flight budget is temporary."""
        metadata = as_object(error.get("metadata")) or {}
        if kind in ("exceeded_current_quota_error", "payment_required"):
            return QuotaExceededError
        if status == 402 and metadata.get("limit_source") == _IN_FLIGHT:
            return RateLimitError
        if kind in ("provider_overloaded", "engine_overloaded_error"):
            return OverloadedError
        if status == 403 and ("reasons" in metadata or "flagged_input" in metadata):
            return super().error_class(status, "content_filter", error)
        return super().error_class(status, kind, error)

    def hint(self, error: type[ApiError], status: int) -> str | None:
        """Explain the 404 that comes from filters rather than from a wrong id."""
        if status == 404:
            return "No host is left: check the model id, routing filters and max_output"
        return super().hint(error, status)

    def retry_after(
        self, headers: Mapping[str, str], error: Mapping[str, JsonValue], said: str
    ) -> float | None:
        """Headers first, then ``availability.retry_after``."""
        seconds = super().retry_after(headers, error, said)
        if seconds is not None:
            return seconds
        value = money((as_object(error.get("availability")) or {}).get("retry_after"))
        return None if value is None else float(value)

    def read_balance(self, data: Mapping[str, JsonValue]) -> Balance:
        """Credits bought less credits used."""
        credit = as_object(data.get("data")) or {}
        bought, used = money(credit.get("total_credits")), money(credit.get("total_usage"))
        if bought is None or used is None:
            raise ConfigError("OpenRouter gave no credits")
        return Balance(bought - used, self.currency)


def _upstream(metadata: Mapping[str, JsonValue]) -> Mapping[str, JsonValue] | None:
    """Read the error that the serving host gave, wrapped in a string."""
    raw = metadata.get("raw")
    if not isinstance(raw, str):
        return as_object(raw)
    try:
        data = read_object(raw)
    except ValueError:
        return {"type": "exceeded_current_quota_error"} if "exceeded_current_quota_error" in raw else None
    return as_object(data.get("error")) or data


def same_host(left: str, right: str) -> bool:
    """Whether two spellings name the same serving host."""
    return normal_host(left) == normal_host(right)


OPENROUTER: Final = OpenRouter(
    name="openrouter",
    base_url="https://openrouter.ai/api/v1",
    price_host="openrouter.ai",
    key_env=("OPENROUTER_API_KEY",),
    default_max_output=32_768,
    privacy=(
        "Prompts go through OpenRouter, which by default may pick hosts that store prompts or train on them."
        " For private repositories narrow the hosts: Routing(data_collection='deny') and/or Routing(zdr=True)"
    ),
)
