"""The set-up scripts: what they say and do when something is missing, and that a second run does nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts and their inputs in a folder of their own, with an environment that is this one."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    python = binaries / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    shutil.copy(python, binaries / "k3eval")
    return tmp_path


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_make_alone_lists_every_documented_target() -> None:
    done = run(ROOT, "make")
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert done.returncode == 0
    assert {"demo", "test", "bench", "lint", "clean", "setup", "doctor"} <= listed
    declared = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert declared is not None
    assert listed == set(declared[1].split())


def test_scripts_are_executable_and_strict() -> None:
    for script in [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]:
        if script.name == "lib.sh":
            continue
        assert script.stat().st_mode & 0o111, script
        assert "set -euo pipefail" in script.read_text(), script


def test_a_second_set_up_does_nothing_until_the_pins_change(checkout: Path) -> None:
    stamp = checkout / ".venv" / "k3eval-installed"
    stamp.write_text(
        run(checkout, "bash", "-c", "pwd; cksum pyproject.toml constraints.txt scripts/setup.sh").stdout
    )
    # an interpreter that cannot work shows that nothing is asked of it
    done = run(checkout, "scripts/setup.sh", PYTHON="/nonexistent")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with (checkout / "constraints.txt").open("a") as pins:
        pins.write("# changed\n")
    assert run(checkout, "scripts/setup.sh", PYTHON="/nonexistent").returncode == 3


def test_a_python_that_will_not_do_is_named(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    done = run(checkout, "scripts/setup.sh", PYTHON="/nonexistent")
    assert done.returncode == 3
    assert done.stderr.startswith("k3eval: PYTHON is no Python 3.11")
    assert not (checkout / ".venv").exists()


def test_a_docker_host_that_does_not_answer_is_not_replaced(checkout: Path) -> None:
    done = run(checkout, "scripts/ensure-docker.sh", DOCKER_HOST=f"unix://{checkout}/none.sock")
    assert done.returncode == 3
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "unset DOCKER_HOST" in done.stderr


@pytest.mark.docker
def test_an_engine_that_runs_is_used(checkout: Path) -> None:
    done = run(checkout, "scripts/ensure-docker.sh")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"==> Docker engine \S+ answers\n", done.stdout)


def test_a_missing_compiler_stops_only_what_needs_one(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"  # a PATH without a compiler and without apt-get
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    needed = run(checkout, "/bin/bash", "scripts/ensure-compiler.sh", PATH=str(tools))
    assert needed.returncode == 3
    assert "no C compiler on PATH" in needed.stderr
    welcome = run(checkout, "/bin/bash", "scripts/ensure-compiler.sh", "--if-possible", PATH=str(tools))
    assert (welcome.returncode, welcome.stderr) == (0, "")
    assert "plain torch" in welcome.stdout
