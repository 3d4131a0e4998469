"""The assistant's message as a grammar for llguidance: structure, tool arguments, JSON answers.

One Lark grammar describes the whole message after the prompt's channel opener, so that a sampled message
is always well formed: reasoning, answer (free text or JSON for a schema), then calls of declared tools with
arguments that satisfy their schemas. String arguments are raw text in XTML, other types JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from pydantic import JsonValue

from k3eval_local.protocol.messages import Conversation, JsonObject, ToolDef
from k3eval_local.protocol.xtml import escape
from k3eval_local.tokenizer import Tokenizer

# One line (spec 4.4: no newline or tab), with the separators that the encoder writes when the message is
# sent back, so that a replayed call finds its cached prefix.
_JSON_STYLE: JsonObject = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_JSON_TYPES = ("number", "boolean", "null", "object", "array")
_MAX_REF_DEPTH = 32
MOST_CALLS = 8
"""Calls that one message may hold. Each has its own rule, because its index is part of the text."""

_TERMINALS = ("TEXT: /(?s:.*)/", r'KEY: /[^"&\x00-\x1f]{1,64}/')


class SchemaError(ValueError):
    """A JSON schema that cannot constrain decoding; ``where`` names the tool or ``response_format``."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where


class MessageGrammar:
    """One request's constraint; implements the engine's ``Grammar``. Not shared between requests."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, lark: str) -> None:
        self._matcher = matcher
        self.lark = lark
        """What it was compiled from."""
        self._vocab_size = vocab_size
        self._packed = allocate_token_bitmask(1, vocab_size)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Boolean mask ``[vocab]`` of the tokens that may come next."""
        fill_next_token_bitmask(self._matcher, self._packed)
        bits = np.unpackbits(self._packed[0].view(np.uint8), bitorder="little", count=self._vocab_size)
        return bits.view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Advance by a token that was allowed."""
        self._matcher.consume_token(token_id)

    @property
    def done(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()


class OrdinaryTokens:
    """Every ordinary token, for ever: for output of a forced length, which no control token may end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._mask = np.arange(tokenizer.vocab_size) < tokenizer.n_ranks

    def allowed(self) -> npt.NDArray[np.bool_]:
        """The same mask always."""
        return self._mask

    def accept(self, token_id: int) -> None:
        """Nothing to remember."""

    @property
    def done(self) -> bool:
        """Never."""
        return False


class GrammarCompiler:
    """Makes grammars for one tokenizer. Thread-safe; compiled grammars are kept and copied."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer)),
            n_vocab=tokenizer.vocab_size,
            eos_token=tokenizer.control.end_of_msg,
        )
        self._matcher = lru_cache(maxsize=64)(self._compile)

    def message(self, conversation: Conversation, *, parallel_calls: bool = True) -> MessageGrammar:
        """The grammar of the message that answers ``conversation``.

        Raises:
            SchemaError: a tool's parameters or the response format's schema cannot be used.
        """
        lark = message_lark(conversation, parallel_calls=parallel_calls)
        matcher = self._matcher(lark)
        if matcher.is_error():
            raise self._blame(conversation, matcher.get_error())
        return MessageGrammar(matcher.deep_copy(), self._vocab_size, lark)

    def from_lark(self, lark: str) -> MessageGrammar:
        """A grammar as another one was when it was made, from its ``lark``."""
        return MessageGrammar(self._matcher(lark).deep_copy(), self._vocab_size, lark)

    def _compile(self, lark: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(
            self._tokenizer, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0
        )

    def _blame(self, conversation: Conversation, error: str) -> SchemaError:
        """Name the part that does not compile on its own."""
        for tool in conversation.every_tool:
            if reason := self._reason(message_lark(Conversation(messages=(), tools=(tool,)))):
                return SchemaError(f"tool {tool.name}", reason)
        if conversation.response_format.schema is not None:
            form = Conversation(messages=(), response_format=conversation.response_format)
            if reason := self._reason(message_lark(form)):
                return SchemaError("response_format", reason)
        return SchemaError("tools and response_format", _one_line(error))

    def _reason(self, lark: str) -> str:
        matcher = self._matcher(lark)
        return _one_line(matcher.get_error()) if matcher.is_error() else ""


class _Vocabulary:
    """The view of a vocabulary that llguidance asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.control.end_of_msg
        self.special_token_ids = list(range(tokenizer.n_ranks, tokenizer.vocab_size))
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


def message_lark(conversation: Conversation, *, parallel_calls: bool = True) -> str:
    """The grammar text. Deterministic: equal conversations give equal text.

    Raises:
        SchemaError: a schema refers to something that is not there, or has no value at all.
    """
    rules = _Rules()
    choice = conversation.tool_choice
    tools = conversation.every_tool
    if choice.mode == "named":
        tools = tuple(tool for tool in tools if tool.name == choice.name)
    forced = choice.mode in ("required", "named")
    answer = _answer(conversation)
    parts = ['TEXT <|close|> "think" <|sep|> <|open|> "response" <|sep|>'] if conversation.thinking else []
    parts.append(f'{answer} <|close|> "response" <|sep|>')
    if tools and choice.mode != "none":
        most = MOST_CALLS if parallel_calls and choice.mode != "named" else 1
        bodies = [rules.add("arguments", _arguments(rules, tool)) for tool in tools]
        for index in range(1, most + 1):
            calls = " | ".join(_call(tool, index, body) for tool, body in zip(tools, bodies, strict=True))
            more = f" calls{index + 1}?" if index < most else ""
            rules.lines.append(f"calls{index}: ({calls}){more}")
        block = '<|open|> "tools" <|sep|> calls1 <|close|> "tools" <|sep|>'
        parts.append(block if forced else f"({block})?")
    parts.append('<|close|> "message" <|sep|>')
    return "\n".join((f"start: {' '.join(parts)}", *rules.lines, *_TERMINALS))


def _answer(conversation: Conversation) -> str:
    match conversation.response_format.kind:
        case "json_object":
            return _json({"type": "object"})
        case "json_schema":
            return _json(conversation.response_format.schema or {})
        case "text":
            return "TEXT"


@dataclass(slots=True)
class _Rules:
    """Numbered helper rules of one grammar."""

    lines: list[str] = field(default_factory=list)

    def add(self, prefix: str, body: str) -> str:
        name = f"{prefix}{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _call(tool: ToolDef, index: int, arguments: str) -> str:
    head = _literal(f'call tool="{escape(tool.name)}" index="{index}"')
    return f'<|open|> {head} <|sep|> {arguments} <|close|> "call" <|sep|>'


def _arguments(rules: _Rules, tool: ToolDef) -> str:
    root = tool.parameters
    schema = _resolved(root, root, where=tool.name)
    properties = schema.get("properties")
    if schema.keys() & {"anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "enum", "const", "$ref"}:
        # Rules across properties: the whole object as JSON, in the element that has room for it.
        return f'<|open|> "json type=\\"object\\"" <|sep|> {_json(root)} <|close|> "json" <|sep|>'
    if not isinstance(properties, dict) or not properties:
        open_ended = schema.get("additionalProperties") is not False and bool(schema)
        return f"{_free_argument(rules)}*" if open_ended and "properties" not in schema else '""'
    required = schema.get("required")
    needed = set(map(str, required)) if isinstance(required, list) else set()
    parts = []
    for key, value in properties.items():
        forms = _forms(value, _Walk(root, f"{tool.name}.{key}"))
        name = rules.add("arg", " | ".join(_argument(rules, key, form) for form in forms))
        parts.append(name if key in needed else f"{name}?")
    return " ".join(parts)


def _free_argument(rules: _Rules) -> str:
    head = '<|open|> "argument key=\\"" KEY'
    tail = '<|close|> "argument" <|sep|>'
    return rules.add("free", f'{head} "\\" type=\\"string\\"" <|sep|> TEXT {tail}')


@dataclass(frozen=True, slots=True)
class _Form:
    """One way to write a value: the element's ``type`` and the grammar of its body."""

    kind: str
    body: str
    terminal: bool = False
    """The body is a regular expression and needs a terminal of its own."""


def _argument(rules: _Rules, key: str, form: _Form) -> str:
    head = _literal(f'argument key="{escape(key)}" type="{form.kind}"')
    body = rules.add("VALUE", form.body) if form.terminal else form.body
    return f'<|open|> {head} <|sep|> {body} <|close|> "argument" <|sep|>'


@dataclass(slots=True)
class _Walk:
    """The way through one property's schema; ``left`` bounds what unions and references can cost."""

    root: JsonObject
    where: str
    left: int = 100


def _forms(schema: JsonValue, walk: _Walk) -> list[_Form]:
    """Every way in which a value of ``schema`` can be written as an argument element."""
    where = walk.where
    walk.left -= 1
    if walk.left < 0:
        raise SchemaError(where, "its unions have too many branches, or refer to themselves")
    if not isinstance(schema, dict):
        if schema is False:
            raise SchemaError(where, "the schema 'false' has no value")
        schema = {}
    schema = _resolved(schema, walk.root, where=where)
    for union in ("anyOf", "oneOf"):
        branches = schema.get(union)
        if isinstance(branches, list) and branches:
            rest = {key: value for key, value in schema.items() if key != union}
            merged = [rest | branch if isinstance(branch, dict) else branch for branch in branches]
            return _unique(form for branch in merged for form in _forms(branch, walk))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return _enumerated(values, where=where)
    kinds = schema.get("type", ["string", *_JSON_TYPES])
    forms: list[_Form] = []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind == "string":
            forms.append(_string_form(schema, where=where))
        elif kind in (*_JSON_TYPES, "integer"):
            narrowed = schema | {"type": kind} | _definitions(walk.root)
            forms.append(_Form("number" if kind == "integer" else str(kind), _json(narrowed)))
        else:
            raise SchemaError(where, f"unknown type {json.dumps(kind)}")
    if not forms:
        raise SchemaError(where, "'type' is an empty list")
    return _unique(forms)


def _string_form(schema: JsonObject, *, where: str) -> _Form:
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    pattern = schema.get("pattern")
    if not isinstance(low, int) or (high is not None and not isinstance(high, int)):
        raise SchemaError(where, "minLength and maxLength must be integers")
    terminals = []
    if isinstance(pattern, str):
        terminals.append(_search_regex(pattern))
    if low or high is not None:
        terminals.append(f"(?s:.{{{low},{'' if high is None else high}}})")
    if not terminals:
        return _Form("string", "TEXT")
    slashed = (regex.replace("/", r"\/").replace("\n", r"\n") for regex in terminals)
    return _Form("string", " & ".join(f"/{regex}/" for regex in slashed), terminal=True)


def _search_regex(pattern: str) -> str:
    """A JSON schema pattern matches anywhere; a grammar terminal matches the whole text."""
    body = pattern
    head = "" if body.startswith("^") else "(?s:.*)"
    body = body.removeprefix("^")
    anchored = body.endswith("$") and not body.endswith(r"\$")
    return f"{head}(?:{body.removesuffix('$') if anchored else body}){'' if anchored else '(?s:.*)'}"


def _enumerated(values: Sequence[JsonValue], *, where: str) -> list[_Form]:
    texts = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    forms = []
    if texts:
        forms.append(_Form("string", "(" + " | ".join(map(_literal, texts)) + ")"))
    for value in others:
        kind = {bool: "boolean", type(None): "null", dict: "object", list: "array"}.get(type(value), "number")
        forms.append(_Form(kind, _json({"const": value})))
    if not forms:
        raise SchemaError(where, "'enum' is empty")
    return forms


def _resolved(schema: JsonObject, root: JsonObject, *, where: str) -> JsonObject:
    """``schema`` with a ``$ref`` at its top replaced by what it names in ``root``."""
    for _ in range(_MAX_REF_DEPTH):
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return schema
        if not ref.startswith("#"):
            raise SchemaError(where, f"$ref {ref!r} is not inside the schema")
        target: JsonValue = root
        for part in re.split("/", ref.removeprefix("#"))[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise SchemaError(where, f"$ref {ref!r} names nothing")
        schema = target | {key: value for key, value in schema.items() if key != "$ref"}
    raise SchemaError(where, "$ref goes in a circle")


def _definitions(root: JsonObject) -> JsonObject:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _json(schema: JsonObject) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": _JSON_STYLE}, ensure_ascii=False, sort_keys=True)


def _literal(text: str) -> str:
    """A Lark string; an empty one is an empty group."""
    return json.dumps(text, ensure_ascii=False) if text else '""'


def _unique(forms: Iterable[_Form]) -> list[_Form]:
    return list(dict.fromkeys(forms))


def _one_line(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return lines[0][:300] if lines else "not a usable schema"
