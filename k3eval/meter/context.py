"""What the typed client hands the transport with a request, and what watches the bytes of a reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from k3eval.jsontypes import JsonValue
from k3eval.meter.cache import PrefixCheck
from k3eval.options import Timeouts
from k3eval.results import Attempt, Timing
from k3eval.stream import Reply


class Observer(Protocol):
    """What watches the bytes of a streamed reply."""

    @property
    def first_token_ns(self) -> int | None:
        """Arrival of the first generated text."""

    @property
    def started(self) -> bool:
        """Whether any event has been seen."""

    @property
    def complete(self) -> bool:
        """Whether the reply ended as the wire format says."""

    @property
    def error(self) -> Mapping[str, JsonValue] | None:
        """The error object of a stream that failed."""

    def feed(self, data: bytes, at_ns: int) -> None:
        """Take bytes that arrived at ``at_ns``."""

    def finish(self, at_ns: int) -> None:
        """Take the end of the bytes."""

    def reply(self, headers: Mapping[str, str]) -> Reply:
        """Return the reply so far."""


@dataclass(slots=True)
class CallContext:
    """What the typed client hands the transport with a request, and gets back filled in."""

    observer: Observer | None = None
    """What watches the stream of the last attempt: a ``StreamDecoder`` for the typed client."""
    body: Mapping[str, JsonValue] | None = None
    """The request body, parsed; read from the bytes when not given."""
    check: PrefixCheck | None = None
    """The request compared with those before it; done here when not given."""
    timeouts: Timeouts | None = None
    attempts: list[Attempt] = field(default_factory=list)
    reply: Reply | None = None
    timing: Timing | None = None
