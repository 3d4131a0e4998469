"""What goes out: one request, written as each host wants it."""

from __future__ import annotations

from decimal import Decimal

import pytest

from k3eval import (
    K3,
    CachePolicy,
    ConfigError,
    Message,
    Meter,
    Reasoning,
    Routing,
    SchemaError,
    ToolCall,
    ToolSpec,
)
from k3eval.jsontypes import JsonObject
from k3eval.notices import Notice
from k3eval.options import Effort
from k3eval.providers import provider_named
from k3eval.providers.compatible import is_private
from k3eval.testing import Reply, ScriptedTransport, answer, failure

KEY = "sk-invented-0123456789"
ASK = [Message.user("hi")]
ADD = ToolSpec(
    "add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
)
ZIP = ToolSpec("zip", "Zips.", {"type": "object", "properties": {}})
DETAILS = ({"type": "reasoning.text", "text": "hm", "index": 0, "signature": "s"},)
THOUGHT = Message.assistant(
    None, tool_calls=[ToolCall("add:0", "add", '{"a": 1}')], reasoning=Reasoning("hm", DETAILS, "reasoning")
)
TURNS = [*ASK, THOUGHT, Message.tool("add:0", "1")]


class Wire:
    """A client on a script; ``body`` is what it sent last."""

    def __init__(self, notices: list[Notice]) -> None:
        self.notices = notices
        self.script = ScriptedTransport(answer(), repeat=True)

    def client(
        self,
        provider: str,
        model: str = "kimi-k3",
        *,
        effort: Effort | None = None,
        cache: CachePolicy | None = None,
        routing: Routing | None = None,
    ) -> K3:
        return K3(
            provider,
            model,
            base_url="https://api.example.com/v1" if provider == "compatible" else None,
            api_key=KEY,
            meter=Meter(notify=self.notices.append),
            transport=self.script,
            effort=effort,
            cache=cache,
            routing=routing,
        )

    @property
    def body(self) -> JsonObject:
        return self.script.requests[-1].body

    @property
    def codes(self) -> list[str]:
        return [notice.code for notice in self.notices]


@pytest.fixture
def wire(notices: list[Notice]) -> Wire:
    return Wire(notices)


@pytest.mark.parametrize(
    ("provider", "url"),
    [
        ("moonshot", "https://api.moonshot.ai/v1/chat/completions"),
        ("moonshot-cn", "https://api.moonshot.cn/v1/chat/completions"),
        ("openrouter", "https://openrouter.ai/api/v1/chat/completions"),
        ("local", "http://127.0.0.1:8000/v1/chat/completions"),
    ],
)
def test_address_and_key(wire: Wire, provider: str, url: str) -> None:
    wire.client(provider).chat(ASK)
    (sent,) = wire.script.requests
    assert sent.url == url
    assert sent.headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("provider", "member"),
    [
        ("moonshot", "max_completion_tokens"),
        ("moonshot-cn", "max_completion_tokens"),
        ("openrouter", "max_tokens"),
        ("local", "max_tokens"),
        ("compatible", "max_tokens"),
    ],
)
def test_output_cap(wire: Wire, provider: str, member: str) -> None:
    wire.client(provider).chat(ASK, max_output=9_000)
    assert wire.body[member] == 9_000
    assert len({"max_tokens", "max_completion_tokens"} & set(wire.body)) == 1


@pytest.mark.parametrize("provider", ["moonshot", "openrouter"])
def test_paid_hosts_always_get_a_cap(wire: Wire, provider: str) -> None:
    wire.client(provider).chat(ASK)
    assert 32_768 in wire.body.values()


@pytest.mark.parametrize(
    ("provider", "effort", "members"),
    [
        ("moonshot", "low", {"reasoning_effort": "low"}),
        ("moonshot", "off", {"thinking": {"type": "disabled"}}),
        ("openrouter", "high", {"reasoning": {"effort": "high"}}),
        ("openrouter", "off", {"reasoning": {"enabled": False}}),
        ("compatible", "max", {"chat_template_kwargs": {"thinking": True, "thinking_effort": "max"}}),
        ("local", "off", {"chat_template_kwargs": {"thinking": False}}),
    ],
)
def test_effort(wire: Wire, provider: str, effort: Effort, members: JsonObject) -> None:
    wire.client(provider, effort=effort).chat(ASK)
    assert {name: wire.body[name] for name in members} == members
    assert len({"thinking", "reasoning_effort", "reasoning", "chat_template_kwargs"} & set(wire.body)) == 1


def test_template_switches_of_the_caller_join(wire: Wire) -> None:
    wire.client("local", effort="low").chat(ASK, extra={"chat_template_kwargs": {"preserve_thinking": True}})
    assert wire.body["chat_template_kwargs"] == {
        "thinking": True,
        "thinking_effort": "low",
        "preserve_thinking": True,
    }


def test_no_effort_sends_nothing(wire: Wire) -> None:
    for provider in ("moonshot", "openrouter", "local"):
        wire.client(provider).chat(ASK)
        assert not {"thinking", "reasoning_effort", "reasoning", "chat_template_kwargs"} & set(wire.body)


def test_replay_of_reasoning(wire: Wire) -> None:
    wire.client("moonshot").chat(TURNS)
    sent = wire.body["messages"][1]  # type: ignore[index, call-overload]
    assert sent == {
        "role": "assistant",
        "reasoning_content": "hm",
        "tool_calls": [THOUGHT.tool_calls[0].to_json()],
    }
    wire.client("openrouter").chat(TURNS)
    sent = wire.body["messages"][1]  # type: ignore[index, call-overload]
    assert sent["reasoning_details"] == list(DETAILS)
    assert not {"reasoning", "reasoning_content"} & set(sent)
    wire.client("local").chat(TURNS)
    sent = wire.body["messages"][1]  # type: ignore[index, call-overload]
    assert sent["reasoning"] == "hm"


def test_openrouter_replays_text_without_details(wire: Wire) -> None:
    wire.client("openrouter").chat([*ASK, Message.assistant("x", reasoning="why"), *ASK])
    assert wire.body["messages"][1] == {"role": "assistant", "content": "x", "reasoning": "why"}  # type: ignore[index, call-overload]


@pytest.mark.parametrize("content", [None, ""])
def test_moonshot_refuses_empty_turns_so_none_is_sent(wire: Wire, content: str | None) -> None:
    call = ToolCall("f_0", "f", "{}")
    wire.client("moonshot").chat(
        [*ASK, Message.assistant(content, tool_calls=[call]), Message.tool("f_0", "1")]
    )
    assert wire.body["messages"][1] == {
        "role": "assistant",
        "tool_calls": [call.to_json()],
        "reasoning_content": " ",
    }  # type: ignore[index, call-overload]
    wire.client("moonshot").chat([*ASK, Message.assistant(content), *ASK])
    assert wire.body["messages"][1] == {"role": "assistant", "content": " "}  # type: ignore[index, call-overload]


def test_moonshot_gets_no_empty_text_parts(wire: Wire) -> None:
    wire.client("moonshot").chat(
        [Message.user([{"type": "text", "text": ""}, {"type": "text", "text": "x"}])]
    )
    assert wire.body["messages"][0]["content"] == [{"type": "text", "text": "x"}]  # type: ignore[index, call-overload]


def test_ids_go_back_byte_for_byte(wire: Wire) -> None:
    for provider in ("moonshot", "openrouter", "local"):
        odd = ToolCall("functions.add:0_x.y", "add", '{"a" : 1 }')
        wire.client(provider).chat([*ASK, Message.assistant("", tool_calls=[odd]), Message.tool(odd.id, "1")])
        messages = wire.body["messages"]
        assert messages[1]["tool_calls"] == [odd.to_json()]  # type: ignore[index, call-overload]
        assert messages[2]["tool_call_id"] == odd.id  # type: ignore[index, call-overload]


@pytest.mark.parametrize("provider", ["moonshot", "openrouter", "local", "compatible"])
def test_same_request_same_bytes_whatever_the_order_of_tools(wire: Wire, provider: str) -> None:
    wire.client(provider).chat(ASK, tools=[ZIP, ADD])
    wire.client(provider).chat(ASK, tools=[ADD, ZIP])
    first, second = wire.script.requests[-2:]
    assert first.body == second.body
    assert list(first.body) == list(second.body)


@pytest.mark.parametrize("provider", ["moonshot", "openrouter", "compatible", "local"])
def test_sampling_that_k3_fixes_is_not_sent(wire: Wire, provider: str) -> None:
    client = wire.client(provider)
    client.chat(ASK, temperature=0.2, extra={"top_p": 0.5, "presence_penalty": 1})
    client.chat(ASK, temperature=0.2)
    assert not {"temperature", "top_p", "presence_penalty"} & set(wire.script.requests[0].body)
    assert wire.codes.count("pinned_sampling") == 3


def test_the_fixed_value_itself_is_no_warning(wire: Wire) -> None:
    wire.client("moonshot").chat(ASK, temperature=1.0)
    assert "temperature" not in wire.body
    assert "pinned_sampling" not in wire.codes


def test_other_models_keep_their_sampling(wire: Wire) -> None:
    wire.client("local", "a").chat(ASK, temperature=0.0, seed=3)
    assert (wire.body["temperature"], wire.body["seed"]) == (0.0, 3)
    assert wire.codes == []


def test_moonshot_has_no_seed(wire: Wire) -> None:
    wire.client("moonshot").chat(ASK, seed=3)
    assert "seed" not in wire.body
    assert "no_seed" in wire.codes


def test_cache_life_goes_to_moonshot_only(wire: Wire) -> None:
    policy = CachePolicy(ttl="1h", session="s1", key="k")
    wire.client("moonshot", cache=policy).chat(ASK)
    assert wire.body["prompt_cache_options"] == {"mode": "implicit", "ttl": "1h"}
    assert wire.body["prompt_cache_key"] == "k"
    assert "session_id" not in wire.body
    wire.client("openrouter", cache=policy).chat(ASK)
    assert "prompt_cache_options" not in wire.body
    assert wire.body["session_id"] == "s1"
    assert "no_ttl" in wire.codes


def test_routing(wire: Wire) -> None:
    routing = Routing(
        only=("moonshotai/mxfp4",), allow_fallbacks=False, data_collection="deny", zdr=True,
        max_price_input=Decimal("3.5"),
    )  # fmt: skip
    wire.client("openrouter", routing=routing).chat(ASK)
    assert wire.body["provider"] == {
        "only": ["moonshotai/mxfp4"],
        "allow_fallbacks": False,
        "data_collection": "deny",
        "zdr": True,
        "max_price": {"prompt": "3.5"},
    }
    assert wire.script.requests[-1].headers["x-openrouter-cache"] == "false"
    wire.client("moonshot", routing=routing).chat(ASK)
    assert "provider" not in wire.body


def test_order_switches_sessions_off(wire: Wire) -> None:
    wire.client("openrouter", routing=Routing(order=("a",)), cache=CachePolicy(session="s")).chat(ASK)
    assert "session_off" in wire.codes


@pytest.mark.parametrize(
    ("provider", "asked"), [("moonshot", True), ("openrouter", False), ("local", True), ("compatible", True)]
)
def test_usage_is_asked_for_where_it_must_be(wire: Wire, provider: str, asked: bool) -> None:
    wire.script = ScriptedTransport(
        Reply((b"data: [DONE]\n\n",), headers={"content-type": "text/event-stream"})
    )
    with wire.client(provider).stream(ASK):
        pass
    assert wire.body["stream"] is True
    assert (wire.body.get("stream_options") == {"include_usage": True}) is asked


def test_answer_format(wire: Wire) -> None:
    schema: JsonObject = {"properties": {"a": {"type": ["string", "null"]}}}
    wire.client("moonshot").chat(
        ASK, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    )
    sent = wire.body["response_format"]["json_schema"]["schema"]  # type: ignore[index, call-overload]
    assert sent["type"] == "object"
    assert sent["properties"]["a"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}
    with pytest.raises(ConfigError, match="name and a schema"):
        wire.client("moonshot").chat(
            ASK, response_format={"type": "json_schema", "json_schema": {"name": "n"}}
        )


@pytest.mark.parametrize("provider", ["moonshot", "openrouter"])
def test_bad_tools_fail_before_anything_is_sent(wire: Wire, provider: str) -> None:
    for bad in (
        [ToolSpec("1st", "", {"type": "object"})],
        [ADD, ADD],
        [ToolSpec("f", "", {"type": "object", "properties": {"a": {}}})],
        [ToolSpec(f"f{i}", "", {"type": "object"}) for i in range(129)],
    ):
        with pytest.raises(SchemaError):
            wire.client(provider).chat(ASK, tools=bad)
    assert wire.script.requests == []


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ("add", {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tool_choice(wire: Wire, choice: str, sent: object) -> None:
    wire.client("local").chat(ASK, tools=[ADD], tool_choice=choice)
    assert wire.body["tool_choice"] == sent


def test_forced_choice_falls_back_where_thinking_forbids_it(wire: Wire) -> None:
    refusal = failure(
        400,
        {
            "type": "invalid_request_error",
            "message": "tool_choice required is incompatible with thinking enabled",
        },
    )
    wire.script = ScriptedTransport(refusal, answer())
    wire.client("moonshot").chat(ASK, tools=[ADD], tool_choice="required")
    assert [r.body["tool_choice"] for r in wire.script.requests] == ["required", "auto"]
    assert "tool_choice" in wire.codes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": "nope", "tools": [ADD]}, "names no tool"),
        ({"max_output": 0}, "at least 1"),
        ({"stop": "x"}, "list of strings"),
        ({"stop": list("abcdef")}, "stop strings"),
        ({"stop": ["x" * 33]}, "stop strings"),
        ({"extra": {"x": float("nan")}}, "as JSON"),
        ({"extra": {"x": object()}}, "as JSON"),
    ],
)
def test_what_cannot_be_sent(wire: Wire, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wire.client("moonshot").chat(ASK, **options)  # type: ignore[arg-type]
    assert wire.script.requests == []


def test_no_messages(wire: Wire) -> None:
    with pytest.raises(ConfigError, match="empty"):
        wire.client("moonshot").chat([])
    with pytest.raises(ConfigError, match="Message objects"):
        wire.client("moonshot").chat([{"role": "user", "content": "x"}])  # type: ignore[list-item]


def test_warnings_before_the_first_paid_call_come_once(wire: Wire) -> None:
    for _ in range(3):
        client = wire.client("openrouter", "moonshotai/kimi-k3")
        client.meter.notices.once("x", "y", "z")
        client.chat(ASK, max_output=100)
        client.chat(ASK, max_output=100)
    assert wire.codes.count("privacy") == 3  # once for each meter
    assert wire.codes.count("small_cap") == 3
    assert wire.codes.count("stale_price") == 3
    text = next(notice.message for notice in wire.notices if notice.code == "privacy")
    assert "data_collection" in text
    assert "zdr" in text


def test_no_small_cap_warning_at_lower_effort(wire: Wire) -> None:
    wire.client("moonshot", effort="low").chat(ASK, max_output=100)
    assert "small_cap" not in wire.codes
    assert wire.codes == ["privacy"]


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOONSHOT_API_KEY", "OPENROUTER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="MOONSHOT_API_KEY"):
        K3("moonshot", "kimi-k3")
    monkeypatch.setenv("MOONSHOT_API_KEY", "sk-from-the-environment")
    with K3("moonshot", "kimi-k3") as client:
        assert client.headers["authorization"] == "Bearer sk-from-the-environment"
        assert "sk-from" not in repr(client)
    for bad in ("sk-\nabcdefgh", "sk-ключ-ключ", "sk-a b"):
        with pytest.raises(ConfigError, match="copy it again") as caught:
            K3("moonshot", "kimi-k3", api_key=bad)
        assert bad not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "private"),
    [
        ("http://127.0.0.1:1/v1", True), ("http://localhost/v1", True), ("http://10.1.2.3/v1", True),
        ("http://[::1]:8/v1", True), ("http://gpu-box:8000/v1", True), ("http://x.internal/v1", True),
        ("https://api.example.com/v1", False), ("http://8.8.8.8/v1", False),
    ],
)  # fmt: skip
def test_own_machines_are_free(url: str, private: bool) -> None:
    assert is_private(url) is private
    assert provider_named("compatible", url).self_hosted is private


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="openrouter, moonshot"):
        provider_named("azure")
    with pytest.raises(ConfigError, match="base_url"):
        provider_named("compatible")
    with pytest.raises(ConfigError, match="http"):
        K3("local", "a", base_url="127.0.0.1:80")
    with pytest.raises(ConfigError, match="unknown effort"):
        K3("local", "a", effort="medium")  # type: ignore[arg-type]
