from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from decimal import Decimal

import pytest
import shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from k3eval import (
    End,
    PriceTable,
    ProtocolError,
    ReasoningDelta,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    UsageUpdate,
)
from k3eval.jsontypes import JsonObject, JsonValue
from k3eval.meter.scan import StreamScanner
from k3eval.sse import MAX_EVENT_BYTES, SseParser
from k3eval.stream import Reply, StreamDecoder
from k3eval.testing import packets


def decode(*parts: bytes) -> tuple[Reply, list[StreamEvent]]:
    decoder, found = StreamDecoder(), []
    for at, part in enumerate(parts, 1):
        decoder.feed(part, at)
        found += decoder.take()
    decoder.finish(len(parts) + 1)
    return decoder.reply({}), found + decoder.take()


def chunks(*deltas: JsonObject, finish: str | None = "stop") -> bytes:
    data: list[JsonObject] = [{"id": "c", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if finish is not None:
        data.append({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return shapes.sse((*(json.dumps(item) for item in data), "[DONE]"))


def fragment(arguments: str | None = None, **call: JsonValue) -> JsonObject:
    name = call.pop("name", None)
    function = {k: v for k, v in (("name", name), ("arguments", arguments)) if v is not None}
    return {"tool_calls": [{**call, "function": function}]}


# -- the parser of server-sent events --------------------------------------------------------------

LINES = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1, max_size=30)


@given(st.lists(LINES, min_size=1, max_size=6), st.sampled_from(["\n", "\r\n", "\r"]), st.randoms())
def test_any_split_gives_the_same_events(lines: list[str], end: str, dice: random.Random) -> None:
    stream = "".join(f"data: {line}{end}: keep-alive{end}{end}" for line in lines).encode()
    parser, found = SseParser(), []
    for packet in packets(stream, random.Random(dice.random())):
        found += parser.feed(packet)
    found += parser.finish()
    assert found == [line.encode() for line in lines]


def test_other_line_separators_are_text() -> None:
    text = "a\u2028b\u0085c\x0bd\x0ce\u2029"
    assert SseParser().feed(f"data: {text}\n\n".encode()) == [text.encode()]


def test_two_data_lines_are_one_event() -> None:
    assert SseParser().feed(b"data: a\ndata: b\n\ndata:c\n\n") == [b"a\nb", b"c"]


def test_no_space_byte_order_mark_and_unknown_fields() -> None:
    assert SseParser().feed(b"\xef\xbb\xbfdata:x\nid: 1\nevent: y\nretry: 5\n\n") == [b"x"]


def test_last_event_without_blank_line() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a") == []
    assert parser.finish() == [b"a"]


def test_keep_alives_are_counted() -> None:
    parser = SseParser()
    parser.feed(b": OPENROUTER PROCESSING\n\n: again\n\n")
    assert parser.comments == 2


def test_an_endless_event_is_refused() -> None:
    parser = SseParser()
    part = b"x" * (MAX_EVENT_BYTES // 4 + 1)
    fed = (parser.feed(part) for _ in range(5))
    with pytest.raises(ProtocolError, match="larger than"):
        list(fed)


# -- shapes of hosts -------------------------------------------------------------------------------


def test_moonshot_tool_stream() -> None:
    reply, events = decode(shapes.sse(shapes.MOONSHOT_TOOL_STREAM, space=False))
    assert reply.complete
    assert reply.finish_reason == "tool_calls"
    assert reply.message.tool_calls == (ToolCall("ls_0", "ls", '{"p":"src"}'),)
    assert reply.message.reasoning is not None
    assert reply.message.reasoning.text == "look"
    assert reply.message.content is None
    assert reply.report is not None
    assert reply.report.usage == Usage(90, 0, None, 22, None)
    assert [type(event) for event in events] == [
        ReasoningDelta, ToolCallDelta, ToolCallDelta, ToolCallDelta, UsageUpdate, UsageUpdate, End,
    ]  # fmt: skip


def test_openrouter_stream() -> None:
    reply, events = decode(shapes.sse(shapes.OPENROUTER_STREAM, keep_alive=": OPENROUTER PROCESSING\n\n"))
    assert reply.message.text == "ok"
    assert reply.message.reasoning is not None
    assert reply.message.reasoning.text == "hm"
    assert reply.message.reasoning.member == "reasoning"
    assert [dict(d) for d in reply.message.reasoning.details] == [
        {"type": "reasoning.text", "text": "hm", "format": "unknown", "index": 0}
    ]
    assert (reply.served_by, reply.model, reply.id) == ("Moonshot AI", "moonshotai/kimi-k3-20260715", "gen-1")
    assert reply.report is not None
    assert reply.report.billed == Decimal("0.000966")
    assert reply.report.usage == Usage(80, 1920, 0, 4, 6)
    assert [event.text for event in events if isinstance(event, ReasoningDelta | TextDelta)] == ["hm", "ok"]


def test_repeated_finish_ends_once() -> None:
    reply, events = decode(shapes.sse(shapes.OPENROUTER_REPEATED_FINISH))
    assert reply.message.tool_calls == (ToolCall("add:0", "add", "{}"),)
    assert sum(isinstance(event, End) for event in events) == 1
    assert reply.report is not None
    assert reply.report.billed == Decimal("0.000285")


@pytest.mark.parametrize("shape", [shapes.ERROR_WITH_CHOICE, shapes.ERROR_WITHOUT_CHOICE])
def test_error_in_stream(shape: tuple[str, ...]) -> None:
    reply, events = decode(shapes.sse(shape))
    assert not reply.complete
    assert reply.error is not None
    assert not any(isinstance(event, End) for event in events)


@pytest.mark.parametrize(
    ("events", "complete"),
    [
        (shapes.MOONSHOT_TOOL_STREAM, True),
        (shapes.MOONSHOT_TOOL_STREAM[:-1], True),  # usage, no [DONE]
        (shapes.MOONSHOT_TOOL_STREAM[:-2], True),  # usage inside the finish choice
        (shapes.MOONSHOT_TOOL_STREAM[:-3], False),
        ((*shapes.MOONSHOT_TOOL_STREAM[:4], "[DONE]"), False),  # [DONE] without a finish reason
        (("[DONE]",), False),
        ((), False),
    ],
)
def test_when_a_stream_is_complete(events: tuple[str, ...], complete: bool) -> None:
    assert decode(shapes.sse(events))[0].complete is complete


def test_role_only_chunk_is_no_token() -> None:
    stream = chunks({"role": "assistant", "content": ""}, {"content": "abc"}, {"content": "de"})
    parts = [part + b"\n\n" for part in stream.split(b"\n\n") if part]
    reply, _ = decode(*parts)
    assert (reply.first_token_ns, reply.last_token_ns, reply.token_events) == (2, 3, 2)
    assert (reply.first_event_chars, reply.total_chars) == (3, 5)


def test_nulls_everywhere() -> None:
    nulls: JsonObject = {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": None}
    reply, events = decode(chunks(nulls, {**nulls, "content": "x"}))
    assert reply.message.text == "x"
    assert reply.token_events == 1
    assert len(events) == 2


@pytest.mark.parametrize("member", ["reasoning_content", "reasoning"])
def test_reasoning_members(member: str) -> None:
    reply, _ = decode(chunks({member: "a"}, {member: "b"}, {"content": "c"}))
    assert reply.message.reasoning is not None
    assert (reply.message.reasoning.text, reply.message.reasoning.member) == ("ab", member)
    assert reply.message.to_json()[member] == "ab"


def test_reasoning_details_alone() -> None:
    details = [
        {"type": "reasoning.text", "text": t, "index": 0, "signature": s}
        for t, s in (("a", None), ("b", "s"))
    ]
    hidden = {"type": "reasoning.encrypted", "data": "AA==", "index": 1}
    reply, events = decode(
        chunks(
            *({"reasoning_details": [d]} for d in details), {"reasoning_details": [hidden]}, {"content": "c"}
        )
    )
    assert reply.message.reasoning is not None
    assert reply.message.reasoning.text == "ab"
    assert [dict(d) for d in reply.message.reasoning.details] == [
        {"type": "reasoning.text", "text": "ab", "index": 0, "signature": "s"},
        hidden,
    ]
    assert sum(isinstance(e, ReasoningDelta) for e in events) == 2


CALLS = (ToolCall("a:0", "f", '{"x":1}'), ToolCall("b:1", "g", '{"y":[2]}'))


@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param(
            [fragment("", index=i, id=c.id, name=c.name) for i, c in enumerate(CALLS)]
            + [
                fragment(part, index=i)
                for i, c in enumerate(CALLS)
                for part in (c.arguments[:3], c.arguments[3:])
            ],
            id="as published",
        ),
        pytest.param(
            [fragment(c.arguments[:2], id=c.id, name=c.name) for c in CALLS[:1]]
            + [fragment(CALLS[0].arguments[2:])]
            + [fragment(CALLS[1].arguments, id=CALLS[1].id, name=CALLS[1].name)],
            id="no index",
        ),
        pytest.param(
            [fragment(c.arguments, index=0, id=c.id, name=c.name) for c in CALLS], id="every index is zero"
        ),
        pytest.param(
            [fragment(p, id=c.id, name=c.name) for c in CALLS for p in (c.arguments[:1], c.arguments[1:])],
            id="id and name in every piece",
        ),
        pytest.param([{"tool_calls": [c.to_json() for c in CALLS]}], id="whole calls in one piece"),
        pytest.param(
            [fragment(c.arguments[:4], index=i, id=c.id, name=c.name) for i, c in enumerate(CALLS)]
            + [fragment(c.arguments, index=i, id=c.id, name=c.name) for i, c in enumerate(CALLS)],
            id="arguments so far, again and again",
        ),
        pytest.param(
            [fragment(c.arguments, index=i + 3, id=c.id, name=c.name) for i, c in enumerate(CALLS)],
            id="indices with a gap",
        ),
    ],
)
def test_tool_call_deltas(deltas: Sequence[JsonObject]) -> None:
    reply, _ = decode(chunks(*deltas, finish="tool_calls"))
    assert reply.message.tool_calls == CALLS


def test_calls_without_ids_get_names_of_their_own() -> None:
    reply, _ = decode(chunks(fragment("{}", name="f"), fragment("{}", name="f"), finish="tool_calls"))
    first, second = reply.message.tool_calls
    assert first.name == second.name == "f"
    assert first.id
    assert first.id != second.id


def test_arguments_sent_as_an_object() -> None:
    call: JsonObject = {
        "tool_calls": [{"index": 0, "id": "i", "function": {"name": "f", "arguments": {"a": 1}}}]
    }
    assert decode(chunks(call))[0].message.tool_calls[0].parsed() == {"a": 1}


def test_whole_message_in_place_of_deltas() -> None:
    whole: JsonObject = {"role": "assistant", "content": "abcd", "reasoning_content": "t"}
    events = (
        '{"choices":[{"index":0,"delta":{"content":"ab"}}]}',
        json.dumps({"choices": [{"index": 0, "message": whole, "finish_reason": "stop"}]}),
        "[DONE]",
    )
    reply, found = decode(shapes.sse(events))
    assert reply.message.text == "abcd"
    assert reply.message.reasoning is not None
    assert [e.text for e in found if isinstance(e, TextDelta)] == ["ab", "cd"]


def test_text_so_far_in_every_delta() -> None:
    reply, _ = decode(chunks(*({"content": "The quick brown fox"[:n]} for n in (3, 5, 9, 15, 19))))
    assert reply.message.text == "The quick brown fox"


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=12).filter(lambda p: len(set(p)) > 1))
def test_ordinary_deltas_are_joined(pieces: list[str]) -> None:
    grows = all(len(b) > len(a) and b.startswith(a) for a, b in itertools.pairwise(pieces))
    if not grows:
        assert decode(chunks(*({"content": p} for p in pieces)))[0].message.text == "".join(pieces)


def test_a_character_split_over_two_deltas() -> None:
    assert decode(chunks({"content": "\ud83d"}, {"content": "\ude00!"}))[0].message.text == "\U0001f600!"


@pytest.mark.parametrize("raw", ["unexpected_state", "eos", "STOP"])
def test_unlisted_finish_words(raw: str) -> None:
    reply, _ = decode(chunks({"content": "x"}, finish=raw))
    assert (reply.finish_reason, reply.raw_finish_reason) == ("other", raw)


@pytest.mark.parametrize("event", ["{", "[1]", "null", '{"a":NaN}', "hello", "\x00", '{"a":' * 50_000])
def test_what_is_no_chunk(event: str) -> None:
    with pytest.raises(ProtocolError, match="stream event"):
        decode(shapes.sse((event,)))


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(ProtocolError):
        decode(b'data: {"a":"\xff\xfe"}\n\n')


@pytest.mark.parametrize(
    "odd",
    [
        '{"choices":null}', '{"choices":{}}', '{"choices":[null]}', '{"choices":[{"delta":null}]}',
        '{"choices":[{"delta":{"content":5}}]}', '{"choices":[{"delta":{"tool_calls":[null,{}]}}]}',
        '{"choices":[{"delta":{"content":[{"type":"text","text":""}]}}]}', '{"usage":5}', '{"usage":[]}',
        "{}",
        '{"choices":[{"index":1,"delta":{"content":"other choice"}}]}', '{"choices":[{"finish_reason":""}]}',
    ],
)  # fmt: skip
def test_odd_chunks_change_nothing(odd: str) -> None:
    plain = (
        '{"choices":[{"delta":{"content":"x"}}]}',
        '{"choices":[{"delta":{},"finish_reason":"stop"}]}',
        "[DONE]",
    )
    reply, _ = decode(shapes.sse((plain[0], odd, *plain[1:])))
    assert reply.complete
    assert reply.message.text == "x"


# -- properties over packets, keep-alives and the order of usage -----------------------------------

SHAPES = (shapes.MOONSHOT_TOOL_STREAM, shapes.OPENROUTER_STREAM, shapes.OPENROUTER_REPEATED_FINISH)
ROW = PriceTable.bundled().find("api.moonshot.ai", "kimi-k3")


def essence(reply: Reply) -> tuple[object, ...]:
    assert ROW is not None
    cost = None if reply.report is None else ROW.price(reply.report)
    return (
        reply.message,
        reply.raw_finish_reason,
        reply.report,
        cost,
        reply.complete,
        reply.id,
        reply.served_by,
    )


@settings(deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.randoms(),
    st.sampled_from(["", ": x\n\n", ":\n", "event: m\n"]),
    st.booleans(),
)
def test_packets_and_keep_alives_change_nothing(
    shape: tuple[str, ...], dice: random.Random, keep_alive: str, space: bool
) -> None:
    stream = shapes.sse(shape, keep_alive=keep_alive, space=space)
    parts = packets(stream, random.Random(dice.random()))
    expected = essence(decode(shapes.sse(shape))[0])
    assert essence(decode(*parts)[0]) == expected
    scanner = StreamScanner()
    for at, part in enumerate(parts):
        scanner.feed(part, at)
    scanner.finish(len(parts))
    seen = scanner.reply({})
    assert (seen.report, seen.raw_finish_reason, seen.complete, seen.id) == (
        expected[2],
        expected[1],
        True,
        expected[5],
    )


FULL: JsonObject = {
    "prompt_tokens": 90, "completion_tokens": 22,
    "prompt_tokens_details": {"cached_tokens": 64}, "completion_tokens_details": {"reasoning_tokens": 3},
}  # fmt: skip
BARE: JsonObject = {"prompt_tokens": 90, "completion_tokens": 22}
EMPTY: list[JsonValue] = [None, {}, {"prompt_tokens": 0, "completion_tokens": 0}, {"prompt_tokens": None}]


@settings(deadline=None)
@given(
    st.permutations([FULL, BARE, {**FULL, "cost": 0.001}, *EMPTY]),
    st.lists(st.sampled_from(["top", "choice", "both"]), min_size=7, max_size=7),
    st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_order_and_place_of_usage_change_nothing(
    objects: list[JsonValue], places: list[str], with_choice: list[bool]
) -> None:
    events = ['{"choices":[{"delta":{"content":"x"}}]}', '{"choices":[{"delta":{},"finish_reason":"stop"}]}']
    for value, place, choice in zip(objects, places, with_choice, strict=True):
        inside: JsonObject = {"delta": {}, "usage": value if place in ("choice", "both") else None}
        chunk: JsonObject = {"choices": [inside] if choice or place != "top" else []}
        if place != "choice":
            chunk["usage"] = value
        events.append(json.dumps(chunk))
    reply, found = decode(shapes.sse((*events, "[DONE]")))
    assert reply.report is not None
    assert reply.report.usage == Usage(26, 64, None, 19, 3)
    assert reply.report.billed == Decimal("0.001")
    assert sum(isinstance(event, End) for event in found) == 1


def test_growing_usage_keeps_the_last() -> None:
    events = [
        f'{{"choices":[{{"delta":{{"content":"x"}}}}],"usage":{{"prompt_tokens":5,"completion_tokens":{n}}}}}'
        for n in (1, 2, 3)
    ]
    reply, _ = decode(
        shapes.sse((*events, '{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":null}', "[DONE]"))
    )
    assert reply.report is not None
    assert reply.report.usage.output == 3
