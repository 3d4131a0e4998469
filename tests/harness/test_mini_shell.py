"""Computed command output equals that of a real shell and pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3eval_harness.task.mini import NoiseShape, Shape, make_project
from k3eval_harness.task.mini.folder import write_files
from k3eval_harness.task.mini.shell import (
    TEST_COMMAND,
    Printed,
    locate,
    locate_command,
    run_tests,
)


def _really(command: str, folder: Path) -> Printed:
    path = f"{Path(sys.executable).parent}:{os.defpath}"
    env = {"PATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, timeout=120, text=True, check=False
    )
    return Printed(done.stdout + done.stderr, done.returncode)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(6))
def test_the_texts_are_those_of_a_real_shell(tmp_path: Path, index: int) -> None:
    shape = Shape(noise=NoiseShape(share=0.5), invented=0.3)
    project = make_project(7, index, shape)
    edits = [None, project.fix, *project.near_misses[:1]]
    for number, edit in enumerate(edits):
        folder = tmp_path / str(number)
        write_files(folder, project.files(edit))
        assert _really(TEST_COMMAND, folder) == run_tests(project, edit)
        command = locate_command(project.broken.name)
        assert _really(command, folder) == locate(project, edit)
