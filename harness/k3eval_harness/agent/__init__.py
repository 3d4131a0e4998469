"""Agents: the k3 tool loop, oracle, nop, and others by ``module:Class``."""

from __future__ import annotations

from k3eval_harness.agent.protocol import Agent, AgentContext, AgentLimits, AgentListener, AgentResult
from k3eval_harness.agent.registry import BUILT_IN, make_agent

__all__ = ["BUILT_IN", "Agent", "AgentContext", "AgentLimits", "AgentListener", "AgentResult", "make_agent"]
