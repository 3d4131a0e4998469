"""What a provider states about itself: data, and a few hooks where hosts differ in behaviour.

A provider knows how its host wants a request written, how it words errors, and where it puts what else
matters (request id, serving host, balance). It does no input or output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, Final, Literal

from k3eval.errors import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    ConfigError,
    ContentFilterError,
    ContextOverflowError,
    K3EvalError,
    OverloadedError,
    QuotaExceededError,
    RateLimitError,
    ServerError,
)
from k3eval.jsontypes import JsonObject, JsonValue, as_int, as_object, as_str, read_object
from k3eval.messages import Message
from k3eval.meter.pricing import normal_model
from k3eval.meter.usage_wire import money
from k3eval.notices import Notices
from k3eval.options import ChatRequest, Effort
from k3eval.schema import check_tools, flatten
from k3eval.tools import ToolSpec

FIXED_SAMPLING: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 0.95,
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
"""What every K3 model fixes; another value is refused by its hosts. The rule is the model's, not the route's.
"""

_OVERFLOW: Final = re.compile(
    r"exceeded model token limit|input token length too long|maximum context length|context_length_exceeded"
    r"|context length exceeded|prompt is too long|exceeds the (?:model'?s )?context",
    re.IGNORECASE,
)
_SECONDS_IN_TEXT: Final = re.compile(r"(?:try|retry) again (?:after|in) (\d+(?:\.\d+)?) ?s", re.IGNORECASE)
_CONCURRENCY: Final = re.compile(r"concurrency[^0-9]{0,20}(\d+)", re.IGNORECASE)
_PER_MINUTE: Final = re.compile(r"\bRPM\b[^0-9]{0,20}(\d+)|(\d+) requests per minute", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model can do at a host; ``None`` = not known."""

    context: int | None
    max_output: int | None
    efforts: tuple[Effort, ...]
    tools: bool | None
    images: bool | None
    fixed_sampling: bool
    """Temperature and its like are fixed by the model."""
    price_row: str | None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model that a host offers."""

    id: str
    context: int | None = None
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Balance:
    """Money left in an account."""

    amount: Decimal
    currency: str


def is_k3_family(model: str) -> bool:
    """Whether a model id names a K3 model, through whichever route."""
    return normal_model(model).startswith("kimi-k3")


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One host or kind of host. Subclasses state the data and override hooks."""

    name: str
    base_url: str | None
    key_env: tuple[str, ...] = ()
    """Environment variables that may hold the key, first found wins."""
    key_required: bool = True
    currency: str = "USD"
    max_output_member: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    default_max_output: int | None = None
    """Sent when the caller gives no cap: a cap that the caller can see beats the host's own default."""
    price_host: str | None = None
    """Host under which the price table lists it; taken from the address when not given."""
    self_hosted: bool = False
    """Tokens cost no money here: cost is unknown, and a money budget counts zero."""
    privacy: str | None = None
    """What to know before the first paid call."""

    moonshot_schemas: ClassVar[bool] = False

    # -- requests ---------------------------------------------------------------------------------

    def body(self, request: ChatRequest, notices: Notices) -> JsonObject:
        """Return the request body: stable order, tools sorted, no clock. ``ConfigError`` for what cannot be
        sent.
        """
        data: JsonObject = {"model": request.model}
        tools = self.tools(request)
        if tools:
            data["tools"] = [spec.to_json() for spec in tools]
        data["messages"] = [
            self.message(message, request, number) for number, message in enumerate(request.messages)
        ]
        if not request.messages:
            raise ConfigError("messages is empty")
        if request.tool_choice is not None:
            data["tool_choice"] = _tool_choice(request.tool_choice, tools)
        cap = self.default_max_output if request.max_output is None else request.max_output
        if cap is not None:
            if cap < 1:
                raise ConfigError("max_output must be at least 1")
            data[self.max_output_member] = cap
        if request.temperature is not None:
            data["temperature"] = request.temperature
        if request.seed is not None:
            data["seed"] = request.seed
        if request.stop:
            data["stop"] = list(request.stop)
        if request.response_format is not None:
            data["response_format"] = self.response_format(request.response_format)
        if request.stream:
            data["stream"] = True
            self.stream_options(data)
        self.extend(data, request, notices)
        for key, value in request.extra.items():
            data[key] = value
        if is_k3_family(request.model):
            _drop_fixed_sampling(data, notices)
        return data

    def tools(self, request: ChatRequest) -> tuple[ToolSpec, ...]:
        """Return the tools in a stable order, in the host's schema dialect."""
        if self.moonshot_schemas:
            return check_tools(request.tools)
        names = [spec.name for spec in request.tools]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two tools are called {name!r}")
        return tuple(sorted(request.tools, key=lambda spec: spec.name))

    def message(self, message: Message, request: ChatRequest, number: int) -> JsonObject:
        """Return a message as this host wants it sent; members that a host sent as null stay away."""
        return {name: value for name, value in message.to_json().items() if value is not None}

    def response_format(self, value: Mapping[str, JsonValue]) -> JsonObject:
        """Return the answer format, its schema in the host's dialect."""
        data: JsonObject = dict(value)
        wrapped = as_object(data.get("json_schema"))
        schema = None if wrapped is None else as_object(wrapped.get("schema"))
        if self.moonshot_schemas and wrapped is not None:
            if not wrapped.get("name") or schema is None:
                raise ConfigError("response_format json_schema needs a name and a schema")
            data["json_schema"] = {**wrapped, "schema": flatten(schema, where="response_format")}
        return data

    def stream_options(self, data: JsonObject) -> None:
        """Ask for usage in the stream, where the host has to be asked."""
        data["stream_options"] = {"include_usage": True}

    def extend(self, data: JsonObject, request: ChatRequest, notices: Notices) -> None:
        """Add the host's own members."""

    def headers(self, request: ChatRequest) -> Mapping[str, str]:
        """Return extra headers for a chat call."""
        return {}

    def pinned(self, body: Mapping[str, JsonValue]) -> tuple[str, ...]:
        """Behind a router: the only hosts that may serve this request."""
        return ()

    # -- replies ----------------------------------------------------------------------------------

    def request_id(self, headers: Mapping[str, str], reply_id: str | None) -> str | None:
        """Return the id under which the host can find the call again."""
        return headers.get("x-request-id") or reply_id

    def error(
        self, status: int, headers: Mapping[str, str], body: bytes, *, request: str | None
    ) -> K3EvalError:
        """Return the error that an error reply stands for."""
        try:
            data = read_object(body)
        except ValueError:
            data = {}
        text = body[:2000].decode("utf-8", "replace")
        return self.error_of(
            status,
            as_object(data.get("error")) or data,
            headers,
            text=text if not data else None,
            request=request,
            request_id=self.request_id(headers, as_str(data.get("id"))),
        )

    def error_of(
        self,
        status: int,
        error: Mapping[str, JsonValue],
        headers: Mapping[str, str],
        *,
        request: str | None,
        request_id: str | None,
        text: str | None = None,
    ) -> K3EvalError:
        """Return the error for an error object, from an error reply or from inside an HTTP 200."""
        kind = self.error_type(error)
        said = as_str(error.get("message")) or _said(text) or "no message"
        message = f"{self.name} answered {status}{f' {kind}' if kind else ''}: {said}"
        if status < 500 and (_OVERFLOW.search(said) or (kind and _OVERFLOW.search(kind))):
            return ContextOverflowError(
                f"{message}. Shorten the conversation or lower max_output",
                request_id=request_id,
                request=request,
            )
        chosen = self.error_class(status, kind, error)
        hint = self.hint(chosen, status)
        return chosen(
            f"{message}. {hint}" if hint else message,
            status=status,
            host=self.name,
            type=kind,
            request_id=request_id,
            request=request,
            retry_after_s=self.retry_after(headers, error, said),
            body=text if text is not None else str(dict(error))[:2000],
        )

    def error_type(self, error: Mapping[str, JsonValue]) -> str | None:
        """Return the host's word for the error."""
        return as_str(error.get("type")) or as_str(error.get("error_type"))

    def error_class(self, status: int, kind: str | None, error: Mapping[str, JsonValue]) -> type[ApiError]:
        """Return the class of an error by its status and the host's word for it."""
        if kind in ("content_filter", "content_policy_violation", "refusal"):
            return ContentFilterError
        if status in (401, 403):
            return AuthenticationError
        if status == 402:
            return QuotaExceededError
        if status == 429:
            return RateLimitError
        if status in (503, 529):
            return OverloadedError
        if status >= 500 or status == 408:
            return ServerError
        return BadRequestError

    def hint(self, error: type[ApiError], status: int) -> str | None:
        """Return what the user can do about an error."""
        if error is AuthenticationError:
            names = " or ".join(self.key_env)
            return f"Check the key in {names}" if names else "Check the key"
        if error is QuotaExceededError:
            return "Top up the account or raise its limit; retrying does not help"
        return None

    def retry_after(
        self, headers: Mapping[str, str], error: Mapping[str, JsonValue], said: str
    ) -> float | None:
        """Return the seconds that the host asks to wait: from headers, else from the text."""
        for name in ("retry-after", "x-retry-after"):
            seconds = _seconds(headers.get(name))
            if seconds is not None:
                return seconds
        found = _SECONDS_IN_TEXT.search(said)
        return float(found.group(1)) if found else None

    def limits_in(self, error: ApiError) -> tuple[int | None, int | None]:
        """Return (requests at a time, requests a minute) where an error's text states them."""
        at_once = _CONCURRENCY.search(error.message)
        minute = _PER_MINUTE.search(error.message)
        return (
            int(at_once.group(1)) if at_once else None,
            int(minute.group(1) or minute.group(2)) if minute else None,
        )

    # -- other endpoints --------------------------------------------------------------------------

    models_path: ClassVar[str] = "/models"
    balance_path: ClassVar[str | None] = None
    estimate_path: ClassVar[str | None] = None
    receipt_path: ClassVar[str | None] = None
    """Where the charge for one call can be asked for, by its request id."""

    def read_models(self, data: Mapping[str, JsonValue]) -> tuple[ModelInfo, ...]:
        """Read the list of models."""
        found = data.get("data")
        return tuple(
            ModelInfo(
                id=as_str(item.get("id")) or "",
                context=as_int(item.get("context_length")) or as_int(item.get("max_model_len")),
                owner=as_str(item.get("owned_by")),
            )
            for item in (found if isinstance(found, list) else ())
            if isinstance(item, dict)
        )

    def read_receipt(self, data: Mapping[str, JsonValue]) -> Decimal | None:
        """Read what one call was charged."""
        return money((as_object(data.get("data")) or {}).get("total_cost"))

    def read_balance(self, data: Mapping[str, JsonValue]) -> Balance:
        """Read the account's balance; ``ConfigError`` where the host has none."""
        raise ConfigError(f"{self.name} has no balance to ask for")


def _tool_choice(choice: str, tools: Sequence[ToolSpec]) -> JsonValue:
    if choice == "required" and not tools:
        raise ConfigError("tool_choice 'required' needs tools")
    if choice in ("auto", "none", "required"):
        return choice
    if choice not in {spec.name for spec in tools}:
        raise ConfigError(f"tool_choice {choice!r} names no tool; use auto, none, required or a tool's name")
    return {"type": "function", "function": {"name": choice}}


def _drop_fixed_sampling(data: JsonObject, notices: Notices) -> None:
    """Leave out what the model fixes; say so once where the caller wanted another value."""
    for name, fixed in FIXED_SAMPLING.items():
        if name not in data:
            continue
        value = data.pop(name)
        if value is not None and value != fixed:
            notices.once(
                "pinned_sampling",
                name,
                f"K3 fixes {name} at {fixed}; {name}={value} was not sent. Results vary from call to call",
            )


def _seconds(value: str | None) -> float | None:
    """Read a Retry-After header: seconds, or an HTTP date (RFC 9110)."""
    if value is None:
        return None
    try:
        return max(float(value), 0.0) if value.strip().lower() not in ("nan", "inf", "infinity") else None
    except ValueError:
        pass
    from datetime import UTC, datetime
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max((moment - datetime.now(UTC)).total_seconds(), 0.0)


def _said(text: str | None) -> str | None:
    """Return one line of an error body that is no JSON; a gateway's HTML page is reduced to its words."""
    if not text:
        return None
    words = " ".join(re.sub(r"<[^>]*>", " ", text).split())
    return words[:200] or None
