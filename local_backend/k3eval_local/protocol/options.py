"""The option messages' bodies, in this project's own words.

Kimi K3 was trained with fixed English instructions that are not reproduced here (they are under the Kimi
K3 licence). The scaled models have no such habit, so any stable wording serves; it must stay byte-stable,
because it stands at the head of every prompt and so of every cached prefix.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from k3eval_local.protocol.messages import JsonObject, ResponseFormat, ToolChoice, ToolDef

EFFORTS = ("low", "high", "max")
"""Reasoning efforts that K3 accepts; the default is ``max``."""

_EFFORT: Mapping[str, str] = {
    "low": "Think briefly: only what the answer needs.",
    "high": "Think carefully and check the main steps before answering.",
    "max": "Think as long as it helps: explore, verify and correct before answering.",
}


def effort_body(effort: str) -> str:
    """Body of the ``thinking-effort`` message."""
    return _EFFORT[effort]


def tools_body(tools: Iterable[ToolDef], *, dynamic: bool) -> str:
    """Body of a ``tool-declare`` message: one line of words, then the tools as compact JSON."""
    head = "From here on these tools exist as well." if dynamic else "These tools exist."
    specs: list[JsonObject] = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools
    ]
    return f"{head}\n{compact(specs)}"


def tool_choice_body(choice: ToolChoice) -> str | None:
    """Body of the ``tool-choice`` message; ``auto`` has none."""
    match choice.mode:
        case "none":
            return "Answer without calling any tool."
        case "required":
            return "Call at least one tool now."
        case "named":
            return f"Call the tool {choice.name} now."
        case "auto":
            return None


def response_format_body(form: ResponseFormat) -> str | None:
    """Body of the ``response-format`` message; plain text has none."""
    match form.kind:
        case "json_object":
            return "Answer with one JSON object on one line and nothing else."
        case "json_schema":
            head = "Answer with JSON on one line that satisfies this schema, and nothing else."
            return f"{head}\n{compact(form.schema)}"
        case "text":
            return None


def compact(value: object) -> str:
    """JSON without spaces and with sorted keys, as tool specs and schemas are rendered (spec 4.1)."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
