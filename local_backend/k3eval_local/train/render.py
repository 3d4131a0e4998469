"""Conversations in JSONL become token ids, by the server's own encoder, with a mask of what the model writes.

One line is one object with ``messages`` and ``tools`` in chat-completions form; ``untrained`` (indices of
assistant messages to read but not to imitate), ``id`` and ``kind`` are optional. A template is rendered
exactly as the server would render the same request, so training and use cannot drift apart.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, JsonValue, ValidationError

from k3eval_local.errors import LocalError
from k3eval_local.protocol.messages import Call, ChatMessage, Conversation, ToolDef
from k3eval_local.protocol.xtml import encode
from k3eval_local.tokenizer import Tokenizer

_BROKEN = re.compile("[\udc80-\udcff]")
"""What the error handler ``surrogateescape`` makes of bytes that are no UTF-8."""


class DataError(LocalError, ValueError):
    """Data that hold no conversations. The message names the line."""


class _Function(BaseModel):
    name: str
    arguments: str


class _ToolCall(BaseModel):
    id: str
    function: _Function


class _ToolFunction(BaseModel):
    name: str
    description: str = ""
    parameters: dict[str, JsonValue] = {}


class _Tool(BaseModel):
    function: _ToolFunction


class _Message(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] = []
    tool_call_id: str | None = None


class _Record(BaseModel):
    id: str = ""
    kind: str = ""
    tools: list[_Tool] = []
    messages: list[_Message]
    untrained: list[int] = []


@dataclass(frozen=True)
class Turn:
    """Token positions of an assistant message.

    ``begin`` is where it opens, ``start`` the first token that the model writes, ``end`` is exclusive and
    behind the end-of-message token.
    """

    begin: int
    start: int
    end: int
    trained: bool


@dataclass(frozen=True)
class Example:
    """One conversation as ids.

    ``prefix`` tokens at the head are common to many conversations: tools and effort, or, up to ``opening``,
    a first system message too.
    """

    id: str
    kind: str
    ids: tuple[int, ...]
    prefix: int
    opening: int
    turns: tuple[Turn, ...]

    @property
    def trained_tokens(self) -> int:
        """How many tokens the model learns to write."""
        return sum(turn.end - turn.start for turn in self.turns if turn.trained)

    def first(self, turns: int) -> "Example":
        """The conversation up to its ``turns``-th assistant message."""
        kept = self.turns[:turns]
        return replace(self, ids=self.ids[: kept[-1].end], turns=kept)


def read_records(lines: Iterable[str], name: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """The JSON objects of a JSONL text with their line numbers; blank lines are left out.

    Raises:
        DataError: a line is no JSON object; the message names the text by ``name``.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if _BROKEN.search(line):
            raise DataError(f"{name}, line {number}: not UTF-8; write the file as UTF-8")
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{name}, line {number}: cut or no JSON ({error.msg}, column {error.colno}); "
                f"every line must hold one whole conversation"
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}, line {number}: no usable JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{name}, line {number}: not a JSON object with messages")
        yield number, record


def read_examples(
    lines: Iterable[str], tokenizer: Tokenizer, name: str = "training data"
) -> Iterator[Example]:
    """The examples of a JSONL text, called ``name`` in errors.

    Raises:
        DataError: a line is no conversation with a message to learn; says which line and what is wrong.
    """
    for number, record in read_records(lines, name):
        try:
            example = render(record, tokenizer)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise DataError(f"{name}, line {number}: no conversation: {where}: {first['msg']}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}, line {number}: no conversation: {error}") from error
        if not any(turn.trained for turn in example.turns):
            raise DataError(f"{name}, line {number}: no assistant message that is not in untrained")
        yield example


def render(record: Mapping[str, object], tokenizer: Tokenizer, *, effort: str | None = "max") -> Example:
    """One conversation as the server renders it, thinking on."""
    data = _Record.model_validate(record)
    if not data.messages:
        raise DataError("it holds no message")
    conversation = Conversation(
        tuple(_chat_message(message) for message in data.messages),
        tuple(ToolDef(t.function.name, t.function.description, t.function.parameters) for t in data.tools),
        effort=effort,
    )
    prompt = encode(tokenizer, conversation)
    options = len(prompt.boundaries) - len(data.messages)
    ends = prompt.boundaries[options:]
    starts = (prompt.boundaries[options - 1] if options else 0, *ends[:-1])
    opener = len(prompt.ids) - prompt.boundaries[-1]  # what the server writes before the model does
    turns = tuple(
        Turn(start, start + opener, end, index not in data.untrained)
        for index, (message, start, end) in enumerate(zip(data.messages, starts, ends, strict=True))
        if message.role == "assistant"
    )
    opening = ends[0] if data.messages[0].role == "system" else starts[0]
    return Example(data.id, data.kind, prompt.ids[: ends[-1]], starts[0], opening, turns)


def _chat_message(message: _Message) -> ChatMessage:
    return ChatMessage(
        message.role,
        message.content or "",
        reasoning=message.reasoning_content,
        calls=tuple(Call(c.id, c.function.name, c.function.arguments) for c in message.tool_calls),
        call_id=message.tool_call_id,
    )


def share_openings(examples: Sequence[Example], least: int = 50) -> list[Example]:
    """The examples; where ``least`` of them have the same system message it becomes part of their prefix."""
    counts = Counter(example.ids[: example.opening] for example in examples)
    return [
        replace(example, prefix=example.opening)
        if counts[example.ids[: example.opening]] >= least
        else example
        for example in examples
    ]
