"""OpenTelemetry spans after the GenAI conventions, when that package is installed; otherwise nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Value = str | int | float | bool
"""What an attribute may hold."""


class Span(Protocol):
    """The part of OpenTelemetry's span that is used here."""

    def set_attribute(self, key: str, value: Value) -> None:
        """Set one attribute."""

    def add_event(self, name: str, attributes: Mapping[str, Value]) -> None:
        """Add an event."""

    def end(self) -> None:
        """End the span."""


class _NoSpan:
    def set_attribute(self, key: str, value: Value) -> None:
        pass

    def add_event(self, name: str, attributes: Mapping[str, Value]) -> None:
        pass

    def end(self) -> None:
        pass


def start_span(name: str, attributes: Mapping[str, Value]) -> Span:
    """Start a client span. It never holds content: no prompts, no answers."""
    try:
        from opentelemetry.trace import SpanKind, get_tracer
    except ImportError:
        return _NoSpan()
    span: Span = get_tracer("k3eval").start_span(name, kind=SpanKind.CLIENT, attributes=dict(attributes))
    return span
