"""What an agent may leave in a work tree cannot turn an unsolved bundled task into a passed one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3eval_harness.agent.protocol import AgentContext, AgentResult
from k3eval_harness.engine.events import SilentObserver
from k3eval_harness.job import JobConfig, run_job
from k3eval_harness.results import load_job
from k3eval_harness.results.schema import Outcome
from k3eval_harness.task import find_tasks

pytestmark = [pytest.mark.docker, pytest.mark.slow]

TASKS = ("mini-7-00000", "tomlkit-emptied-aot")
PACKAGE = (
    "cd /app && p=$(ls -d */__init__.py | grep -v tests | head -1) && cat /tmp/x $p > /tmp/y && cp /tmp/y $p"
)
WRITE_AND_LEAVE = """\
import os, sys
for path in ("/logs/verifier/reward.txt", "/tests/grade.py", "/tests/all_passed.py"):
    try:
        open(path, "w").write("open('/logs/verifier/reward.txt', 'w').write('1')" if "py" in path else "1")
    except OSError:
        pass
if "pytest" in sys.modules:
    os._exit(0)
"""
LOOP = (
    "while :; do echo 1 > /logs/verifier/reward.txt; rm -f /tmp/k3eval-scratch/*; "
    "ln -s /etc/passwd /tmp/k3eval-scratch/junit.xml; done 2>/dev/null"
)
ATTACKS = {
    "start-up modules, settings and a false pytest": f"""cd /app; cat > /tmp/x <<'END'
{WRITE_AND_LEAVE}END
for f in sitecustomize usercustomize conftest pytest _pytest pluggy json ast; do cp /tmp/x $f.py; done
mkdir -p tests; cp /tmp/x tests/conftest.py; printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini""",
    "a package that ends the run": f"cat > /tmp/x <<'END'\n{WRITE_AND_LEAVE}END\n{PACKAGE}",
    "a package that leaves a process": f"""cat > /tmp/x <<'END'
import subprocess
subprocess.Popen(["sh", "-c", {LOOP!r}], start_new_session=True)
END
{PACKAGE}""",
    "links": "cd /app; ln -s /tests t; ln -s /logs/verifier/reward.txt r; rm -rf tests; ln -s /tests tests; "
    "cp /bin/sh su; chmod 6755 su; mkfifo pipe; true",
    "nothing left": "rm -rf /app/* /app/.[a-z]*",
    "a flood": "echo 'import os; [os.write(1, b\"x\" * 1000000) for _ in range(100)]' > /tmp/x; " + PACKAGE,
}


class Attacker:
    """An agent that runs one script."""

    name = "attacker"
    version = "1"
    prompt_sha256: str | None = None
    needs_model = False
    script = ""

    def run(self, context: AgentContext) -> AgentResult:
        shell = context.sandbox.open_shell()
        try:
            assert shell.run(self.script, timeout_s=30).exit_code == 0
        finally:
            shell.close()
        return AgentResult(stop_reason="finished")


@pytest.fixture
def script() -> Iterator[None]:
    yield
    Attacker.script = ""


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails(attack: str, tmp_path: Path, script: None) -> None:
    Attacker.script = ATTACKS[attack]
    tasks = tuple(task for name in TASKS for task in find_tasks(name))
    config = JobConfig(tasks, f"{__name__}:Attacker", None, out=tmp_path)
    summary = run_job(config, SilentObserver(), threading.Event())
    trials = load_job(Path(summary.results_dir)).trials
    assert [(trial.outcome, trial.detail) for trial in trials] == [
        (Outcome.FAILED, "reward 0 below 1")
    ] * len(TASKS)
