from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3eval import ConfigError, Message, ModelRef, ProtocolError, Reasoning, ToolArgumentsError, ToolCall
from k3eval.jsontypes import JsonValue, read_json, write_json

texts = st.text(max_size=20)
calls = st.builds(ToolCall, texts.filter(bool), texts, texts)
thoughts = st.builds(
    Reasoning,
    texts,
    st.lists(st.fixed_dictionaries({"type": st.just("reasoning.text"), "text": texts}), max_size=3).map(
        tuple
    ),
    st.sampled_from(["reasoning_content", "reasoning"]),
)
messages = st.one_of(
    st.builds(Message.system, texts),
    st.builds(Message.user, texts),
    st.builds(Message.tool, texts, texts),
    st.builds(
        Message,
        st.just("assistant"),
        st.none() | texts,
        st.lists(calls, max_size=3).map(tuple),
        reasoning=st.none() | thoughts,
        extra=st.dictionaries(st.sampled_from(["refusal", "audio"]), texts, max_size=2),
    ),
)


@given(messages)
def test_round_trip(message: Message) -> None:
    assert Message.from_json(message.to_json()) == message
    assert Message.from_json(read_json(write_json(message.to_json()))) == message


def test_wire_form_comes_back_member_for_member() -> None:
    wire: dict[str, JsonValue] = {
        "role": "assistant",
        "content": "x",
        "reasoning": "hm",
        "reasoning_details": [{"type": "reasoning.encrypted", "data": "AA==", "id": None, "index": 0}],
        "tool_calls": [
            {
                "id": "functions.add:0",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a" :1}'},
            }
        ],
        "refusal": None,
    }
    assert Message.from_json(wire).to_json() == wire


@pytest.mark.parametrize(
    "data",
    [[], "x", {"role": "robot"}, {"role": "user", "content": 3}],
)
def test_what_is_no_message(data: JsonValue) -> None:
    with pytest.raises(ProtocolError):
        Message.from_json(data)


def test_parts() -> None:
    parts: list[dict[str, JsonValue]] = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:"}},
    ]
    message = Message.user(parts)
    assert message.text == "a"
    assert message.to_json()["content"] == parts


def test_plain_reasoning_text() -> None:
    assert Message.assistant("x", reasoning="why").to_json()["reasoning_content"] == "why"


@pytest.mark.parametrize("text", ["", "  ", "{}"])
def test_no_arguments(text: str) -> None:
    assert ToolCall("1", "f", text).parsed() == {}


@pytest.mark.parametrize(
    "text", ['{"text":"cut he', "[1]", "NaN", '{"a":NaN}', "nonsense", '{"a":1}}', "\x00"]
)
def test_bad_arguments(text: str) -> None:
    with pytest.raises(ToolArgumentsError, match="arguments of f"):
        ToolCall("1", "f", text).parsed()


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(ToolArgumentsError):
        ToolCall("1", "f", '{"a":' * 100_000).parsed()


def test_stable_bytes() -> None:
    message = Message.user("naïve \u2028 \U0001f600 漢")
    assert write_json(message.to_json()) == write_json(message.to_json())
    assert json.loads(write_json(message.to_json())) == message.to_json()
    assert b"\\u" not in write_json(message.to_json())


def test_half_a_character_can_be_sent() -> None:
    assert json.loads(write_json({"a": "\ud83d"})) == {"a": "\ud83d"}


def test_nan_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(float("nan"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("local/a", ("local", "a", None)),
        ("moonshot/kimi-k3", ("moonshot", "kimi-k3", None)),
        ("moonshot-cn/kimi-k3", ("moonshot-cn", "kimi-k3", None)),
        ("openrouter/moonshotai/kimi-k3", ("openrouter", "moonshotai/kimi-k3", None)),
        ("compatible/org/m@http://h:1/v1", ("compatible", "org/m", "http://h:1/v1")),
        ("compatible/m@https://h/v1", ("compatible", "m", "https://h/v1")),
        ("local/a@http://127.0.0.1:9/v1", ("local", "a", "http://127.0.0.1:9/v1")),
    ],
)
def test_model_names(text: str, parts: tuple[str, str, str | None]) -> None:
    ref = ModelRef.parse(text)
    assert (ref.provider, ref.model, ref.base_url) == parts
    assert str(ref) == text


@pytest.mark.parametrize(
    "text", ["", "kimi-k3", "azure/x", "local/", "compatible/m", "compatible/m@http://", "local/a b"]
)
def test_bad_model_names(text: str) -> None:
    with pytest.raises(ConfigError, match="write"):
        ModelRef.parse(text)
