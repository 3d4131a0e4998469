"""The prefix cache seen from outside: what broke a prefix, why tokens were paid for again, what a perfect
cache costs."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3eval import K3, Message, Meter, Reasoning, ToolCall, ToolSpec, Usage
from k3eval.jsontypes import JsonObject
from k3eval.meter.cache import PrefixWatch, prefix_of
from k3eval.options import Effort
from k3eval.testing import Reply, ScriptedTransport, answer

KEY = "sk-invented-0123456789"
S = 1_000_000_000
SYSTEM: JsonObject = {"role": "system", "content": "You fix bugs." * 50}
FIRST: JsonObject = {"role": "user", "content": "Fix it." * 200}
TURN: list[JsonObject] = [
    {"role": "assistant", "content": "looking", "reasoning_content": "hm"},
    {"role": "user", "content": "go on"},
]


def body(*messages: JsonObject, **members: object) -> JsonObject:
    return {"model": "kimi-k3", "messages": list(messages), **members}  # type: ignore[dict-item]


def watched(
    first: JsonObject, *, prompt: int = 5000, output: int = 100, host: str | None = "h"
) -> PrefixWatch:
    watch = PrefixWatch()
    watch.answered(watch.check(prefix_of(first)), Usage(prompt, 0, None, output, None), host, 0)
    return watch


def reason(
    watch: PrefixWatch,
    second: JsonObject,
    read: int | None,
    *,
    host: str = "h",
    at_s: float = 1,
    ttl: float | None = 300,
) -> str | None:
    usage = Usage(6000 - (read or 0), read, None, 10, None)
    return watch.check(prefix_of(second)).miss_reason(usage, host, int(at_s * S), ttl)


def test_first_call_has_nothing_to_hit() -> None:
    assert reason(PrefixWatch(), body(SYSTEM, FIRST), 0) == "first call of the conversation"
    assert reason(PrefixWatch(), body(SYSTEM, FIRST), 4096) is None


def test_a_grown_conversation_that_hits_has_no_reason() -> None:
    watch = watched(body(SYSTEM, FIRST))
    assert watch.check(prefix_of(body(SYSTEM, FIRST, *TURN))).stable
    assert reason(watch, body(SYSTEM, FIRST, *TURN), 4864) is None


CHANGED: JsonObject = {"role": "system", "content": "It is 12:00. " + str(SYSTEM["content"])}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (body(CHANGED, FIRST, *TURN), "prefix changed at message 0 (system)"),
        (body(SYSTEM, FIRST, {**TURN[0], "content": "other"}, TURN[1]), None),
        (
            body(SYSTEM, FIRST, *TURN, tools=[{"type": "function", "function": {"name": "f"}}]),
            "prefix changed at tools",
        ),
        (body(SYSTEM, FIRST, *TURN, reasoning_effort="low"), "effort changed"),
        (body(SYSTEM, FIRST, *TURN, thinking={"type": "disabled"}), "effort changed"),
    ],
)
def test_what_changed(second: JsonObject, said: str | None) -> None:
    watch = watched(body(SYSTEM, FIRST))
    assert reason(watch, second, 0) == (said or "not kept by the host")
    assert watch.check(prefix_of(second)).stable is (said is None)


def test_which_message_broke_a_long_conversation() -> None:
    long = [SYSTEM, FIRST, *TURN, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    broken = [*long[:3], {"role": "user", "content": "edited"}, *long[4:], {"role": "user", "content": "d"}]
    check = watched(body(*long)).check(prefix_of(body(*broken)))  # type: ignore[arg-type]
    assert check.broken_by == "message 3 (user)"
    assert 0 < check.seen_tokens < 5000


def test_host_flip() -> None:
    assert (
        reason(watched(body(SYSTEM, FIRST), host="a"), body(SYSTEM, FIRST, *TURN), 0, host="b")
        == "host flipped from a to b"
    )


def test_life_passed() -> None:
    said = reason(watched(body(SYSTEM, FIRST)), body(SYSTEM, FIRST, *TURN), 0, at_s=400)
    assert said == "cache life of 300 s passed (400 s since the last call)"
    assert (
        reason(watched(body(SYSTEM, FIRST)), body(SYSTEM, FIRST, *TURN), 0, at_s=400, ttl=3600)
        == "not kept by the host"
    )


def test_below_minimum() -> None:
    watch = watched(body(SYSTEM, FIRST), prompt=100)
    assert reason(watch, body(SYSTEM, FIRST, *TURN), 0) == "below the minimum of about 256 tokens"


def test_not_reported() -> None:
    assert (
        reason(watched(body(SYSTEM, FIRST)), body(SYSTEM, FIRST, *TURN), None) == "not reported by the host"
    )


def test_two_conversations_do_not_disturb_each_other() -> None:
    watch = PrefixWatch()
    other: JsonObject = {"role": "user", "content": "another task"}
    for first in (FIRST, other):
        watch.answered(watch.check(prefix_of(body(SYSTEM, first))), Usage(5000, 0, None, 9, None), "h", 0)
    for first in (FIRST, other):
        assert watch.check(prefix_of(body(SYSTEM, first, *TURN))).stable
    assert watch.check(prefix_of(body(SYSTEM, {"role": "user", "content": "third"}))).before is None


def test_attempts_at_one_task_branch_off_without_blame() -> None:
    watch = PrefixWatch()
    other = [{**TURN[0], "content": "another way"}, TURN[1]]
    for tail in (TURN, other):
        reply = Message.from_json(tail[0])
        for known in ([], tail):
            check = watch.check(prefix_of(body(SYSTEM, FIRST, *known)))
            assert check.stable
            watch.answered(check, Usage(5200, 0, None, 9, None), "h", 0, reply if not known else None)
    for tail in (TURN, other):
        check = watch.check(prefix_of(body(SYSTEM, FIRST, *tail, *TURN)))
        assert check.stable
        assert check.common == 4


messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text(max_size=5)}
    ),
    min_size=1,
    max_size=6,
)


@given(messages, messages)
def test_known_tokens_never_exceed_what_was_counted(left: list[JsonObject], right: list[JsonObject]) -> None:
    watch = watched(body(*left), prompt=500, output=50)
    for second in (body(*left, *right), body(*right), body(*left)):
        check = watch.check(prefix_of(second))
        tokens, rest = check.known_prompt
        assert 0 <= tokens <= 550
        assert 0 <= rest <= sum(check.prefix.sizes)
        assert 0 <= check.seen_tokens <= 550
    assert watch.check(prefix_of(body(*left, *right))).stable


# -- through the client ----------------------------------------------------------------------------


def used(prompt: int, read: int, output: int = 100) -> JsonObject:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": read},
    }


def talk(meter: Meter, *replies: Reply, effort: Effort | None = None) -> K3:
    script = ScriptedTransport(*replies)
    return K3(
        "moonshot", "kimi-k3", api_key=KEY, meter=meter, transport=script, effort=effort, max_output=8000
    )


def test_three_costs_side_by_side(meter: Meter) -> None:
    k3 = talk(meter, answer("a", usage=used(10_000, 0)), answer("b", usage=used(11_000, 4_096)))
    history = [Message.user("x" * 40_000)]
    first = k3.chat(history)
    assert first.cost.ideal_cache == first.cost.computed
    assert first.cache_miss_reason == "first call of the conversation"
    history += [first.message, Message.user("go on")]
    second = k3.chat(history)
    assert second.cost.computed == (Decimal(6904 * 3) + Decimal("0.3") * 4096 + 1500).scaleb(-6)
    assert second.cost.ideal_cache == (Decimal(900 * 3) + Decimal("0.3") * 10_100 + 1500).scaleb(-6)
    assert second.cache_miss_reason == "not kept by the host"
    assert meter.total.cost.ideal_cache == (first.cost.ideal_cache or 0) + second.cost.ideal_cache


def test_reserve_is_tight_once_the_prefix_was_counted(meter: Meter) -> None:
    k3 = talk(meter, answer("a", usage=used(10_000, 0)), answer("b", usage=used(10_200, 9_984)))
    history = [Message.user("x" * 40_000)]
    reply = k3.chat(history)
    k3.chat([*history, reply.message, Message.user("go on")])
    first, second = meter.ledger.attempts()
    del first
    assert second.state == "settled"
    with_prefix = k3.meter.prefixes.check(prefix_of(body({"role": "user", "content": "x" * 40_000})))
    assert with_prefix.stable


def test_the_bound_is_never_below_the_count(meter: Meter) -> None:
    """The worst case is reserved from bytes: a token has at least one."""
    from k3eval.meter.call import Call
    from k3eval.meter.context import CallContext

    k3 = talk(meter, answer("a", usage=used(10_000, 0)))
    request, context = k3.prepare(k3.request([Message.user("x" * 12_000)], False))
    call = Call(meter, k3.provider, str(request.url), request.content, None, context)
    assert call.prompt_bound >= 12_000
    assert isinstance(context, CallContext)


def test_replayed_reasoning_keeps_the_prefix(meter: Meter) -> None:
    call = ToolCall("f_0", "f", '{"a": 1}')
    spec = ToolSpec("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}})
    k3 = talk(
        meter,
        answer(None, reasoning="hm", tool_calls=[call], usage=used(9_000, 0)),
        answer("b", usage=used(9_300, 8_960)),
    )
    history = [Message.system("s"), Message.user("x" * 30_000)]
    first = k3.chat(history, tools=[spec])
    assert first.message.reasoning == Reasoning("hm")
    second = k3.chat([*history, first.message, Message.tool("f_0", "1")], tools=[replace(spec)])
    assert second.cache_miss_reason is None


def test_dropped_reasoning_is_found_out(meter: Meter) -> None:
    replies = [
        answer("a", reasoning="hm", usage=used(9_000, 0)),
        answer("b", usage=used(9_300, 8_960)),
        answer("c", usage=used(9_500, 0)),
    ]
    k3 = talk(meter, *replies)
    start = [Message.user("x" * 30_000)]
    first = k3.chat(start)
    history = [*start, first.message, Message.user("two")]
    second = k3.chat(history)
    bare = replace(first.message, reasoning=None)
    third = k3.chat([*start, bare, *history[2:], second.message, Message.user("three")])
    assert third.cache_miss_reason == "prefix changed at message 1 (assistant)"
