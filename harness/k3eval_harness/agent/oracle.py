"""The agent that knows the answer: it runs the task's ``solution/solve.sh``.

Files of the task's oracle stage are laid beside it in /solution. They come from an image that no other agent
ever sees.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

from k3eval_harness.agent.protocol import AgentContext, AgentResult
from k3eval_harness.errors import TaskError
from k3eval_harness.results.layout import write_text
from k3eval_harness.task.env import resolve_env

_NO_LIMIT_SECONDS: Final = 24 * 3600.0
_OUTPUT_BYTES: Final = 1_000_000


class OracleAgent:
    """See ``Agent``."""

    name = "oracle"
    version = "1"
    prompt_sha256: str | None = None
    needs_model = False

    def run(self, context: AgentContext) -> AgentResult:
        """Apply the solution. A failing script is graded like any other work."""
        task, sandbox = context.task, context.sandbox
        if not (task.solution_dir / "solve.sh").is_file():
            raise TaskError(f"{task.solution_dir / 'solve.sh'}: missing; the oracle needs a solution")
        sandbox.upload(task.solution_dir, "/solution")
        if context.fetch_oracle_files is not None:
            with tempfile.TemporaryDirectory(prefix="k3eval-oracle-") as folder:
                context.fetch_oracle_files(Path(folder))
                for file in sorted(Path(folder).iterdir()):
                    sandbox.upload(file, f"/solution/{file.name}")
        context.check_cancelled()
        env = resolve_env(task.config.solution.env, os.environ, f"{task.path / 'task.toml'}: solution.env")
        shell = sandbox.open_shell(env=env)
        try:
            result = shell.run(
                "/solution/solve.sh",
                timeout_s=min(context.seconds_left(), _NO_LIMIT_SECONDS),
                output_limit=_OUTPUT_BYTES,
            )
        finally:
            shell.close()
        context.check_cancelled()
        write_text(context.log_dir / "oracle.txt", result.text)
        if result.timed_out:
            return AgentResult(stop_reason="time_limit", detail="solve.sh ran out of time")
        if result.exit_code != 0:
            write_text(context.log_dir / "exit-code.txt", f"{result.exit_code}\n")
            return AgentResult(
                stop_reason="finished", detail=f"solve.sh ended with exit code {result.exit_code}"
            )
        return AgentResult(stop_reason="finished")
