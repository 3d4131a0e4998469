"""Remarks about a task that reads well but may not measure well. Pure: reads files, runs nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from k3eval_harness.task.dockerfile import base_references, stage_names
from k3eval_harness.task.load import Finding, Task

_NETWORK: Final = re.compile(
    r"\b(apt(?:-get)?\s+(?:update|install)|pip3?\s+(?:install|download)|uv\s+(?:pip|add|sync|tool)"
    r"|uvx\b|npm\s+(?:i|install|ci)|curl\s|wget\s|git\s+(?:clone|fetch|pull)|cargo\s+install|go\s+get)"
)
_OFFLINE_PIP: Final = re.compile(r"--no-index|--no-deps\s+(?:-e\s+)?[./]|--no-build-isolation")


def lint_task(task: Task) -> tuple[Finding, ...]:
    """All remarks, errors first. An empty tuple says that nothing was found."""
    order = {"error": 0, "warning": 1, "info": 2}
    found = [
        *task.findings,
        *_unsupported(task),
        *_environment(task),
        *_tests(task),
        *_solution(task),
        *_limits(task),
    ]
    return tuple(sorted(found, key=lambda item: order[item.level]))


def unsupported(task: Task) -> str | None:
    """Why this task cannot be run here at all, in one line; None when it can."""
    return next((f"{finding.where}: {finding.message}" for finding in _unsupported(task)), None)


def _unsupported(task: Task) -> Iterator[Finding]:
    environment = task.config.environment
    if task.config.steps:
        yield Finding("error", "task.toml: steps", "multi-step tasks are not supported")
    if environment.os == "windows":
        yield Finding("error", "task.toml: environment.os", "Windows containers are not supported")
    if environment.gpus or environment.tpu:
        yield Finding("error", "task.toml: environment.gpus", "accelerators in the sandbox are not supported")
    if environment.mcp_servers:
        yield Finding(
            "error", "task.toml: environment.mcp_servers", "the sandbox has no network for MCP servers"
        )
    compose = [path.name for path in task.environment_dir.glob("docker-compose.y*ml")]
    if compose:
        yield Finding("error", f"environment/{compose[0]}", "compose environments are not supported")
    verifier = task.config.verifier
    if verifier.environment is not None or (task.tests_dir / "Dockerfile").is_file():
        yield Finding(
            "error", "task.toml: verifier.environment", "a verifier image of its own is not supported"
        )
    if not environment.docker_image and not task.dockerfile.is_file():
        yield Finding(
            "error", "environment/Dockerfile", "missing; add one or set docker_image in [environment]"
        )
    if not (task.tests_dir / "test.sh").is_file():
        yield Finding("error", "tests/test.sh", "missing; it runs the hidden tests and writes the reward")


def _environment(task: Task) -> Iterator[Finding]:
    environment = task.config.environment
    if environment.network_mode in ("public", "allowlist"):
        yield Finding(
            "warning",
            "task.toml: environment.network_mode",
            "sandboxes have no network; a task that needs one cannot be solved here",
        )
    if environment.skills_dir is not None:
        yield Finding("warning", "task.toml: environment.skills_dir", "not used: agents get no skills here")
    if environment.docker_image and ("@sha256:" not in environment.docker_image):
        yield Finding("warning", "task.toml: environment.docker_image", "not pinned by digest")
    if not task.dockerfile.is_file():
        return
    text = task.dockerfile.read_text(encoding="utf-8", errors="replace")
    for reference in base_references(text):
        if "@sha256:" not in reference and (
            ":" not in reference.rpartition("/")[2] or reference.endswith(":latest")
        ):
            yield Finding("warning", "environment/Dockerfile", f"base image {reference} has no fixed version")
    stage = task.extras.oracle_stage
    if stage and stage not in stage_names(text):
        yield Finding("error", "environment/Dockerfile", f"there is no stage named {stage} (oracle_stage)")


def _tests(task: Task) -> Iterator[Finding]:
    if (task.path / ".harborignore").exists():
        yield Finding("warning", ".harborignore", "not used: all of tests/ and solution/ is uploaded")
    for path in sorted(task.tests_dir.rglob("*.sh")) if task.tests_dir.is_dir() else ():
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1
        ):
            code = line.split("#", 1)[0]
            match = _NETWORK.search(code)
            if match and not _OFFLINE_PIP.search(code):
                where = f"{path.relative_to(task.path).as_posix()}:{number}"
                yield Finding(
                    "warning",
                    where,
                    f"`{match[0].strip()}` needs a network at grade time; put it into the image",
                )
    test = task.tests_dir / "test.sh"
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(task.tests_dir.rglob("*"))
        if path.is_file()
    ]
    named = any(name in text for text in texts for name in ("reward.txt", "reward.json"))
    if test.is_file() and not named:
        yield Finding(
            "warning", "tests/test.sh", "nothing in tests/ writes /logs/verifier/reward.txt or .json"
        )


def _solution(task: Task) -> Iterator[Finding]:
    solve = task.solution_dir / "solve.sh"
    if not solve.is_file():
        yield Finding(
            "warning", "solution/solve.sh", "missing; without it nobody can show that the task is solvable"
        )
    elif not os.access(solve, os.R_OK):
        yield Finding("error", "solution/solve.sh", "cannot be read")


def _limits(task: Task) -> Iterator[Finding]:
    if task.config.agent.timeout_sec is None:
        yield Finding("warning", "task.toml: agent.timeout_sec", "no time limit for the agent")
    if "timeout_sec" not in task.config.verifier.model_fields_set:
        yield Finding("info", "task.toml: verifier.timeout_sec", "not set; 600 seconds are used")
    if task.config.agent.user in ("root", 0):
        yield Finding("warning", "task.toml: agent.user", "the agent runs as root")
