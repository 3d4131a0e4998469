# ruff: noqa: E501 - schemas stand beside what they become
from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from k3eval import (
    K3,
    AsyncK3,
    Completion,
    ConfigError,
    Message,
    Meter,
    SchemaError,
    ToolArgumentsError,
    ToolCall,
    ToolSpec,
    tool,
)
from k3eval.jsontypes import JsonObject, JsonValue
from k3eval.schema import check_tools, find_problems, flatten
from k3eval.testing import ScriptedTransport, answer
from k3eval.tools import AnyTool, result_text, run_call

ASK = [Message.user("go")]


class Point(BaseModel):
    x: int
    y: int | None = None


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


@tool
def move(
    to: Point, speed: Annotated[float, "Metres a second."] = 1.0, mode: Literal["walk", "run"] = "walk"
) -> dict[str, object]:
    """Move somewhere.

    Slowly, as a rule.
    """
    return {"x": to.x, "speed": speed, "mode": mode}


@tool(name="plant")
def grow(tree: Tree, labels: dict[str, int] | None = None) -> str:
    """Plant a tree."""
    return tree.name


@tool
def fails() -> str:
    """Always fails."""
    raise RuntimeError("no luck")


@tool
async def later(seconds: int) -> str:
    """Wait a little."""
    await asyncio.sleep(0)
    return f"waited {seconds}"


def test_a_tool_is_still_the_function() -> None:
    assert move(Point(x=1)) == {"x": 1, "speed": 1.0, "mode": "walk"}
    assert move.spec.name == "move"
    assert move.spec.description == "Move somewhere.\n\nSlowly, as a rule."
    assert grow.spec.name == "plant"
    properties = move.spec.parameters["properties"]
    assert properties["speed"]["description"] == "Metres a second."  # type: ignore[index, call-overload]
    assert move.spec.parameters["required"] == ["to"]


def test_arguments_are_validated() -> None:
    assert (
        run_call({"move": move}, ToolCall("1", "move", '{"to":{"x":3},"mode":"run"}'))
        == '{"x":3,"speed":1.0,"mode":"run"}'
    )
    with pytest.raises(ToolArgumentsError, match=r"arguments of move: to\.x"):
        move.arguments(ToolCall("1", "move", '{"to":{"x":"far"}}'))
    with pytest.raises(ToolArgumentsError, match="arguments of move: sped"):
        move.arguments(ToolCall("1", "move", '{"to":{"x":1},"sped":2}'))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (ToolCall("1", "nope", "{}"), "error: there is no tool 'nope'; there are: fails, move"),
        (ToolCall("1", "fails", "{}"), "error: RuntimeError: no luck"),
        (ToolCall("1", "move", '{"to'), "error: arguments of move are not JSON"),
        (ToolCall("1", "move", "{}"), "error: arguments of move: to: Field required"),
    ],
)
def test_what_the_model_is_told(call: ToolCall, told: str) -> None:
    table: dict[str, AnyTool] = {"move": move, "fails": fails}
    assert run_call(table, call).startswith(told)


def test_functions_that_cannot_be_tools() -> None:
    with pytest.raises(ConfigError, match="needs a type"):

        @tool
        def untyped(a) -> str:  # type: ignore[no-untyped-def]
            return str(a)

    with pytest.raises(ConfigError, match="by keyword"):

        @tool
        def positional(*a: int) -> str:
            return str(a)


@dataclass
class Odd:
    a: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (Point(x=1), '{"x":1,"y":null}'),
        (None, "null"),
        (Odd(1), "Odd(a=1)"),
    ],
)
def test_results_as_text(value: object, text: str) -> None:
    assert result_text(value) == text


def script(*replies: object) -> ScriptedTransport:
    return ScriptedTransport(*replies)  # type: ignore[arg-type]


CALLS = [ToolCall("move_0", "move", '{"to":{"x":3}}'), ToolCall("nope_1", "nope", "{}")]


def test_loop(meter: Meter) -> None:
    fake = script(answer(None, reasoning="hm", tool_calls=CALLS), answer("done"))
    seen: list[Completion] = []
    with K3("local", "a", meter=meter, transport=fake) as k3:
        run = k3.run_tools(ASK, [move], on_turn=seen.append)
    assert run.completion.text == "done"
    assert not run.stopped
    assert [m.role for m in run.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert run.messages[2].content == '{"x":3,"speed":1.0,"mode":"walk"}'
    assert run.messages[3].tool_call_id == "nope_1"
    assert run.completions == tuple(seen)
    assert fake.requests[1].body["messages"][1]["reasoning_content"] == "hm"  # type: ignore[index, call-overload]


def test_loop_stops_at_its_limit(meter: Meter) -> None:
    fake = ScriptedTransport(answer(None, tool_calls=CALLS[:1]), repeat=True)
    with K3("local", "a", meter=meter, transport=fake) as k3:
        run = k3.run_tools(ASK, [move], max_turns=3)
    assert run.stopped
    assert len(run.completions) == len(fake.requests) == 3


def test_async_loop_awaits_tools(meter: Meter) -> None:
    fake = script(
        answer(None, tool_calls=[ToolCall("l_0", "later", '{"seconds":2}'), CALLS[0]]), answer("done")
    )

    async def run() -> tuple[Message, ...]:
        async with AsyncK3("local", "a", meter=meter, transport=fake) as k3:
            return (await k3.run_tools(ASK, [later, move])).messages

    messages = asyncio.run(run())
    assert messages[2].content == "waited 2"


def test_coroutines_need_the_async_client(meter: Meter) -> None:
    fake = script(answer(None, tool_calls=[ToolCall("l_0", "later", '{"seconds":2}')]))
    with K3("local", "a", meter=meter, transport=fake) as k3, pytest.raises(ConfigError, match="AsyncK3"):
        k3.run_tools(ASK, [later])


# -- Moonshot's schema dialect ---------------------------------------------------------------------


def test_tools_of_functions_fit_the_dialect() -> None:
    for spec in check_tools([move.spec, grow.spec, fails.spec, later.spec]):
        assert find_problems(spec.parameters) == []
    recursive = next(s for s in check_tools([grow.spec]) if s.name == "plant").parameters
    assert "$ref" in json.dumps(recursive)
    assert "#/$defs/Tree" in json.dumps(recursive)


@pytest.mark.parametrize(
    ("schema", "flat"),
    [
        ({}, {"type": "object", "properties": {}}),
        ({"properties": {"a": {"type": "string"}}}, {"type": "object", "properties": {"a": {"type": "string"}}}),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/definitions/A", "description": "d"}}, "definitions": {"A": {"type": "integer"}}},
            {"type": "object", "properties": {"a": {"type": "integer", "description": "d"}}},
        ),
        (
            {"type": "object", "properties": {"a": {"type": "string", "anyOf": [{"minLength": 1}, {"type": "null"}]}}},
            {"type": "object", "properties": {"a": {"anyOf": [{"minLength": 1, "type": "string"}, {"type": "null"}]}}},
        ),
        (
            {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"const": "x"}}},
            {"type": "object", "properties": {"a": {"enum": [1, 2], "type": "integer"}, "b": {"enum": ["x"], "type": "string"}}},
        ),
        (
            {"type": "object", "properties": {"a": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2}}},
            {"type": "object", "properties": {"a": {"type": "array", "minItems": 2, "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}},
        ),
        (
            {"type": "object", "properties": {"a": {"allOf": [{"type": "object", "properties": {"x": {"type": "null"}}}, {"required": ["x"], "properties": {"x": {"type": "string"}}}]}}},
            {"type": "object", "properties": {"a": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}}},
        ),
        (
            {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}]}}},
            {"type": "object", "properties": {"a": {"type": "string"}}},
        ),
    ],
)  # fmt: skip
def test_flattening(schema: JsonObject, flat: JsonObject) -> None:
    assert flatten(schema) == flat


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string"}, "root must be an object"),
        ({"type": "object", "properties": {"a": {}}}, r"schema\.a: has no type"),
        ({"type": "object", "properties": {"a": True}}, r"schema\.a: any value"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/B"}}}, "cannot resolve"),
        ({"type": "object", "properties": {"a": {"$ref": "other.json"}}}, "cannot resolve"),
        ({"type": "object", "required": ["b"], "properties": {"a": {"type": "null"}}}, "required names 'b'"),
        ({"type": "object", "properties": {"a": {"enum": [1, "x"]}}}, "enum mixes"),
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, "'not' is not accepted"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "has no type"),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_sent(schema: JsonObject, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        flatten(schema)


leaves = st.sampled_from(
    [{"type": "string"}, {"type": "integer", "minimum": 0}, {"enum": ["a", "b"]}, {"const": 3}, {"type": ["string", "null"]}, {"$ref": "#/$defs/D"}, {"$ref": "#/$defs/R"}]
)  # fmt: skip
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda p: {"type": "object", "properties": p, "required": sorted(p)[:1]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: {"anyOf": items}),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: {"type": "array", "prefixItems": items}),
        inner.map(lambda item: {"type": "array", "items": item}),
    ),
    max_leaves=8,
)
DEFS = {"D": {"type": "number"}, "R": {"type": "object", "properties": {"next": {"$ref": "#/$defs/R"}}}}


@given(st.dictionaries(st.sampled_from("pqr"), schemas, max_size=3))
def test_whatever_is_flattened_fits(properties: dict[str, JsonValue]) -> None:
    flat = flatten({"type": "object", "properties": properties, "$defs": DEFS})
    assert find_problems(flat) == []
    assert flatten(flat) == flat


def test_order_of_tools_does_not_matter() -> None:
    a, b = ToolSpec("a", "", {"type": "object"}), ToolSpec("b", "", {"type": "object"})
    assert check_tools([a, b]) == check_tools([b, a])
