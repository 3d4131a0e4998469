"""The agent that does nothing: a task whose tests pass without any work measures nothing."""

from __future__ import annotations

from k3eval_harness.agent.protocol import AgentContext, AgentResult


class NopAgent:
    """See ``Agent``."""

    name = "nop"
    version = "1"
    prompt_sha256: str | None = None
    needs_model = False

    def run(self, context: AgentContext) -> AgentResult:
        """Leave the work tree as it is."""
        context.check_cancelled()
        return AgentResult(stop_reason="finished")
