"""What an import loads. Counted in modules, not in seconds, so that it holds on any machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import k3eval

HEAVY = (
    "httpx",
    "openai",
    "tenacity",
    "tiktoken",
    "pydantic",
    "sqlite3",
    "asyncio",
    "docker",
    "pandas",
    "torch",
    "rich",
)


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(out.stdout))


def test_import_is_light() -> None:
    bare, ours = loaded_by("pass"), loaded_by("import k3eval")
    assert not set(HEAVY) & ours
    assert len(ours - bare) <= 5


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("from k3eval import Message, ModelRef, Usage, Cost, ToolCall", HEAVY),
        ("from k3eval.errors import ApiError", HEAVY),
        ("from k3eval import ToolSpec, tool", HEAVY),
        (
            "from k3eval import K3",
            ("httpx", "openai", "tenacity", "tiktoken", "pydantic", "docker", "pandas", "torch"),
        ),
        ("from k3eval import Meter, Budget, Ledger", ("httpx", "openai", "tenacity", "tiktoken", "pydantic")),
        (
            "from k3eval import K3; K3('local', 'a')",
            ("openai", "tiktoken", "pydantic", "docker", "pandas", "torch"),
        ),
    ],
)
def test_names_load_what_they_need_and_no_more(code: str, absent: tuple[str, ...]) -> None:
    assert not set(absent) & loaded_by(code)


@pytest.mark.parametrize("name", k3eval.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(k3eval, name) is not None
    assert name in dir(k3eval)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        k3eval.nothing  # type: ignore[attr-defined]  # noqa: B018 - the access is the test


def test_the_error_tree_is_drawn_as_it_is() -> None:
    from k3eval import errors

    lines = (errors.__doc__ or "").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("K3EvalError"))
    stack: list[str] = []
    for line in lines[start:]:
        depth = (len(line) - len(line.lstrip())) // 2
        name, *rest = line.split()
        kind = getattr(errors, name)
        del stack[depth:]
        if stack:
            assert kind.__base__.__name__ == stack[-1]
            assert kind.cause == rest[0]
        stack.append(name)
    drawn = {line.split()[0] for line in lines[start:]}
    real = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.K3EvalError)}
    assert drawn == real
