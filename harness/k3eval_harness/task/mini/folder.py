"""Generated projects as task folders in Harbor's format, all on one image.

The project's files lie in ``repo/`` and are laid into /app when a sandbox starts (``inject``), so the image
holds nothing of the task and is built once. A reader without that key can copy ``repo/`` to /app itself.
"""

import errno
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from k3eval_harness.errors import UsageError
from k3eval_harness.task.mini.opening import instruction
from k3eval_harness.task.mini.project import MiniProject, Shape, make_project

FAMILY = "repo-fix-mini"

DOCKERFILE = """\
FROM python:3.11-slim-bookworm
RUN pip install --no-cache-dir --no-deps \\
    pytest==9.2.0 \\
    iniconfig==2.3.1 \\
    packaging==26.4 \\
    pluggy==1.7.0 \\
    pygments==2.21.0
RUN useradd --uid 1000 --create-home agent && mkdir /app && chown agent /app
ENV PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER agent
"""

TEST_SH = """\
#!/bin/bash
# Reward 1 when every hidden test passes. The project is imported from /app; nothing of its own tests,
# start-up modules or pytest settings is used. The tests run as `agent`, who cannot write the reward; the
# verdict is root's, after everything that they started has ended.
set -u
out=/logs/verifier
scratch=/tmp/k3eval-scratch
drop="setpriv --reuid=agent --regid=agent --clear-groups"
mkdir -p "$out"
echo 0 > "$out/reward.txt"
install -d -o agent -g agent "$scratch"
unset PYTEST_ADDOPTS PYTEST_PLUGINS
cd /tests || exit 1
HOME=/home/agent timeout -k 5 120 $drop python -I -c '
import sys
import pytest
sys.path += ["/tests", "/app"]  # last, so that the project cannot stand in for pytest
sys.exit(pytest.main(["-q", "--tb=line", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=/tests",
                      "--confcutdir=/tests", "--junitxml=/tmp/k3eval-scratch/junit.xml", "/tests"]))' \\
    > /tmp/k3eval-log 2>&1
code=$?
$drop sh -c 'kill -9 -1; exit 7'
[ $? -eq 7 ] || exit 1 # no process can be started: reward 0 stands
tail -c 20000 /tmp/k3eval-log
[ -f "$scratch/junit.xml" ] && [ ! -L "$scratch/junit.xml" ] || exit 1
head -c 8000000 "$scratch/junit.xml" > "$out/junit.xml"
[ "$code" -eq 0 ] && python -I /tests/all_passed.py "$out/junit.xml" && echo 1 > "$out/reward.txt"
exit 0
"""

ALL_PASSED_PY = """\
# Exit 0 when the report names every hidden test as passed.
import ast
import pathlib
import sys
import xml.etree.ElementTree

wanted = {
    f"{path.stem}::{node.name}"
    for path in pathlib.Path(__file__).parent.glob("test_*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
}
cases = xml.etree.ElementTree.parse(sys.argv[1]).getroot().iter("testcase")
passed = {f"{case.get('classname')}::{case.get('name')}" for case in cases if len(case) == 0}
sys.exit(0 if wanted and wanted <= passed else 1)
"""

_SOLVE_SH = """\
#!/bin/bash
set -eu
cat > /tmp/fix.py <<'END'
import pathlib

path = pathlib.Path("/app") / {path!r}
text = path.read_text()
old, new = {old!r}, {new!r}
assert text.count(old) == 1
path.write_text(text.replace(old, new))
END
python /tmp/fix.py
"""

_TASK_TOML = """\
schema_version = "1.4"

[task]
name = "k3eval/{name}"
description = "A small Python project with one seeded bug"

[agent]
timeout_sec = 600.0
user = "agent"

[verifier]
timeout_sec = 180.0
user = "root"

[environment]
cpus = 1
memory_mb = 512
network_mode = "no-network"
workdir = "/app"

[metadata.k3eval]
family = "repo-fix-mini"
kind = "{kind}"
inject = "repo"
provenance = "generated: {shape}series {seed}, project {index}"
"""


def task_name(project: MiniProject, label: str = "") -> str:
    """``mini-SEED-INDEX``, or ``mini-LABEL-SEED-INDEX`` for projects that are not of the usual shape."""
    return "-".join(("mini", *filter(None, (label,)), str(project.seed), f"{project.index:05d}"))


def how_to_make(name: str) -> str | None:
    """The command that makes the task called ``mini-SEED-INDEX``, with or without ``k3eval/``; else None."""
    match = re.fullmatch(r"(?:k3eval/|repo-fix-mini/)?(mini-(0|[1-9]\d{0,17})-(\d{5,9}))", name)
    if match is None:
        return None
    command = f"k3eval tasks generate --seed {int(match[2])} --n {int(match[3]) + 1} --out DIR"
    return f"`{command}` makes DIR/{match[1]}"


def task_files(project: MiniProject, label: str = "") -> dict[str, str]:
    """Relative path to text of every file of the task folder."""
    fix = project.fix
    solve = _SOLVE_SH.format(path=fix.path, old=fix.old, new=fix.new)
    name = task_name(project, label)
    toml = _TASK_TOML.format(
        name=name,
        kind=project.kind,
        seed=project.seed,
        index=project.index,
        shape=f"shape {label}, " if label else "",
    )
    made = {
        "task.toml": toml,
        "instruction.md": instruction(project),
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": TEST_SH,
        "tests/all_passed.py": ALL_PASSED_PY,
        "solution/solve.sh": solve,
    }
    made |= {f"tests/{path}": text for path, text in project.hidden_test().items()}
    made |= {f"repo/{path}": text for path, text in project.files().items()}
    return made


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write the texts; shell scripts become executable."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)


_PLACE_TRIES = 10


def place(folder: Path, files: Mapping[str, str]) -> None:
    """Have ``folder`` hold exactly the texts: it appears whole, and one that has them already stays.

    So several runs may make the same tasks at once. A folder with other content is moved away whole first.
    """
    if _holds(folder, files):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        made = Path(scratch) / "new"
        write_files(made, files)
        for number in range(_PLACE_TRIES):
            try:
                made.rename(folder)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or number == _PLACE_TRIES - 1:
                    raise
            if _holds(folder, files):  # another run was quicker
                return
            with suppress(FileNotFoundError):
                folder.rename(Path(scratch) / f"old-{number}")


def _holds(folder: Path, files: Mapping[str, str]) -> bool:
    """Whether the folder has these files, shell scripts executable, and no other."""
    try:
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
        return found.keys() == files.keys() and all(
            path.is_file()
            and path.read_bytes() == files[name].encode()
            and (path.suffix != ".sh" or path.stat().st_mode & 0o777 == 0o755)
            for name, path in found.items()
        )
    except FileNotFoundError:  # it is being moved away
        return False


def generate(
    count: int,
    seed: int,
    out: Path,
    *,
    shape: Shape | None = None,
    label: str = "",
    progress: Callable[[int], None] | None = None,
) -> tuple[Path, ...]:
    """Write tasks 0 .. ``count`` - 1 of the series ``seed`` below ``out`` and return their folders.

    ``label`` names a ``shape`` other than the usual one in the tasks' names.
    Equal arguments write equal bytes. No two tasks of a series have the same files. A folder of the same
    name is replaced as a whole, or left as it is where it holds the same files.

    Raises:
        UsageError: ``count`` is below 1, or ``out`` is a file.
    """
    if count < 1:
        raise UsageError(f"cannot generate {count} tasks; give at least 1")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; give a folder")
    folders: list[Path] = []
    seen: set[tuple[tuple[str, str], ...]] = set()
    for index in range(count):
        project = make_project(seed, index, shape)
        content = tuple(project.files().items())
        if content in seen:
            raise AssertionError(f"projects of series {seed} repeat at {index}")
        seen.add(content)
        folder = out / task_name(project, label)
        place(folder, task_files(project, label))
        folders.append(folder)
        if progress is not None:
            progress(index + 1)
    return tuple(folders)
