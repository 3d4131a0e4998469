"""XTML: a conversation as token ids, segment by segment (spec section 4.1).

Control tokens are placed as ids; tag names, attributes and text are separate ordinary BPE pieces, so user
text that spells a control token stays text. Rendering to one string first and tokenising that would lose
both properties. ``Prompt.prompt_tokens`` is the rendered length without the last channel opener.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from k3eval_local.protocol.messages import Call, ChatMessage, Conversation
from k3eval_local.protocol.options import effort_body, response_format_body, tool_choice_body, tools_body
from k3eval_local.tokenizer import Tokenizer

CHANNEL_OPENER = 3
"""Tokens of ``OPEN think SEP`` (or ``response``) that usage does not count (spec 4.2)."""


class ConversationError(ValueError):
    """A conversation that has no rendering; ``index`` is the message at fault."""

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. ``boundaries`` are the lengths at which a message ends, ascending."""

    ids: tuple[int, ...]
    boundaries: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        """What ``usage.prompt_tokens`` reports."""
        return len(self.ids) - CHANNEL_OPENER


def encode(tokenizer: Tokenizer, conversation: Conversation) -> Prompt:
    """Render ``conversation`` up to the point where the assistant's next message starts.

    Raises:
        ConversationError: a tool result answers no call of the assistant message before it.
    """
    writer = _Writer(tokenizer)
    if conversation.tools:
        writer.option("tool-declare", tools_body(conversation.tools, dynamic=False))
    if conversation.thinking and conversation.effort is not None:
        writer.option("thinking-effort", effort_body(conversation.effort))
    for message, answered in in_call_order(conversation.messages):
        _message(writer, message, answered, thinking=conversation.thinking)
    if choice := tool_choice_body(conversation.tool_choice):
        writer.option("tool-choice", choice)
    if form := response_format_body(conversation.response_format):
        writer.option("response-format", form)
    writer.open("message", role="assistant")
    writer.open("think" if conversation.thinking else "response")
    return Prompt(tuple(writer.ids), tuple(writer.boundaries))


def in_call_order(messages: Sequence[ChatMessage]) -> list[tuple[ChatMessage, tuple[Call, int] | None]]:
    """``messages`` with every run of tool results put in the order of the calls that they answer.

    Each tool message comes with its call and the call's 1-based index. Ids are opaque; the alias
    ``name:zero_based_position`` is accepted too.

    Raises:
        ConversationError: a result has no call, or two results answer the same call.
    """
    ordered: list[tuple[ChatMessage, tuple[Call, int] | None]] = []
    calls: tuple[Call, ...] = ()
    run: dict[int, ChatMessage] = {}

    def flush() -> None:
        ordered.extend((run[position], (calls[position], position + 1)) for position in sorted(run))
        run.clear()

    for index, message in enumerate(messages):
        if message.role == "tool":
            position = _position(calls, message.call_id)
            if position is None:
                raise ConversationError(
                    f"tool_call_id {message.call_id!r} answers no call of the assistant message before it",
                    index=index,
                )
            if position in run:
                raise ConversationError(f"tool_call_id {message.call_id!r} is answered twice", index=index)
            run[position] = message
            continue
        flush()
        if message.role == "assistant":
            calls = message.calls
        elif message.role == "user":
            calls = ()
        ordered.append((message, None))
    flush()
    return ordered


def _position(calls: Sequence[Call], call_id: str | None) -> int | None:
    for position, call in enumerate(calls):
        if call.id == call_id:
            return position
    for position, call in enumerate(calls):
        if f"{call.name}:{position}" == call_id:
            return position
    return None


def _message(
    writer: _Writer, message: ChatMessage, answered: tuple[Call, int] | None, *, thinking: bool
) -> None:
    if message.tools:
        writer.option("tool-declare", tools_body(message.tools, dynamic=True))
        return
    if message.role == "tool" and answered is not None:
        call, index = answered
        writer.open("message", role="tool", tool=call.name, index=str(index))
        writer.text(message.text)
    else:
        attributes = {"role": message.role} | ({"name": message.name} if message.name is not None else {})
        writer.open("message", **attributes)
        if message.role == "assistant":
            _assistant_body(writer, message, thinking=thinking)
        else:
            writer.text(message.text)
    writer.end_message()


def _assistant_body(writer: _Writer, message: ChatMessage, *, thinking: bool) -> None:
    if thinking:  # preserved thinking: every earlier message keeps its element, even an empty one
        writer.element("think", message.reasoning or "")
    writer.element("response", message.text)
    if not message.calls:
        return
    writer.open("tools")
    for index, call in enumerate(message.calls, start=1):
        writer.open("call", tool=call.name, index=str(index))
        arguments = _parsed(call.arguments)
        if arguments is None:  # what is no JSON object is kept whole (input only)
            writer.element("json", call.arguments, type="object")
        else:
            for key, value in arguments.items():
                text = isinstance(value, str) and not isinstance(value, _Number)
                writer.element(
                    "argument", str(value) if text else _render(value), key=key, type=xtml_type(value)
                )
        writer.close("call")
    writer.close("tools")


class _Number(str):
    """A JSON number as it was spelled: ``1e2`` sent back as ``100.0`` would miss its cached prefix."""

    __slots__ = ()


def _parsed(arguments: str) -> dict[str, JsonValue] | None:
    try:
        value = json.loads(arguments, parse_float=_Number, parse_int=_Number, parse_constant=_Number)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _render(value: JsonValue) -> str:
    """JSON with Python's default separators, numbers as they were spelled."""
    match value:
        case _Number():
            return str(value)
        case dict():
            members = (
                f"{json.dumps(key, ensure_ascii=False)}: {_render(each)}" for key, each in value.items()
            )
            return "{" + ", ".join(members) + "}"
        case list():
            return "[" + ", ".join(map(_render, value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def xtml_type(value: JsonValue) -> str:
    """The ``type`` attribute of an argument."""
    match value:
        case _Number() | int() | float() if not isinstance(value, bool):
            return "number"
        case str():
            return "string"
        case bool():
            return "boolean"
        case None:
            return "null"
        case dict():
            return "object"
        case _:
            return "array"


def escape(value: str) -> str:
    """An attribute value: only ``&`` and ``"`` are escaped, in this order."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """The inverse of :func:`escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


@dataclass(slots=True)
class _Writer:
    tokenizer: Tokenizer
    ids: list[int] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)

    def text(self, text: str) -> None:
        self.ids.extend(self.tokenizer.encode(text))

    def open(self, tag: str, **attributes: str) -> None:
        control = self.tokenizer.control
        self.ids.append(control.open)
        self.text(tag)
        for key, value in attributes.items():
            for piece in (f" {key}", '="', escape(value), '"'):
                self.text(piece)
        self.ids.append(control.sep)

    def close(self, tag: str) -> None:
        control = self.tokenizer.control
        self.ids.append(control.close)
        self.text(tag)
        self.ids.append(control.sep)

    def element(self, tag: str, body: str, **attributes: str) -> None:
        self.open(tag, **attributes)
        self.text(body)
        self.close(tag)

    def end_message(self) -> None:
        self.close("message")
        self.ids.append(self.tokenizer.control.end_of_msg)
        self.boundaries.append(len(self.ids))

    def option(self, kind: str, body: str) -> None:
        self.open("message", role="system", type=kind)
        self.text(body)
        self.end_message()
