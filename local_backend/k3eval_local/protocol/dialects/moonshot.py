"""Moonshot's platform (provider-facts section 2): fixed sampling, replayed reasoning, its own schema flavour.

Chunks have no nulls; every choice ends with an empty delta that carries this choice's usage, and with
``include_usage`` one more chunk repeats it. Errors have a ``type`` and no ``code``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue

from k3eval_local.protocol.dialects.base import (
    Dialect,
    ErrorReply,
    Frames,
    hex_id,
    read_effort,
    usage_json,
    with_timings,
)
from k3eval_local.protocol.errors import ErrorKind, ProtocolError, bad_request
from k3eval_local.protocol.messages import Conversation, JsonObject, ToolChoice
from k3eval_local.protocol.options import EFFORTS
from k3eval_local.protocol.prices import MOONSHOT, MOONSHOT_TIERS, PriceRow
from k3eval_local.protocol.reply import (
    Counts,
    FinishReason,
    ModelCard,
    ReplyChoice,
    ReplyHead,
    ReplyTail,
    TokenLogprob,
)
from k3eval_local.protocol.request import ChatRequest, read_tool_choice
from k3eval_local.protocol.wire import ChatBody, MessageBody, WireModel

FIXED: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 0.95,
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""The only value of each sampling member that K3 accepts."""

_ERRORS: Mapping[ErrorKind, tuple[int, str]] = {
    ErrorKind.KEY_MISSING: (401, "invalid_authentication_error"),
    ErrorKind.KEY_WRONG: (401, "incorrect_api_key_error"),
    ErrorKind.UNKNOWN_MODEL: (404, "resource_not_found_error"),
    ErrorKind.UNKNOWN_PATH: (404, "resource_not_found_error"),
    ErrorKind.NO_ENDPOINT: (404, "resource_not_found_error"),
    ErrorKind.NOT_FOUND: (404, "resource_not_found_error"),
    ErrorKind.WRONG_METHOD: (405, "invalid_request_error"),
    ErrorKind.TOO_LARGE: (413, "invalid_request_error"),
    ErrorKind.RATE: (429, "rate_limit_reached_error"),
    ErrorKind.CONCURRENCY: (429, "rate_limit_reached_error"),
    ErrorKind.BUDGET_IN_USE: (429, "rate_limit_reached_error"),
    ErrorKind.QUOTA: (429, "exceeded_current_quota_error"),
    ErrorKind.WRAPPED_QUOTA: (429, "exceeded_current_quota_error"),
    ErrorKind.OVERLOADED: (429, "engine_overloaded_error"),
    ErrorKind.SERVER: (500, "server_error"),
    ErrorKind.BAD_GATEWAY: (502, "server_error"),
    ErrorKind.UNAVAILABLE: (503, "server_unavailable"),
    ErrorKind.TIMEOUT: (504, "server_error"),
}
_BAD_REQUEST = (400, "invalid_request_error")


class ThinkingBody(WireModel):
    """``thinking``."""

    type: str | None = None
    keep: str | None = None
    effort: str | None = None


class CacheOptionsBody(WireModel):
    """``prompt_cache_options``."""

    mode: str | None = None
    ttl: str | None = None


class MoonshotBody(ChatBody):
    """Moonshot's additions to the request."""

    thinking: ThinkingBody | None = None
    prompt_cache_options: CacheOptionsBody | None = None
    prompt_cache_breakpoint: JsonValue = None


class MoonshotDialect(Dialect[MoonshotBody]):
    """``--dialect moonshot``."""

    name = "moonshot"
    aliases = ("kimi-k3",)
    tiers = MOONSHOT_TIERS
    clamp_output = True
    most_stops = 5
    longest_stop_bytes = 32
    most_tools = 128
    body = MoonshotBody

    def check(self, body: MoonshotBody) -> None:
        """The vendor's refusals."""
        for name, allowed in FIXED.items():
            value = getattr(body, name)
            if value is not None and value != allowed:
                raise bad_request(f"invalid {name}: only {allowed:g} is allowed for this model", name)
        if body.prompt_cache_breakpoint is not None:
            raise bad_request("prompt_cache_breakpoint: caching is automatic", "prompt_cache_breakpoint")
        options = body.prompt_cache_options or CacheOptionsBody()
        if options.mode not in (None, "implicit") or options.ttl not in (None, "5m", "1h"):
            raise bad_request(
                "prompt_cache_options: mode is implicit, ttl is 5m or 1h", "prompt_cache_options"
            )
        thinking = self.thinking(body)[0]
        for index, message in enumerate(body.messages):
            _check_message(index, message, thinking=thinking)
        for tool in (
            *(body.tools or ()),
            *(tool for message in body.messages for tool in message.tools or ()),
        ):
            reason = flavour_error(tool.function.parameters or {"type": "object", "properties": {}})
            if reason is not None:
                raise bad_request(_flavoured("tools.function.parameters", reason), "tools")
        schema = body.response_format.json_schema if body.response_format is not None else None
        if schema is not None and schema.schema_ is not None and schema.strict is not False:
            reason = flavour_error(schema.schema_)
            if reason is not None:
                raise bad_request(_flavoured("response_format.json_schema", reason), "response_format")

    def tool_choice(self, body: MoonshotBody, conversation: Conversation) -> ToolChoice:
        """The named-function object is silently ignored on K3."""
        if body.tool_choice is not None and not isinstance(body.tool_choice, str):
            return ToolChoice("auto")
        return read_tool_choice(body, conversation.every_tool)

    def thinking(self, body: MoonshotBody) -> tuple[bool, str | None]:
        """``thinking`` or ``reasoning_effort``, which wins when both are given."""
        thinking = body.thinking or ThinkingBody()
        if thinking.type not in (None, "enabled", "disabled"):
            raise bad_request(f"thinking.type: {thinking.type!r} is not enabled or disabled", "thinking")
        effort = read_effort(body.reasoning_effort or thinking.effort)
        return (False, None) if thinking.type == "disabled" else (True, effort)

    def request(self, body: MoonshotBody, conversation: Conversation) -> ChatRequest:
        """Fixed sampling; a seed is not in the schema and gives no reproducibility."""
        options = body.prompt_cache_options
        return replace(
            super().request(body, conversation),
            temperature=FIXED["temperature"],
            top_p=FIXED["top_p"],
            seed=None,
            parallel_calls=True,
            write_1h=options is not None and options.ttl == "1h",
        )

    def new_id(self) -> str:
        """``chatcmpl-`` and 24 hexadecimal digits."""
        return f"chatcmpl-{hex_id(24)}"

    def call_id(self, name: str, index: int, earlier: int) -> str:
        """``NAME_N``, counted through the conversation."""
        return f"{name}_{earlier + index}"

    def price(self, request: ChatRequest) -> PriceRow | None:
        """The first-party row of the requested id; kimi-k3's for the local names."""
        return MOONSHOT.get(request.model.lower(), MOONSHOT["kimi-k3"]) if self.options.prices else None

    def message(self, head: ReplyHead, choice: ReplyChoice) -> JsonObject:
        """Absent members instead of nulls."""
        message: JsonObject = {"role": "assistant", "content": choice.content}
        if head.request.conversation.thinking:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            calls: list[JsonObject] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
            message["tool_calls"] = [*calls]
        return message

    def usage(self, tail: ReplyTail) -> JsonObject:
        """With the older top-level ``cached_tokens`` beside the newer place."""
        return _usage(tail.counts)

    def headers(self, request: ChatRequest | None = None, tail: ReplyTail | None = None) -> dict[str, str]:
        """Trace ids; the split of the written tokens is only told here."""
        headers = {"x-msh-trace-id": hex_id(32), "Msh-Request-Id": hex_id(32)}
        if request is not None and tail is not None:
            for ttl, mine in (("5m", not request.write_1h), ("1h", request.write_1h)):
                headers[f"Msh-Usage-Cache-Write-Tokens-{ttl}"] = str(tail.counts.written if mine else 0)
        return headers

    def frames(self, head: ReplyHead) -> Frames:
        """Chunks without nulls."""
        return _MoonshotFrames(self, head)

    def error(self, error: ProtocolError) -> ErrorReply:
        """``{"error": {type, message}}``; retry hints in two headers and in the text."""
        status, kind = _ERRORS.get(error.kind, _BAD_REQUEST)
        message = error.message
        if error.kind is ErrorKind.CONTEXT and error.limit is not None:
            message = f"Your request exceeded model token limit: {error.limit} (requested: {error.requested})"
        headers = {}
        if error.retry_after_s is not None and kind == "rate_limit_reached_error":
            headers = {"retry-after": str(error.retry_after_s), "x-retry-after": str(error.retry_after_s)}
            message = f"{message}, please try again after {error.retry_after_s} seconds"
        return ErrorReply(status, {"error": {"type": kind, "message": message}}, headers)

    def models(self, cards: Sequence[ModelCard]) -> JsonObject:
        """The list with Moonshot's capability flags."""
        data: list[JsonObject] = [
            {
                "id": card.id,
                "object": "model",
                "created": card.created,
                "owned_by": "moonshot",
                "context_length": card.context_length,
                "supports_image_in": False,
                "supports_video_in": False,
                "supports_reasoning": True,
                "supports_thinking_type": ["enabled", "disabled"],
                "supported_reasoning_efforts": [*EFFORTS],
                "weights": card.weights,
            }
            for card in cards
        ]
        return {"object": "list", "data": [*data]}


class _MoonshotFrames(Frames):
    def __init__(self, dialect: MoonshotDialect, head: ReplyHead) -> None:
        super().__init__(dialect, head)
        self._begun: set[int] = set()

    def first(self, choice: int, delta: JsonObject) -> JsonObject:
        if choice in self._begun:
            return delta
        self._begun.add(choice)
        return {"role": "assistant"} | delta

    def reasoning_delta(self, text: str) -> JsonObject:
        return {"reasoning_content": text}

    def choice(
        self,
        index: int,
        delta: JsonObject,
        finish: FinishReason | None,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> JsonObject:
        full = super().choice(index, delta, finish, logprobs)
        return {key: value for key, value in full.items() if value is not None}

    def finish(
        self, choice: int, reason: FinishReason, stopped_by: str | None, counts: Counts
    ) -> list[JsonObject]:
        return [self.frame([self.choice(choice, {}, reason) | {"usage": _usage(counts)}])]

    def end(self, tail: ReplyTail) -> list[JsonObject]:
        if self.head.request.include_usage:
            return with_timings([self.frame([]) | {"usage": _usage(tail.counts)}], tail)
        if tail.timings is not None:
            return with_timings([self.frame([])], tail)
        return []


def _usage(counts: Counts) -> JsonObject:
    return usage_json(counts) | {"cached_tokens": counts.cached}


def _check_message(index: int, message: MessageBody, *, thinking: bool) -> None:
    if message.partial:
        raise bad_request(f"messages.{index}.partial: prefix continuation is not available here", "messages")
    if isinstance(message.content, list) and any(part.text == "" for part in message.content):
        raise bad_request("text content is empty", "messages")
    if message.role != "assistant":
        return
    if not message.content and not message.tool_calls and not message.reasoning_content:
        raise bad_request(f"message at position {index} with role 'assistant' must not be empty", "messages")
    if thinking and message.tool_calls and message.reasoning_content is None:
        raise bad_request(
            "thinking is enabled but reasoning_content is missing in assistant tool call message "
            f"at index {index}",
            "messages",
        )


def _flavoured(where: str, reason: str) -> str:
    return f"{where} is not a valid moonshot flavored json schema, details: <{reason}>"


def flavour_error(schema: JsonObject) -> str | None:
    """Why ``schema`` is outside Moonshot's flavour of JSON schema; ``None`` when it is inside.

    The root has ``type: object``; every property has a type (or ``anyOf`` without one); ``$ref`` starts with
    ``#/$defs``; ``required`` names existing properties; no tuple items.
    """
    if schema.get("type") != "object":
        return "at path '': the root must have type 'object'"
    return _flavour(schema, "", root=True)


def _flavour(schema: JsonValue, path: str, *, root: bool = False) -> str | None:
    if not isinstance(schema, dict):
        return f"at path '{path}': a schema must be an object"
    ref = schema.get("$ref")
    if ref is not None:
        inside = isinstance(ref, str) and ref.startswith("#/$defs/")
        return None if inside else f"at path '{path}': $ref must start with #/$defs/"
    unions = schema.get("anyOf")
    if unions is not None and "type" in schema and not root:
        return f"at path '{path}': type must not stand beside anyOf"
    if unions is None and "type" not in schema and not schema.keys() & {"enum", "const"}:
        return f"at path '{path}': type is not defined"
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return f"at path '{path}': properties must be an object"
    required = schema.get("required", [])
    if not isinstance(required, list):
        return f"at path '{path}': required must be a list"
    missing = [name for name in required if name not in properties] if "properties" in schema else []
    if missing:
        return f"at path '{path}': required names {missing[0]!r}, which is no property"
    if isinstance(schema.get("items"), list) or "prefixItems" in schema:
        return f"at path '{path}': tuple items are not supported"
    children: list[tuple[str, JsonValue]] = [
        (f"properties.{name}", value) for name, value in properties.items()
    ]
    children += [("items", schema["items"])] if "items" in schema else []
    children += [
        (f"anyOf.{index}", value) for index, value in enumerate(unions if isinstance(unions, list) else ())
    ]
    definitions = schema.get("$defs")
    children += (
        [(f"$defs.{name}", value) for name, value in definitions.items()]
        if isinstance(definitions, dict)
        else []
    )
    for name, child in children:
        reason = _flavour(child, f"{path}.{name}" if path else name)
        if reason is not None:
            return reason
    return None
