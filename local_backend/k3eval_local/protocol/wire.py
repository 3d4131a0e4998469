"""Request bodies as they come over the wire. Unknown members are ignored: clients and APIs grow.

Types are strict (``"1"`` is no number); what the values mean, and which are refused, is the dialects'
business. Each dialect adds its own members to :class:`ChatBody`.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from k3eval_local.protocol.errors import ErrorKind, ProtocolError, bad_request
from k3eval_local.protocol.messages import JsonObject


class WireModel(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class PartBody(WireModel):
    """One part of a message's content."""

    type: str
    text: str | None = None


class FunctionCallBody(WireModel):
    """Name and arguments (JSON text) of a call."""

    name: str
    arguments: str | None = None


class CallBody(WireModel):
    """A tool call of an earlier assistant message."""

    id: str
    type: str = "function"
    function: FunctionCallBody


class FunctionBody(WireModel):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolBody(WireModel):
    """A tool."""

    type: str = "function"
    function: FunctionBody


class MessageBody(WireModel):
    """One message, with every vendor's name for reasoning."""

    role: str
    content: str | list[PartBody] | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[JsonObject] | None = None
    tools: list[ToolBody] | None = None
    partial: bool | None = None


class NamedFunctionBody(WireModel):
    """The function that must be called."""

    name: str


class ToolChoiceBody(WireModel):
    """``tool_choice`` as an object."""

    type: str = "function"
    function: NamedFunctionBody


class JsonSchemaBody(WireModel):
    """``response_format.json_schema``."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormatBody(WireModel):
    """``response_format``."""

    type: str
    json_schema: JsonSchemaBody | None = None


class StreamOptionsBody(WireModel):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatBody(WireModel):
    """``POST /v1/chat/completions``: the members that all dialects share."""

    model: Annotated[str, Field(max_length=256)]
    messages: Annotated[list[MessageBody], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=2**31)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    n: Annotated[int | None, Field(ge=1, le=16)] = None
    stop: str | list[str] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatBody | None = None
    reasoning_effort: str | None = None
    k3eval_timings: bool | None = None


class CountBody(WireModel):
    """``POST /v1/tokenizers/estimate-token-count``."""

    model: Annotated[str, Field(max_length=256)]
    messages: Annotated[list[MessageBody], Field(min_length=1)]
    tools: list[ToolBody] | None = None


Body = TypeVar("Body", bound=WireModel)


def parse_json(data: bytes) -> JsonValue:
    """The JSON document in ``data``.

    Raises:
        ProtocolError: it is no JSON (also: NaN, lone surrogates, nested too deeply).
    """
    try:
        value: JsonValue = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ProtocolError(ErrorKind.BAD_JSON, f"the request body is not valid JSON: {error}") from error
    return value


def parse_body(kind: type[Body], data: bytes) -> Body:
    """``data`` as a body of ``kind``.

    Raises:
        ProtocolError: not JSON, or a member of the wrong type or outside its range; the first one is named.
    """
    value = parse_json(data)
    if not isinstance(value, dict):
        raise bad_request("the request body must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise bad_request(f"{where}: {first['msg']}", where.partition(".")[0]) from error
