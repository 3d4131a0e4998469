"""Tool schemas, argument checks, observation texts and prompts: stable bytes that a model is trained on."""

from __future__ import annotations

import json

import pytest

from k3eval_harness.agent import make_agent
from k3eval_harness.agent.observations import (
    bash_observation,
    edit_observation,
    edit_refused,
    error_observation,
    read_observation,
)
from k3eval_harness.agent.prompts import prompt_digest, render
from k3eval_harness.agent.tools import (
    TOOLS,
    BashArguments,
    EditArguments,
    ReadArguments,
    SubmitArguments,
    ToolArguments,
    ToolCallError,
    parse_arguments,
)
from k3eval_harness.errors import UsageError


@pytest.mark.parametrize(
    ("name", "model"),
    [("bash", BashArguments), ("read", ReadArguments), ("edit", EditArguments), ("submit", SubmitArguments)],
)
def test_the_told_schema_is_the_checked_one(name: str, model: type[ToolArguments]) -> None:
    tool = next(tool for tool in TOOLS if tool.name == name)
    properties = tool.parameters["properties"]
    assert isinstance(properties, dict)
    checked = model.model_json_schema()
    assert properties.keys() == checked["properties"].keys()
    assert tool.parameters.get("required", []) == checked.get("required", [])
    for key, told in properties.items():
        assert told["type"] == checked["properties"][key]["type"]
    assert tool.spec().name == name


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("bash", '{"command": "ls"}', BashArguments(command="ls")),
        ("bash", '{"command": "ls", "timeout_sec": 5}', BashArguments(command="ls", timeout_sec=5)),
        ("read", '{"path": "a", "start": 3}', ReadArguments(path="a", start=3)),
        ("submit", "", SubmitArguments()),
        ("submit", "{}", SubmitArguments()),
    ],
)
def test_good_arguments(name: str, arguments: str, expected: ToolArguments) -> None:
    assert parse_arguments(name, arguments) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("bash", "{}", "command: Field required"),
        ("bash", '{"command": 1}', "command: Input should be a valid string"),
        ("bash", '{"command": "ls", "cmd": 1}', "cmd: Extra inputs are not permitted"),
        ("bash", '{"command": "ls", "timeout_sec": 0}', "timeout_sec: "),
        ("bash", '{"command": "ls"', "Invalid JSON"),
        ("bash", "[1]", "the arguments of bash are wrong"),
        ("python", "{}", "no tool named 'python'; the tools are bash, read, edit, submit"),
    ],
)
def test_wrong_arguments_say_what_to_change(name: str, arguments: str, words: str) -> None:
    with pytest.raises(ToolCallError) as caught:
        parse_arguments(name, arguments)
    assert words in str(caught.value)


def test_observation_texts() -> None:
    assert bash_observation("a\nb\n", 0) == "a\nb\n[exit code 0]"
    assert bash_observation("", 1) == "[exit code 1]"
    assert bash_observation("x", None, True, 5, timeout_s=2) == (
        "x\n[5 bytes of output left out]\n[killed after 2 seconds; the shell was restarted]"
    )
    assert bash_observation("x", None, note="n") == "x\n[n]\n[exit code unknown]"
    assert read_observation("f", ["a", "b"], 3, 9) == "3\ta\n4\tb\n[lines 3-4 of 9]"
    assert read_observation("f", [], 10, 9) == "[f has 9 lines; there is no line 10]"
    assert read_observation("f", [], 1, 0) == "[f is empty]"
    assert edit_observation("f", created=False, line=3) == "[edited f at line 3]"
    assert edit_refused("f", 0) == "[error: old_str does not occur in f; nothing was changed]"
    assert edit_refused("f", 2) == "[error: old_str occurs 2 times in f; add context so that it occurs once]"
    assert error_observation("no") == "[error: no]"


def test_prompts_are_the_same_bytes_every_time() -> None:
    first = render("system.md.j2", workdir="/app")
    assert first == render("system.md.j2", workdir="/app")
    assert "/app" in first
    assert render("task.md.j2", instruction="a {{ b }} <c>") == "a {{ b }} <c>"
    assert prompt_digest() == prompt_digest()
    json.dumps([tool.parameters for tool in TOOLS])


def test_agents_by_name() -> None:
    assert [make_agent(name).name for name in ("oracle", "nop", "k3")] == ["oracle", "nop", "k3"]
    assert make_agent("k3eval_harness.agent.nop:NopAgent").name == "nop"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("orakle", "did you mean oracle?"),
        ("no_such_module_xyz:A", "cannot import no_such_module_xyz"),
        ("k3eval_harness.agent.nop:Nope", "has no Nope"),
        ("k3eval_harness.agent.tools:AgentTool", "must work without arguments"),
        ("collections:OrderedDict", "has no name, version"),
    ],
)
def test_unknown_and_unfit_agents(name: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_agent(name)
    assert words in caught.value.message
