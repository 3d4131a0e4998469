"""Tiny tasks for the harness's own tests: no image of their own, a shell script as hidden test."""

from __future__ import annotations

from pathlib import Path

from k3eval_harness.sandbox.base_image import BASE_REF

TOML = f"""\
schema_version = "1.4"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 60.0
[environment]
docker_image = "{BASE_REF}"
workdir = "/app"
memory_mb = 256
cpus = 1
"""

TEST = """\
#!/bin/sh
if [ "$(cat hello.txt 2>/dev/null)" = hello ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
cat > /logs/verifier/junit.xml <<XML
<testsuites><testsuite><testcase classname="t" name="hello">$([ $reward = 1 ] || echo '<failure/>')</testcase>
<testcase classname="t" name="other"/></testsuite></testsuites>
XML
"""

SOLVE = "#!/bin/sh\necho hello > hello.txt\n"


def write_task(
    folder: Path,
    name: str = "hello",
    *,
    toml: str = TOML,
    test: str | None = TEST,
    solve: str | None = SOLVE,
    instruction: str = "Write hello into /app/hello.txt.\n",
    dockerfile: str | None = None,
) -> Path:
    """A task folder ``folder/name``; returns its path."""
    path = folder / name
    files = {
        "task.toml": toml,
        "instruction.md": instruction,
        "tests/test.sh": test,
        "solution/solve.sh": solve,
        "environment/Dockerfile": dockerfile,
    }
    for relative, text in files.items():
        if text is not None:
            file = path / relative
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return path
