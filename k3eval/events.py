"""What a streamed reply is made of: typed events, each with the monotonic time of its bytes.

They are not frozen: one is made for every piece of a reply, and a frozen one takes twice as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from k3eval.meter.usage import Usage


@dataclass(slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning."""

    text: str
    at_ns: int
    """``time.monotonic_ns`` when the packet that completed this event arrived."""


@dataclass(slots=True)
class TextDelta:
    """A piece of the answer."""

    text: str
    at_ns: int


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of a tool call: the first one of a call has its id and name."""

    index: int
    """Position of the call in the message."""
    id: str | None
    name: str | None
    arguments: str
    at_ns: int


@dataclass(slots=True)
class UsageUpdate:
    """The usage reported so far; the last one counts, they are never added."""

    usage: Usage
    at_ns: int


@dataclass(slots=True)
class End:
    """The reply is complete."""

    finish_reason: str
    """``stop``, ``length``, ``tool_calls``, ``content_filter`` or ``other``."""
    raw_finish_reason: str | None
    """The host's own word."""
    at_ns: int


StreamEvent: TypeAlias = ReasoningDelta | TextDelta | ToolCallDelta | UsageUpdate | End
