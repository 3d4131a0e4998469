"""Proof that a generated project is a fair task, by running pytest on its files as a user would.

The visible tests fail before and pass after the oracle's edit; the hidden tests fail before and after every
near miss and pass after the oracle's edit.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from k3eval_harness.task.mini.folder import write_files
from k3eval_harness.task.mini.project import Edit, MiniProject

_SECONDS = 120


@dataclass(frozen=True)
class Proof:
    """Which runs passed. ``near_misses`` are hidden test runs, one for each wrong edit."""

    visible_before: bool
    visible_after: bool
    hidden_before: bool
    hidden_after: bool
    near_misses: tuple[bool, ...]

    @property
    def sound(self) -> bool:
        """Whether the project is a fair task."""
        wrong = (self.visible_before, self.hidden_before, *self.near_misses)
        return self.visible_after and self.hidden_after and not any(wrong)


def prove(project: MiniProject) -> Proof:
    """Run the tests in temporary folders; about a second for each of the runs."""
    fix = project.fix
    return Proof(
        visible_before=_passes(project, None, hidden=False),
        visible_after=_passes(project, fix, hidden=False),
        hidden_before=_passes(project, None, hidden=True),
        hidden_after=_passes(project, fix, hidden=True),
        near_misses=tuple(_passes(project, edit, hidden=True) for edit in project.near_misses),
    )


def _passes(project: MiniProject, edit: Edit | None, *, hidden: bool) -> bool:
    with tempfile.TemporaryDirectory(prefix="k3eval-mini-") as name:
        folder = Path(name)
        files = project.files(edit)
        if hidden:
            files |= {f"hidden/{path}": text for path, text in project.hidden_test().items()}
        write_files(folder, files)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
        done = subprocess.run(
            [*command, f"--rootdir={folder}", "hidden" if hidden else "tests"],
            cwd=folder,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
        return done.returncode == 0
