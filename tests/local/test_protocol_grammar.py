"""Whatever is sampled under the grammar is a well-formed message that keeps its schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from server_helpers import TOKENIZER, NoiseEngine

from k3eval_local.engine.request import GenerationRequest, Sampling
from k3eval_local.protocol.grammar import (
    MOST_CALLS,
    GrammarCompiler,
    OrdinaryTokens,
    SchemaError,
    message_lark,
)
from k3eval_local.protocol.messages import (
    Call,
    ChatMessage,
    Conversation,
    JsonObject,
    ResponseFormat,
    ToolChoice,
    ToolDef,
)
from k3eval_local.protocol.parser import (
    CallArguments,
    CallEnd,
    CallStart,
    OutputParser,
    Reasoning,
    Text,
    parse_all,
)
from k3eval_local.protocol.xtml import encode

COMPILER = GrammarCompiler(TOKENIZER)
SAMPLES = 12


def sample(conversation: Conversation, seed: int, *, parallel: bool = True) -> tuple[list[int], bool]:
    """Ids drawn under the grammar, and whether the message came to its end."""
    request = GenerationRequest(
        prompt_ids=(1,),
        max_tokens=3000,
        sampling=Sampling(seed=seed),
        stop_ids=frozenset({TOKENIZER.control.end_of_msg}),
        grammar=COMPILER.message(conversation, parallel_calls=parallel),
    )
    result = NoiseEngine().submit(request).result()
    return list(result.ids), result.finish == "stop"


def calls_of(ids: list[int], *, thinking: bool = True) -> list[tuple[str, dict[str, object]]]:
    events = parse_all(OutputParser(TOKENIZER, thinking=thinking), ids)
    names = [event.name for event in events if isinstance(event, CallStart)]
    pieces = ["" for _ in names]
    for event in events:
        if isinstance(event, CallArguments):
            pieces[event.index] += event.text
    done = {event.index for event in events if isinstance(event, CallEnd)}
    return [(name, json.loads(pieces[n])) for n, name in enumerate(names) if n in done]


def asking(*tools: ToolDef, mode: str = "required", name: str | None = None) -> Conversation:
    choice = ToolChoice(mode, name)
    return Conversation(messages=(ChatMessage("user", "x"),), tools=tools, tool_choice=choice)


BASH = ToolDef(
    "bash",
    "run",
    {
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout_sec": {"type": "integer"}},
        "required": ["command"],
    },
)
SUBMIT = ToolDef("submit", "end", {"type": "object", "properties": {"summary": {"type": "string"}}})


def has(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)


PROPERTIES: list[tuple[str, JsonObject, Callable[[object], bool]]] = [
    ("string", {"type": "string"}, lambda v: has(v, str)),
    ("integer", {"type": "integer", "minimum": 3, "maximum": 40}, lambda v: has(v, int) and 3 <= v <= 40),
    ("number", {"type": "number"}, lambda v: has(v, (int, float))),
    ("boolean", {"type": "boolean"}, lambda v: has(v, bool)),
    ("null", {"type": "null"}, lambda v: v is None),
    ("array", {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, lambda v: has(v, list)),
    ("object", {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                "additionalProperties": False}, lambda v: isinstance(v, dict) and set(v) == {"x"}),
    ("enum", {"enum": ["a", 'b/"c', 3, None, True]}, lambda v: v in ("a", 'b/"c', 3, None, True)),
    ("const", {"const": "only & this"}, lambda v: v == "only & this"),
    ("length", {"type": "string", "minLength": 2, "maxLength": 4}, lambda v: 2 <= len(str(v)) <= 4),
    ("pattern", {"type": "string", "pattern": "^[a-c]{2}/x$"}, lambda v: bool(re.fullmatch("..?/x", str(v)))),
    ("search", {"type": "string", "pattern": "q9", "maxLength": 30}, lambda v: "q9" in str(v)),
    ("union", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, lambda v: v is None or has(v, int)),
    ("types", {"type": ["boolean", "null"]}, lambda v: v is None or has(v, bool)),
    ("ref", {"$ref": "#/$defs/Flag"}, lambda v: has(v, bool)),
    ("anything", {}, lambda v: True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "schema", "good"), PROPERTIES, ids=[each[0] for each in PROPERTIES])
def test_sampled_arguments_keep_the_schema(
    name: str, schema: JsonObject, good: Callable[[object], bool]
) -> None:
    tool = ToolDef(
        "f",
        "",
        {
            "type": "object",
            "$defs": {"Flag": {"type": "boolean"}},
            "properties": {name: schema},
            "required": [name],
        },
    )
    complete = 0
    for seed in range(SAMPLES):
        ids, ended = sample(asking(tool, mode="named", name="f"), seed)
        for called, arguments in calls_of(ids):
            complete += 1
            assert called == "f"
            assert set(arguments) == {name}
            assert good(arguments[name])
        assert not ended or len(calls_of(ids)) == 1
    assert complete >= SAMPLES / 3


def test_required_calls_a_declared_tool_at_least_once() -> None:
    names = set()
    for seed in range(SAMPLES):
        ids, ended = sample(asking(BASH, SUBMIT), seed)
        calls = calls_of(ids)
        assert calls or not ended
        names |= {name for name, _ in calls}
    assert names == {"bash", "submit"}


def test_calls_are_numbered_from_one() -> None:
    for seed in range(SAMPLES):
        text = TOKENIZER.decode(sample(asking(SUBMIT), seed)[0])
        indices = [int(index) for index in re.findall(r'index="(\d+)"', text)]
        assert indices == list(range(1, len(indices) + 1))
        assert len(indices) <= MOST_CALLS


def test_without_parallel_calls_there_is_one() -> None:
    lengths = {len(calls_of(sample(asking(SUBMIT), seed, parallel=False)[0])) for seed in range(SAMPLES)}
    assert lengths <= {0, 1}


def test_auto_may_call_or_answer_and_none_never_calls() -> None:
    auto = [bool(calls_of(sample(asking(SUBMIT, mode="auto"), seed)[0])) for seed in range(3 * SAMPLES)]
    assert set(auto) == {True, False}
    assert not any(calls_of(sample(asking(SUBMIT, mode="none"), seed)[0]) for seed in range(SAMPLES))


def test_every_sampled_message_is_well_formed() -> None:
    for seed in range(SAMPLES):
        for thinking in (True, False):
            conversation = Conversation(messages=(ChatMessage("user", "x"),), thinking=thinking)
            ids, ended = sample(conversation, seed)
            assert ended
            parser = OutputParser(TOKENIZER, thinking=thinking)
            events = parse_all(parser, ids)
            assert not any(
                "<|" in event.text or "\ufffd" in event.text for event in events if isinstance(event, Text)
            )
            assert parser.ended


@pytest.mark.parametrize("thinking", [True, False])
def test_a_json_answer_is_one_line_and_keeps_its_schema(thinking: bool) -> None:
    schema: JsonObject = {
        "type": "object",
        "properties": {
            "ok": {"type": "boolean"},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 4},
        },
        "required": ["ok", "tags"],
        "additionalProperties": False,
    }
    form = ResponseFormat("json_schema", schema)
    ended_once = False
    for seed in range(SAMPLES):
        ids, ended = sample(Conversation(messages=(), response_format=form, thinking=thinking), seed)
        events = parse_all(OutputParser(TOKENIZER, thinking=thinking), ids)
        answer = "".join(event.text for event in events if isinstance(event, Text))
        assert not re.search(r"[\n\t]", answer)
        if ended:
            ended_once = True
            value = json.loads(answer)
            assert set(value) == {"ok", "tags"}
            assert isinstance(value["ok"], bool)
            assert set(value["tags"]) <= {"x", "y"}
    assert ended_once


def test_json_object_answers_are_objects() -> None:
    answers = []
    for seed in range(SAMPLES):
        ids, ended = sample(Conversation(messages=(), response_format=ResponseFormat("json_object")), seed)
        events = parse_all(OutputParser(TOKENIZER, thinking=True), ids)
        if ended:
            answers.append(json.loads("".join(event.text for event in events if isinstance(event, Text))))
    assert answers
    assert all(isinstance(answer, dict) for answer in answers)


def test_a_sampled_call_replayed_extends_its_own_prompt() -> None:
    """A reply sent back must be a prefix again: otherwise the cache misses at every turn."""
    conversation = asking(
        ToolDef(
            "f",
            "",
            {
                "type": "object",
                "properties": {
                    "v": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                    "s": {"type": "string", "maxLength": 3},
                },
                "required": ["v", "s"],
            },
        ),
        mode="named",
        name="f",
    )
    replayed = 0
    for seed in range(SAMPLES):
        ids, ended = sample(conversation, seed)
        if not ended:
            continue
        events = parse_all(OutputParser(TOKENIZER, thinking=True), ids)
        message = ChatMessage(
            "assistant",
            "".join(event.text for event in events if isinstance(event, Text)),
            reasoning="".join(event.text for event in events if isinstance(event, Reasoning)),
            calls=(
                Call("i", "f", "".join(event.text for event in events if isinstance(event, CallArguments))),
            ),
        )
        opener = encode(TOKENIZER, Conversation(messages=(), effort=None)).ids
        again = encode(TOKENIZER, Conversation(messages=(message,), effort=None))
        assert again.ids[: again.boundaries[0]] == (*opener, *ids)
        replayed += 1
    assert replayed


SELF: JsonObject = {"anyOf": [{"$ref": "#/$defs/X"}, {"type": "null"}]}
TWICE: JsonObject = {"anyOf": [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/X"}]}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "object", "properties": {"a": {"type": "strnig"}}}, "unknown type"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "zzz"}}}},
            "Invalid type: zzz",
        ),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}}, "invalid regex"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}}, "names nothing"),
        ({"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}, "not inside the schema"),
        ({"$ref": "#"}, "circle"),
        ({"type": "object", "properties": {"a": False}}, "no value"),
        ({"type": "object", "$defs": {"X": SELF}, "properties": {"a": {"$ref": "#/$defs/X"}}}, "themselves"),
        ({"type": "object", "$defs": {"X": TWICE}, "properties": {"a": {"$ref": "#/$defs/X"}}}, "themselves"),
        ({"type": "object", "properties": {"a": {"enum": []}}}, "empty"),
        ({"type": "object", "properties": {"a": {"type": []}}}, "empty list"),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": "x"}}}, "integers"),
    ],
)
def test_unusable_parameters_are_named(parameters: JsonObject, message: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(message)) as caught:
        COMPILER.message(asking(BASH, ToolDef("odd", "", parameters)))
    assert "odd" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unusable_response_schema_is_named() -> None:
    form = ResponseFormat("json_schema", {"type": "fooo"})
    with pytest.raises(SchemaError, match=r"response_format: .*fooo"):
        COMPILER.message(Conversation(messages=(), tools=(BASH,), response_format=form))


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": "object", "additionalProperties": False},
        {"anyOf": [{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}]},
        {
            "type": "object",
            "properties": {'odd "key" & more': {"type": "boolean"}},
            "required": ['odd "key" & more'],
        },
    ],
)
def test_unusual_but_usable_parameters_give_objects(parameters: JsonObject) -> None:
    tools = (ToolDef("f", "", parameters), ToolDef("g", "", parameters))
    for seed in range(4):
        for _, arguments in calls_of(sample(asking(*tools), seed)[0]):
            assert isinstance(arguments, dict)


def test_grammars_of_two_requests_are_independent() -> None:
    first, second = (COMPILER.message(asking(SUBMIT)) for _ in range(2))
    first.accept(65)
    first.accept(TOKENIZER.control.close)
    assert first.allowed().sum() == 1
    assert second.allowed().sum() > 100
    assert not first.done


def test_equal_conversations_have_equal_grammars() -> None:
    assert message_lark(asking(BASH, SUBMIT)) == message_lark(asking(BASH, SUBMIT))


def test_forced_length_allows_every_ordinary_token_and_nothing_else() -> None:
    grammar = OrdinaryTokens(TOKENIZER)
    assert list(grammar.allowed()) == [
        not TOKENIZER.is_control(token) for token in range(TOKENIZER.vocab_size)
    ]
    grammar.accept(65)
    assert not grammar.done
