"""A cheap look at a stream that another client decodes: usage, finish, errors, first and last token.

Only events that can matter are parsed: those until the first token, and those that mention usage, an error or
a finish reason. The others are counted. That keeps the meter under a foreign client at a few per cent of its
cost.
"""

from __future__ import annotations

from collections.abc import Mapping

from k3eval.jsontypes import JsonValue
from k3eval.messages import Message
from k3eval.sse import DONE, SseParser
from k3eval.stream import Reply, StreamDecoder

_MARKS = (b'"finish_reason":"', b'"finish_reason": "', b'"usage":{', b'"usage": {', b'"error"')


class StreamScanner:
    """Same interface as ``StreamDecoder``, without the message."""

    __slots__ = ("_full", "_skipped", "_sse", "last_token_ns")

    def __init__(self) -> None:
        self._sse = SseParser()
        self._full = StreamDecoder()
        self._skipped = 0
        self.last_token_ns: int | None = None

    @property
    def first_token_ns(self) -> int | None:
        """Arrival of the first generated text."""
        return self._full.first_token_ns

    @property
    def started(self) -> bool:
        """Whether any event has been seen."""
        return self._full.started

    @property
    def complete(self) -> bool:
        """Whether the reply ended as the wire format says."""
        return self._full.complete

    @property
    def error(self) -> Mapping[str, JsonValue] | None:
        """The error object of a stream that failed."""
        return self._full.error

    def feed(self, data: bytes, at_ns: int) -> None:
        """Take bytes that arrived at ``at_ns``."""
        for event in self._sse.feed(data):
            self._event(event, at_ns)

    def finish(self, at_ns: int) -> None:
        """Take the end of the bytes."""
        for event in self._sse.finish():
            self._event(event, at_ns)

    def reply(self, headers: Mapping[str, str]) -> Reply:
        """Return what is known of the reply; its message is not."""
        found = self._full.reply(headers)
        return Reply(
            message=Message("assistant"),
            raw_finish_reason=found.raw_finish_reason,
            report=found.report,
            error=found.error,
            complete=found.complete,
            id=found.id,
            model=found.model,
            served_by=found.served_by,
            first_token_ns=found.first_token_ns,
            last_token_ns=self.last_token_ns or found.last_token_ns,
            token_events=found.token_events + self._skipped,
            first_event_chars=found.first_event_chars,
            raw=found.raw,
        )

    def _event(self, data: bytes, at_ns: int) -> None:
        if self._full.first_token_ns is None or data == DONE or any(mark in data for mark in _MARKS):
            self._full.event(data, at_ns)
            self._full.take()
        else:
            self._skipped += 1
            self.last_token_ns = at_ns
