"""A conversation as the protocol sees it: vendor-neutral, immutable, already checked.

The wire formats are read into these values, and :mod:`k3eval_local.protocol.xtml` encodes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

JsonObject = dict[str, JsonValue]

Role = Literal["system", "user", "assistant", "tool"]
ToolMode = Literal["auto", "none", "required", "named"]
FormatKind = Literal["text", "json_object", "json_schema"]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an assistant message. ``arguments`` is JSON text, kept as the client sent it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolDef:
    """A tool that the model may call. ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: JsonObject


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. ``tools`` declares tools in mid-conversation and is only on empty system messages."""

    role: Role
    text: str = ""
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    """Of a ``tool`` message: the id of the call that it answers."""
    tools: tuple[ToolDef, ...] = ()


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the answer must look like."""

    kind: FormatKind = "text"
    schema: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call tools; ``name`` only with mode ``named``."""

    mode: ToolMode = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Everything that is rendered into the prompt."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolDef, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    response_format: ResponseFormat = ResponseFormat()
    thinking: bool = True
    effort: str | None = "max"

    @property
    def every_tool(self) -> tuple[ToolDef, ...]:
        """Tools declared up front and in mid-conversation."""
        return (*self.tools, *(tool for message in self.messages for tool in message.tools))
