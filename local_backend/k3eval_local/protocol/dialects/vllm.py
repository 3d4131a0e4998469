"""vLLM serving Kimi K3 (``--reasoning-parser kimi_k3 --tool-call-parser kimi_k3``): the local default.

Chunks carry nulls for what is absent, usage comes only when asked for (in its own chunk, or on every chunk
with ``continuous_usage_stats``), sampling members are free, named tool choice works through a grammar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from k3eval_local.protocol.dialects.base import (
    Dialect,
    ErrorReply,
    Frames,
    hex_id,
    read_effort,
    refuse_unless,
    usage_json,
    with_timings,
)
from k3eval_local.protocol.errors import ErrorKind, ProtocolError, bad_request
from k3eval_local.protocol.messages import Conversation, JsonObject
from k3eval_local.protocol.options import EFFORTS
from k3eval_local.protocol.reply import (
    Counts,
    FinishReason,
    ModelCard,
    ReplyChoice,
    ReplyHead,
    ReplyTail,
)
from k3eval_local.protocol.request import ChatRequest
from k3eval_local.protocol.wire import ChatBody, WireModel

_ERRORS: Mapping[ErrorKind, tuple[int, str]] = {
    ErrorKind.KEY_MISSING: (401, "AuthenticationError"),
    ErrorKind.KEY_WRONG: (401, "AuthenticationError"),
    ErrorKind.UNKNOWN_MODEL: (404, "NotFoundError"),
    ErrorKind.UNKNOWN_PATH: (404, "NotFoundError"),
    ErrorKind.NO_ENDPOINT: (404, "NotFoundError"),
    ErrorKind.NOT_FOUND: (404, "NotFoundError"),
    ErrorKind.WRONG_METHOD: (405, "MethodNotAllowedError"),
    ErrorKind.TOO_LARGE: (413, "RequestEntityTooLargeError"),
    ErrorKind.RATE: (429, "RateLimitError"),
    ErrorKind.CONCURRENCY: (429, "RateLimitError"),
    ErrorKind.QUOTA: (429, "RateLimitError"),
    ErrorKind.BUDGET_IN_USE: (429, "RateLimitError"),
    ErrorKind.WRAPPED_QUOTA: (429, "RateLimitError"),
    ErrorKind.OVERLOADED: (503, "ServiceUnavailableError"),
    ErrorKind.SERVER: (500, "InternalServerError"),
    ErrorKind.BAD_GATEWAY: (502, "BadGatewayError"),
    ErrorKind.UNAVAILABLE: (503, "ServiceUnavailableError"),
    ErrorKind.TIMEOUT: (504, "GatewayTimeoutError"),
}
_BAD_REQUEST = (400, "BadRequestError")


class TemplateKwargs(WireModel):
    """``chat_template_kwargs`` that K3's template knows."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    thinking_effort: str | None = None


class VllmBody(ChatBody):
    """vLLM's additions to the request."""

    min_tokens: Annotated[int | None, Field(ge=0, le=2**31)] = None
    ignore_eos: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class VllmDialect(Dialect[VllmBody]):
    """``--dialect vllm``."""

    name = "vllm"
    aliases = ("moonshotai/Kimi-K3", "kimi-k3")
    most_stops = 64
    body = VllmBody

    def check(self, body: VllmBody) -> None:
        """Refuse sampling that the engine does not have."""
        refuse_unless(body.presence_penalty, 0, "presence_penalty")
        refuse_unless(body.frequency_penalty, 0, "frequency_penalty")
        refuse_unless(body.repetition_penalty, 1, "repetition_penalty")
        refuse_unless(body.min_p, 0, "min_p")
        if body.top_k not in (None, -1, 0):
            raise bad_request(f"top_k: {body.top_k} is not supported by this server, only -1", "top_k")
        if body.min_tokens and body.min_tokens > (body.max_completion_tokens or body.max_tokens or 2**31):
            raise bad_request("min_tokens: must not be above max_tokens", "min_tokens")

    def thinking(self, body: VllmBody) -> tuple[bool, str | None]:
        """``chat_template_kwargs`` or ``reasoning_effort``; the effort ``none`` switches thinking off."""
        kwargs = body.chat_template_kwargs or TemplateKwargs()
        effort = body.reasoning_effort or kwargs.thinking_effort
        if effort == "none" or kwargs.thinking is False or kwargs.enable_thinking is False:
            return False, None
        return True, read_effort(effort)

    def request(self, body: VllmBody, conversation: Conversation) -> ChatRequest:
        """Adds the forced length and the reasoning switch."""
        options = body.stream_options
        return replace(
            super().request(body, conversation),
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            show_reasoning=body.include_reasoning is not False,
            continuous_usage=bool(options and options.continuous_usage_stats),
        )

    def new_id(self) -> str:
        """``chatcmpl-`` and 32 hexadecimal digits."""
        return f"chatcmpl-{hex_id(32)}"

    def call_id(self, name: str, index: int, earlier: int) -> str:
        """``chatcmpl-tool-`` and 32 hexadecimal digits: random, not counted."""
        return f"chatcmpl-tool-{hex_id(32)}"

    def choice(self, head: ReplyHead, choice: ReplyChoice) -> JsonObject:
        """Adds ``stop_reason``, the stop text if one ended the answer."""
        entry = super().choice(head, choice)
        return {"logprobs": None} | entry | {"stop_reason": choice.stopped_by}

    def message(self, head: ReplyHead, choice: ReplyChoice) -> JsonObject:
        """Content and reasoning are null when empty; ``tool_calls`` is always a list."""
        calls: list[JsonObject] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
        return {
            "role": "assistant",
            "content": choice.content or (None if calls else ""),
            "refusal": None,
            self.options.reasoning_field: (choice.reasoning or None) if head.request.show_reasoning else None,
            "tool_calls": [*calls],
        }

    def headers(self, request: ChatRequest | None = None, tail: ReplyTail | None = None) -> dict[str, str]:
        """A request id."""
        return {"x-request-id": hex_id(32)}

    def frames(self, head: ReplyHead) -> Frames:
        """Chunks with nulls, and usage when asked for."""
        return _VllmFrames(self, head)

    def error(self, error: ProtocolError) -> ErrorReply:
        """``{"error": {message, type, param, code}}``."""
        status, kind = _ERRORS.get(error.kind, _BAD_REQUEST)
        message = error.message
        if error.kind is ErrorKind.CONTEXT and error.limit is not None:
            message = f"this model's maximum context length is {error.limit} tokens: {message}"
        headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
        body: JsonObject = {"error": {"message": message, "type": kind, "param": error.param, "code": status}}
        return ErrorReply(status, body, headers)

    def models(self, cards: Sequence[ModelCard]) -> JsonObject:
        """The list, with ``max_model_len`` and the efforts that the model knows."""
        data: list[JsonObject] = [
            {
                "id": card.id,
                "object": "model",
                "created": card.created,
                "owned_by": "k3eval",
                "root": card.id,
                "parent": None,
                "max_model_len": card.context_length,
                "context_length": card.context_length,
                "supports_reasoning": True,
                "supported_reasoning_efforts": [*EFFORTS],
                "weights": card.weights,
            }
            for card in cards
        ]
        return {"object": "list", "data": [*data]}


class _VllmFrames(Frames):
    def __init__(self, dialect: VllmDialect, head: ReplyHead) -> None:
        super().__init__(dialect, head)
        self._reasoning_field = dialect.options.reasoning_field

    def begin(self) -> list[JsonObject]:
        return [
            self.frame([self.choice(index, {"role": "assistant", "content": ""}, None)])
            for index in range(self.head.request.n)
        ]

    def reasoning_delta(self, text: str) -> JsonObject:
        return {self._reasoning_field: text}

    def finish(
        self, choice: int, reason: FinishReason, stopped_by: str | None, counts: Counts
    ) -> list[JsonObject]:
        return [self.frame([self.choice(choice, {}, reason) | {"stop_reason": stopped_by}])]

    def end(self, tail: ReplyTail) -> list[JsonObject]:
        request = self.head.request
        if request.include_usage:
            return with_timings([self.frame([]) | {"usage": usage_json(tail.counts)}], tail)
        if tail.timings is not None:
            return with_timings([self.frame([])], tail)
        return []
