"""Agents: the k3 tool loop, oracle, nop."""
