"""Moonshot's own platform: an international and a China service, same contract, separate accounts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from k3eval.errors import ApiError, AuthenticationError, ConfigError, OverloadedError, QuotaExceededError
from k3eval.jsontypes import JsonObject, JsonValue, as_object, as_str
from k3eval.messages import Message
from k3eval.meter.usage_wire import money
from k3eval.notices import Notices
from k3eval.options import ChatRequest
from k3eval.providers.base import Balance, Provider

MAX_STOPS: Final = 5
MAX_STOP_BYTES: Final = 32
BLANK: Final = " "
"""Thinking models refuse an assistant turn without reasoning, and an empty string counts as none."""


@dataclass(frozen=True, kw_only=True)
class Moonshot(Provider):
    """``api.moonshot.ai`` and ``api.moonshot.cn``."""

    moonshot_schemas: ClassVar[bool] = True
    balance_path: ClassVar[str | None] = "/users/me/balance"
    estimate_path: ClassVar[str | None] = "/tokenizers/estimate-token-count"

    def message(self, message: Message, request: ChatRequest, number: int) -> JsonObject:
        """Replay reasoning as ``reasoning_content``; leave out empty turns and parts, as the host wants."""
        data = super().message(message, request, number)
        if message.role == "assistant":
            for member in ("reasoning", "reasoning_details"):
                data.pop(member, None)
            thought = message.reasoning.text if message.reasoning is not None else ""
            if request.effort != "off" and (thought or message.tool_calls):
                data["reasoning_content"] = thought or BLANK
            else:
                data.pop("reasoning_content", None)
            if not message.text and not _has_other_parts(message):
                data.pop("content", None)
                if not message.tool_calls:
                    data["content"] = BLANK
        elif isinstance(message.content, tuple):
            data["content"] = [
                dict(part)
                for part in message.content
                if part.get("type") != "text" or as_str(part.get("text"))
            ]
        return data

    def extend(self, data: JsonObject, request: ChatRequest, notices: Notices) -> None:
        """Effort and cache life. One member switches thinking: which of two would win is undocumented."""
        if request.effort == "off":
            data["thinking"] = {"type": "disabled"}
        elif request.effort is not None:
            data["reasoning_effort"] = request.effort
        if request.cache.ttl is not None:
            data["prompt_cache_options"] = {"mode": "implicit", "ttl": request.cache.ttl}
        if request.cache.key is not None:
            data["prompt_cache_key"] = request.cache.key
        if data.pop("seed", None) is not None:
            notices.once("no_seed", self.name, f"{self.name} has no seed: it was not sent, results will vary")
        if len(request.stop) > MAX_STOPS or any(len(s.encode()) > MAX_STOP_BYTES for s in request.stop):
            raise ConfigError(f"{self.name} accepts {MAX_STOPS} stop strings of {MAX_STOP_BYTES} bytes")

    def request_id(self, headers: Mapping[str, str], reply_id: str | None) -> str | None:
        """Return the trace id."""
        for name in ("x-msh-trace-id", "x-trace-id", "msh-request-id"):
            if headers.get(name):
                return headers[name]
        return reply_id

    def error_class(self, status: int, kind: str | None, error: Mapping[str, JsonValue]) -> type[ApiError]:
        """Tell the three kinds of 429 apart by the error's type."""
        if kind == "exceeded_current_quota_error":
            return QuotaExceededError
        if kind == "engine_overloaded_error":
            return OverloadedError
        return super().error_class(status, kind, error)

    def hint(self, error: type[ApiError], status: int) -> str | None:
        """Name the other host for a refused key and the successor for a retired model."""
        if error is AuthenticationError and status == 401:
            other = "moonshot-cn" if self.name == "moonshot" else "moonshot"
            return f"Check the key; keys of {other} do not work here: try provider {other}"
        if status == 404:
            return "Older Kimi models are retired; kimi-k3 and kimi-k3.1-pro are served"
        if status == 504:
            return "No reply came in 15 minutes; use stream() for long answers"
        return super().hint(error, status)

    def read_balance(self, data: Mapping[str, JsonValue]) -> Balance:
        """Read ``data.available_balance``."""
        amount = money((as_object(data.get("data")) or {}).get("available_balance"))
        if amount is None:
            raise ConfigError(f"{self.name} gave no balance")
        return Balance(amount, self.currency)


def _has_other_parts(message: Message) -> bool:
    return isinstance(message.content, tuple) and any(part.get("type") != "text" for part in message.content)


MOONSHOT: Final = Moonshot(
    name="moonshot",
    base_url="https://api.moonshot.ai/v1",
    price_host="api.moonshot.ai",
    key_env=("MOONSHOT_API_KEY",),
    max_output_member="max_completion_tokens",
    default_max_output=32_768,
    privacy=(
        "Prompts go to Moonshot's international service: run by a company in Singapore, which may store them"
        " there and, by its terms of 2026-07-30, may use them to improve its services unless an enterprise"
        " agreement says otherwise. The China service (moonshot-cn) is a separate account on the mainland"
    ),
)

MOONSHOT_CN: Final = Moonshot(
    name="moonshot-cn",
    base_url="https://api.moonshot.cn/v1",
    price_host="api.moonshot.cn",
    key_env=("MOONSHOT_CN_API_KEY", "MOONSHOT_API_KEY"),
    currency="CNY",
    max_output_member="max_completion_tokens",
    default_max_output=32_768,
    privacy="Prompts go to Moonshot's China service, an account of its own on the Chinese mainland",
)
