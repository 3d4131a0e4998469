"""A chat request after a dialect has read it: neutral, checked, ready to be encoded and sampled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3eval_local.protocol.errors import bad_request
from k3eval_local.protocol.messages import (
    Call,
    ChatMessage,
    Conversation,
    ResponseFormat,
    Role,
    ToolChoice,
    ToolDef,
)
from k3eval_local.protocol.wire import CallBody, ChatBody, MessageBody, ResponseFormatBody, ToolBody

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
"""Names that every dialect accepts."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat completion to make."""

    model: str
    conversation: Conversation
    max_tokens: int | None = None
    """``None``: the server's default, bounded by the context."""
    min_tokens: int = 0
    ignore_eos: bool = False
    """Generate up to ``max_tokens`` whatever comes: for decode measurements."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """``None``: none. ``k``: the chosen token's and the ``k`` most likely ones'."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    show_reasoning: bool = True
    parallel_calls: bool = True
    timings: bool = False
    host: str | None = None
    """OpenRouter: the tag of the endpoint that serves the request."""
    write_1h: bool = False
    """Moonshot: the cache writes of this request are meant to live for an hour, at that price."""

    @property
    def earlier_calls(self) -> int:
        """Tool calls in the conversation so far; K3 numbers calls through the whole conversation."""
        return sum(len(message.calls) for message in self.conversation.messages)


def read_messages(bodies: Sequence[MessageBody]) -> tuple[ChatMessage, ...]:
    """Messages of the wire as messages of the protocol.

    Raises:
        ProtocolError: an unknown role, content that is not text, a call or result without its id.
    """
    return tuple(_read_message(index, body) for index, body in enumerate(bodies))


def _read_message(index: int, body: MessageBody) -> ChatMessage:
    where = f"messages.{index}"
    role = _ROLES.get(body.role)
    if role is None:
        raise bad_request(f"{where}.role: {body.role!r} is not one of {', '.join(_ROLES)}", "messages")
    text = read_text(body, where)
    if body.tools is not None and (role != "system" or text):
        raise bad_request(
            f"{where}.tools: only a system message without content may declare tools", "messages"
        )
    if role == "tool" and not body.tool_call_id:
        raise bad_request(f"{where}: a tool message needs the tool_call_id that it answers", "messages")
    if body.tool_calls and role != "assistant":
        raise bad_request(f"{where}.tool_calls: only an assistant message has tool calls", "messages")
    return ChatMessage(
        role=role,
        text=text,
        name=body.name if role != "tool" else None,
        reasoning=_reasoning(body) if role == "assistant" else None,
        calls=_read_calls(where, body.tool_calls or ()),
        call_id=body.tool_call_id if role == "tool" else None,
        tools=read_tools(body.tools or (), f"{where}.tools"),
    )


def read_text(body: MessageBody, where: str) -> str:
    """The message's content as one text.

    Raises:
        ProtocolError: a part is not text; this server has no vision.
    """
    if body.content is None or isinstance(body.content, str):
        return body.content or ""
    texts = []
    for number, part in enumerate(body.content):
        if part.type != "text" or part.text is None:
            raise bad_request(
                f"{where}.content.{number}: content of type {part.type!r} is not supported here, send text",
                "messages",
            )
        texts.append(part.text)
    return "".join(texts)


def _reasoning(body: MessageBody) -> str | None:
    for text in (body.reasoning_content, body.reasoning):
        if text is not None:
            return text
    if body.reasoning_details:
        texts = (detail.get("text") or detail.get("summary") for detail in body.reasoning_details)
        return "".join(text for text in texts if isinstance(text, str))
    return None


def _read_calls(where: str, bodies: Iterable[CallBody]) -> tuple[Call, ...]:
    calls = tuple(Call(body.id, body.function.name, body.function.arguments or "{}") for body in bodies)
    for call in calls:
        if not call.id:
            raise bad_request(f"{where}.tool_calls: every call needs an id", "messages")
    if len({call.id for call in calls}) < len(calls):
        raise bad_request(f"{where}.tool_calls: two calls have the same id", "messages")
    return calls


def read_tools(bodies: Iterable[ToolBody], where: str = "tools") -> tuple[ToolDef, ...]:
    """Declared tools.

    Raises:
        ProtocolError: a type other than function, or a name that no host accepts.
    """
    tools = []
    for index, body in enumerate(bodies):
        if body.type != "function":
            raise bad_request(
                f"{where}.{index}.type: {body.type!r} is not available here, use 'function'", "tools"
            )
        if not TOOL_NAME.fullmatch(body.function.name):
            raise bad_request(
                f"{where}.{index}.function.name: {body.function.name!r} must start with a letter or '_' and "
                "hold letters, digits, '_', '-', '.' only, at most 128",
                "tools",
            )
        tools.append(
            ToolDef(body.function.name, body.function.description or "", body.function.parameters or {})
        )
    return tuple(tools)


def check_unique(tools: Iterable[ToolDef]) -> None:
    """Raise ProtocolError when two tools, declared anywhere, have one name."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise bad_request(f"tools: the name {tool.name!r} is declared twice", "tools")
        seen.add(tool.name)


def read_tool_choice(body: ChatBody, tools: Sequence[ToolDef]) -> ToolChoice:
    """``tool_choice``.

    Raises:
        ProtocolError: an unknown word, a forced call without tools, a name that is not declared.
    """
    choice = body.tool_choice
    if choice is None:
        return ToolChoice("auto")
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise bad_request(f"tool_choice: {choice!r} is not one of auto, none, required", "tool_choice")
        if choice == "required" and not tools:
            raise bad_request("tool_choice: 'required' needs tools", "tool_choice")
        return ToolChoice("auto" if choice == "auto" else "none" if choice == "none" else "required")
    name = choice.function.name
    if choice.type != "function" or all(tool.name != name for tool in tools):
        raise bad_request(f"tool_choice: {name!r} is not among the tools", "tool_choice")
    return ToolChoice("named", name)


def read_response_format(body: ResponseFormatBody | None) -> ResponseFormat:
    """``response_format``.

    Raises:
        ProtocolError: an unknown type, or a json_schema without name or schema.
    """
    if body is None or body.type == "text":
        return ResponseFormat()
    if body.type == "json_object":
        return ResponseFormat("json_object")
    if body.type != "json_schema":
        raise bad_request(
            f"response_format.type: {body.type!r} is not one of text, json_object, json_schema",
            "response_format",
        )
    schema = body.json_schema
    if schema is None or not schema.name or schema.schema_ is None:
        raise bad_request("response_format.json_schema: both name and schema are needed", "response_format")
    return ResponseFormat("json_schema", schema.schema_)


def read_stop(stop: str | Sequence[str] | None, *, most: int, longest_bytes: int | None) -> tuple[str, ...]:
    """``stop`` as a tuple of texts.

    Raises:
        ProtocolError: too many, too long, or an empty one.
    """
    texts = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > most:
        raise bad_request(f"stop: at most {most} texts, not {len(texts)}", "stop")
    for text in texts:
        if not text:
            raise bad_request("stop: an empty text would stop at once", "stop")
        if longest_bytes is not None and len(text.encode()) > longest_bytes:
            raise bad_request(f"stop: at most {longest_bytes} bytes each", "stop")
    return texts
