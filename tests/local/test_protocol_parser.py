"""Streams of token ids to events: what was encoded comes back, and nothing at all can break the parser."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_helpers import TOKENIZER, spoken

from k3eval_local.protocol.messages import Call, ChatMessage, Conversation
from k3eval_local.protocol.parser import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    OutputParser,
    Reasoning,
    Text,
    parse_all,
)
from k3eval_local.protocol.xtml import encode
from k3eval_local.tokenizer import Tokenizer

CONTROL = TOKENIZER.control


def parsed(
    ids: Sequence[int], *, thinking: bool = True, tools: bool = True, tokenizer: Tokenizer = TOKENIZER
) -> list[Event]:
    return parse_all(OutputParser(tokenizer, thinking=thinking, allow_calls=tools), ids)


def joined(events: Sequence[Event]) -> tuple[str, str, list[tuple[str, str]], list[int]]:
    """Reasoning, answer, calls (name, arguments) and which calls are complete."""
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    text = "".join(event.text for event in events if isinstance(event, Text))
    names = {event.index: event.name for event in events if isinstance(event, CallStart)}
    arguments = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    ends = [event.index for event in events if isinstance(event, CallEnd)]
    return reasoning, text, [(name, arguments[index]) for index, name in names.items()], ends


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1000, 1000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=8), JSON, max_size=4)
NAMES = st.text(alphabet='abc_&"<>.', min_size=1, max_size=8)


@given(st.text(), st.text(), st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3))
def test_an_encoded_message_comes_back(
    reasoning: str, text: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    message = ChatMessage(
        "assistant",
        text,
        reasoning=reasoning,
        calls=tuple(Call(f"id{n}", name, json.dumps(args)) for n, (name, args) in enumerate(calls)),
    )
    conversation = Conversation(messages=(message,), effort=None)
    prompt = encode(TOKENIZER, conversation)
    prefix = encode(TOKENIZER, Conversation(messages=(), effort=None)).ids
    ids = prompt.ids[len(prefix) : prompt.boundaries[0]]
    got_reasoning, got_text, got_calls, ends = joined(parsed(ids))
    assert (got_reasoning, got_text) == (reasoning, text)
    assert [name for name, _ in got_calls] == [name for name, _ in calls]
    assert [json.loads(arguments) for _, arguments in got_calls] == [args for _, args in calls]
    assert ends == list(range(len(calls)))


def test_arguments_keep_the_encoders_own_spelling() -> None:
    arguments = '{"a": {"x": [1, 2], "y": "é"}, "b": "line\\n\\"q\\"", "c": 1.5}'
    message = ChatMessage("assistant", reasoning="", calls=(Call("i", "f", arguments),))
    prompt = encode(TOKENIZER, Conversation(messages=(message,), effort=None))
    prefix = len(encode(TOKENIZER, Conversation(messages=(), effort=None)).ids)
    assert joined(parsed(prompt.ids[prefix:]))[2] == [("f", arguments)]


@given(st.randoms(use_true_random=False))
def test_any_split_into_tokens_gives_the_same_message(rng: random.Random) -> None:
    words = ["think", "résumé 你好 🎉", 'x "y" \\ \n', " and more"]
    ranks = {bytes((value,)): value for value in range(256)}
    whole = "".join(words).encode()
    for _ in range(40):  # tokens that cut words and characters anywhere
        start = rng.randrange(len(whole))
        ranks.setdefault(whole[start : start + rng.randint(2, 5)], len(ranks))
    other = Tokenizer(ranks)

    def ids(tokenizer: Tokenizer) -> list[int]:
        return spoken(
            words[1], reasoning=words[3], calls=[("f", [("k", "string", words[2])])], tokenizer=tokenizer
        )

    assert joined(parsed(_resplit(ids(other), other, rng), tokenizer=other)) == joined(parsed(ids(TOKENIZER)))


def _resplit(ids: list[int], tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """The same bytes and control ids, ordinary tokens chosen at random."""
    out: list[int] = []
    data = b""
    tokens = {tokenizer.token_bytes(token): token for token in range(tokenizer.n_ranks)}

    def flush() -> None:
        nonlocal data
        while data:
            fitting = [size for size in range(1, 6) if data[:size] in tokens and len(data) >= size]
            size = rng.choice(fitting)
            out.append(tokens[data[:size]])
            data = data[size:]

    for token in ids:
        if tokenizer.is_control(token):
            flush()
            out.append(token)
        else:
            data += tokenizer.token_bytes(token)
    flush()
    return out


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=300), st.booleans(), st.booleans())
def test_noise_never_breaks_the_parser(ids: list[int], thinking: bool, tools: bool) -> None:
    _check_sanity(ids, thinking=thinking, tools=tools)


STRUCTURED = st.lists(
    st.sampled_from(
        [CONTROL.open, CONTROL.close, CONTROL.sep, CONTROL.end_of_msg, CONTROL.pad]
        + [TOKENIZER.encode(word) for word in (
            "think", "response", "tools", "call", 'call tool="f"', 'argument key="k" type="number"',
            'argument key="k"', 'json type="object"', "json", "argument", "message", "1", "é", '{"a": 1}', "",
        )]
    ),
    max_size=60,
)  # fmt: skip


@given(STRUCTURED, st.booleans(), st.booleans())
def test_shuffled_structure_never_breaks_the_parser(
    parts: list[int | list[int]], thinking: bool, tools: bool
) -> None:
    ids = [token for part in parts for token in (part if isinstance(part, list) else [part])]
    _check_sanity(ids, thinking=thinking, tools=tools)


def _check_sanity(ids: list[int], *, thinking: bool, tools: bool) -> None:
    parser = OutputParser(TOKENIZER, thinking=thinking, allow_calls=tools)
    events = parse_all(parser, ids)
    _, _, calls, ends = joined(events)
    assert parser.reasoning_tokens <= len(ids)
    assert (calls == []) or tools
    assert len(ends) == parser.complete_calls <= len(calls)
    assert [event.index for event in events if isinstance(event, CallStart)] == list(range(len(calls)))
    started: set[int] = set()
    for event in events:  # pieces of a call come between its start and its end
        if isinstance(event, CallStart):
            started.add(event.index)
        elif isinstance(event, CallArguments):
            assert event.index in started
        elif isinstance(event, CallEnd):
            started.remove(event.index)


def test_token_by_token_text_is_shown_as_soon_as_a_character_is_whole() -> None:
    parser = OutputParser(TOKENIZER, thinking=False)
    shown = [parser.feed(token) for token in TOKENIZER.encode("aé🎉")]
    assert [bool(events) for events in shown] == [True, False, True, False, False, False, True]


def words(*parts: int | str) -> list[int]:
    ids: list[int] = []
    for part in parts:
        ids += TOKENIZER.encode(part) if isinstance(part, str) else [part]
    return ids


B, C, S, E = CONTROL.open, CONTROL.close, CONTROL.sep, CONTROL.end_of_msg


def test_a_missing_think_close_does_not_lose_the_answer_or_the_calls() -> None:
    ids = words("why", B, "response", S, "so", B, "tools", S, B, 'call tool="f" index="1"', S, C, "call", S)
    assert joined(parsed(ids)) == ("why", "so", [("f", "{}")], [0])


def test_a_missing_response_element_still_gives_an_answer() -> None:
    assert joined(parsed(words("why", C, "think", S, "so", C, "message", S, E)))[:2] == ("why", "so")


def test_calls_are_never_shown_as_text_when_no_tools_were_declared() -> None:
    ids = spoken("so", reasoning="why", calls=[("f", [("k", "string", "v")])])
    assert joined(parsed(ids, tools=False)) == ("why", "so", [], [])


def test_unknown_tags_are_text() -> None:
    ids = words("a", B, "table", S, "b", C, "table", S, "c")
    assert joined(parsed(ids, thinking=False))[1] == "a<|open|>table<|sep|>b<|close|>table<|sep|>c"


def test_other_control_tokens_are_shown_by_name() -> None:
    assert joined(parsed(words("a", CONTROL.pad, "b"), thinking=False))[1] == "a[PAD]b"


def test_a_header_without_end_is_text_in_the_end() -> None:
    assert joined(parsed(words(B, "x" * 5000), thinking=False))[1] == "<|open|>" + "x" * 5000


def test_a_cut_call_keeps_what_was_said_and_has_no_end() -> None:
    ids = words(
        C,
        "think",
        S,
        B,
        "tools",
        S,
        B,
        'call tool="w" index="1"',
        S,
        B,
        'argument key="text" type="string"',
        S,
        "cut he",
    )
    assert joined(parsed(ids)) == ("", "", [("w", '{"text": "cut he')], [])


def test_nothing_follows_the_end_of_the_message() -> None:
    parser = OutputParser(TOKENIZER, thinking=False)
    assert joined(parse_all(parser, words("a", E, "b", B, "response", S, "c")))[1] == "a"
    assert parser.ended


def test_a_raw_json_call_body_is_the_arguments() -> None:
    ids = words(
        B,
        "tools",
        S,
        B,
        'call tool="f"',
        S,
        B,
        'json type="object"',
        S,
        '{"a":1}',
        C,
        "json",
        S,
        C,
        "call",
        S,
    )
    assert joined(parsed(ids, thinking=False))[2:] == ([("f", '{"a":1}')], [0])


def test_broken_utf8_becomes_replacement_characters() -> None:
    assert joined(parsed([0xE4, 0xBD, 65, 0xFF], thinking=False))[1] == "\ufffdA\ufffd"


def test_reasoning_tokens_are_those_of_the_think_element() -> None:
    ids = spoken("text", reasoning="abc")
    parser = OutputParser(TOKENIZER, thinking=True)
    parse_all(parser, ids)
    assert parser.reasoning_tokens == len("abc") + len("think") + 2


@pytest.mark.parametrize("value", ["", "plain", 'quote " and \\ and \n', "<|close|>"])
def test_string_arguments_are_json_escaped(value: str) -> None:
    ids = spoken(reasoning="", calls=[("f", [("k", "string", value)])])
    assert json.loads(joined(parsed(ids))[2][0][1]) == {"k": value}
