"""What a dialect must be able to do, and the OpenAI-like behaviour that all three share.

A dialect reads a request body (and refuses what its vendor refuses), shapes replies, stream frames and
errors, and names its ids. Frames are JSON objects; the server turns them into bytes.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from k3eval_local.protocol.errors import ProtocolError, bad_request
from k3eval_local.protocol.messages import Conversation, JsonObject, ToolChoice
from k3eval_local.protocol.options import EFFORTS
from k3eval_local.protocol.parser import CallArguments, CallStart, Event, Reasoning, Text
from k3eval_local.protocol.prices import Limits, PriceRow
from k3eval_local.protocol.reply import (
    Counts,
    FinishReason,
    ModelCard,
    ReplyChoice,
    ReplyHead,
    ReplyTail,
    TokenLogprob,
)
from k3eval_local.protocol.request import (
    ChatRequest,
    check_unique,
    read_messages,
    read_response_format,
    read_stop,
    read_tool_choice,
    read_tools,
)
from k3eval_local.protocol.wire import ChatBody, parse_body


@dataclass(frozen=True, slots=True)
class DialectOptions:
    """What the person who starts the server may choose."""

    prices: bool = False
    """Apply the published prices to the local tokens."""
    reasoning_field: str = "reasoning_content"
    """vllm: newer versions call the member ``reasoning``."""
    repeat_finish: bool = False
    """openrouter: the other real end form, a finish chunk repeated together with the usage."""
    temperature: float = 1.0
    """For requests that name none; a checkpoint's ``generation_config.json`` sets it, as in vLLM."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A refusal in the dialect's envelope."""

    status: int
    body: JsonObject
    headers: Mapping[str, str]


BodyType = TypeVar("BodyType", bound=ChatBody)


class Dialect(ABC, Generic[BodyType]):
    """One vendor's way of speaking chat completions. Instances hold no state of requests."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]]
    """Model ids under which clients of this vendor expect K3."""
    tiers: ClassVar[Mapping[str, Limits]] = {}
    keep_alive: ClassVar[bytes | None] = None
    """An SSE comment to send at once and in every silence."""
    clamp_output: ClassVar[bool] = False
    """Whether too large an output limit is cut to the context (else it is refused)."""
    most_stops: ClassVar[int]
    longest_stop_bytes: ClassVar[int | None] = None
    most_tools: ClassVar[int | None] = None
    body: type[BodyType]

    def __init__(self, options: DialectOptions) -> None:
        self.options = options

    # Reading

    def read_bytes(self, data: bytes) -> ChatRequest:
        """The neutral request in a request body.

        Raises:
            ProtocolError: as :func:`parse_body` and :meth:`read`.
        """
        return self.read(parse_body(self.body, data))

    def read(self, body: BodyType) -> ChatRequest:
        """The neutral request.

        Raises:
            ProtocolError: the vendor refuses the body, or this server cannot do what it asks for.
        """
        self.check(body)
        tools = read_tools(body.tools or ())
        if self.most_tools is not None and len(tools) > self.most_tools:
            raise bad_request(f"tools: at most {self.most_tools}, not {len(tools)}", "tools")
        thinking, effort = self.thinking(body)
        conversation = Conversation(
            messages=read_messages(body.messages),
            tools=tools,
            response_format=read_response_format(body.response_format),
            thinking=thinking,
            effort=effort,
        )
        check_unique(conversation.every_tool)
        return self.request(body, self._with_choice(body, conversation))

    def _with_choice(self, body: BodyType, conversation: Conversation) -> Conversation:
        choice = self.tool_choice(body, conversation)
        return Conversation(
            messages=conversation.messages,
            tools=conversation.tools,
            tool_choice=choice,
            response_format=conversation.response_format,
            thinking=conversation.thinking,
            effort=conversation.effort,
        )

    def check(self, body: BodyType) -> None:
        """Refuse what only this vendor refuses. Raises ProtocolError."""

    def tool_choice(self, body: BodyType, conversation: Conversation) -> ToolChoice:
        """How tools may be used."""
        return read_tool_choice(body, conversation.every_tool)

    @abstractmethod
    def thinking(self, body: BodyType) -> tuple[bool, str | None]:
        """Whether the model thinks, and the effort (``None`` when it does not)."""

    def request(self, body: BodyType, conversation: Conversation) -> ChatRequest:
        """The request around ``conversation``; dialects override it for their own members."""
        stream_options = body.stream_options
        wants_logprobs = bool(body.logprobs) or bool(body.top_logprobs)
        return ChatRequest(
            model=body.model,
            conversation=conversation,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            temperature=self.options.temperature if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=body.seed,
            n=body.n or 1,
            stop=read_stop(body.stop, most=self.most_stops, longest_bytes=self.longest_stop_bytes),
            logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
            stream=bool(body.stream),
            include_usage=bool(stream_options and stream_options.include_usage),
            parallel_calls=body.parallel_tool_calls is not False,
            timings=bool(body.k3eval_timings),
        )

    # Names

    @abstractmethod
    def new_id(self) -> str:
        """A fresh reply id."""

    @abstractmethod
    def call_id(self, name: str, index: int, earlier: int) -> str:
        """Id of the ``index``-th call of a reply, after ``earlier`` calls in the conversation."""

    def price(self, request: ChatRequest) -> PriceRow | None:
        """The price row to apply; ``None`` when prices are off or the vendor has none."""
        return None

    # Replies

    def completion(self, head: ReplyHead, choices: Sequence[ReplyChoice], tail: ReplyTail) -> JsonObject:
        """The whole reply of a request that does not stream."""
        reply: JsonObject = {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.request.model,
            "choices": [self.choice(head, choice) for choice in choices],
            "usage": self.usage(tail),
        }
        if tail.timings is not None:
            reply["k3eval_timings"] = tail.timings.to_json()
        return reply

    def choice(self, head: ReplyHead, choice: ReplyChoice) -> JsonObject:
        """One entry of ``choices``."""
        entry: JsonObject = {
            "index": choice.index,
            "finish_reason": choice.finish,
            "message": self.message(head, choice),
        }
        if choice.logprobs is not None:
            entry["logprobs"] = {"content": [item.to_json() for item in choice.logprobs]}
        return entry

    @abstractmethod
    def message(self, head: ReplyHead, choice: ReplyChoice) -> JsonObject:
        """``choices[i].message``."""

    def usage(self, tail: ReplyTail) -> JsonObject:
        """``usage``."""
        return usage_json(tail.counts)

    @abstractmethod
    def frames(self, head: ReplyHead) -> Frames:
        """The shape of a stream."""

    def headers(self, request: ChatRequest | None = None, tail: ReplyTail | None = None) -> dict[str, str]:
        """Response headers; ``request`` and ``tail`` are known only after a reply that does not stream."""
        return {}

    def error_frames(self, head: ReplyHead, error: ProtocolError) -> list[JsonObject]:
        """What is sent when a generation fails after its stream has begun."""
        return [self.error(error).body]

    # Metadata

    @abstractmethod
    def error(self, error: ProtocolError) -> ErrorReply:
        """A refusal."""

    @abstractmethod
    def models(self, cards: Sequence[ModelCard]) -> JsonObject:
        """``GET /v1/models``."""


class CallNames(Protocol):
    """How a dialect names tool calls."""

    def call_id(self, name: str, index: int, earlier: int) -> str:
        """Id of the ``index``-th call of a reply, after ``earlier`` calls in the conversation."""
        ...


class Frames(ABC):
    """Shapes one stream; holds what the vendor's form needs to know about earlier frames."""

    def __init__(self, names: CallNames, head: ReplyHead) -> None:
        self._names = names
        self.head = head

    def begin(self) -> list[JsonObject]:
        """Frames before the first token."""
        return []

    def event(self, choice: int, event: Event, logprobs: Sequence[TokenLogprob] | None) -> list[JsonObject]:
        """Frames of one parsed event; an event that the client must not see has none."""
        match event:
            case Reasoning(text):
                if not self.head.request.show_reasoning:
                    return []
                delta = self.reasoning_delta(text)
            case Text(text):
                delta = self.text_delta(text)
            case CallStart(index, name):
                call = self._names.call_id(name, index, self.head.request.earlier_calls)
                delta = self.call_start_delta(index, call, name)
            case CallArguments(index, text):
                delta = self.arguments_delta(index, text)
            case _:
                return []
        return [self.frame([self.choice(choice, self.first(choice, delta), None, logprobs)])]

    def first(self, choice: int, delta: JsonObject) -> JsonObject:
        """Hook: add to a choice's first delta."""
        return delta

    @abstractmethod
    def reasoning_delta(self, text: str) -> JsonObject:
        """Delta of a piece of reasoning."""

    def text_delta(self, text: str) -> JsonObject:
        """Delta of a piece of the answer."""
        return {"content": text}

    def call_start_delta(self, index: int, call_id: str, name: str) -> JsonObject:
        """Delta that opens a tool call."""
        return {
            "tool_calls": [
                {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            ]
        }

    def arguments_delta(self, index: int, text: str) -> JsonObject:
        """Delta of a piece of a call's arguments."""
        return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    @abstractmethod
    def finish(
        self, choice: int, reason: FinishReason, stopped_by: str | None, counts: Counts
    ) -> list[JsonObject]:
        """Frames that end one choice; ``counts`` are this choice's."""

    @abstractmethod
    def end(self, tail: ReplyTail) -> list[JsonObject]:
        """Frames after the last choice has ended."""

    def choice(
        self,
        index: int,
        delta: JsonObject,
        finish: FinishReason | None,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> JsonObject:
        """One entry of a frame's ``choices``, with nulls for what is not there."""
        return {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": [item.to_json() for item in logprobs]},
            "finish_reason": finish,
        }

    def frame(self, choices: list[JsonObject]) -> JsonObject:
        """A frame around ``choices``."""
        return {
            "id": self.head.id,
            "object": "chat.completion.chunk",
            "created": self.head.created,
            "model": self.head.request.model,
            "choices": [*choices],
        }


def usage_json(counts: Counts) -> JsonObject:
    """The members of ``usage`` that all dialects have."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.total,
        "prompt_tokens_details": {
            "cached_tokens": counts.cached,
            "cache_write_tokens": counts.written,
        },
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }


def with_timings(frames: list[JsonObject], tail: ReplyTail) -> list[JsonObject]:
    """``frames`` with the timing extension on the last one."""
    if tail.timings is not None and frames:
        frames[-1]["k3eval_timings"] = tail.timings.to_json()
    return frames


def read_effort(effort: str | None, *, default: str = "max", param: str = "reasoning_effort") -> str:
    """A reasoning effort that K3 has.

    Raises:
        ProtocolError: another word.
    """
    if effort is None:
        return default
    if effort not in EFFORTS:
        raise bad_request(f"{param}: {effort!r} is not one of {', '.join(EFFORTS)}", param)
    return effort


def refuse_unless(value: float | None, allowed: float, param: str) -> None:
    """Refuse a sampling member that this server cannot honour, rather than ignore it."""
    if value is not None and value != allowed:
        raise bad_request(f"{param}: {value} is not supported by this server, only {allowed:g}", param)


def hex_id(digits: int) -> str:
    """Random hexadecimal digits."""
    return secrets.token_hex((digits + 1) // 2)[:digits]
