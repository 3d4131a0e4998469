"""The tools of the k3 agent, as data: what the model is told, and how its arguments are checked.

Descriptions and schemas are literals, not generated: they are part of the byte-stable prompt prefix
and of the training text of the bundled checkpoint, so a library update must not change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from k3eval import ToolSpec
    from k3eval.jsontypes import JsonValue

JsonSchema = Mapping[str, "JsonValue"]

DEFAULT_COMMAND_SECONDS: Final = 120
MAX_COMMAND_SECONDS: Final = 1800
DEFAULT_READ_LINES: Final = 400


@dataclass(frozen=True, slots=True)
class AgentTool:
    """One tool: name, description and JSON schema of its arguments."""

    name: str
    description: str
    parameters: JsonSchema

    def spec(self) -> ToolSpec:
        """The same as the SDK's type."""
        from k3eval import ToolSpec

        return ToolSpec(name=self.name, description=self.description, parameters=self.parameters)


BASH: Final = AgentTool(
    name="bash",
    description=(
        "Run a command in a persistent bash shell. The working directory, variables and background jobs "
        "stay from call to call. Output is stdout and stderr together; long output is cut in the middle."
    ),
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command to run."},
            "timeout_sec": {
                "type": "integer",
                "description": "Seconds after which the command is killed. Default 120.",
            },
        },
        "required": ["command"],
        "additionalProperties": False,
    },
)

READ: Final = AgentTool(
    name="read",
    description="Read lines of a text file, with line numbers.",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Path of the file."},
            "start": {"type": "integer", "description": "First line, counted from 1. Default 1."},
            "lines": {"type": "integer", "description": "How many lines. Default 400."},
        },
        "required": ["path"],
        "additionalProperties": False,
    },
)

EDIT: Final = AgentTool(
    name="edit",
    description=(
        "Replace text in a file. old_str must occur exactly once in it. "
        "With an empty old_str a new file with the text new_str is made."
    ),
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Path of the file."},
            "old_str": {"type": "string", "description": "The text to replace."},
            "new_str": {"type": "string", "description": "The text to put in its place."},
        },
        "required": ["path", "old_str", "new_str"],
        "additionalProperties": False,
    },
)

SUBMIT: Final = AgentTool(
    name="submit",
    description="Hand in the work. Call this once, when the task is done.",
    parameters={
        "type": "object",
        "properties": {"summary": {"type": "string", "description": "What was changed, in one line."}},
        "additionalProperties": False,
    },
)

TOOLS: Final = (BASH, READ, EDIT, SUBMIT)


class _Arguments(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class BashArguments(_Arguments):
    """Arguments of ``bash``."""

    command: str
    timeout_sec: int = Field(default=DEFAULT_COMMAND_SECONDS, ge=1, le=MAX_COMMAND_SECONDS)


class ReadArguments(_Arguments):
    """Arguments of ``read``."""

    path: str = Field(min_length=1)
    start: int = Field(default=1, ge=1)
    lines: int = Field(default=DEFAULT_READ_LINES, ge=1)


class EditArguments(_Arguments):
    """Arguments of ``edit``."""

    path: str = Field(min_length=1)
    old_str: str
    new_str: str


class SubmitArguments(_Arguments):
    """Arguments of ``submit``."""

    summary: str = ""


ToolArguments = BashArguments | ReadArguments | EditArguments | SubmitArguments

_MODELS: Final[Mapping[str, type[ToolArguments]]] = {
    "bash": BashArguments,
    "read": ReadArguments,
    "edit": EditArguments,
    "submit": SubmitArguments,
}


class ToolCallError(ValueError):
    """A call that names no tool or whose arguments do not fit. The text goes back to the model."""


def parse_arguments(name: str, arguments: str) -> ToolArguments:
    """Check the raw JSON ``arguments`` of a call to the tool ``name``.

    Raises ToolCallError with a text that tells the model what to change.
    """
    model = _MODELS.get(name)
    if model is None:
        raise ToolCallError(f"there is no tool named {name!r}; the tools are {', '.join(_MODELS)}")
    try:
        return model.model_validate_json(arguments or "{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = first["msg"] if not where else f"{where}: {first['msg']}"
        raise ToolCallError(f"the arguments of {name} are wrong: {reason}") from error
