"""Events that are written once and filled with text are the dialect's own frames."""

from __future__ import annotations

import json

import pytest

from k3eval_local.protocol.dialects import DIALECTS, DialectOptions
from k3eval_local.protocol.messages import ChatMessage, Conversation
from k3eval_local.protocol.parser import CallArguments, CallStart, Event, Reasoning, Text
from k3eval_local.protocol.reply import ReplyHead, TokenLogprob
from k3eval_local.protocol.request import ChatRequest
from k3eval_local.server.streaming import TextFrames

EVENTS: list[tuple[int, Event, tuple[TokenLogprob, ...] | None]] = [
    (0, Reasoning("why"), None),
    (1, Reasoning("for\n"), None),
    (0, Reasoning(' "not"\\ \0'), None),
    (0, Text("so"), None),
    (0, Text(" it"), (TokenLogprob(b" it", -0.5, ()),)),
    (0, Text(" is \u00e9\U0001f600"), None),
    (1, Text("\0text\0"), None),
    (0, CallStart(0, "add"), None),
    (0, CallArguments(0, '{"a": 1}'), None),
    (1, Text(""), None),
    (0, Text("."), None),
]


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("shown", [True, False])
def test_text_frames_are_the_dialects(name: str, shown: bool) -> None:
    dialect = DIALECTS[name](DialectOptions())
    request = ChatRequest("a", Conversation(messages=(ChatMessage("user", "hi"),)), n=2, show_reasoning=shown)
    head = ReplyHead("reply-1", 1, request)
    plain, quick = dialect.frames(head), TextFrames(dialect.frames(head))
    written = 0
    for choice, event, logprobs in EVENTS:
        made = quick.frames(choice, event, logprobs)
        written += sum(isinstance(frame, bytes) for frame in made)
        as_json = [
            json.loads(frame.removeprefix(b"data: ")) if isinstance(frame, bytes) else frame for frame in made
        ]
        expected = plain.event(choice, event, logprobs)
        assert [_without_ids(frame) for frame in as_json] == [_without_ids(frame) for frame in expected]
    assert written >= 3


def _without_ids(frame: dict) -> dict:
    """Call ids are random in one dialect."""
    text = json.loads(json.dumps(frame))
    for choice in text["choices"]:
        for call in choice["delta"].get("tool_calls") or ():
            call.pop("id", None)
    return text
