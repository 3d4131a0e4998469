"""Bytes of a streamed reply to typed events, and to the whole message.

Sans-io: ``feed`` takes bytes with their arrival time, whoever read them. Tolerates what hosts really send:
deltas without index or id, whole messages in place of deltas, a finish repeated with the usage, nulls
everywhere, errors inside the stream. A stream is complete only after a finish reason and (``[DONE]`` or
usage); ``Reply.complete`` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from k3eval.errors import ProtocolError
from k3eval.events import End, ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta, UsageUpdate
from k3eval.jsontypes import JsonValue, as_int, as_object, as_str, read_object, write_json
from k3eval.messages import Message, Reasoning, ReasoningMember, ToolCall, detail_text
from k3eval.meter.usage_wire import UsageFinder, UsageReport
from k3eval.sse import DONE, SseParser

FINISH_REASONS: Final = frozenset({"stop", "length", "tool_calls", "content_filter", "error"})
_SNAPSHOT_PIECES: Final = 3
"""So many pieces, each the one before plus more, show that a host sends the whole text so far every time."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What one attempt gave, streamed or not. Times are monotonic nanoseconds."""

    message: Message
    raw_finish_reason: str | None
    report: UsageReport | None
    error: Mapping[str, JsonValue] | None
    """The error object of a reply that failed under HTTP 200."""
    complete: bool
    id: str | None
    model: str | None
    served_by: str | None
    """The host behind a router, where it says so."""
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    token_events: int = 0
    arrivals: int = 0
    largest_burst: int = 0
    first_event_chars: int = 0
    total_chars: int = 0
    raw: Mapping[str, JsonValue] = field(default_factory=dict, repr=False)
    """The last chunk or the whole reply, for members that have no field here."""

    @property
    def finish_reason(self) -> str | None:
        """The finish reason in the five words that every host shares, else ``other``."""
        return normal_finish(self.raw_finish_reason)


def normal_finish(raw: str | None) -> str | None:
    """Map a host's finish reason to a known word; unlisted words become ``other``."""
    if raw is None or raw in FINISH_REASONS:
        return raw
    return "tool_calls" if raw == "function_call" else "other"


class _Text:
    """Pieces of one text, joined at the end. Recognises a host that repeats the text so far each time."""

    __slots__ = ("_cumulative", "_last", "pieces")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._last = ""
        self._cumulative = True

    def add(self, piece: str) -> str:
        """Take a piece; return what is new in it."""
        self.pieces.append(piece)
        if not self._cumulative:
            return piece
        last, self._last = self._last, piece
        if last and not (len(piece) > len(last) and piece.startswith(last)):
            self._cumulative = False
        elif len(self.pieces) > _SNAPSHOT_PIECES:
            return piece[len(last) :]
        return piece

    def value(self) -> str:
        if self._cumulative and len(self.pieces) > _SNAPSHOT_PIECES:
            return self._last
        return mend_surrogates("".join(self.pieces))


class _Call:
    """One tool call under construction."""

    __slots__ = ("arguments", "id", "name", "position")

    def __init__(self, position: int) -> None:
        self.position = position
        self.id = ""
        self.name = ""
        self.arguments: list[str] = []

    def value(self, reply_id: str | None) -> ToolCall:
        joined = mend_surrogates("".join(self.arguments))
        if len(self.arguments) > 1 and not _is_object(joined) and _is_object(self.arguments[-1]):
            joined = self.arguments[-1]  # a host that sent the whole text again
        return ToolCall(self.id or f"call_{reply_id or 'x'}_{self.position}", self.name, joined)


class MessageBuilder:
    """Accumulates deltas to one assistant message and says which of them carry generated text."""

    __slots__ = ("_by_index", "_calls", "_details", "_member", "_reasoning", "_text")

    def __init__(self) -> None:
        self._text = _Text()
        self._reasoning = _Text()
        self._member: ReasoningMember = "reasoning_content"
        self._details: list[dict[str, JsonValue]] = []
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}

    def add(self, delta: Mapping[str, JsonValue], at_ns: int, events: list[StreamEvent]) -> int:
        """Take one delta, append its events, and return how many generated characters it carried."""
        chars = 0
        for name, value in delta.items():
            if not value or name == "role":
                continue
            if name == "content":
                new = self._text.add(value if isinstance(value, str) else _parts_text(value))
                if new:
                    events.append(TextDelta(new, at_ns))
                    chars += len(new)
            elif name == "tool_calls":
                for call in value if isinstance(value, list) else ():
                    if isinstance(call, dict):
                        chars += self._add_call(call, at_ns, events)
            elif name == "reasoning_content":
                chars += self._add_reasoning(value, "reasoning_content", at_ns, events)
            elif name == "reasoning":
                if not delta.get("reasoning_content"):
                    chars += self._add_reasoning(value, "reasoning", at_ns, events)
            elif name == "reasoning_details":
                chars += self._add_details(value, delta, at_ns, events)
        return chars

    def replace(self, message: Mapping[str, JsonValue], at_ns: int, events: list[StreamEvent]) -> int:
        """Take a whole message in place of a delta: what it states counts, what it leaves out stays."""
        fresh = MessageBuilder()
        found: list[StreamEvent] = []
        fresh.add(message, at_ns, found)
        chars = 0
        for event in found:
            if isinstance(event, ReasoningDelta):
                new = event.text.removeprefix(self._reasoning.value())
                if new:
                    events.append(ReasoningDelta(new, at_ns))
                    chars += len(new)
            elif isinstance(event, TextDelta):
                new = event.text.removeprefix(self._text.value())
                if new:
                    events.append(TextDelta(new, at_ns))
                    chars += len(new)
            elif isinstance(event, ToolCallDelta) and not self._calls:
                events.append(event)
                chars += len(event.name or "") + len(event.arguments)
        if fresh._text.pieces:
            self._text = fresh._text
        if fresh._reasoning.pieces:
            self._reasoning, self._member = fresh._reasoning, fresh._member
        if fresh._calls:
            self._calls, self._by_index = fresh._calls, fresh._by_index
        if fresh._details:
            self._details = fresh._details
        return chars

    def message(self, reply_id: str | None) -> Message:
        """Return the message so far."""
        text, thought = self._text.value(), self._reasoning.value()
        reasoning = (
            Reasoning(thought, tuple(self._details), self._member) if thought or self._details else None
        )
        calls = tuple(call.value(reply_id) for call in self._calls)
        return Message("assistant", text or (None if calls else ""), calls, reasoning=reasoning)

    def _add_reasoning(
        self, text: JsonValue, member: ReasoningMember, at_ns: int, events: list[StreamEvent]
    ) -> int:
        if not isinstance(text, str):
            return 0
        self._member = member
        new = self._reasoning.add(text)
        if not new:
            return 0
        events.append(ReasoningDelta(new, at_ns))
        return len(new)

    def _add_details(
        self, details: JsonValue, delta: Mapping[str, JsonValue], at_ns: int, events: list[StreamEvent]
    ) -> int:
        """Keep the structured details; their text counts only where there is no plain text beside them."""
        fresh = [item for item in details if isinstance(item, dict)] if isinstance(details, list) else []
        _merge_details(self._details, fresh)
        if delta.get("reasoning_content") or delta.get("reasoning"):
            return 0
        text = "".join(detail_text(item) for item in fresh)
        return self._add_reasoning(text, "reasoning", at_ns, events) if text else 0

    def _add_call(self, data: Mapping[str, JsonValue], at_ns: int, events: list[StreamEvent]) -> int:
        """Take a piece of a tool call."""
        index, function = data.get("index"), as_object(data.get("function")) or {}
        if type(index) is int and index in self._by_index and not data.get("id") and not function.get("name"):
            more = function.get("arguments")  # nearly all pieces: more arguments for a known call
            if isinstance(more, str) and more:
                call = self._by_index[index]
                call.arguments.append(more)
                events.append(ToolCallDelta(call.position, None, None, more, at_ns))
                return len(more)
        call_id, name = as_str(data.get("id")) or "", as_str(function.get("name")) or ""
        raw = function.get("arguments")
        arguments = "" if raw is None else raw if isinstance(raw, str) else write_json(raw).decode()
        call = self._find_call(as_int(index), call_id, name)
        fresh_name = name if not call.name else ""
        call.id = call.id or call_id
        call.name = call.name or name
        if arguments:
            call.arguments.append(arguments)
        if not (fresh_name or arguments or call_id):
            return 0
        events.append(ToolCallDelta(call.position, call_id or None, fresh_name or None, arguments, at_ns))
        return len(fresh_name) + len(arguments)

    def _find_call(self, index: int | None, call_id: str, name: str) -> _Call:
        """Find the call that a piece belongs to. Some hosts leave out the index, the id, or both."""
        if call_id:
            for known in self._calls:
                if known.id == call_id and (index is None or self._by_index.get(index) in (known, None)):
                    return known
        last = self._calls[-1] if self._calls else None
        found = self._by_index.get(index) if index is not None else last
        starts_new = (
            found is None
            or (call_id != "" and found.id not in ("", call_id))
            or (index is None and not call_id and bool(name) and bool(found.name) and bool(found.arguments))
        )
        if found is None or starts_new:
            found = _Call(len(self._calls))
            self._calls.append(found)
        if index is not None:
            self._by_index[index] = found
        return found


class StreamDecoder:
    """Full decoder of one streamed reply: typed events out, the whole reply at the end."""

    __slots__ = (
        "_builder", "_burst", "_done", "_ended", "_events", "_finish", "_id", "_model", "_raw", "_served_by",
        "_sse", "_usage", "arrivals", "error", "first_event_chars", "first_token_ns", "largest_burst",
        "last_token_ns", "token_events", "total_chars",
    )  # fmt: skip

    def __init__(self) -> None:
        self._sse = SseParser()
        self._builder = MessageBuilder()
        self._usage = UsageFinder()
        self._events: list[StreamEvent] = []
        self._finish: str | None = None
        self._id: str | None = None
        self._model: str | None = None
        self._served_by: str | None = None
        self._raw: Mapping[str, JsonValue] = {}
        self._done = False
        self._ended = False
        self.error: Mapping[str, JsonValue] | None = None
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.token_events = 0
        self.arrivals = 0
        self.largest_burst = self._burst = 0
        self.first_event_chars = 0
        self.total_chars = 0

    def feed(self, data: bytes, at_ns: int) -> None:
        """Take bytes that arrived at ``at_ns``. ``ProtocolError`` where they are no chat stream."""
        for event in self._sse.feed(data):
            self.event(event, at_ns)

    def finish(self, at_ns: int) -> None:
        """Take the end of the bytes."""
        for event in self._sse.finish():
            self.event(event, at_ns)
        if self.complete and not self._ended:
            self._ended = True
            self._events.append(End(normal_finish(self._finish) or "other", self._finish, at_ns))

    def take(self) -> list[StreamEvent]:
        """Return the events since the last call."""
        events = self._events
        if events:
            self._events = []
        return events

    @property
    def started(self) -> bool:
        """Whether any chunk has been seen."""
        return bool(self._raw) or self._done

    @property
    def complete(self) -> bool:
        """Whether the reply ended as the wire format says."""
        return (
            self._finish is not None and self.error is None and (self._done or self._usage.report is not None)
        )

    def reply(self, headers: Mapping[str, str]) -> Reply:
        """Return the reply so far."""
        self._usage.see_headers(headers)
        return Reply(
            message=self._builder.message(self._id),
            raw_finish_reason=self._finish,
            report=self._usage.report,
            error=self.error,
            complete=self.complete,
            id=self._id,
            model=self._model,
            served_by=self._served_by,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            token_events=self.token_events,
            arrivals=self.arrivals,
            largest_burst=self.largest_burst,
            first_event_chars=self.first_event_chars,
            total_chars=self.total_chars,
            raw=self._raw,
        )

    def event(self, data: bytes, at_ns: int) -> None:
        """Take the data of one event."""
        if data[:1] != b"{" and data.strip() == DONE:
            self._done = True
            return
        try:
            payload = read_object(data)
        except ValueError as error:
            raise ProtocolError(f"a stream event is not a JSON object: {error}") from error
        get = payload.get
        choices = get("choices")
        usage = get("usage")
        if self._id is None or usage is not None or not choices:
            self._identify(payload)
        if get("error"):
            self.error = as_object(get("error")) or payload
        self._raw = payload
        if isinstance(choices, list):
            for choice in choices:
                if isinstance(choice, dict) and not choice.get("index"):
                    self._choice(choice, at_ns)
                    if usage is None and choice.get("usage") is not None:
                        usage = choice["usage"]
        if usage is not None:
            self._see_usage(payload, at_ns)

    def _identify(self, payload: Mapping[str, JsonValue]) -> None:
        """Take who answers: from the first chunk, and from the last one, whose model may be more exact."""
        self._id = self._id or as_str(payload.get("id"))
        self._model = as_str(payload.get("model")) or self._model
        self._served_by = as_str(payload.get("provider")) or self._served_by
        if payload.get("object") == "error":
            self.error = payload

    def _choice(self, choice: Mapping[str, JsonValue], at_ns: int) -> None:
        get = choice.get
        delta = get("delta")
        if isinstance(delta, dict):
            chars = self._builder.add(delta, at_ns, self._events) if delta else 0
        else:
            message = get("message")
            chars = self._builder.replace(message, at_ns, self._events) if isinstance(message, dict) else 0
        if chars:
            if self.first_token_ns is None:
                self.first_token_ns = at_ns
                self.first_event_chars = chars
            if at_ns != self.last_token_ns:
                self.arrivals += 1
                self._burst = 0
            self._burst += 1
            if self._burst > self.largest_burst:
                self.largest_burst = self._burst
            self.last_token_ns = at_ns
            self.token_events += 1
            self.total_chars += chars
        finish = get("finish_reason")
        if finish and isinstance(finish, str) and (self._finish is None or finish == "error"):
            self._finish = finish
        error = get("error")
        if error:
            self.error = as_object(error) or {"message": str(error)}

    def _see_usage(self, payload: Mapping[str, JsonValue], at_ns: int) -> None:
        if self._usage.see(payload) and self._usage.report is not None:
            self._events.append(UsageUpdate(self._usage.report.usage, at_ns))


def read_reply(payload: Mapping[str, JsonValue], headers: Mapping[str, str]) -> Reply:
    """Read a reply that came in one piece; ``ProtocolError`` where it has neither choice nor error."""
    usage = UsageFinder()
    usage.see(payload)
    usage.see_headers(headers)
    choices = payload.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    error = as_object(payload.get("error")) or as_object(choice.get("error"))
    if payload.get("object") == "error":
        error = payload
    if not choice and error is None:
        raise ProtocolError("the reply has neither a choice nor an error")
    message = Message.from_json(choice.get("message") or {"role": "assistant", "content": None})
    finish = as_str(choice.get("finish_reason")) or None
    return Reply(
        message=_with_ids(message, as_str(payload.get("id"))),
        raw_finish_reason=finish,
        report=usage.report,
        error=error,
        complete=error is None and finish not in (None, "error"),
        id=as_str(payload.get("id")),
        model=as_str(payload.get("model")),
        served_by=as_str(payload.get("provider")),
        total_chars=len(message.text),
        raw=payload,
    )


def _with_ids(message: Message, reply_id: str | None) -> Message:
    """Name tool calls that came without an id, so that their results can be told apart."""
    if all(call.id for call in message.tool_calls):
        return message
    calls = tuple(
        call if call.id else ToolCall(f"call_{reply_id or 'x'}_{i}", call.name, call.arguments)
        for i, call in enumerate(message.tool_calls)
    )
    return Message(
        message.role,
        message.content,
        calls,
        message.tool_call_id,
        message.name,
        message.reasoning,
        message.extra,
    )


def mend_surrogates(text: str) -> str:
    """Join the two halves of a character that a host split over two JSON strings."""
    if text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _is_object(text: str) -> bool:
    try:
        read_object(text)
    except ValueError:
        return False
    return True


def _parts_text(content: JsonValue) -> str:
    if not isinstance(content, list):
        return ""
    return "".join(as_str(part.get("text")) or "" for part in content if isinstance(part, dict))


def _merge_details(known: list[dict[str, JsonValue]], fresh: Sequence[Mapping[str, JsonValue]]) -> None:
    """Join text pieces of the same detail; every other detail is kept as it came."""
    for item in fresh:
        last = known[-1] if known else None
        key = next((k for k in ("text", "summary") if isinstance(item.get(k), str)), None)
        if (
            last is not None
            and key is not None
            and isinstance(last.get(key), str)
            and last.get("type") == item.get("type")
            and last.get("index") == item.get("index")
        ):
            joined = f"{last[key]}{item[key]}"
            last.update({name: value for name, value in item.items() if value is not None})
            last[key] = joined
        else:
            known.append(dict(item))
