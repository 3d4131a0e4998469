"""Messages of a conversation, kept whole.

A message read from a host and sent back is the same message: reasoning text and its structured details,
tool-call ids byte for byte, and members that this package does not know. ``to_json``/``from_json`` are exact
inverses; how a host wants reasoning replayed is the provider's business, not the message's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from k3eval.errors import ProtocolError, ToolArgumentsError
from k3eval.jsontypes import JsonObject, JsonValue, as_object, as_str, read_json, write_json

Role = Literal["system", "user", "assistant", "tool", "developer"]
ReasoningMember = Literal["reasoning_content", "reasoning"]
Content: TypeAlias = "str | tuple[Mapping[str, JsonValue], ...] | None"
"""Text, or content parts (``{"type": "text", ...}``, ``{"type": "image_url", ...}``) as they go on the wire.
"""

_ROLES = ("system", "user", "assistant", "tool", "developer")
_KNOWN = {
    "role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning",
    "reasoning_details",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asks for. The id is opaque: it may hold ``:``, ``.`` and ``_``."""

    id: str
    name: str
    arguments: str
    """The raw text that the model wrote; meant to be a JSON object, not always one."""

    def parsed(self) -> dict[str, JsonValue]:
        """Return the arguments as an object; an empty text counts as no arguments.

        Raises ``ToolArgumentsError`` where the model wrote anything else.
        """
        if not self.arguments.strip():
            return {}
        try:
            value = read_json(self.arguments)
        except ValueError as error:
            raise ToolArgumentsError(f"arguments of {self.name} are not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ToolArgumentsError(
                f"arguments of {self.name} must be a JSON object, not {type(value).__name__}"
            )
        return value

    def to_json(self) -> JsonObject:
        """Return the wire form."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }

    @classmethod
    def from_json(cls, data: JsonValue) -> ToolCall:
        """Read the wire form. Missing members become empty strings, arguments sent as an object text."""
        call = as_object(data) or {}
        function = as_object(call.get("function")) or {}
        arguments = function.get("arguments")
        if arguments is None:
            text = ""
        else:
            text = arguments if isinstance(arguments, str) else write_json(arguments).decode("utf-8")
        return cls(as_str(call.get("id")) or "", as_str(function.get("name")) or "", text)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought, as the host handed it over."""

    text: str
    """For display. Where ``details`` exist they hold the same text; never join the two."""
    details: tuple[Mapping[str, JsonValue], ...] = ()
    """OpenRouter's ``reasoning_details``, sent back unchanged and in order."""
    member: ReasoningMember = "reasoning_content"
    """The member under which the host sent the text."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Build it with ``Message.system/user/assistant/tool`` or from a reply."""

    role: Role
    content: Content = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: Reasoning | None = None
    extra: Mapping[str, JsonValue] = field(default_factory=dict)
    """Members of the wire form that have no field here, kept for the way back."""

    @property
    def text(self) -> str:
        """The text of the message; text parts joined, other parts left out."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(as_str(part.get("text")) or "" for part in self.content if part.get("type") == "text")

    @classmethod
    def system(cls, content: str) -> Message:
        """Return a system message."""
        return cls("system", content)

    @classmethod
    def user(cls, content: str | Sequence[Mapping[str, JsonValue]]) -> Message:
        """Return a user message of text or of content parts."""
        return cls("user", content if isinstance(content, str) else tuple(content))

    @classmethod
    def assistant(
        cls,
        content: str | None = None,
        *,
        tool_calls: Sequence[ToolCall] = (),
        reasoning: Reasoning | str | None = None,
    ) -> Message:
        """Return an assistant message; reasoning may be given as plain text."""
        thought = Reasoning(reasoning) if isinstance(reasoning, str) else reasoning
        return cls("assistant", content, tuple(tool_calls), reasoning=thought)

    @classmethod
    def tool(cls, tool_call_id: str, content: str, *, name: str | None = None) -> Message:
        """Return the result of one tool call."""
        return cls("tool", content, tool_call_id=tool_call_id, name=name)

    def to_json(self) -> JsonObject:
        """Return the wire form with every member that the message has, under the names it came with."""
        data: JsonObject = {"role": self.role}
        if self.content is not None:
            data["content"] = (
                self.content if isinstance(self.content, str) else [dict(p) for p in self.content]
            )
        if self.reasoning is not None:
            data[self.reasoning.member] = self.reasoning.text
            if self.reasoning.details:
                data["reasoning_details"] = [dict(detail) for detail in self.reasoning.details]
        if self.tool_calls:
            data["tool_calls"] = [call.to_json() for call in self.tool_calls]
        if self.tool_call_id is not None:
            data["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            data["name"] = self.name
        data.update(self.extra)
        return data

    @classmethod
    def from_json(cls, data: JsonValue) -> Message:
        """Read the wire form; ``ProtocolError`` where it is no message."""
        value = as_object(data)
        if value is None:
            raise ProtocolError("a message must be a JSON object")
        role = value.get("role", "assistant")
        if role not in _ROLES:
            raise ProtocolError(f"unknown message role {role!r}")
        calls = value.get("tool_calls")
        return cls(
            role=cast("Role", role),
            content=_content(value.get("content")),
            tool_calls=tuple(ToolCall.from_json(call) for call in calls) if isinstance(calls, list) else (),
            tool_call_id=as_str(value.get("tool_call_id")),
            name=as_str(value.get("name")),
            reasoning=read_reasoning(value),
            extra={key: item for key, item in value.items() if key not in _KNOWN},
        )


def read_reasoning(value: Mapping[str, JsonValue]) -> Reasoning | None:
    """Find reasoning in a message or a delta: ``reasoning_content``, ``reasoning``, ``reasoning_details``."""
    raw = value.get("reasoning_details")
    details = tuple(item for item in raw if isinstance(item, dict)) if isinstance(raw, list) else ()
    text = as_str(value.get("reasoning_content"))
    if text is not None:
        return Reasoning(text, details, "reasoning_content")
    text = as_str(value.get("reasoning"))
    if text is not None:
        return Reasoning(text, details, "reasoning")
    if details:
        return Reasoning("".join(detail_text(item) for item in details), details, "reasoning")
    return None


def detail_text(detail: Mapping[str, JsonValue]) -> str:
    """Return the readable text of one reasoning detail; encrypted details have none."""
    return as_str(detail.get("text")) or as_str(detail.get("summary")) or ""


def _content(value: JsonValue) -> Content:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return tuple(part for part in value if isinstance(part, dict))
    raise ProtocolError(f"message content must be text or parts, not {type(value).__name__}")
