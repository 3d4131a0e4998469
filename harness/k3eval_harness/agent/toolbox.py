"""Carries out the k3 agent's tool calls in a sandbox. A call never raises for what the model did wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3eval_harness.agent import files, observations
from k3eval_harness.agent.protocol import AgentContext
from k3eval_harness.agent.tools import (
    BashArguments,
    EditArguments,
    ReadArguments,
    ToolArguments,
    ToolCallError,
    parse_arguments,
)

if TYPE_CHECKING:
    from k3eval import ToolCall
    from k3eval_harness.sandbox.protocol import Shell

_KILLED = 137


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What one call gave."""

    observation: str
    error: bool = False
    """The call named no tool or its arguments did not fit."""
    submitted: bool = False


class Toolbox:
    """The tools of one trial, with the agent's shell and one for file access."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._sandbox = context.sandbox
        self._bash: Shell = self._sandbox.open_shell()
        self._files: Shell = self._sandbox.open_shell()
        self._cwd = self._sandbox.workdir
        self._oom_kills = 0

    def close(self) -> None:
        """End both shells."""
        self._bash.close()
        self._files.close()

    def call(self, call: ToolCall) -> ToolOutcome:
        """Carry out one call. Raises SandboxError when the sandbox fails."""
        try:
            arguments = parse_arguments(call.name, call.arguments)
        except ToolCallError as error:
            return ToolOutcome(observations.error_observation(str(error)), error=True)
        try:
            return self._dispatch(arguments)
        except files.FileProblem as problem:
            return ToolOutcome(observations.error_observation(str(problem)))

    def _dispatch(self, arguments: ToolArguments) -> ToolOutcome:
        if isinstance(arguments, BashArguments):
            return ToolOutcome(self._run(arguments))
        if isinstance(arguments, ReadArguments):
            return ToolOutcome(self._read(arguments))
        if isinstance(arguments, EditArguments):
            return ToolOutcome(self._edit(arguments))
        return ToolOutcome(observations.submit_observation(), submitted=True)

    def _run(self, arguments: BashArguments) -> str:
        limit = min(float(arguments.timeout_sec), max(self._context.seconds_left(), 0.1))
        result = self._bash.run(
            arguments.command, timeout_s=limit, output_limit=self._context.limits.command_output_bytes
        )
        self._cwd = result.cwd or self._cwd
        note = None
        if result.flooded:
            note = "killed because it printed without end; the shell was restarted"
        elif not result.timed_out and result.shell_restarted:
            note = "the command ended the shell; a new one was started"
        if (result.exit_code == _KILLED or result.shell_restarted) and self._memory_ran_out():
            note = "the memory limit killed a process" + (f"; {note}" if note else "")
        return observations.bash_observation(
            result.text,
            result.exit_code,
            result.timed_out,
            result.truncated_bytes,
            timeout_s=arguments.timeout_sec,
            note=note,
        )

    def _memory_ran_out(self) -> bool:
        before, self._oom_kills = self._oom_kills, self._sandbox.oom_kills()
        return self._oom_kills > before

    def _read(self, arguments: ReadArguments) -> str:
        path = files.absolute(arguments.path, self._cwd)
        text = files.read_bytes(self._files, path).decode("utf-8", errors="replace")
        lines = text.splitlines()
        first = arguments.start - 1
        return observations.read_observation(
            arguments.path, lines[first : first + arguments.lines], arguments.start, len(lines)
        )

    def _edit(self, arguments: EditArguments) -> str:
        path = files.absolute(arguments.path, self._cwd)
        if not arguments.old_str:
            if files.exists(self._files, path):
                return observations.error_observation(
                    f"{arguments.path} exists; give the text to replace as old_str"
                )
            files.write_bytes(self._files, path, arguments.new_str.encode("utf-8", "surrogatepass"))
            return observations.edit_observation(arguments.path, created=True)
        content = files.read_bytes(self._files, path)
        old = arguments.old_str.encode("utf-8", "surrogatepass")
        count = content.count(old)
        if count != 1:
            return observations.edit_refused(arguments.path, count)
        at = content.index(old)
        new = content[:at] + arguments.new_str.encode("utf-8", "surrogatepass") + content[at + len(old) :]
        files.write_bytes(self._files, path, new)
        return observations.edit_observation(
            arguments.path, created=False, line=content.count(b"\n", 0, at) + 1
        )
