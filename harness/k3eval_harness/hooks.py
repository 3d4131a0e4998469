"""Commands of a task around the agent: the health check before it, the collect hooks after it."""

from __future__ import annotations

import time
from collections.abc import Callable

from k3eval_harness.errors import SandboxError
from k3eval_harness.sandbox.protocol import Sandbox
from k3eval_harness.task import Task


def wait_healthy(task: Task, sandbox: Sandbox, check_cancelled: Callable[[], None]) -> None:
    """Run ``[environment.healthcheck]`` until it succeeds. Raises SandboxError after its retries.

    Failures during ``start_period_sec`` do not count, as in Docker's own health checks.
    """
    health = task.config.environment.healthcheck
    if health is None:
        return
    shell = sandbox.open_shell()
    start = time.monotonic()
    failures = 0
    try:
        while True:
            check_cancelled()
            result = shell.run(health.command, timeout_s=health.timeout_sec)
            if result.exit_code == 0:
                return
            starting = time.monotonic() - start < health.start_period_sec
            failures += not starting
            if failures >= health.retries:
                said = " ".join(result.text.split())[-200:]
                raise SandboxError(f"the task's health check failed {failures} times: {said}")
            time.sleep(health.start_interval_sec if starting else health.interval_sec)
    finally:
        shell.close()


def run_collect_hooks(task: Task, sandbox: Sandbox, log: Callable[[str], None]) -> None:
    """Run ``[[verifier.collect]]`` in the agent's container; a failing one is logged, as in Harbor."""
    for hook in task.config.verifier.collect:
        shell = sandbox.open_shell(user=None if hook.user is None else str(hook.user))
        try:
            result = shell.run(hook.command, timeout_s=hook.timeout_sec)
        finally:
            shell.close()
        if result.exit_code != 0:
            log(
                f"collect hook {hook.command!r} ended with exit code {result.exit_code}: {result.text[-500:]}"
            )
