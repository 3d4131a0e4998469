"""Prompt templates of the k3 agent: the same task gives the same bytes on every run."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from typing import Final

from k3eval_harness.agent.tools import TOOLS

_TEMPLATES: Final = ("system.md.j2", "task.md.j2")


def render(template: str, **values: str) -> str:
    """Fill in one template; an undefined name is an error. No newline at the end."""
    from jinja2 import Environment, StrictUndefined

    # plain text for a model, never HTML
    environment = Environment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=False)  # noqa: S701
    return environment.from_string(_text(template)).render(**values).rstrip("\n")


def prompt_digest() -> str:
    """SHA-256 (hex) over the templates and the tools: results with different digests do not compare."""
    digest = hashlib.sha256()
    for template in _TEMPLATES:
        digest.update(_text(template).encode())
    tools = [[tool.name, tool.description, tool.parameters] for tool in TOOLS]
    digest.update(json.dumps(tools, sort_keys=True).encode())
    return digest.hexdigest()


def _text(template: str) -> str:
    return resources.files(__name__).joinpath(template).read_text(encoding="utf-8")
