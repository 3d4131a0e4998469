"""Typed options of a client and of one call. Plain values: nothing here imports anything heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Literal, TypeAlias

from k3eval.errors import ConfigError
from k3eval.jsontypes import JsonValue

if TYPE_CHECKING:
    from k3eval.messages import Message
    from k3eval.tools import ToolSpec

Effort = Literal["off", "low", "high", "max"]
"""How long the model thinks. Changing it between turns loses the prefix cache."""
EFFORTS: tuple[Effort, ...] = ("off", "low", "high", "max")

ToolChoice: TypeAlias = str
"""``auto``, ``none``, ``required``, or the name of a tool."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds. Minutes of silence are normal for a reasoning model; hours are not."""

    connect: float = 10.0
    first_token: float = 900.0
    """From sending to the first generated text; keep-alives do not extend it."""
    idle: float = 600.0
    """Between two packets, keep-alives included."""
    total: float = 3600.0
    """For one attempt, from sending to the last byte."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"the {name} time-out must be above zero")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long a call is tried again. Only what a later try may cure is retried."""

    max_attempts: int = 5
    first_wait_s: float = 0.5
    """Wait before the second try where the host does not say; doubles with each try, with jitter."""
    max_wait_s: float = 60.0
    """A host that asks for a longer wait is not tried again."""
    max_total_s: float = 600.0
    """No new try starts later than this after the first."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError("max_attempts must be at least 1")


@dataclass(frozen=True, slots=True)
class Routing:
    """Which hosts OpenRouter may use. Pin them in an evaluation: behind one id price and quality vary."""

    only: tuple[str, ...] = ()
    """Host names or full tags, such as ``moonshotai`` or ``moonshotai/mxfp4``."""
    order: tuple[str, ...] = ()
    """Preferred order. Switches sticky sessions off."""
    ignore: tuple[str, ...] = ()
    allow_fallbacks: bool | None = None
    require_parameters: bool | None = None
    data_collection: Literal["allow", "deny"] | None = None
    """``deny`` leaves out hosts that may store prompts or train on them."""
    zdr: bool | None = None
    """Only hosts that retain nothing."""
    quantizations: tuple[str, ...] = ()
    max_price_input: Decimal | None = None
    """USD per million prompt tokens."""
    max_price_output: Decimal | None = None

    def __post_init__(self) -> None:
        for name in ("only", "order", "ignore", "quantizations"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"routing.{name} must be a tuple of names, not one string")


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """How the host's prefix cache is used. Caching itself is automatic on every K3 host."""

    session: str | None = None
    """OpenRouter's sticky session: the same host answers while it is used at least every ten minutes."""
    ttl: Literal["5m", "1h"] | None = None
    """Moonshot's cache life; one hour costs twice the input price for the tokens written."""
    key: str | None = None
    """``prompt_cache_key``: a hint only, measured to raise cost on one host; off unless given."""

    def __post_init__(self) -> None:
        if self.session is not None and not 0 < len(self.session) <= 256:
            raise ConfigError("a cache session name has 1 to 256 characters")
        if self.ttl not in (None, "5m", "1h"):
            raise ConfigError("the cache ttl is '5m' or '1h'")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call, independent of how a host wants it written."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    tool_choice: ToolChoice | None = None
    max_output: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    response_format: Mapping[str, JsonValue] | None = None
    extra: Mapping[str, JsonValue] = field(default_factory=dict)
    effort: Effort | None = None
    cache: CachePolicy = CachePolicy()
    routing: Routing = Routing()
    stream: bool = False
