"""Token ids of the assistant's message to typed events, as they stream.

The parser follows XTML but trusts nothing: tags that are malformed, unknown or out of place become text of
the channel they appear in, missing closers are implied by what follows, and any sequence of ids gives a
defined result. It never raises for a token of the vocabulary. Events depend only on the ids, not on how
they arrive.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from k3eval_local.protocol.xtml import unescape
from k3eval_local.tokenizer import Tokenizer

MAX_TAG_BYTES = 2048
"""A tag's header that grows beyond this is text, not a tag."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the think element."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; ``index`` counts this message's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: the pieces of one call, joined, are its JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete."""

    index: int


Event = Reasoning | Text | CallStart | CallArguments | CallEnd


class _At(Enum):
    """Where the parser stands; the message level is between the channels."""

    MESSAGE = auto()
    THINK = auto()
    RESPONSE = auto()
    TOOLS = auto()
    CALL = auto()
    STRING = auto()
    JSON = auto()
    RAW = auto()
    END = auto()


_ATTRIBUTE = re.compile(r' ([A-Za-z_-]+)="([^"]*)"')
_TEXT_PLACES = frozenset({_At.MESSAGE, _At.THINK, _At.RESPONSE})
_CALL_PLACES = frozenset({_At.CALL, _At.STRING, _At.JSON, _At.RAW})


class OutputParser:
    """Parses one generated message.

    Args:
        tokenizer: names the control ids and gives tokens their bytes.
        thinking: whether the prompt ended by opening the think element (else the response element).
        allow_calls: whether tools were declared. Without tools, calls are dropped, never shown as text.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, allow_calls: bool = True) -> None:
        self._tokenizer = tokenizer
        self._allow_calls = allow_calls
        self._at = _At.THINK if thinking else _At.RESPONSE
        self._header: bytearray | None = None
        self._closing = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._out: list[Event] = []
        self._started = 0
        self._first_argument = True
        self._raw_used = False
        self.reasoning_tokens = 0
        self.complete_calls = 0

    @property
    def in_answer(self) -> bool:
        """Whether the next ordinary token belongs to the answer's text."""
        return self._at in (_At.MESSAGE, _At.RESPONSE) and self._header is None

    @property
    def ended(self) -> bool:
        """Whether the message was closed or ended by the end-of-message id."""
        return self._at is _At.END

    def feed(self, token: int) -> tuple[Event, ...]:
        """Events that ``token`` completes, possibly none."""
        if self._at is _At.THINK:
            self.reasoning_tokens += 1
        if self._header is None and token < self._tokenizer.n_ranks:  # nearly every token
            self._body(self._tokenizer.token_bytes(token))
            return self._take() if self._out else ()
        control = self._tokenizer.control
        if token == control.end_of_msg:
            self._abandon_header()
            self._leave(_At.END)
        elif token in (control.open, control.close):
            self._abandon_header()
            self._header, self._closing = bytearray(), token == control.close
        elif self._header is not None:
            self._extend_header(token)
        else:
            self._body(self._tokenizer.token_bytes(token))
        return self._take()

    def finish(self) -> tuple[Event, ...]:
        """What was still held back when generation ended. A cut call gets no :class:`CallEnd`."""
        self._abandon_header()
        self._flush_text()
        return self._take()

    def _take(self) -> tuple[Event, ...]:
        events, self._out = tuple(self._out), []
        return events

    # Tags

    def _extend_header(self, token: int) -> None:
        assert self._header is not None  # noqa: S101 - narrows the type; the only caller has checked it
        if token == self._tokenizer.control.sep:
            header = bytes(self._header)
            self._header = None
            if not self._tag(header):
                self._literal(header, sep=True)
        elif self._tokenizer.is_control(token) or len(self._header) > MAX_TAG_BYTES:
            self._abandon_header()
            self._body(self._tokenizer.token_bytes(token))
        else:
            self._header += self._tokenizer.token_bytes(token)

    def _abandon_header(self) -> None:
        if self._header is not None:
            header, self._header = bytes(self._header), None
            self._literal(header, sep=False)

    def _literal(self, header: bytes, *, sep: bool) -> None:
        control = self._tokenizer.control
        opener = control.close if self._closing else control.open
        closer = self._tokenizer.token_bytes(control.sep) if sep else b""
        self._body(self._tokenizer.token_bytes(opener) + header + closer)

    def _tag(self, header: bytes) -> bool:
        """Act on a complete tag; False when it is no tag that may stand here."""
        name, attributes = _read_header(header)
        if self._closing:
            return self._close_tag(name)
        return self._open_tag(name, attributes)

    def _open_tag(self, name: str, attributes: dict[str, str]) -> bool:
        match name:
            case "think" if self._at is _At.MESSAGE:
                self._leave(_At.THINK)
            case "response" if self._at in (_At.MESSAGE, _At.THINK):
                self._leave(_At.RESPONSE)  # a missing close of the think element is implied
            case "tools" if self._at in _TEXT_PLACES:
                self._leave(_At.TOOLS)
            case "call" if "tool" in attributes and self._at in (_At.TOOLS, *_TEXT_PLACES, *_CALL_PLACES):
                self._leave(_At.TOOLS)
                self._start_call(attributes["tool"])
            case "argument" if "key" in attributes and self._at in _CALL_PLACES:
                self._leave(_At.CALL)
                self._start_argument(attributes["key"], attributes.get("type", "string"))
            case "json" if self._at is _At.CALL and self._first_argument:
                self._leave(_At.RAW)
            case _:
                return False
        return True

    def _close_tag(self, name: str) -> bool:
        match name:
            case "think" if self._at is _At.THINK:
                self._leave(_At.MESSAGE)
            case "response" if self._at is _At.RESPONSE:
                self._leave(_At.MESSAGE)
            case "argument" if self._at in (_At.STRING, _At.JSON):
                self._leave(_At.CALL)
            case "json" if self._at is _At.RAW:
                self._leave(_At.CALL)
            case "call" if self._at in _CALL_PLACES:
                self._leave(_At.TOOLS)
            case "tools" if self._at is _At.TOOLS or self._at in _CALL_PLACES:
                self._leave(_At.MESSAGE)
            case "message" if self._at is not _At.END:
                self._leave(_At.END)
            case _:
                return False
        return True

    # Places

    def _leave(self, to: _At) -> None:
        """Close what is open and stand at ``to``."""
        self._flush_text()
        if self._at is _At.STRING:
            self._arguments('"')
        if self._at in _CALL_PLACES and to not in _CALL_PLACES:
            if not self._raw_used:
                self._arguments("{}" if self._first_argument else "}")
            self.complete_calls += self._allow_calls
            self._emit_call(CallEnd(self._started - 1))
        self._at = to

    def _start_call(self, name: str) -> None:
        self._at = _At.CALL
        self._first_argument = True
        self._raw_used = False
        self._started += 1
        self._emit_call(CallStart(self._started - 1, name))

    def _start_argument(self, key: str, kind: str) -> None:
        lead = "{" if self._first_argument else ", "
        self._first_argument = False
        self._arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
        self._at = _At.JSON if kind in ("number", "boolean", "null", "object", "array") else _At.STRING
        if self._at is _At.STRING:
            self._arguments('"')

    # Bodies

    def _body(self, data: bytes) -> None:
        self._text(self._utf8.decode(data))

    def _flush_text(self) -> None:
        self._text(self._utf8.decode(b"", final=True))
        self._utf8.reset()

    def _text(self, text: str) -> None:
        if not text:
            return
        match self._at:
            case _At.THINK:
                self._out.append(Reasoning(text))
            case _At.RESPONSE | _At.MESSAGE:  # an answer without its element is still the answer
                self._out.append(Text(text))
            case _At.STRING:
                self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            case _At.JSON:
                self._arguments(text)
            case _At.RAW:
                self._raw_used = True
                self._arguments(text)
            case _At.TOOLS | _At.CALL | _At.END:
                pass  # noise between elements has no meaning

    def _arguments(self, text: str) -> None:
        self._emit_call(CallArguments(self._started - 1, text))

    def _emit_call(self, event: CallStart | CallArguments | CallEnd) -> None:
        if self._allow_calls:
            self._out.append(event)


def _read_header(header: bytes) -> tuple[str, dict[str, str]]:
    """Tag name and attributes; the name is empty when the header is not well formed."""
    text = header.decode("utf-8", "replace")
    name, space, rest = text.partition(" ")
    attributes: dict[str, str] = {}
    position = 0
    rest = space + rest
    while position < len(rest):
        match = _ATTRIBUTE.match(rest, position)
        if match is None:
            return "", {}
        attributes[match[1]] = unescape(match[2])
        position = match.end()
    return name, attributes


def parse_all(parser: OutputParser, ids: Iterable[int]) -> list[Event]:
    """All events of a finished message."""
    events = [event for token in ids for event in parser.feed(token)]
    events.extend(parser.finish())
    return events
