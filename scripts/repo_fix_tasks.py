"""Render what the tasks under tasks/repo-fix share from each task's task.toml.

A task is written by hand as task.toml, instruction.md and tests/test_hidden.py; its Dockerfile and the
small files of grading and of the oracle come from scripts/repo_fix/, so that each folder is a complete
Harbor task. ``--check`` changes nothing and fails when a folder differs from what would be rendered.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path

import jinja2

ROOT = Path(__file__).resolve().parent.parent
REGRESSION = """\
# Run in a copy of the work tree; the package is imported from there.
export PYTHONPATH="$PYTHONPATH:{root}"
{command}
"""
TEMPLATES = Path(__file__).resolve().parent / "repo_fix"


def render(task: Path) -> dict[str, str]:
    """The rendered files of one task folder, by path inside it."""
    facts = tomllib.loads((task / "task.toml").read_text())["metadata"]["k3eval"]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - makes Dockerfiles, not HTML
        keep_trailing_newline=True,
    )
    expected = {kind: facts[kind] for kind in ("fail_to_pass", "pass_to_pass")}
    return {
        "environment/Dockerfile": environment.get_template("Dockerfile.j2").render(k=facts),
        "tests/test.sh": (TEMPLATES / "test.sh").read_text(),
        "tests/grade.py": (TEMPLATES / "grade.py").read_text(),
        "tests/regression.sh": REGRESSION.format(
            root=facts["import_root"].replace("/app", "$PWD", 1), command=facts["regression_command"]
        ),
        "tests/expected.json": json.dumps(expected, indent=1) + "\n",
        "solution/solve.sh": (TEMPLATES / "solve.sh").read_text(),
    }


def main() -> int:
    """Render or check every task folder. Exit 1 when --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("tasks", nargs="*", type=Path, help="task folders (default: all of tasks/repo-fix)")
    args = parser.parse_args()
    tasks = args.tasks or sorted(p.parent for p in (ROOT / "tasks" / "repo-fix").glob("*/task.toml"))
    stale = []
    for task in tasks:
        for name, text in render(task).items():
            path = task / name
            if path.exists() and path.read_text() == text:
                continue
            stale.append(path)
            if not args.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                if name.endswith(("test.sh", "solve.sh")):
                    path.chmod(0o755)
    for path in stale:
        sys.stdout.write(f"{'differs' if args.check else 'wrote'}: {path}\n")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
