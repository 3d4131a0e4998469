"""Every Python snippet of the README runs as it stands, in its own process, against the local backend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "README.md"
SECTION = re.compile(r"^### ([^\n]+)\n(?:(?!^### ).)*?```python\n(.*?)```", re.MULTILINE | re.DOTALL)
SNIPPETS = dict(SECTION.findall(PAGE.read_text("utf-8")))
ADDRESS = "http://127.0.0.1:8000/v1"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-m", "k3eval_local.server", "--model", "a", "--port", "0", "--threads", "1"]
    command += ["--parent-pid", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["base_url"])
        process.terminate()


def test_there_are_five_and_all_are_found() -> None:
    assert len(SNIPPETS) == PAGE.read_text("utf-8").count("```python") == 5


@pytest.mark.parametrize("title", SNIPPETS)
def test_snippet(title: str, address: str, tmp_path: Path) -> None:
    code = SNIPPETS[title]
    assert ADDRESS in code
    script = tmp_path / "snippet.py"
    script.write_text(code.replace(ADDRESS, address), "utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "budget" in title.lower():
        assert "spent or held" in done.stdout
        k3eval = str(Path(sys.executable).with_name("k3eval"))
        listed = subprocess.run(
            [k3eval, "usage", "ledger.sqlite", "--json"],
            cwd=tmp_path, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        assert json.loads(listed.stdout)["calls"] > 0
