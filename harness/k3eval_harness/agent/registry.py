"""From an agent's name on the command line to the agent."""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path
from typing import Final, cast

from k3eval_harness.agent.protocol import Agent
from k3eval_harness.errors import UsageError

BUILT_IN: Final = ("oracle", "nop", "k3")


def make_agent(name: str) -> Agent:
    """The agent called ``name``, or a new ``module:Class()``. Raises UsageError."""
    if name == "oracle":
        from k3eval_harness.agent.oracle import OracleAgent

        return OracleAgent()
    if name == "nop":
        from k3eval_harness.agent.nop import NopAgent

        return NopAgent()
    if name == "k3":
        from k3eval_harness.agent.k3 import K3Agent

        return K3Agent()
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"no agent named {name!r}: use {', '.join(BUILT_IN)} or module:Class{hint}")
    return _custom(name, module, attribute)


def _custom(name: str, module: str, attribute: str) -> Agent:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        made: object = getattr(importlib.import_module(module), attribute)()
    except (ImportError, SyntaxError) as error:
        raise UsageError(f"agent {name}: cannot import {module}: {error}") from error
    except AttributeError as error:
        raise UsageError(f"agent {name}: {module} has no {attribute}") from error
    except TypeError as error:
        raise UsageError(f"agent {name}: {attribute}() must work without arguments: {error}") from error
    missing = [
        part for part in ("name", "version", "prompt_sha256", "needs_model", "run") if not hasattr(made, part)
    ]
    if missing:
        raise UsageError(
            f"agent {name}: {attribute} has no {', '.join(missing)}; see k3eval_harness.agent.Agent"
        )
    return cast("Agent", made)
