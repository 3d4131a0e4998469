"""The load benchmark, briefly: many sessions, faults, clients that leave; nothing lost, mixed or leaked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_sessions_with_faults_lose_and_mix_and_leak_nothing(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "server.py"
    options = ("--load", "5", "--sessions", "24", "--requests", "24", "--out", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(script), *options],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'local_backend'}"},
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "server-load.json").read_text())["rows"]
    figures = {row["case"]: row["value"] for row in rows if row["section"].startswith("24 sessions")}
    assert figures["streams without a fault"] > 0
    assert figures["replies with a fault"] > 0
    assert figures["streams lost, or not what the request says alone"] == 0
