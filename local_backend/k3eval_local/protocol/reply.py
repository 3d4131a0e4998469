"""What a reply is made of, before a dialect gives it its shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Literal

from k3eval_local.protocol.messages import JsonObject
from k3eval_local.protocol.request import ChatRequest

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a reply: ``cached`` and ``written`` are of ``prompt``, ``reasoning`` of ``completion``."""

    prompt: int
    completion: int
    cached: int
    written: int
    reasoning: int

    @property
    def total(self) -> int:
        """Prompt plus completion."""
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A finished tool call."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a chosen token of the answer and of the likeliest tokens in its place."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]

    def to_json(self) -> JsonObject:
        """The wire form, the same in every dialect."""
        return _token_json(self.token, self.logprob) | {
            "top_logprobs": [_token_json(token, logprob) for token, logprob in self.top]
        }


@dataclass(slots=True)
class ReplyChoice:
    """One finished alternative."""

    index: int
    reasoning: str = ""
    content: str = ""
    calls: list[ReplyCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason = "stop"
    stopped_by: str | None = None
    """The stop text that ended the answer, if one did."""

    def name_calls(self, call_id: Callable[[str, int, int], str], earlier: int) -> None:
        """Give every call its id: ``call_id(name, index, earlier calls of the conversation)``."""
        self.calls = [
            replace(call, id=call_id(call.name, index, earlier)) for index, call in enumerate(self.calls)
        ]


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What is known before the first token."""

    id: str
    created: int
    """Unix seconds."""
    request: ChatRequest


@dataclass(frozen=True, slots=True)
class Timings:
    """The opt-in ``k3eval_timings`` extension; nanoseconds, offsets from the engine's acceptance."""

    queue_ns: int
    prefill_ns: int
    token_ns: tuple[int, ...]

    def to_json(self) -> JsonObject:
        """The wire form."""
        return {"queue_ns": self.queue_ns, "prefill_ns": self.prefill_ns, "token_ns": list(self.token_ns)}


@dataclass(frozen=True, slots=True)
class ReplyTail:
    """What is known after the last token."""

    counts: Counts
    cost: Decimal | None = None
    """In the price row's currency; ``None`` when no prices are applied."""
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What ``/v1/models`` says about one served name."""

    id: str
    created: int
    context_length: int
    max_output: int
    weights: str


def _token_json(token: bytes, logprob: float) -> JsonObject:
    return {
        "token": token.decode("utf-8", "replace"),
        # JSON has no -inf: a token that a mask excluded still needs a number.
        "logprob": max(logprob, -9999.0),
        "bytes": list(token),
    }
