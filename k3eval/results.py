"""What a call gives back: the message, what it cost, how long it took, and every attempt at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from k3eval.jsontypes import JsonValue
from k3eval.messages import Message
from k3eval.meter.usage import Usage

AttemptState = Literal["reserved", "settled", "unknown"]
"""``reserved``: under way, or its process died; ``unknown``: the reply was lost, the worst case stands."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Three views of one cost in ``currency``; ``None`` = unknown, zero = free."""

    billed: Decimal | None = None
    """What the provider says it charged."""
    computed: Decimal | None = None
    """Tokens times the dated price row."""
    ideal_cache: Decimal | None = None
    """What it would have cost had every token seen before been read from the cache."""
    currency: str = "USD"
    price_row: str | None = None
    """``host/model@YYYY-MM-DD``."""

    @property
    def best(self) -> Decimal | None:
        """The billed figure where there is one, else the computed one."""
        return self.computed if self.billed is None else self.billed


@dataclass(frozen=True, slots=True)
class Timing:
    """Monotonic nanoseconds of the attempt that answered, stamped where the socket was waited for."""

    sent_ns: int
    first_token_ns: int | None
    """First event with generated text (answer, reasoning or tool call); never a role-only event."""
    last_token_ns: int | None
    end_ns: int
    token_events: int = 0
    """Events that carried generated text. An event is not a token."""
    first_event_chars: int = 0
    """Generated characters in the first such event."""
    total_chars: int = 0
    arrivals: int = 0
    """How often such events had to be waited for; those that came together share a stamp. 0 = not counted."""
    largest_burst: int = 0
    """Most such events under one stamp: many of them mean that the reader was late, not the host fast."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a call, as the ledger keeps it."""

    call_id: str
    number: int
    """1 for the first try."""
    started_at: str
    """UTC, ISO 8601."""
    ended_at: str | None
    state: AttemptState
    provider: str
    host: str
    model: str
    status: int | None = None
    """HTTP status; null where no reply came."""
    error: str | None = None
    """The host's word for what went wrong, or ours."""
    request_id: str | None = None
    finish_reason: str | None = None
    served_by: str | None = None
    usage: Usage | None = None
    cost: Cost = Cost()
    held: Decimal | None = None
    """What the budget counts for this attempt: its cost, or the worst case while that is unknown."""
    notes: tuple[str, ...] = ()
    """``write_tier_unknown``, ``usage_inconsistent``, ``billed_differs``, ``reply_cached``."""
    cache_miss_reason: str | None = None
    seconds: float | None = None
    ttft_seconds: float | None = None
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one call."""

    message: Message
    finish_reason: str
    """``stop``, ``length``, ``tool_calls``, ``content_filter`` or ``other``."""
    usage: Usage | None
    cost: Cost
    timing: Timing
    model: str
    """The model as the host names it."""
    host: str
    """Who served the call: behind a router the host that the router chose."""
    request_id: str | None
    attempts: tuple[Attempt, ...]
    cache_miss_reason: str | None = None
    """Why tokens that could have come from the prefix cache did not; null where they did."""
    raw_finish_reason: str | None = None
    raw: Mapping[str, JsonValue] = field(default_factory=dict, repr=False)
    """The whole reply, or the last chunk of a stream, for members that have no field here."""

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.message.text


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over calls."""

    usage: Usage
    cost: Cost
    """In the one currency used; with several, see ``by_currency`` (``currency`` is then ``mixed``)."""
    calls: int
    attempts: int
    unknown: int = 0
    """Attempts whose reply was lost: their cost is in no sum."""
    by_currency: tuple[Cost, ...] = ()
